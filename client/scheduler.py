"""The scheduler interface, and the reference scheduler behind it: continuous batching, chunked
prefill, prefix caching, preemption by recompute. Knows request ids, tokens and blocks; no slots,
no wire, no clock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from client.adoption import AdoptedRequest
from client.block_pool import ROOT_HASH, BlockPool, chained_hash
from client.errors import RequestError
from client.loading import LoadedModel
from client.requests import GenerationRequest, check_fits, seeded, validated
from client.scheduler_output import Logprobs, NewRequest, SchedulerOutput, StepResult
from client.slots import MAX_ADMITTED_TOKENS
from rpc_schema.config import WorkerConfig
from rpc_schema.kv_cache import NUM_NULL_BLOCKS, blocks_for
from rpc_schema.sampling import SamplingParams
from rpc_schema.step import NO_TOKEN

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

NOT_A_NUMBER = (
    "the model's output for token {place} is not a number: its weights overflow or are damaged "
    "for this input; the other requests are unharmed"
)


class _Note(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What another driver's scheduler needs to know of a request beside what the workers do."""

    limit: int
    arrival: int
    num_cached_tokens: int
    num_preemptions: int


PIPELINE_CHUNK = 2048
"""Fewest prompt tokens of several prompts for which a pipeline's step is closed. Later stages wait
for the first step, and earlier ones for the last, so that steps should be short while there are few
tokens; but a product of fewer rows is less than its best."""

CHUNKS_PER_STAGE = 2
"""Steps a stage over which prompts are spread while each has PIPELINE_CHUNK tokens or more."""

MAX_LOOKED_AT = 1024
"""Waiting prompts that are looked at for that."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    req_id: str
    token_ids: list[int]
    """Generated tokens; a stop token is the last of them."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache at the first admission."""
    num_preemptions: int
    logprobs: list[Logprobs] | None
    """One for each token, where the request asked for them."""
    error: str = ""
    """Why the request failed, where finish_reason is "error"; token_ids are those before."""


class SchedulerInterface(Protocol):
    """What `client.driver.Driver` asks of a scheduler. All calls come from one thread.

    The driver sends every output of schedule() before it makes another call, takes results in
    the order of the outputs, and keeps at most pipeline size + 1 outputs without a result.
    """

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served.
        """

    def abort_request(self, req_id: str) -> None:
        """End a request early; unknown ids are ignored. No RequestOutput follows."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not finished."""

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to send until a result comes."""

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Take in what a step sampled; return the requests that it finished.

        Tokens of requests that have finished meanwhile may be among them, and NO_TOKEN for requests
        that have failed.
        """

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Take back steps that failed; none of them will have a result.

        The workers know the requests of lost_req_ids no more: those that are to go on must be
        admitted again, from their known tokens. Blocks written by the failed steps hold nothing.
        """


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a scheduler may use, as the group was loaded."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    """Null block included."""
    block_size: int
    pipeline_parallel_size: int = 1
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    vocab_size: int | None = None
    """None leaves the token ids of requests unchecked."""


def scheduler_limits(model: LoadedModel, config: WorkerConfig) -> SchedulerLimits:
    """Return what a scheduler may use of a group that was loaded with `config`."""
    return SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        eos_token_ids=model.metadata.eos_token_ids,
        vocab_size=model.metadata.vocab_size,
    )


@dataclass(slots=True, eq=False)
class _Request:
    """A request's progress. Three counts matter, and each is at most the next:

    num_computed (positions whose step was sent) <= num_tokens (known or being sampled) <= limit.
    """

    id: str
    tokens: list[int]
    """The known ones: the prompt, then what was generated."""
    num_prompt_tokens: int
    limit: int
    """Where max_tokens or max_model_len ends it."""
    sampling: SamplingParams
    stop_ids: frozenset[int]
    arrival: int
    num_tokens: int = 0
    num_computed: int = 0
    admission: int = -1
    """Rises with each admission; -1 while waiting."""
    last_step: int = -1
    """The step that samples its last token; -1 for none."""
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as tokens are known. They depend on tokens alone, and stay."""
    num_remembered: int = 0
    """Of its blocks, how many the pool knows the contents of."""
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    num_shared_blocks: int = 0
    """Of its blocks since its admission, how many others had filled."""
    shares: bool = True
    """Whether it may begin with blocks that others filled."""
    num_void: int = 0
    """Tokens on their way that are to be passed over."""
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def num_in_flight(self) -> int:
        """Tokens that are being sampled."""
        return self.num_tokens - len(self.tokens)


