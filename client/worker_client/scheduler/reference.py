"""The reference scheduler: continuous batching, chunked prefill, prefix caching, preemption by
recompute. Takes the driver's calls, commits steps and processes their results."""

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import extension_of
from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PoolingParams
from rpc_schema.routed_experts import RoutedExperts
from rpc_schema.sampling import PromptLogprobs, TraceLogprobs
from rpc_schema.step import NO_TOKEN
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.loras import GroupAdapter
from worker_client.group.running import RunningRequests
from worker_client.group.weights_state import WeightsVersion
from worker_client.requests import (
    FinishReason,
    GenerationRequest,
    Reports,
    RequestOutput,
    parent_id,
    sample_id,
)
from worker_client.scheduler.adapter_versions import AdapterVersions
from worker_client.scheduler.admissions import admit
from worker_client.scheduler.decode_groups import DecodeGroups
from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.drafting.expected_drafts import NO_DRAFTS_EXPECTED
from worker_client.scheduler.drafting.payoffs import OnDraftingChange, log_change
from worker_client.scheduler.drafting.request_drafts import NO_DRAFTS
from worker_client.scheduler.interface import (
    NO_JUMP,
    Jump,
    SchedulerLimits,
)
from worker_client.scheduler.new_requests import adopted_request, new_request
from worker_client.scheduler.planning import Step
from worker_client.scheduler.reported import Reported
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_blocks import CachedChanges, RequestBlocks
from worker_client.scheduler.request_queues import RequestQueues, Urgency, by_priority
from worker_client.scheduler.step_budget import Clock, StepBudget
from worker_client.scheduler_output import (
    DraftOutcome,
    ExpertsChunk,
    PromptChunk,
    SchedulerOutput,
    StepResult,
    TraceChunk,
)
from worker_client.steps.cached_blocks import CachedBlocks

if TYPE_CHECKING:  # it needs the library of an extra
    from worker_client.inputs.tokenizer import Tokenizer


POOLED_NOT_FINITE = (
    "the model's output is NaN or infinite for this input: activations overflow, or the weights "
    "are damaged; the other requests are not affected"
)
LOGITS_NOT_FINITE = (
    "the model's output for token {place} is NaN or infinite: activations overflow for this input, "
    "the weights are damaged, or no token is left that it may sample; the other requests are not "
    "affected"
)

OVERDUE = "its deadline has passed; fix: allow more time, or send fewer requests at once"

MAX_IMBALANCE = 8
"""Largest difference in size between decode groups if max_itl_ms is set."""


