"""A scheduler's output and its results, by request id: the convenient form of a step.
`steps/slots.py` converts it to the wire's."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rpc_schema.codec import Frame
from rpc_schema.extensions import ReplyExtension, RequestExtension, StepExtension
from rpc_schema.pooling import PooledOutputs
from rpc_schema.sampling import TokenLogprobs

ValueT = TypeVar("ValueT")


class NewRequest(Struct, frozen=True, gc=False):
    """An admission: a request that the workers do not have, or have dropped.

    A preempted request, and one that was lost with a failed step, comes back as a NewRequest with
    all its tokens.
    """

    req_id: str
    token_ids: NDArray[np.int32]
    """int32 [num_tokens]: the prompt, then the tokens generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose KV is in block_ids already; less than len(token_ids)."""
    block_ids: Sequence[int]
    """All its blocks so far in the first KV group: those of the computed tokens, and those
    that this step writes."""
    extensions: tuple[RequestExtension, ...] = ()
    """Its optional features, at most one of each kind: worker_client.requests.SamplingParams
    makes those of sampling. Without any, decoding is greedy."""
    note: bytes = b""
    """At most 1024 bytes for the scheduler of another driver that continues the request: see
    adoption.py."""
    more_block_ids: Sequence[Sequence[int]] = ()
    """Blocks of each further group. In a group with a window, 0 replaces blocks that no token from
    num_computed_tokens on sees."""

    @property
    def blocks_by_group(self) -> tuple[Sequence[int], ...]:
        """Blocks of each group."""
        return (self.block_ids, *self.more_block_ids)


@dataclass(frozen=True, slots=True)
class StepFault:
    """The first fault that a check has found in a scheduler's output."""

    message: str
    field: str
    value: object
    fix: str
    req_id: object = None
    """The request at fault; None if it is the step as a whole."""


EncodedValues: TypeAlias = tuple[StepExtension, Sequence[Frame]]
"""An extension of a message, and its frames."""


