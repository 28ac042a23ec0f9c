"""One request of the reference scheduler: its counts, its end, and its start, here or by adoption
from another driver."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rpc_schema.extensions import extension_of
from rpc_schema.kv_cache import NUM_NULL_BLOCKS, BlockGroup, blocks_for
from rpc_schema.sampling import LogprobsWanted, StopTokens
from rpc_schema.step import NO_TOKEN
from worker_client.adoption import AdoptedRequest
from worker_client.errors import RequestError
from worker_client.parts.registry import Extensions, may_refuse, prefix_root
from worker_client.requests import GenerationRequest, check_fits
from worker_client.scheduler.interface import FinishReason, RequestOutput, SchedulerLimits
from worker_client.scheduler_output import Logprobs, NewRequest
from worker_client.step_checks import (
    MAX_ADMITTED_BYTES,
    MAX_ADMITTED_TOKENS,
    WIRE_LIMITS,
    admission_bytes,
    extension_bytes,
    extension_fault,
)

MAX_NOTE_BYTES = 64
"""Bound on an encoded _Note."""


class _Note(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Facts of a request for another driver's scheduler, besides those that the workers have."""

    limit: int
    arrival: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(slots=True)
class HeldBlocks:
    """A request's blocks; RequestBlocks alone writes here."""

    by_group: list[list[int]] = field(default_factory=list)
    """Blocks of each group of layers, by position; 0 replaces a block that a window has passed.
    Empty while it waits."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, in units of the smallest block size of all groups, as far as
    tokens are known. They depend on tokens alone, and stay."""
    num_remembered: int = 0
    """Number of these whose contents the pool has recorded."""
    num_shared: int = 0
    """Number of these that other requests had filled, since its admission."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before that."""
    may_share: bool = True
    """It may begin with blocks that others filled."""
    root: bytes = b""
    """First parent of the hash chain."""


@dataclass(slots=True, eq=False)
class Request:
    """A request's progress. Three counts matter, and each is at most the next:

    num_computed (positions whose step was sent) <= num_tokens (known or being sampled) <= limit.
    """

    id: str
    tokens: list[int]
    """Known tokens: the prompt, then the generated ones."""
    num_prompt_tokens: int
    limit: int
    """Number of tokens at which max_tokens or max_model_len ends it."""
    extensions: Extensions
    arrival: int = -1
    """Place in the order of arrival; the request queues assign it."""
    num_preemptions: int = 0
    stop_ids: frozenset[int] = field(init=False)
    extension_bytes: int = field(init=False)
    """Bytes of the extensions in an admission's message."""
    num_tokens: int = field(init=False)
    num_computed: int = 0
    admission: int = -1
    """Increases with each admission; -1 while waiting."""
    unannounced: bool = False
    """It runs by adoption, and is not yet in a step of this driver."""
    last_step: int = -1
    """Step that samples its last token; -1 for none."""
    num_void: int = 0
    """Number of tokens in flight that are to be ignored."""
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    logprobs: list[Logprobs] | None = field(init=False)
    """Log probabilities of the generated tokens; None if it does not report them."""

    def __post_init__(self) -> None:
        stops = extension_of(self.extensions, StopTokens)
        self.stop_ids = frozenset() if stops is None else frozenset(stops.token_ids)
        self.num_tokens = len(self.tokens)
        self.logprobs = None if extension_of(self.extensions, LogprobsWanted) is None else []
        self.extension_bytes = extension_bytes(self.extensions)
        self.blocks.root = prefix_root(self.extensions)

    @property
    def is_running(self) -> bool:
        """True if it has been admitted; else it waits."""
        return self.admission >= 0

    @property
    def least_computed(self) -> int:
        """Number of positions that stay computed even if steps in flight refuse tokens."""
        if not may_refuse(self.extensions):
            return self.num_computed
        return min(self.num_computed, len(self.tokens) - 1)

    @property
    def num_in_flight(self) -> int:
        """Number of tokens being sampled."""
        return self.num_tokens - len(self.tokens)

    def take(self, token: int) -> FinishReason | None:
        """Append a sampled token; return the reason if the request ends with it."""
        tokens = self.tokens
        tokens.append(token)
        if token in self.stop_ids:
            return "stop"
        return "length" if len(tokens) == self.limit else None

    def take_again(self) -> FinishReason | None:
        """Append all generated tokens of an adopted request again, up to its end or to a NO_TOKEN;
        return the reason if it ends. A request that reports logprobs begins again from its prompt:
        earlier reports are not kept."""
        generated = self.tokens[self.num_prompt_tokens :]
        del self.tokens[self.num_prompt_tokens :]
        reason = None
        for token in generated if self.logprobs is None else ():
            if token == NO_TOKEN or reason is not None:
                break
            reason = self.take(token)
        self.num_tokens = len(self.tokens)
        return reason

    def go_on_from_known(self, num_void: int = 0) -> None:
        """Give up the tokens in flight. num_void: how many of them still arrive, to be ignored."""
        self.num_tokens = len(self.tokens)
        self.num_void = num_void

    def admission_bytes(self, num_tokens: int, groups: Sequence[BlockGroup]) -> int:
        """Return the largest number of bytes that its admission with this many tokens takes in a
        step's message."""
        num_blocks = sum(blocks_for(num_tokens, group.block_size) for group in groups)
        own = self.extension_bytes
        return admission_bytes(num_tokens, num_blocks, len(self.id), own, MAX_NOTE_BYTES)

    def as_new(self) -> NewRequest:
        """Return its admission for the workers."""
        note = _Note(self.limit, self.arrival, self.blocks.num_cached_tokens, self.num_preemptions)
        return NewRequest(
            req_id=self.id,
            token_ids=np.array(self.tokens, np.int32),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed,
            block_ids=list(self.blocks.by_group[0]),
            more_block_ids=[list(own) for own in self.blocks.by_group[1:]],
            extensions=self.extensions,
            note=msgspec.msgpack.encode(note),
        )

    def output(self, reason: FinishReason, error: str = "") -> RequestOutput:
        """Return its output as it ends."""
        return RequestOutput(
            req_id=self.id,
            token_ids=self.tokens[self.num_prompt_tokens :],
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=max(0, self.blocks.num_cached_tokens),
            num_preemptions=self.num_preemptions,
            logprobs=self.logprobs,
            error=error,
        )