@dataclass(slots=True)
class _Step:
    """A step in the making: nothing in it counts until it is committed."""

    number: int
    budget: int
    prefill_chunk: int
    """Tokens that several prompts may have together."""
    num_prefill_tokens: int = 0
    num_admitted_tokens: int = 0
    decodes: dict[str, _Request] = field(default_factory=dict)
    prefills: dict[str, int] = field(default_factory=dict)
    new: list[_Request] = field(default_factory=list)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    is_whole_group: bool = False
    """Everybody in the group decodes: its tuple of ids can be used again."""


class Scheduler:
    """The reference scheduler. First come, first served; decodes before prefills.

    Running requests are in one of three places: `_prefilling`, one of the decode groups (one for
    each pipeline stage, so that the stages work on different requests), or nowhere, when their
    last token is being sampled. All are in `_running`.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._eos_token_ids = _existing_tokens(limits)
        self._pool = BlockPool(limits.num_blocks)
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._prefilling: dict[str, _Request] = {}
        self._groups: list[dict[str, _Request]] = [{} for _ in range(limits.pipeline_parallel_size)]
        self._group_ids: list[tuple[str, ...] | None] = [None] * limits.pipeline_parallel_size
        self._turn = 0
        self._finished: list[str] = []
        self._adopted: set[str] = set()
        """Running requests that the workers are yet to hear of again."""
        self._to_remember: list[_Request] = []
        self._num_steps = 0
        self._in_flight: deque[int] = deque()
        self._num_admissions = 0
        self._num_arrivals = 0
        # A decode group never exceeds the token budget: groups are kept equal within one.
        self._max_running = min(
            limits.max_num_seqs,
            limits.max_num_batched_tokens * limits.pipeline_parallel_size,
        )

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request. Its id may be one that finished, once no step in flight names it.

        Raises:
            RequestError: a field is out of bounds, its id is in use, or it can never be served.
        """
        request = seeded(validated(request))
        if request.id in self._requests:
            raise RequestError(
                "the id is in use", field="id", value=request.id, fix="choose another"
            )
        num_prompt = len(request.prompt_token_ids)
        limit = self._limit(request)
        entry = _Request(
            id=request.id,
            tokens=request.prompt_token_ids.tolist(),
            num_prompt_tokens=num_prompt,
            limit=limit,
            sampling=request.sampling(self._eos_token_ids),
            stop_ids=frozenset(request.stop_ids(self._eos_token_ids)),
            arrival=self._num_arrivals,
            num_tokens=num_prompt,
        )
        self._num_arrivals += 1
        self._requests[entry.id] = entry
        self._waiting.append(entry)

    def adopt_requests(self, requests: Sequence[AdoptedRequest]) -> list[RequestOutput]:
        """Go on with requests that another driver's Scheduler has left: before any other call but
        add_request. Return those that have all their tokens already; they end here.

        They run from the first step on, with the blocks that they have; those without begin again
        from their tokens, and those that report logprobs from their prompt: what was reported
        before is kept nowhere.

        Raises:
            RequestError: a request was not admitted by a Scheduler, its id is in use, or it does
                not fit these limits. Nothing is adopted.
        """
        adopted = [(self._entry_of(request), request) for request in requests]
        adopted.sort(key=lambda pair: pair[0].arrival)
        done = []
        for entry, request in adopted:
            self._num_arrivals = max(self._num_arrivals, entry.arrival + 1)
            self._requests[entry.id] = entry
            reason = _cut_at_end(entry)
            if entry.sampling.logprobs is not None:
                del entry.tokens[entry.num_prompt_tokens :]
                reason = None
            entry.num_tokens = len(entry.tokens)
            has_place = len(self._running) < self._max_running
            if reason is None and has_place and _has_kv(entry, request):
                self._resume(entry, request)
            else:
                self._waiting.append(entry)
            if reason is not None:
                done.append(self._finish(entry, reason))
        self._sort_waiting()
        return done

    def _entry_of(self, request: AdoptedRequest) -> _Request:
        """Return an adopted request as it is here, not running yet."""
        try:
            note = msgspec.msgpack.decode(request.note, type=_Note)
        except msgspec.DecodeError:
            raise RequestError(
                f"request {request.req_id!r} was admitted by another kind of scheduler",
                field="note",
                value=request.note,
                fix="adopt it with that scheduler, or drop it",
            ) from None
        if request.req_id in self._requests:
            raise RequestError(
                "the id is in use", field="id", value=request.req_id, fix="adopt requests first"
            )
        usable = self._limits.num_blocks - NUM_NULL_BLOCKS
        needed = blocks_for(note.limit - 1, self._limits.block_size)
        if note.limit > self._limits.max_model_len or needed > usable:
            raise RequestError(
                f"request {request.req_id!r} may have {note.limit} tokens, which is more than fits",
                field="limit",
                value=note.limit,
                fix="use the limits that it was admitted under",
            )
        return _Request(
            id=request.req_id,
            tokens=request.token_ids.tolist(),
            num_prompt_tokens=request.num_prompt_tokens,
            limit=note.limit,
            sampling=request.sampling,
            stop_ids=frozenset(request.sampling.stop_token_ids),
            arrival=note.arrival,
            num_cached_tokens=note.num_cached_tokens,
            num_preemptions=note.num_preemptions,
        )

    def _resume(self, entry: _Request, request: AdoptedRequest) -> None:
        """Have a request run on with its blocks."""
        self._pool.hold(request.block_ids)
        entry.block_ids = list(request.block_ids)
        entry.num_computed = request.num_computed_tokens
        self._run(entry)
        self._adopted.add(entry.id)
        self._remember(entry)

    def _run(self, request: _Request) -> None:
        request.admission = self._num_admissions
        self._num_admissions += 1
        self._running[request.id] = request
        self._prefilling[request.id] = request

    def abort_request(self, req_id: str) -> None:
        """End a request early; unknown ids are ignored."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        if request.admission >= 0:
            self._leave(request)
            self._finished.append(req_id)
        else:
            self._waiting.remove(request)

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not finished."""
        return bool(self._requests)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; see SchedulerInterface."""
        self._remember_sent_blocks()
        step = _Step(self._num_steps, self._limits.max_num_batched_tokens, self._prefill_chunk())
        turn = self._plan_decodes(step, self._is_next)
        self._plan_prefills(step)
        if not step.preempted:
            self._admit(step)
        if not (step.decodes or step.prefills or step.preempted):
            turn = self._plan_decodes(step, _is_anybody)
        if not (step.decodes or step.prefills or step.preempted):
            return self._farewell()
        return self._commit(step, turn)

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Take in what a step sampled; see SchedulerInterface."""
        if self._in_flight:
            self._in_flight.popleft()
        done = []
        block_size = self._limits.block_size
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            request = self._requests.get(req_id)
            if request is None:  # stopped meanwhile: sampled past its end
                continue
            if request.num_void:
                request.num_void -= 1
                continue
            if token == NO_TOKEN:
                done += self._not_a_number(request)
                continue
            request.tokens.append(token)
            if request.sampling.logprobs is not None:
                request.logprobs.append(result.logprobs[req_id])
            if token in request.stop_ids:
                done.append(self._finish(request, "stop"))
            elif len(request.tokens) == request.limit:
                done.append(self._finish(request, "length"))
            elif len(request.tokens) % block_size == 0 and request.admission >= 0:
                self._to_remember.append(request)
        return done

    def forget_prefixes(self) -> None:
        """Drop the prefix cache: the weights have changed, and what is cached is of the old ones.
        To be called when no step is in flight."""
        self._to_remember.clear()
        self._pool.forget_all()

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Take back steps that failed: lost requests wait again, in the order they came."""
        for _ in outputs:
            self._in_flight.pop()
        self._to_remember.clear()
        self._pool.forget_all()
        lost = [self._running[req_id] for req_id in lost_req_ids if req_id in self._running]
        for request in lost:
            self._requeue(request)
        for request in self._running.values():  # its blocks are good, and are remembered anew
            request.num_remembered = 0
        for request in self._requests.values():
            request.num_tokens = len(request.tokens)
            request.num_void = 0
        self._sort_waiting()

    def _limit(self, request: GenerationRequest) -> int:
        """Return the number of tokens at which a request ends, if it can be served to there."""
        limits = self._limits
        check_fits(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
        num_prompt = len(request.prompt_token_ids)
        limit = min(num_prompt + request.max_tokens, limits.max_model_len)
        usable = limits.num_blocks - NUM_NULL_BLOCKS
        if blocks_for(limit - 1, limits.block_size) > usable:
            raise RequestError(
                f"{limit} tokens do not fit into {usable} blocks of {limits.block_size}",
                field="max_tokens",
                value=request.max_tokens,
                fix="ask for less",
            )
        if limit - 1 > MAX_ADMITTED_TOKENS:  # after a preemption all of them are sent at once
            raise RequestError(
                f"{limit} tokens are more than a step can admit",
                field="prompt_token_ids" if num_prompt > MAX_ADMITTED_TOKENS else "max_tokens",
                value=num_prompt if num_prompt > MAX_ADMITTED_TOKENS else request.max_tokens,
                fix=f"use at most {MAX_ADMITTED_TOKENS} tokens, prompt and output together",
            )
        return limit

    # ------------------------------------------------------------------ planning a step

    def _plan_decodes(self, step: _Step, may_decode: Callable[[_Request], bool]) -> int:
        """Plan the group whose turn it is, or the next one with somebody to run; return it."""
        num_groups = len(self._groups)
        for offset in range(num_groups):
            index = (self._turn + offset) % num_groups
            ready = [r for r in self._groups[index].values() if may_decode(r)]
            if not ready:
                continue
            step.decodes = {request.id: request for request in ready}
            step.is_whole_group = len(ready) == len(self._groups[index])
            self._find_decode_blocks(step, ready)
            if step.decodes:
                step.budget -= len(step.decodes)
                return index
        return self._turn

    def _is_next(self, request: _Request) -> bool:
        """At most once in as many consecutive steps in flight as there are stages, so that the
        stages work on different requests; where there is nothing else to do, more often."""
        if self._num_steps - request.last_step >= len(self._groups):
            return True
        return not self._in_flight or request.last_step < self._in_flight[0]

    def _find_decode_blocks(self, step: _Step, ready: list[_Request]) -> None:
        block_size = self._limits.block_size
        needy = [r for r in ready if r.num_computed == len(r.block_ids) * block_size]
        if len(needy) > self._pool.num_free:
            needy.sort(key=lambda request: request.admission)
        for request in needy:
            if request.id in step.decodes and not self._extend(step, request, 1):
                del step.decodes[request.id]
                step.is_whole_group = False

    def _plan_prefills(self, step: _Step) -> None:
        for request in list(self._prefilling.values()):
            count = min(request.num_tokens - request.num_computed, step.budget)
            if (
                self._has_room(step, count)
                and request.admission >= 0
                and self._may_be_sent(step, request)
                and self._extend(step, request, count)
            ):
                self._plan_prefill(step, request, count)
                if request.id in self._adopted:
                    step.new.append(request)
                    step.num_admitted_tokens += len(request.tokens)
                    step.new_blocks.pop(request.id, None)  # they come with the others

    def _may_be_sent(self, step: _Step, request: _Request) -> bool:
        """Whether the tokens of a request that was adopted fit into the step's message."""
        return (
            request.id not in self._adopted
            or step.num_admitted_tokens + len(request.tokens) <= MAX_ADMITTED_TOKENS
        )

    def _prefill_chunk(self) -> int:
        """How many tokens several prompts share a step with: the budget, or in a pipeline their
        part of all that wait."""
        budget = self._limits.max_num_batched_tokens
        if len(self._groups) == 1:
            return budget
        num_steps = CHUNKS_PER_STAGE * len(self._groups)
        pending = 0
        for request in islice(chain(self._prefilling.values(), self._waiting), MAX_LOOKED_AT):
            pending += request.num_tokens - request.num_computed
            if pending >= num_steps * budget:
                break
        return max(PIPELINE_CHUNK, min(budget, pending // num_steps))

    def _has_room(self, step: _Step, count: int) -> bool:
        """Whether a step may take count more prompt tokens: of one prompt what the budget allows,
        of several a chunk."""
        together = step.num_prefill_tokens + count
        return count > 0 and (not step.prefills or together <= step.prefill_chunk)

    def _plan_prefill(self, step: _Step, request: _Request, count: int) -> None:
        step.prefills[request.id] = count
        step.num_prefill_tokens += count
        step.budget -= count

    def _extend(self, step: _Step, request: _Request, count: int) -> bool:
        """Find blocks for `count` more tokens, preempting the latest admitted where need be.

        Only requests admitted after this one are preempted; without any, this one waits.
        """
        size = self._limits.block_size
        needed = blocks_for(request.num_computed + count, size) - len(request.block_ids)
        while needed > self._pool.num_free:
            victim = next(reversed(self._running.values()))
            if victim is request:
                return False
            self._preempt(step, victim)
        if needed > 0:
            block_ids = self._pool.allocate(needed)
            request.block_ids += block_ids
            step.new_blocks[request.id] = block_ids
        return True

    def _preempt(self, step: _Step, victim: _Request) -> None:
        step.decodes.pop(victim.id, None)
        freed = step.prefills.pop(victim.id, 0)
        step.budget += freed
        step.num_prefill_tokens -= freed
        step.new_blocks.pop(victim.id, None)
        step.new = [request for request in step.new if request is not victim]
        step.preempted.append(victim.id)
        step.is_whole_group = False
        self._remember(victim)
        victim.num_preemptions += 1
        self._requeue(victim)
        self._sort_waiting()

    def _admit(self, step: _Step) -> None:
        """Admit waiting requests in order, as long as blocks, slots and tokens last."""
        num_admitted_tokens = step.num_admitted_tokens
        while self._waiting and step.budget > 0 and len(self._running) < self._max_running:
            request = self._waiting[0]
            num_admitted_tokens += len(request.tokens)
            if request.num_in_flight or request.num_void:
                return
            if num_admitted_tokens > MAX_ADMITTED_TOKENS:
                return
            cached = self._find_cached(request)
            needed = blocks_for(len(request.tokens), self._limits.block_size) - len(cached)
            if needed > self._pool.num_free - self._pool.num_free_among(cached):
                return
            num_computed = len(cached) * self._limits.block_size
            count = min(request.num_tokens - num_computed, step.budget)
            if not self._has_room(step, count):
                return
            self._waiting.popleft()
            self._start(step, request, cached, count)

    def _find_cached(self, request: _Request) -> list[int]:
        if not self._limits.enable_prefix_caching or not request.shares:
            return []
        self._hash_blocks(request)
        num_usable = (len(request.tokens) - 1) // self._limits.block_size
        return self._pool.find(request.hashes[:num_usable])

    def _start(self, step: _Step, request: _Request, cached: list[int], count: int) -> None:
        size = self._limits.block_size
        self._pool.hold(cached)
        request.block_ids = list(cached)
        request.num_remembered = request.num_shared_blocks = len(cached)
        request.num_computed = len(cached) * size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed
        needed = blocks_for(request.num_computed + count, size) - len(cached)
        request.block_ids += self._pool.allocate(needed)
        self._run(request)
        step.new.append(request)
        self._plan_prefill(step, request, count)

    # ------------------------------------------------------------------ committing it

    def _commit(self, step: _Step, turn: int) -> SchedulerOutput:
        new = [self._build_new(request) for request in step.new]
        self._adopted.difference_update(request.id for request in step.new)
        decode_req_ids = self._commit_decodes(step, turn)
        self._commit_prefills(step)
        finished, self._finished = self._finished, []
        self._num_steps += 1
        self._in_flight.append(step.number)
        self._turn = (turn + 1) % len(self._groups)
        return SchedulerOutput(
            num_scheduled_tokens=step.prefills,
            decode_req_ids=decode_req_ids,
            scheduled_new_reqs=new,
            new_block_ids=step.new_blocks,
            finished_req_ids=finished,
            preempted_req_ids=step.preempted,
        )

    def _build_new(self, request: _Request) -> NewRequest:
        return NewRequest(
            req_id=request.id,
            token_ids=np.array(request.tokens, np.int32),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed,
            block_ids=list(request.block_ids),
            sampling=request.sampling,
            note=_note(request),
        )

    def _commit_decodes(self, step: _Step, turn: int) -> tuple[str, ...]:
        ended = []
        for request in step.decodes.values():
            request.num_computed += 1
            request.num_tokens += 1
            request.last_step = step.number
            if request.num_tokens == request.limit:
                ended.append(request)
        known = self._group_ids[turn] if step.is_whole_group else None
        req_ids = known or tuple(step.decodes)
        if step.is_whole_group:
            self._group_ids[turn] = req_ids
        for request in ended:
            self._leave_group(request)
        return req_ids

    def _commit_prefills(self, step: _Step) -> None:
        for req_id, count in step.prefills.items():
            request = self._requests[req_id]
            request.num_computed += count
            self._to_remember.append(request)
            if request.num_computed == request.num_tokens:
                request.num_tokens += 1
                request.last_step = step.number
                del self._prefilling[req_id]
                if request.num_tokens < request.limit:
                    self._join_group(request)

    def _farewell(self) -> SchedulerOutput | None:
        """When all is done, tell the workers who has finished; else that can ride along later."""
        if not self._finished or self._requests or self._in_flight:
            return None
        return self._commit(_Step(self._num_steps, 0, 0), self._turn)

    # ------------------------------------------------------------------ groups, ends, caching

    def _join_group(self, request: _Request) -> None:
        index = min(range(len(self._groups)), key=lambda i: len(self._groups[i]))
        self._groups[index][request.id] = request
        self._group_ids[index] = None

    def _leave_group(self, request: _Request) -> None:
        for index, group in enumerate(self._groups):
            if group.pop(request.id, None) is not None:
                self._group_ids[index] = None
                self._balance(index)
                return

    def _balance(self, smaller: int) -> None:
        """Keep the groups equal within one after somebody has left."""
        larger = max(range(len(self._groups)), key=lambda i: len(self._groups[i]))
        if len(self._groups[larger]) > len(self._groups[smaller]) + 1:
            req_id, request = self._groups[larger].popitem()
            self._groups[smaller][req_id] = request
            self._group_ids[larger] = self._group_ids[smaller] = None

    def _leave(self, request: _Request) -> None:
        """Take a request out of the running ones and give its blocks back.

        Steps in flight may still write to them; whoever gets them runs after those steps.
        """
        self._leave_group(request)
        self._prefilling.pop(request.id, None)
        self._adopted.discard(request.id)
        del self._running[request.id]
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_remembered = 0
        request.num_computed = 0
        request.admission = -1

    def _requeue(self, request: _Request) -> None:
        self._leave(request)
        self._waiting.append(request)

    def _sort_waiting(self) -> None:
        self._waiting = deque(sorted(self._waiting, key=lambda request: request.arrival))

    def _not_a_number(self, request: _Request) -> list[RequestOutput]:
        """The request's context gives no numbers, so that what it wrote to its blocks is not to be
        shared. Where it began with blocks of another request, that one's may be the fault: then it
        is computed anew, from its known tokens and by itself."""
        self._pool.forget(request.hashes)
        if not request.num_shared_blocks:
            place = len(request.tokens) + 1
            return [self._finish(request, "error", NOT_A_NUMBER.format(place=place))]
        request.shares = False
        request.num_shared_blocks = 0
        request.num_void = request.num_in_flight - 1
        request.num_tokens = len(request.tokens)
        if request.admission >= 0:  # else it has been preempted, and waits already
            self._finished.append(request.id)
            self._requeue(request)
            self._sort_waiting()
        return []

    def _finish(self, request: _Request, reason: FinishReason, error: str = "") -> RequestOutput:
        del self._requests[request.id]
        if request.admission >= 0:
            if not error:
                self._remember(request)
            self._leave(request)
            self._finished.append(request.id)
        else:  # preempted with its last token in flight
            self._waiting.remove(request)
        return RequestOutput(
            req_id=request.id,
            token_ids=request.tokens[request.num_prompt_tokens :],
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_preemptions=request.num_preemptions,
            logprobs=request.logprobs if request.sampling.logprobs is not None else None,
            error=error,
        )

    def _remember_sent_blocks(self) -> None:
        """Blocks may be hit from the step after the one that fills them: that one is sent."""
        pending, self._to_remember = self._to_remember, []
        for request in pending:
            if request.admission >= 0:
                self._remember(request)

    def _remember(self, request: _Request) -> None:
        if not self._limits.enable_prefix_caching:
            return
        self._hash_blocks(request)
        full = min(len(request.tokens), request.num_computed) // self._limits.block_size
        for index in range(request.num_remembered, full):
            self._pool.remember(request.block_ids[index], request.hashes[index])
        request.num_remembered = max(full, request.num_remembered)

    def _hash_blocks(self, request: _Request) -> None:
        """Bring a request's block hashes up to its known tokens."""
        size = self._limits.block_size
        num_full = len(request.tokens) // size
        for index in range(len(request.hashes), num_full):
            parent = request.hashes[-1] if request.hashes else ROOT_HASH
            tokens = np.array(request.tokens[index * size : (index + 1) * size], np.int32)
            request.hashes.append(chained_hash(parent, tokens))


def _note(request: _Request) -> bytes:
    return msgspec.msgpack.encode(
        _Note(request.limit, request.arrival, request.num_cached_tokens, request.num_preemptions)
    )


def _has_kv(entry: _Request, request: AdoptedRequest) -> bool:
    return bool(request.block_ids) and entry.num_tokens == len(request.token_ids)


def _cut_at_end(request: _Request) -> FinishReason | None:
    """Drop tokens that were sampled past a request's end, or behind one that could not be chosen;
    return why it ends, if it does."""
    for index in range(request.num_prompt_tokens, len(request.tokens)):
        if request.tokens[index] == NO_TOKEN:
            del request.tokens[index:]
            return None
        if request.tokens[index] in request.stop_ids:
            del request.tokens[index + 1 :]
            return "stop"
        if index + 1 == request.limit:
            del request.tokens[index + 1 :]
            return "length"
    return None


def _is_anybody(request: _Request) -> bool:
    return True


def _existing_tokens(limits: SchedulerLimits) -> tuple[int, ...]:
    """The tokens that end a sequence, without those that the model cannot produce."""
    size = limits.vocab_size
    return tuple(token for token in limits.eos_token_ids if size is None or token < size)