class StepValues:
    """Values of an optional feature for some requests of one step. A feature has a subclass."""

    @property
    def req_ids(self) -> Collection[str]:
        """Requests with values. Those that do not sample are left out."""
        return ()

    @property
    def deferred_req_ids(self) -> Collection[str]:
        """Requests whose sampling waits for WorkerGroup.sample_tokens, which comes before their
        next step; those that sample nothing in this one are ignored."""
        return ()

    @property
    def filled_blocks(self) -> Collection[int]:
        """Blocks that the step fills before its forward pass; no request that goes on has one."""
        return ()

    def find_fault(self) -> StepFault | None:
        """Check types and sizes, not contents: no work grows with them."""
        return None

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues | StepFault | None:
        """Return the extension in the message and its frames; None if nothing is left of it.
        slot_of: slots of the requests that sample now. Values of others are left out."""
        return None


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Order of application: finished and preempted, new requests, new blocks, then the
    scheduled tokens.

    A request that reaches its last known token samples one token (num_samples: or several), which
    counts as known from the next step on: a scheduler need not wait for it. One that pools
    (rpc_schema.pooling) has its output instead, and is not scheduled again.
    """

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each request in this step, each at least 1, without the requests of
    decode_req_ids."""
    decode_req_ids: tuple[str, ...] = ()
    """Requests with exactly one token. Pass the same tuple object for as long as the set does not
    change: encoding then costs nothing per request."""
    scheduled_new_reqs: Sequence[NewRequest] = ()
    new_block_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Blocks of the first group to append, for requests that are not new in this step."""
    more_new_block_ids: Sequence[Mapping[str, Sequence[int]]] = ()
    """Blocks of each further group to append."""
    finished_req_ids: Sequence[str] = ()
    """Requests to forget; unknown ones are ignored."""
    preempted_req_ids: Sequence[str] = ()
    """Requests to forget as well; separate only for the reader of a trace."""
    extensions: tuple["StepValues", ...] = ()
    """Values of optional features for this step, at most one of each kind; see
    worker_client/steps/masks.py for grammars' masks and deferred sampling."""
    num_samples: Mapping[str, int] = field(default_factory=dict)
    """For requests that sample in this step: after how many of their last scheduled tokens, if not
    after the last one alone. At most max_samples_per_seq of the configuration. Each request gains
    one token as always; StepResult.samples has all of them."""
    num_drafts: Mapping[str, int] = field(default_factory=dict)
    """For requests of num_scheduled_tokens, so many of their scheduled tokens, the last ones, are
    drafts: guesses of tokens that they have not sampled (speculative decoding). At most
    num_speculative_tokens of the configuration. The scheduled tokens are then all tokens that are
    left to compute, and the drafts. The request gains at least one token, and one more for each
    draft that is accepted. Its counts grow as if all were: StepResult.refused has the rest. Not
    with num_samples. vLLM's name is scheduled_spec_decode_tokens."""
    draft_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafts of requests in num_drafts that the driver brings. The device has those of the others:
    it makes them with each token that it samples."""
    skip_drafts: bool = False
    """The device makes no drafts after this step: its requests have none of the device's in their
    next steps. Where drafts do not pay, this saves their time."""

    @property
    def deferred_req_ids(self) -> list[str]:
        """Requests whose sampling extensions defer."""
        return [req_id for each in self.extensions for req_id in each.deferred_req_ids]

    @property
    def num_requests(self) -> int:
        """Number of requests in this step."""
        return len(self.decode_req_ids) + len(self.num_scheduled_tokens)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Number of tokens in this step."""
        return len(self.decode_req_ids) + sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class LockstepOutput(SchedulerOutput):
    """One step of all replicas in lockstep. The other fields are those of its replicas together,
    but `extensions` are for the requests of all of them; see `of`."""

    replicas: tuple[SchedulerOutput, ...] = ()
    """Each replica's part, by dp_rank; one without requests has an empty part."""

    @classmethod
    def of(cls, replicas: Sequence[SchedulerOutput]) -> "LockstepOutput":
        """Return the step that consists of these parts."""
        more = zip_longest(*[part.more_new_block_ids for part in replicas], fillvalue=_NONE)
        return cls(
            num_scheduled_tokens=_united([part.num_scheduled_tokens for part in replicas]),
            decode_req_ids=tuple(chain(*[part.decode_req_ids for part in replicas])),
            scheduled_new_reqs=tuple(chain(*[part.scheduled_new_reqs for part in replicas])),
            new_block_ids=_united([part.new_block_ids for part in replicas]),
            more_new_block_ids=tuple([_united(group) for group in more]),
            finished_req_ids=tuple(chain(*[part.finished_req_ids for part in replicas])),
            preempted_req_ids=tuple(chain(*[part.preempted_req_ids for part in replicas])),
            num_samples=_united([part.num_samples for part in replicas]),
            num_drafts=_united([part.num_drafts for part in replicas]),
            draft_token_ids=_united([part.draft_token_ids for part in replicas]),
            skip_drafts=all(part.skip_drafts for part in replicas),
            replicas=tuple(replicas),
        )


_NONE: Mapping[str, Any] = {}


def _united(mappings: Iterable[Mapping[str, ValueT]]) -> dict[str, ValueT]:
    """Return all entries of mappings that share no key."""
    united: dict[str, ValueT] = {}
    for mapping in mappings:
        if mapping:
            united.update(mapping)
    return united


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of one sampled token and of the most likely ones at its position."""

    token_ids: NDArray[np.int32]
    """int32 [n + 1]: the sampled token, then the n most likely, most likely first."""
    logprobs: NDArray[np.float32]
    """float32 [n + 1], natural logarithm."""
    rank: int
    """Rank of the sampled token; 1 is the most likely."""


class FullLogprob(NamedTuple):
    """Two log probabilities of one sampled token, natural logarithms."""

    full: float
    """That of the model alone: the whole vocabulary, before masks, rules, temperature and
    filters."""
    sampled: float
    """That of the distribution that the token was drawn from: after all of these. 0 at temperature
    0."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log probabilities of a prompt's tokens that a step has computed."""

    first: int
    """Position in the prompt of the first one."""
    logprobs: Sequence[Logprobs]


@dataclass(frozen=True, slots=True)
class TraceChunk:
    """Both log probabilities of output tokens that a request has brought, as far as a step has
    computed them."""

    first: int
    """Position in the request of the first one."""
    logprobs: Sequence[FullLogprob]


Experts: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Numbers of experts: uint8 or uint16."""


class ExpertsChunk(NamedTuple):
    """The experts of consecutive tokens of a request that a step has computed, or found cached."""

    first: int
    """Position in the request of the first one."""
    experts: Experts
    """[tokens, layers, top_k] as RequestOutput.routed_experts."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One of several tokens that a request sampled in a step."""

    token_id: int
    """The token, as in StepResult.token_ids."""
    reports: Mapping[type[ReplyExtension], Any] = field(default_factory=dict)
    """Reports of features on this token, by kind."""


