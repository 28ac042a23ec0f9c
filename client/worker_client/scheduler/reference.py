"""The reference scheduler: continuous batching, chunked prefill, prefix caching, preemption by
recompute. Takes the driver's calls, and commits steps."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rpc_schema.kv_cache import NUM_NULL_BLOCKS
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.loras import GroupAdapter
from worker_client.group.running import RunningRequests
from worker_client.group.weights_state import WeightsVersion
from worker_client.requests import (
    GenerationRequest,
    Reports,
    RequestOutput,
    parent_id,
    sample_id,
)
from worker_client.scheduler.adapter_updates import AdapterUpdates
from worker_client.scheduler.admissions import admit
from worker_client.scheduler.block_exchange import HostBlockExchange
from worker_client.scheduler.block_hashes import BlockHashes
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.content_names import ContentNames
from worker_client.scheduler.decode_groups import DecodeGroups
from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.drafting.payoffs import OnDraftingChange, log_change
from worker_client.scheduler.interface import (
    NO_JUMP,
    Jump,
    SchedulerLimits,
)
from worker_client.scheduler.new_requests import adopted_request, new_request
from worker_client.scheduler.open_steps import OpenSteps
from worker_client.scheduler.outside_blocks import OutsideBlocks
from worker_client.scheduler.planning import Step
from worker_client.scheduler.prefix_cache import CachedChanges, PrefixCache
from worker_client.scheduler.prefix_loads import PrefixLoads
from worker_client.scheduler.prefix_search import PrefixSearch
from worker_client.scheduler.reported import Reported
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_blocks import RequestBlocks
from worker_client.scheduler.request_exits import RequestExits
from worker_client.scheduler.request_queues import RequestQueues, Urgency, by_priority
from worker_client.scheduler.sampling_weights import SamplingWeights
from worker_client.scheduler.step_budget import Clock, StepBudget
from worker_client.scheduler.step_results import StepResults
from worker_client.scheduler.stores_ahead import StoresAhead
from worker_client.scheduler_output import (
    SchedulerOutput,
    StepResult,
)
from worker_client.steps.cached_blocks import CachedBlocks

if TYPE_CHECKING:  # it needs the library of an extra
    from worker_client.inputs.tokenizer import Tokenizer


OVERDUE = "its deadline has passed; fix: allow more time, or send fewer requests at once"

MAX_IMBALANCE = 8
"""Largest difference in size between decode groups if max_itl_ms is set."""


class Scheduler:
    """The reference scheduler. Decodes before prefills; the most urgent requests first. Parts own
    its state: queues, blocks, decode groups, open steps, versions of weights, and exits."""

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
        self._outside = OutsideBlocks(limits)
        self._hashes = BlockHashes(limits)
        self._pool = BlockPool(
            limits.num_blocks,
            len(limits.block_groups),
            limits.checkpoint_blocks,
            self._outside.on_evict,
            self._outside.on_free,
        )
        self._search = PrefixSearch(limits, self._hashes, self._pool, self._outside.if_any)
        self._prefixes = PrefixCache(limits, self._hashes, self._pool, self._outside)
        self._blocks = RequestBlocks(limits, self._pool, self._prefixes)
        self._weights = SamplingWeights()
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
        self._loads: PrefixLoads | None = None
        if self._outside.tier is not None and not limits.has_device_tier:
            self._loads = PrefixLoads(self._outside, self._queues, self._blocks, clock)
        self._stores_ahead: StoresAhead | None = None
        if limits.max_stored_ahead and self._outside.tier and self._pool.ranked:
            self._stores_ahead = StoresAhead(limits, self._pool, self._pool.ranked, self._outside)
        self._steps = OpenSteps(self._step_budget, self._draft_lengths)
        self._exits = RequestExits(self._queues, self._prefixes, self._weights, self._draft_lengths)
        self._results = StepResults(self._queues, self._prefixes, self._exits, self._draft_lengths)
        self._updates = AdapterUpdates(self._weights, self._steps, self._queues, self._exits)
        self._exchange: HostBlockExchange | None = None
        if (tier := self._outside.tier) is not None:
            names = ContentNames(limits.block_groups, self._hashes.contents_tag)
            self._exchange = HostBlockExchange(
                tier, self._pool, self._keys_of, names, self._steps, self._outside.files
            )
        self._clock = clock
        self._overdue: list[RequestOutput] = []
        """Requests that their deadlines have ended, or an update, for the next result."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request. Its id may be that of a finished one, once no step in flight names it.

        Raises:
            RequestError: a field has the wrong type or is out of bounds, its id is in use, or it
                can never be served. Nothing has changed.
        """
        made = new_request(request, self._limits, self._texts)
        self._queues.check_unused(made.id, fix="choose another")
        if made.extensions:
            self._weights.begin(made)
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
            self._weights.adopt(entry)
            reason = entry.take_again()
            for span in request.earlier_versions:
                entry.stamp(span.version, span.end)
            entry.stamp(request.weights_version)
            is_whole = entry.num_tokens == len(request.token_ids) and entry.prefix.may_share
            has_kv = 0 < request.num_computed_tokens <= entry.most_cached and is_whole
            if reason is not None:
                done.append(self._exits.finish(entry, reason))
            elif has_kv and not self._queues.is_full:
                self._blocks.adopt(entry, request.blocks_by_group, request.num_computed_tokens)
                self._queues.start(entry)
                entry.needs_admission = True
            else:
                entry.prefix.is_mixed = False
        return done

    def abort_request(self, req_id: str) -> None:
        """End a request early; unknown ids are ignored."""
        request = self._queues.unfinished.get(req_id)
        if request is not None:
            self._exits.remove(request)
        self._overdue = [output for output in self._overdue if output.req_id != req_id]

    def hold_request(self, req_id: str) -> None:
        """Do not admit a request that was just added; see HoldingScheduler."""
        self._queues.hold(self._queues.unfinished[req_id])

    def release_request(self, req_id: str) -> None:
        """Admit a held request as any other; see HoldingScheduler."""
        self._outside.end_fetch(req_id)
        self._queues.release(req_id)

    def pause_request(self, req_id: str) -> None:
        """Preempt a request until release_request; see PausingScheduler."""
        request = self._queues.unfinished.get(req_id)
        if request is not None:
            self._exits.preempt(request)
            self._queues.hold(request)

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

    def output_so_far(self, req_id: str) -> RequestOutput | None:
        """Return the output of an unfinished request; see ContinuingScheduler."""
        request = self._queues.unfinished.get(req_id)
        if request is None or not request.has_output:
            return None
        return request.output("abort", self._weights.version)

    def has_unfinished_requests(self) -> bool:
        """Return True while a request has not finished."""
        return bool(self._queues.unfinished or self._overdue)

    @property
    def num_running(self) -> int:
        """Number of requests that have blocks. Any thread may read it."""
        return len(self._queues.running)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that requests may hold."""
        return self._limits.num_blocks - NUM_NULL_BLOCKS

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        return self._blocks.num_free

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; see SchedulerInterface."""
        self._prefixes.remember_sent()
        if self._exchange is not None:
            self._exchange.outgoing.keep_filled()
        if self._queues.next_deadline != math.inf:
            self._overdue += self._end_overdue(idle=bool(self._steps.numbers))
        if self._updates.aborting and not self._steps.numbers:
            self._overdue += self._updates.end_aborting()
        loads = self._loads
        if loads is not None:
            loads.end_arrived(len(self._steps.numbers))
        step = self._plan()
        if step.is_empty and loads is not None and loads.is_loading and not self._steps.numbers:
            loads.end_all()
            step = self._plan()
        if step.is_empty:
            # Once all is done, send ended requests and moves to the workers, else with a later
            # step. A result must come for those that their deadlines have ended. What another group
            # waits for is stored at once.
            all_done = not self._queues.unfinished
            must_tell = self._exits.must_tell or self._outside.has_moves
            must_send = self._overdue or (all_done and must_tell)
            is_awaited = self._exchange is not None and self._exchange.outgoing.must_store
            if not is_awaited and (self._steps.numbers or not must_send):
                return None
        return self._commit(step, self._steps.add(step))

    def _end_loads(self) -> None:
        if self._loads is not None:
            self._loads.end_all()

    def _plan(self) -> Step:
        step = Step(
            self._limits,
            self._queues,
            self._blocks,
            self._search,
            self._groups,
            self._step_budget,
            self._draft_lengths,
            self._loads,
        )
        step.plan(self._steps.next, self._steps.oldest)
        return step

    def _commit(self, step: Step, number: int) -> SchedulerOutput:
        """Count the tokens of a step as computed, and return it for the workers."""
        new = [
            admit(request, self._weights.version, self._weights.present_of(request))
            for request in step.new
        ]
        preempted = step.preempted
        for request in step.new:
            if request.needs_admission:
                # A request that has jumped has a row, to be dropped first. An adopted one has none
                # yet: ids without a row are ignored.
                preempted = [*preempted, request.id]
                request.needs_admission = False
        if self._stores_ahead is not None:
            self._stores_ahead.plan()
        brought = step.take_drafts()
        decoded = self._groups.commit(number, step.group, step.decodes, step.drafts)
        for req_id, count in step.prefills.items():
            request = self._queues.unfinished[req_id]
            request.num_computed += count
            self._prefixes.remember_later(request)
            if request.num_computed == request.num_tokens:
                request.num_tokens += not request.pools
                request.last_step = number
                self._queues.end_prefill(request)
                self._queues.release_behind(req_id)
        if self._exchange is not None and self._exchange.outgoing.are_wanted:
            prompts = (self._queues.unfinished[req_id] for req_id in step.prefills)
            filled = self._prefixes.filled_by(prompts)
            self._exchange.outgoing.keep_filling(filled, self._outside.loading)
        counts: Mapping[str, int] = step.prefills
        if decoded.num_scheduled:
            counts = {**counts, **decoded.num_scheduled} if counts else decoded.num_scheduled
        return SchedulerOutput(
            num_scheduled_tokens=counts,
            decode_req_ids=decoded.req_ids,
            scheduled_new_reqs=new,
            new_block_ids=step.new_blocks[0],
            more_new_block_ids=tuple(step.new_blocks[1:]) if any(step.new_blocks[1:]) else (),
            finished_req_ids=self._exits.take_dropped(),
            preempted_req_ids=preempted,
            num_drafts=decoded.num_drafts,
            draft_token_ids=brought,
            skip_drafts=self._draft_lengths is not None and not self._draft_lengths.asks,
            extensions=self._outside.take_moves(self._hashes.tag),
        )

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Process the tokens that a step sampled; see SchedulerInterface."""
        done, self._overdue = self._overdue, []
        if self._weights.changes or self._updates.aborting:
            done += self._updates.follow()
        self._steps.end_oldest()
        if self._outside.tier is not None:
            self._outside.step_ended(has_tokens=bool(result.req_ids))
        if result.invalid_blocks:
            self._exits.give_up_blocks(result.invalid_blocks)
        if result.arrived_blocks:
            self._outside.have_arrived(result.arrived_blocks)
        if self._loads is not None:
            self._loads.note_result(result.arrived_s_ago)
        if result.weights_version != self._weights.version:
            self._weights.set_version(result.weights_version, self._queues.unfinished.values())
        done += self._results.take(result)
        return done if self._queues.next_deadline == math.inf else done + self._end_overdue()

    def _end_overdue(self, *, idle: bool = False) -> list[RequestOutput]:
        """End the requests whose deadlines have passed. idle: only those that no step in flight
        names. A driver must hear of the others before it sends another step."""
        overdue = self._queues.find_overdue(self._clock, idle=idle)
        return [self._exits.finish(request, "error", OVERDUE) for request in overdue]

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
            return Jump(count, self._exits.finish(request, reason))
        self._queues.jump(request)
        return Jump(count)

    @property
    def weights_key(self) -> bytes:
        """Names the present weights; see ExchangingScheduler."""
        return self._hashes.weights

    def begin_output(self, req_id: str, token_id: int) -> Jump:
        """Let a held request begin its output with a token; see ExchangingScheduler."""
        request = self._queues.unfinished.get(req_id)
        if request is None or not request.is_new or request.reported is not None:
            return NO_JUMP
        request.num_tokens += 1  # as if a step in flight sampled it
        done = self._results.take(StepResult([req_id], [token_id]))
        return Jump(1, done[0] if done else None)

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

    def use_weights(self, version: WeightsVersion) -> None:
        """Cache prefixes of this version alone from now on; see VersionedScheduler."""
        unfinished = self._queues.unfinished.values()
        self._weights.set_version(version.number, unfinished)
        if self._hashes.use_weights(version.key, unfinished):
            self.forget_prefixes()
            self._outside.forget_all()

    def share_recomputed(self) -> None:
        """Share the blocks of running requests, again; see RecomputingScheduler."""
        self._prefixes.share_recomputed(self._queues.running.values())

    def await_recompute(self, req_ids: Collection[str]) -> None:
        """Leave requests out of steps; see SuspendingScheduler."""
        self._queues.suspend(req_ids)

    def use_adapter(
        self, adapter: GroupAdapter, running: RunningRequests, num_in_flight: int
    ) -> None:
        """Compute an adapter's requests with its new weights; see AdaptingScheduler."""
        self._updates.begin(adapter, running, num_in_flight)

    def forget_prefixes(self) -> None:
        """Drop the prefix cache after the group has lost its KV cache: by a sleep or a discard, or
        by new weights of which use_weights does not tell. Requests that the next step would admit
        with their present blocks are recomputed instead, from their known tokens: adopted ones,
        which have no row yet, and those that have jumped forward, which may still have one. If the
        group has dropped the rows of other running requests, it fails the next step, and
        step_failed gets their ids."""
        for request in [each for each in self._queues.running.values() if each.needs_admission]:
            self._exits.begin_again(request)
        self._prefixes.forget_all()
        self._end_loads()

    @property
    def prefix_tag(self) -> bytes:
        """The name of the prefix cache's hashes; see RestoringScheduler."""
        return self._hashes.tag

    def restore_prefixes(self, blocks: CachedBlocks) -> int:
        """Continue with the prefix cache of an earlier driver; see RestoringScheduler."""
        return self._prefixes.restore(blocks)

    def take_cached_changes(self) -> CachedChanges:
        """Return what has changed in the prefix cache; see RestoringScheduler."""
        return self._prefixes.take_changes()

    @property
    def exchange(self) -> HostBlockExchange | None:
        """Blocks that other groups get and give; see ExchangingScheduler."""
        return self._exchange

    def _keys_of(self, req_id: str, num_more: int) -> list[bytes]:
        return self._search.keys_of(self._queues.unfinished[req_id], num_more)

    @property
    def has_host_tier(self) -> bool:
        """True if evicted blocks go to host memory; see TieredScheduler."""
        return self._outside.tier is not None

    def restore_host_tier(self, slots: CachedBlocks) -> int:
        """Continue with the host memory of an earlier driver; see TieredScheduler."""
        return self._outside.restore_tier(slots)

    def forget_host_tier(self) -> None:
        """Drop what is in host memory; see TieredScheduler."""
        self._outside.forget_tier()

    @property
    def has_kv_files(self) -> bool:
        """True if blocks are kept in files; see FetchingScheduler."""
        return self._outside.files is not None

    def may_fetch(self, req_id: str) -> bool:
        """Return True if a request could be admitted next; see FetchingScheduler."""
        request = self._queues.unfinished.get(req_id)
        return request is not None and self._queues.is_in_line(request)

    def lacking_blocks(self, req_id: str, *, windowed: bool) -> Sequence[Sequence[bytes]]:
        """Return what a waiting request could begin with; see FetchingScheduler."""
        request = self._queues.unfinished.get(req_id)
        if request is None:
            return []
        by_group = self._search.find_lacking(request, windowed=windowed)
        return self._outside.begin_fetch(req_id, by_group)

    def note_fetched(self, hashes: Sequence[bytes]) -> None:
        """Note blocks that all ranks have read from files; see FetchingScheduler."""
        self._outside.note_fetched(hashes)

    def forget_fetched(self) -> None:
        """Drop them; see FetchingScheduler."""
        self._outside.forget_fetched()

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Roll back failed steps: lost requests wait again, in order of arrival."""
        self._outside.fail(outputs)
        self._end_loads()
        self._steps.fail(len(outputs))
        self._exits.have_steps_failed = True
        running = self._queues.running
        for req_id in lost_req_ids:
            if req_id in running:
                self._queues.requeue(running[req_id])
        self._prefixes.forget_all(good=running.values())
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
        return [self._exits.finish(request, "abort") for request in ended]