class Scheduler:
    """The reference scheduler. Decodes before prefills; the most urgent requests first. Owns the
    numbers of the steps, and which of them are in flight."""

    def __init__(
        self,
        limits: SchedulerLimits,
        texts: "Tokenizer | None" = None,
        *,
        clock: Clock = time.monotonic,
        urgency: Urgency = by_priority,
        on_drafting_change: OnDraftingChange = log_change,
    ) -> None:
        """texts: the model's tokenizer, for requests with stop strings. clock: returns seconds, as
        time.monotonic does, for limits.max_itl_ms and deadlines. urgency: the policy by which
        requests are admitted and preempted. on_drafting_change: is told when drafts that
        have paid, of all requests or of one, do not any more, and when they pay again.

        Raises:
            ClientConfigError: limits.max_itl_ms is not a positive, finite number.
        """
        self._limits = limits
        self._texts = texts
        self._blocks = RequestBlocks(limits)
        self._adapters = AdapterVersions()
        num_stages, num_tokens = limits.pipeline_parallel_size, limits.max_num_batched_tokens
        self._step_budget: StepBudget | None = None
        max_imbalance = 1
        if limits.max_itl_ms is not None:
            self._step_budget = StepBudget(limits.max_itl_ms, num_stages, clock)
            max_imbalance = max(1, min(MAX_IMBALANCE, num_tokens // 2))
        self._draft_lengths: DraftLengths | None = None
        if limits.num_speculative_tokens and not limits.keeps_state:
            self._draft_lengths = DraftLengths(
                limits.num_speculative_tokens, num_stages, clock, on_drafting_change
            )
        self._groups = DecodeGroups(num_stages, max_imbalance)
        # A decode group never exceeds the token budget, whatever the groups' imbalance.
        most = (num_tokens + 1 - max_imbalance) * num_stages
        most = min(limits.max_num_seqs, most)
        self._queues = RequestQueues(self._blocks, self._groups, most, urgency)
        self._ended: list[str] = []
        """Ended requests that the workers have still to forget."""
        self._clock = clock
        self._overdue: list[RequestOutput] = []
        """Requests that their deadlines have ended, or an update, for the next result."""
        self._aborting: list[Request] = []
        """Requests that an update of their adapter ends once no step in flight names them."""
        self._num_steps = 0
        self._in_flight: deque[int] = deque()
        self._sampled_by = 0
        """Number of the weights' version that has sampled the newest tokens."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request. Its id may be that of a finished one, once no step in flight names it.

        Raises:
            RequestError: a field has the wrong type or is out of bounds, its id is in use, or it
                can never be served. Nothing has changed.
        """
        made = new_request(request, self._limits, self._texts)
        self._queues.check_unused(made.id, fix="choose another")
        if made.extensions:
            self._adapters.begin(made)
        first = sample_id(parent_id(made.id), 0) if made.sample.place else ""
        self._queues.add(made, behind=first)

    def adopt_requests(self, requests: Sequence[AdoptedRequest]) -> list[RequestOutput]:
        """Continue requests that another driver's Scheduler has left. To be called before anything
        but add_request. Return those that have all their tokens already; they end here.

        The others run from the first step on, with their blocks. Requests without blocks are
        recomputed from all their tokens. Requests that report logprobs start over from their
        prompt.

        Raises:
            RequestError: a request was not admitted by a Scheduler, its id is in use, or it does
                not fit these limits. Nothing is adopted.
        """
        for request in requests:
            self._queues.check_unused(request.req_id, fix="adopt requests first")
        adopted = [
            (adopted_request(request, self._limits, self._texts), request) for request in requests
        ]
        done = []
        for entry, _ in adopted:
            self._queues.add(entry)
        adopted.sort(key=lambda pair: (pair[0].urgency, pair[0].arrival))
        for entry, request in adopted:
            self._adapters.adopt(entry)
            reason = entry.take_again()
            for span in request.earlier_versions:
                entry.stamp(span.version, span.end)
            entry.stamp(request.weights_version)
            is_whole = entry.num_tokens == len(request.token_ids) and entry.blocks.may_share
            has_kv = 0 < request.num_computed_tokens <= entry.most_cached and is_whole
            if reason is not None:
                done.append(self._finish(entry, reason))
            elif has_kv and not self._queues.is_full:
                self._blocks.adopt(entry, request.blocks_by_group, request.num_computed_tokens)
                self._queues.start(entry)
                entry.needs_admission = True
            else:
                entry.blocks.is_mixed = False
        return done

    def abort_request(self, req_id: str) -> None:
        """End a request early; unknown ids are ignored."""
        request = self._queues.unfinished.get(req_id)
        if request is not None:
            self._remove(request)
        self._overdue = [output for output in self._overdue if output.req_id != req_id]

    def hold_request(self, req_id: str) -> None:
        """Do not admit a request that was just added; see HoldingScheduler."""
        self._queues.hold(self._queues.unfinished[req_id])

    def release_request(self, req_id: str) -> None:
        """Admit a held request as any other; see HoldingScheduler."""
        self._queues.release(req_id)

    def pause_request(self, req_id: str) -> None:
        """Preempt a request until release_request; see PausingScheduler."""
        request = self._queues.unfinished.get(req_id)
        if request is not None:
            self._preempt(request)
            self._queues.hold(request)

    def _preempt(self, request: Request) -> None:
        """Let a request wait, and ignore what steps in flight sample for it."""
        request.go_on_from_known(num_void=request.num_void + request.num_in_flight)
        self._begin_again(request)

    def generated_tokens(self, req_id: str, first: int) -> list[int]:
        """Return the generated tokens of an unfinished request from number `first` on."""
        request = self._queues.unfinished.get(req_id)
        if request is None:
            return []
        reported, end = request.reported, None
        if reported is not None and reported.is_tracing:
            end = reported.num_traced
        return list(request.tokens[request.num_prompt_tokens :][first:end])

    def generated_reports(self, req_id: str, first: int) -> Reports:
        """Return what an unfinished request reports on its tokens from number `first` on, and on
        its prompt."""
        request = self._queues.unfinished.get(req_id)
        if request is None:
            return Reports(None, None)
        reported = request.reported or Reported()
        own, full = reported.logprobs, reported.full_logprobs
        return Reports(
            None if own is None else own[first:],
            reported.prompt_logprobs,
            None if full is None else full[first:],
            request.known_experts,
        )

    def has_unfinished_requests(self) -> bool:
        """Return True while a request has not finished."""
        return bool(self._queues.unfinished or self._overdue)

    @property
    def num_running(self) -> int:
        """Number of requests that have blocks. Any thread may read it."""
        return len(self._queues.running)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        return self._blocks.num_free

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; see SchedulerInterface."""
        self._blocks.remember_sent()
        if self._queues.next_deadline != math.inf:
            self._overdue += self._end_overdue(idle=bool(self._in_flight))
        if self._aborting and not self._in_flight:
            self._overdue += self._end_aborting()
        step = Step(
            self._limits,
            self._queues,
            self._blocks,
            self._groups,
            self._step_budget,
            self._draft_lengths,
        )
        step.plan(self._num_steps, self._in_flight[0] if self._in_flight else self._num_steps)
        # Once all is done, send the ended requests to the workers; else a later step has them. A
        # result must come for those that their deadlines have ended.
        all_done = not self._queues.unfinished and not self._in_flight
        must_send = (all_done and self._ended) or (self._overdue and not self._in_flight)
        if step.is_empty and not must_send:
            return None
        if self._step_budget is not None:
            self._step_budget.sent(step.load())
        if self._draft_lengths is not None:
            self._draft_lengths.sent(
                self._num_steps,
                len(step.decodes),
                step.num_decode_tokens,
                only_decodes=not step.prefills,
                group=step.group or 0,
            )
        return self._commit(step)

    def _commit(self, step: Step) -> SchedulerOutput:
        new = [
            admit(request, self._sampled_by, self._adapters.present_of(request))
            for request in step.new
        ]
        preempted = step.preempted
        for request in step.new:
            if request.needs_admission:
                # A request that has jumped has a row, to be dropped first. An adopted one has none
                # yet: ids without a row are ignored.
                preempted = [*preempted, request.id]
                request.needs_admission = False
        brought = step.take_drafts()
        decoded = self._groups.commit(self._num_steps, step.group, step.decodes, step.drafts)
        for req_id, count in step.prefills.items():
            request = self._queues.unfinished[req_id]
            request.num_computed += count
            self._blocks.remember_later(request)
            if request.num_computed == request.num_tokens:
                request.num_tokens += not request.pools
                request.last_step = self._num_steps
                self._queues.end_prefill(request)
                self._queues.release_behind(req_id)
        self._in_flight.append(self._num_steps)
        self._num_steps += 1
        ended, self._ended = self._ended, []
        counts: Mapping[str, int] = step.prefills
        if decoded.num_scheduled:
            counts = {**counts, **decoded.num_scheduled} if counts else decoded.num_scheduled
        return SchedulerOutput(
            num_scheduled_tokens=counts,
            decode_req_ids=decoded.req_ids,
            scheduled_new_reqs=new,
            new_block_ids=step.new_blocks[0],
            more_new_block_ids=tuple(step.new_blocks[1:]) if any(step.new_blocks[1:]) else (),
            finished_req_ids=ended,
            preempted_req_ids=preempted,
            num_drafts=decoded.num_drafts,
            draft_token_ids=brought,
            skip_drafts=self._draft_lengths is not None and not self._draft_lengths.asks,
            extensions=self._blocks.take_moves() if self._limits.num_host_blocks else (),
        )

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Process the tokens that a step sampled; see SchedulerInterface."""
        ended = self._follow_adapters() if self._adapters.changes or self._aborting else []
        self._end_oldest()
        if result.invalid_blocks:
            self._give_up(result.invalid_blocks)
        if result.weights_version != self._sampled_by:
            self._note_weights(result.weights_version)
        done, self._overdue = self._overdue + ended, []
        if result.reports:
            self._take_prompts(result.reports.get(PromptLogprobs, {}))
            self._take_traces(result.reports.get(TraceLogprobs, {}))
            self._take_experts(result.reports.get(RoutedExperts, {}))
        if result.refused and self._queues.num_refusing:
            self._take_refusals(result)
        done += self._take_runs(result) if result.drafts else self._take_tokens(result)
        if result.reports:
            done += self._take_outputs(result.pooled)
        return done if self._queues.next_deadline == math.inf else done + self._end_overdue()

    def _take_refusals(self, result: StepResult) -> None:
        """Lower the counts of requests by tokens that a feature has refused. Before the tokens: a
        request that ends with one of these shares blocks by its true counts."""
        for req_id, count in result.refused.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and req_id not in result.drafts:
                self._take_back(request, count)

    def _take_tokens(self, result: StepResult) -> list[RequestOutput]:
        """Process the tokens of a step without drafts."""
        done: list[RequestOutput] = []
        find, block_size = self._queues.unfinished.get, self._blocks.unit
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            request = find(req_id)
            if request is None:  # stopped meanwhile: sampled past its end
                continue
            if request.num_void or token == NO_TOKEN:
                done += self._take_odd(request, token)
                continue
            reason = request.gain(token, result, None)
            if reason is not None:
                done.append(self._finish(request, reason))
            elif len(request.tokens) % block_size == 0 and request.is_running:
                self._blocks.remember_later(request)
        return done

    def _take_runs(self, result: StepResult) -> list[RequestOutput]:
        """Process the tokens of a step with drafts: of each request with some, a run of those that
        were accepted and one more."""
        done: list[RequestOutput] = []
        guesses: list[tuple[Request, DraftOutcome]] = []
        req_ids, token_ids, find = result.req_ids, result.token_ids, self._queues.unfinished.get
        has_odd, unit, end = NO_TOKEN in token_ids, self._blocks.unit, 0
        while end < len(req_ids):
            begin, req_id = end, req_ids[end]
            outcome = result.drafts.get(req_id, NO_DRAFTS)
            end += 1 + outcome.num_accepted
            request = find(req_id)
            if request is None:  # stopped meanwhile: sampled past its end
                continue
            tokens = token_ids[begin:end]
            if has_odd or not request.gain_run(tokens, outcome):
                guessed = self._take_outcome(request, outcome)
                done += self._take_each(request, tokens, result)
            else:
                guessed, num_known = outcome, len(request.tokens)
                if num_known % unit < end - begin and request.is_running:
                    self._blocks.remember_later(request)
            if guessed.num_drafted:
                guesses.append((request, guessed))
        if self._draft_lengths is not None:
            self._draft_lengths.learn(guesses)
        return done

    def _give_up(self, block_ids: Sequence[int]) -> None:
        """Compute the requests again that have one of these blocks, whose contents did not match
        when they were loaded, and what steps in flight sample for them."""
        invalid = frozenset(block_ids)
        for request in [*self._queues.running.values()]:
            if self._blocks.give_up(request, invalid):
                self._preempt(request)

    def _take_outcome(self, request: Request, outcome: DraftOutcome) -> DraftOutcome:
        """Note what has become of a request's drafts. Before the tokens: a request that ends with
        one of these shares blocks by its true counts. Return the outcome of those that were
        guesses."""
        if outcome is NO_DRAFTS:
            return NO_DRAFTS
        is_void, num_known = request.num_void > 0, len(request.tokens)
        guessed = request.drafts.take_outcome(outcome, num_known, is_void=is_void)
        if outcome.num_drafted > outcome.num_accepted:
            self._take_back(request, outcome.num_drafted - outcome.num_accepted)
        return guessed

    def _take_each(
        self, request: Request, tokens: Sequence[int], result: StepResult
    ) -> list[RequestOutput]:
        """Process the tokens of a request one by one, up to its end."""
        done: list[RequestOutput] = []
        ones = result.gained.get(request.id, repeat(None, len(tokens)))
        for token, one in zip(tokens, ones, strict=True):
            if request.id not in self._queues.unfinished:
                break
            if request.num_void or token == NO_TOKEN:
                done += self._take_odd(request, token)
                continue
            reason = request.gain(token, result, one)
            if reason is not None:
                done.append(self._finish(request, reason))
            elif len(request.tokens) % self._blocks.unit == 0 and request.is_running:
                self._blocks.remember_later(request)
        return done

    def _take_odd(self, request: Request, token: int) -> list[RequestOutput]:
        """Process a token that is void, or NO_TOKEN."""
        if request.num_void:
            return self._take_void(request, token)
        return self._not_finite(request, len(request.tokens), request.num_in_flight - 1)

    def _note_weights(self, version: int) -> None:
        """Note that other weights have sampled the tokens from here on."""
        for request in self._queues.unfinished.values():
            request.stamp(self._sampled_by)
        self._sampled_by = version

    def _end_overdue(self, *, idle: bool = False) -> list[RequestOutput]:
        """End the requests whose deadlines have passed. idle: only those that no step in flight
        names. A driver must hear of the others before it sends another step."""
        overdue = self._queues.find_overdue(self._clock, idle=idle)
        return [self._finish(request, "error", OVERDUE) for request in overdue]

    def _end_oldest(self) -> None:
        """Note that the oldest step in flight has its result."""
        if self._in_flight:
            self._in_flight.popleft()
        if self._step_budget is not None:
            self._step_budget.done()
        if self._draft_lengths is not None:
            self._draft_lengths.done()

    def jump_forward(self, req_id: str, token_ids: Sequence[int]) -> Jump:
        """Let a request gain tokens that its grammar forces; see JumpingScheduler."""
        request = self._queues.unfinished.get(req_id)
        count = 0 if request is None else request.num_jumped(token_ids)
        if request is None or not count or self._limits.keeps_state:
            return NO_JUMP
        if req_id in self._queues.suspended:
            return NO_JUMP
        if request.drafts.num_in_flight:  # how many of its tokens are computed is not known
            return NO_JUMP
        if count <= request.num_in_flight + self._num_drafts_of(request):
            return NO_JUMP  # a step computes them as drafts
        count, reason = request.jump(token_ids[:count])
        if reason is not None:
            return Jump(count, self._finish(request, reason))
        self._queues.jump(request)
        return Jump(count)

    def _num_drafts_of(self, request: Request) -> int:
        """Return how many forced tokens the next step of a request may have as drafts."""
        if self._draft_lengths is None or not request.is_running or request.needs_admission:
            return 0
        num_certain = request.drafts.expected.count_forced_from(request.num_tokens)
        return min(self._limits.num_speculative_tokens, num_certain)

    @property
    def most_expected(self) -> int:
        """Most expected tokens of a request in a step; see ExpectingScheduler."""
        return 0 if self._draft_lengths is None else self._limits.num_speculative_tokens

    def expect_tokens(self, req_id: str, token_ids: Sequence[int], num_forced: int) -> None:
        """Note tokens that may follow those in flight; see ExpectingScheduler."""
        request = self._queues.unfinished.get(req_id)
        if request is not None and not request.traits.may_draft:
            stops = request.traits.stop_ids
            request.drafts.expect(token_ids, request.num_tokens, num_forced, stops)

    def _take_void(self, request: Request, token: int) -> list[RequestOutput]:
        """Ignore a token. NO_TOKEN at a place that a jump has filled is a fault all the same."""
        request.num_void -= 1
        if not request.repeated:
            return []
        place, request.repeated = request.repeated[0], request.repeated[1:]
        if token != NO_TOKEN:
            return []
        return self._not_finite(request, place, request.num_void + request.num_in_flight)

    def _take_prompts(self, chunks: Mapping[str, PromptChunk]) -> None:
        for req_id, chunk in chunks.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and request.reported is not None:
                request.reported.take_prompt(chunk)

    def _take_traces(self, chunks: Mapping[str, TraceChunk]) -> None:
        for req_id, chunk in chunks.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and request.reported is not None:
                request.reported.take_trace(chunk, request.num_prompt_tokens)

    def _take_experts(self, chunks: Mapping[str, Sequence[ExpertsChunk]]) -> None:
        for req_id, own in chunks.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and request.experts is not None:
                request.experts.take(own, request.num_settled)

    def _take_outputs(self, pooled: Mapping[str, NDArray[np.float32]]) -> list[RequestOutput]:
        ended = (
            self._take_output(self._queues.unfinished.get(req_id), values)
            for req_id, values in pooled.items()
        )
        return [output for outputs in ended for output in outputs]

    def _take_output(
        self, request: Request | None, values: NDArray[np.float32]
    ) -> list[RequestOutput]:
        """End a request that pools with its output, float32 [rows, width]."""
        if request is None:  # it has been aborted, or its output was there before
            return []
        if not np.isfinite(values).all():
            if self._blocks.distrust(request):
                self._begin_again(request)
                return []
            return [self._finish(request, "error", POOLED_NOT_FINITE)]
        params = extension_of(request.extensions, PoolingParams)
        per_token = params is not None and params.task in ("token_embed", "token_classify")
        return [self._finish(request, "stop", pooled=values if per_token else values[0])]

    def _take_back(self, request: Request, count: int) -> None:
        """Take back tokens that a step had counted for a request, which did not gain them."""
        if request.num_void:
            request.num_void -= count
            request.repeated = request.repeated[: max(0, len(request.repeated) - count)]
            return
        was_complete = request.num_tokens == request.limit
        request.num_tokens -= count
        # They were to follow tokens that it has not gained.
        request.drafts.expected = NO_DRAFTS_EXPECTED
        if request.is_running:
            request.num_computed -= count
            if was_complete:
                self._queues.decode(request)

    def use_weights(self, version: WeightsVersion) -> None:
        """Cache prefixes of this version alone from now on; see VersionedScheduler."""
        self._note_weights(version.number)
        if self._blocks.use_weights(version.key, self._queues.unfinished.values()):
            self.forget_prefixes()
            self._blocks.forget_host_tier()

    def share_recomputed(self) -> None:
        """Share the blocks of running requests, again; see RecomputingScheduler."""
        self._blocks.share_recomputed(self._queues.running.values())

    def await_recompute(self, req_ids: Collection[str]) -> None:
        """Leave requests out of steps; see SuspendingScheduler."""
        self._queues.suspend(req_ids)

    def use_adapter(
        self, adapter: GroupAdapter, running: RunningRequests, num_in_flight: int
    ) -> None:
        """Compute an adapter's requests with its new weights; see AdaptingScheduler."""
        first = self._num_steps
        if num_in_flight < len(self._in_flight):  # planned, and sent after the update
            first = self._in_flight[num_in_flight]
        users = self._adapters.change(adapter, first, self._queues.unfinished.values())
        if running == "keep":
            return
        for request in users:
            if running != "abort":
                if request.is_running:
                    self._preempt(request)
            elif request.is_running or len(request.tokens) > request.num_prompt_tokens:
                self.pause_request(request.id)
                self._aborting.append(request)

    def _follow_adapters(self) -> list[RequestOutput]:
        """Note which weights of adapters have sampled the oldest step in flight. Return the
        requests that an update ends."""
        if self._in_flight:
            unfinished = self._queues.unfinished.values()
            self._adapters.sampled_by(self._in_flight[0], self._sampled_by, unfinished)
        return self._end_aborting()

    def _end_aborting(self) -> list[RequestOutput]:
        ending, self._aborting = self._aborting, []
        unfinished = self._queues.unfinished
        return [self._finish(each, "abort") for each in ending if unfinished.get(each.id) is each]

    def forget_prefixes(self) -> None:
        """Drop the prefix cache after the group has lost its KV cache: by a sleep or a discard, or
        by new weights of which use_weights does not tell. Requests that the next step would admit
        with their present blocks are recomputed instead, from their known tokens: adopted ones,
        which have no row yet, and those that have jumped forward, which may still have one. If the
        group has dropped the rows of other running requests, it fails the next step, and
        step_failed gets their ids."""
        for request in [each for each in self._queues.running.values() if each.needs_admission]:
            self._begin_again(request)
        self._blocks.forget_all()

    @property
    def prefix_tag(self) -> bytes:
        """The name of the prefix cache's hashes; see RestoringScheduler."""
        return self._blocks.tag

    def restore_prefixes(self, blocks: CachedBlocks) -> int:
        """Continue with the prefix cache of an earlier driver; see RestoringScheduler."""
        return self._blocks.restore(blocks)

    def take_cached_changes(self) -> CachedChanges:
        """Return what has changed in the prefix cache; see RestoringScheduler."""
        return self._blocks.take_changes()

    @property
    def has_host_tier(self) -> bool:
        """True if evicted blocks go to host memory; see TieredScheduler."""
        return self._blocks.has_host_tier

    def restore_host_tier(self, slots: CachedBlocks) -> int:
        """Continue with the host memory of an earlier driver; see TieredScheduler."""
        return self._blocks.restore_host_tier(slots)

    def forget_host_tier(self) -> None:
        """Drop what is in host memory; see TieredScheduler."""
        self._blocks.forget_host_tier()

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Roll back failed steps: lost requests wait again, in order of arrival."""
        self._blocks.fail_moves(outputs)
        for _ in outputs:
            self._in_flight.pop()
        if self._step_budget is not None:
            self._step_budget.failed(len(outputs))
        if self._draft_lengths is not None:
            self._draft_lengths.failed(len(outputs))
        running = self._queues.running
        for req_id in lost_req_ids:
            if req_id in running:
                self._queues.requeue(running[req_id])
        self._blocks.forget_all(good=running.values())
        for request in self._queues.unfinished.values():
            request.go_on_from_known()
            request.drafts.lose_steps()

    def end_requests(self, req_ids: Collection[str]) -> list[RequestOutput]:
        """End requests with their tokens so far, and those that wait with some; see
        EndingScheduler."""
        ended = [
            request
            for request in self._queues.unfinished.values()
            if request.id in req_ids
            or not (request.is_running or len(request.tokens) == request.num_prompt_tokens)
        ]
        return [self._finish(request, "abort") for request in ended]

    def _not_finite(self, request: Request, place: int, num_left: int) -> list[RequestOutput]:
        """Handle a request whose logits for the token at a place are NaN or infinite: no request
        may share the blocks that it wrote. If it began with blocks of another request, the fault
        may be in those: then it is computed again, from its known tokens and by itself. num_left:
        tokens of it that still arrive."""
        if not self._blocks.distrust(request):
            adapter = extension_of(request.extensions, LoraRequest)
            reason = LOGITS_NOT_FINITE.format(place=place + 1)
            del request.tokens[place:]
            if adapter is not None:
                reason += f"; or a daemon lacks its adapter {adapter.name!r}: add it again"
            return [self._finish(request, "error", reason)]
        request.go_on_from_known(num_void=num_left)
        self._begin_again(request)
        return []

    def _begin_again(self, request: Request) -> None:
        if request.is_running:  # otherwise it was preempted and already waits
            self._ended.append(request.id)
            self._queues.requeue(request)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: str = "",
        pooled: NDArray[np.float32] | None = None,
    ) -> RequestOutput:
        if request.is_running and not error:
            self._blocks.remember(request)
        self._remove(request)
        return request.output(reason, self._sampled_by, error, pooled)

    def _remove(self, request: Request) -> None:
        if request.is_running:
            self._ended.append(request.id)
        if self._draft_lengths is not None:
            self._draft_lengths.forget(request)
        self._queues.remove(request)