class DraftOutcome(NamedTuple):
    """Outcome of a request's drafts in a step."""

    num_drafted: int
    num_accepted: int
    """Leading drafts that are the tokens which the request has sampled there."""


@dataclass(frozen=True)
class StepResult:
    """Tokens that a step sampled. Only requests that reached their last known token are in it."""

    req_ids: Sequence[str]
    """Each request once per token that it gained, oldest first: once, unless it had drafts, or a
    feature says otherwise."""
    token_ids: Sequence[int]
    """Aligned with req_ids. rpc_schema.step.NO_TOKEN (-1) for a request whose logits contain NaN or
    have no finite maximum: it has failed, and the blocks that it wrote must not be shared."""
    reports: Mapping[type[ReplyExtension], Mapping[str, Any]] = field(default_factory=dict)
    """Reports of features, by kind and request id; see worker_client/parts. Of a request that has
    gained several tokens, those on the last one."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens that a request did not gain although the step counted them: refused drafts,
    for example. Lower the request's computed and known tokens by this."""
    weights_version: int = 0
    """Number of the version of the weights that the step ran with (GroupWeights.version)."""
    samples: Mapping[str, Sequence[SampledToken]] = field(default_factory=dict)
    """All samples of each request that had several (SchedulerOutput.num_samples), in order, without
    one that was refused. The last one is the token that it gained. Those before it are what the
    model would have chosen in place of tokens that the request has: with its seed, penalties and
    other rules as if it ended before them, and with a grammar's mask if StepMasks has one of
    each."""
    drafts: Mapping[str, DraftOutcome] = field(default_factory=dict)
    """For each request that had drafts, how many, and how many of them were accepted."""
    gained: Mapping[str, Sequence[SampledToken]] = field(default_factory=dict)
    """If the step has reports: all tokens, in order, of each request that has gained several."""
    invalid_blocks: Sequence[int] = ()
    """Blocks that the step was to load from host memory and whose contents did not match on the
    rank that answers. Requests that have one get NO_TOKEN, whichever rank loaded it."""
    arrived_blocks: Sequence[int] = ()
    """Blocks that earlier steps have loaded beside steps (HostMoves.num_beside), and that are there
    now on the rank that answers; each is named once. Those that did not match are among
    invalid_blocks."""
    arrived_s_ago: float = 0.0
    """Seconds since the last of these came, about, when the result was sent; 0 if that is not
    known."""

    def without(self, req_ids: Collection[str]) -> "StepResult":
        """Return the result without the tokens of some requests."""
        kept = [
            pair
            for pair in zip(self.req_ids, self.token_ids, strict=True)
            if pair[0] not in req_ids
        ]
        return replace(self, req_ids=[pair[0] for pair in kept], token_ids=[p[1] for p in kept])

    def joined(self, later: "StepResult") -> "StepResult":
        """Return the result with that of the step's later sampling."""
        reports = {
            kind: {**self.reports.get(kind, {}), **later.reports.get(kind, {})}
            for kind in {*self.reports, *later.reports}
        }
        return StepResult(
            [*self.req_ids, *later.req_ids],
            [*self.token_ids, *later.token_ids],
            reports,
            {**self.refused, **later.refused},
            self.weights_version,
            {**self.samples, **later.samples},
            {**self.drafts, **later.drafts},
            {**self.gained, **later.gained},
            self.invalid_blocks,
            [*self.arrived_blocks, *later.arrived_blocks],
            later.arrived_s_ago if later.arrived_blocks else self.arrived_s_ago,
        )

    @property
    def pooled(self) -> Mapping[str, NDArray[np.float32]]:
        """Outputs of the requests that pool and end with the step: float32 [rows, width]. They are
        not in req_ids."""
        return self.reports.get(PooledOutputs, {})

    @property
    def logprobs(self) -> Mapping[str, Logprobs]:
        """Log probabilities of the requests that asked for them."""
        return self.reports.get(TokenLogprobs, {})

    @cached_property
    def sampled(self) -> dict[str, int]:
        """Sampled token of each request; of several that it has gained, the last one."""
        return dict(zip(self.req_ids, self.token_ids, strict=True))