def new_request(request: GenerationRequest, limits: SchedulerLimits) -> Request:
    """Return a valid request in its initial state.

    Raises:
        RequestError: it can never be served.
    """
    check_fits(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
    num_prompt = len(request.prompt_token_ids)
    limit = min(num_prompt + request.max_tokens, limits.max_model_len)
    usable = limits.num_blocks - NUM_NULL_BLOCKS
    if limits.most_blocks(limit - 1) > usable:
        raise RequestError(
            f"{limit} tokens do not fit into {usable} blocks of {limits.block_size}",
            field="max_tokens",
            value=request.max_tokens,
            fix="ask for less",
        )
    size = limits.vocab_size  # a token that the model cannot produce ends nothing
    eos_token_ids = [token for token in limits.eos_token_ids if size is None or token < size]
    extensions = request.extensions(eos_token_ids)
    fault = extension_fault(extensions, WIRE_LIMITS.vocab_size if size is None else size)
    if fault is not None:
        message = "a feature of the request is refused"
        raise RequestError(message, field=fault.field, value=fault.value, fix=fault.fix)
    made = Request(
        id=request.id,
        tokens=request.prompt_token_ids.tolist(),
        num_prompt_tokens=num_prompt,
        limit=limit,
        extensions=extensions,
    )
    _check_admission(made, limits.block_groups)
    return made


def _check_admission(made: Request, groups: Sequence[BlockGroup]) -> None:
    """Check that a step can admit the request by itself: after a preemption with all its tokens."""
    num_bytes = made.admission_bytes(made.limit - 1, groups)
    if made.limit - 1 <= MAX_ADMITTED_TOKENS and num_bytes <= MAX_ADMITTED_BYTES:
        return
    most = min(MAX_ADMITTED_TOKENS, MAX_ADMITTED_BYTES * (made.limit - 1) // num_bytes)
    too_long = made.num_prompt_tokens > most
    raise RequestError(
        f"{made.limit} tokens are more than a step can admit",
        field="prompt_token_ids" if too_long else "max_tokens",
        value=made.num_prompt_tokens if too_long else made.limit - made.num_prompt_tokens,
        fix=f"use at most {most} tokens, prompt and output together",
    )


def adopted_request(request: AdoptedRequest, limits: SchedulerLimits) -> Request:
    """Return a request of another driver in the state from which it continues here, not running
    yet.

    Raises:
        RequestError: it was admitted by another kind of scheduler, or does not fit these limits.
    """
    try:
        note = msgspec.msgpack.decode(request.note, type=_Note)
    except msgspec.DecodeError:
        raise RequestError(
            f"request {request.req_id!r} was admitted by another kind of scheduler",
            field="note",
            value=request.note,
            fix="adopt it with that scheduler, or drop it",
        ) from None
    needed = limits.most_blocks(note.limit - 1)
    if note.limit > limits.max_model_len or needed > limits.num_blocks - NUM_NULL_BLOCKS:
        raise RequestError(
            f"request {request.req_id!r} may have {note.limit} tokens, which is more than fits",
            field="limit",
            value=note.limit,
            fix="use the limits that it was admitted under",
        )
    made = Request(
        id=request.req_id,
        tokens=request.token_ids.tolist(),
        num_prompt_tokens=request.num_prompt_tokens,
        limit=note.limit,
        extensions=request.extensions,
        arrival=note.arrival,
        num_preemptions=note.num_preemptions,
    )
    made.blocks.num_cached_tokens = note.num_cached_tokens
    _check_admission(made, limits.block_groups)
    return made
