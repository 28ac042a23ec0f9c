"""The plan of one step: decodes before prefills, waiting requests in order of urgency. Finds blocks
for it, preempts and admits; tokens count as computed only once the scheduler commits the step."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice

from worker_client.parts.registry import may_start
from worker_client.scheduler.decode_groups import DecodeGroups
from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.prefix_loads import PrefixLoads
from worker_client.scheduler.prefix_search import PrefixSearch
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_blocks import RequestBlocks
from worker_client.scheduler.request_queues import RequestQueues
from worker_client.scheduler.step_budget import PromptAllowance, StepBudget, StepLoad
from worker_client.scheduler.step_room import AdmissionSize, StepRoom
from worker_client.steps.drafts import NONE_BROUGHT

PIPELINE_CHUNK = 2048
"""In a pipeline, a step combines several prompts only up to this many prompt tokens, or more if
many are pending (Step._chunk). Short steps reduce the time that later stages idle at the start and
earlier stages at the end, but GEMMs of fewer rows are less efficient."""

CHUNKS_PER_STAGE = 2
"""Pending prompt tokens are spread over this many steps per stage, as long as each step has at
least PIPELINE_CHUNK tokens."""

LEAST_CUT_DIVISOR = 4
"""A step that already has prompts starts another prompt, and cuts it, only if at least
1 / LEAST_CUT_DIVISOR of its token budget is left. Otherwise the next step takes the prompt whole,
or a longer first chunk of it. Nothing is lost, since a step that is not quite full takes less time,
while attention of short chunks is inefficient."""

MAX_LOOKED_AT = 1024
"""Limit on the waiting prompts that are counted to choose a step's number of prompt tokens."""


class Step:
    """A step being planned, possibly empty. The scheduler reads the public attributes."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: RequestQueues,
        blocks: RequestBlocks,
        search: PrefixSearch,
        groups: DecodeGroups,
        step_budget: StepBudget | None = None,
        draft_lengths: DraftLengths | None = None,
        loads: PrefixLoads | None = None,
    ) -> None:
        """step_budget: limits the prompt tokens of the step while requests decode. draft_lengths:
        chooses drafts; loads: of prefixes, beside steps. None: there are none."""
        self.group: int | None = None
        """Decode group of the step."""
        self.decodes: dict[str, Request] = {}
        self.drafts: dict[str, int] = {}
        """Drafts of the requests in decodes that have some."""
        self.prefills: dict[str, int] = {}
        self.new: list[Request] = []
        self.new_blocks: list[dict[str, list[int]]] = [{} for _ in limits.block_groups]
        """New blocks of each KV group, by request."""
        self.preempted: list[str] = []
        self._limits = limits
        self._queues = queues
        self._blocks = blocks
        self._search = search
        self._groups = groups
        self._budget = limits.max_num_batched_tokens
        self._num_prefill_tokens = 0
        self._room = StepRoom(limits)
        support = limits.pooling
        self._whole_prompts = support is not None and support.whole_prompts
        self._step_budget = step_budget
        self._draft_lengths = draft_lengths
        self._loads = loads
        self._allowance: PromptAllowance | None = None
        self._victims: list[Request] | None = None
        """Running requests, those that lose their blocks first at the end; once they are needed."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute and no request is preempted."""
        return not (self.decodes or self.prefills or self.preempted)

    def plan(self, number: int, oldest: int) -> None:
        """Decide which requests take part in step `number`; `oldest` is the first step in flight,
        or `number`.

        Of any num_stages consecutive steps in flight, at most one decodes a given request, so that
        the stages work on different requests. If nothing else can be done, it decodes more often.
        """
        num_stages = self._limits.pipeline_parallel_size
        chunk = self._chunk(num_stages)
        self._plan_decodes(before=max(oldest, number - num_stages + 1))
        self._plan_drafts()
        if self._step_budget is not None and self._delays_tokens():
            self._allowance = self._step_budget.allowance(self.num_decode_tokens)
        self._plan_prefills(chunk)
        if not self.preempted:
            self._admit(chunk)
        if self.is_empty:
            self._plan_decodes(before=number)
            self._plan_drafts()
        if self.drafts:
            self._extend_for_drafts()
        if self._limits.num_lookahead_tokens and self._draft_lengths is not None:
            self._extend_ahead(self._draft_lengths)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of requests that decode, with their drafts."""
        return len(self.decodes) + sum(self.drafts.values())

    def take_drafts(self) -> Mapping[str, Sequence[int]]:
        """Return the drafts of requests that are not the device's; call it once, before the step is
        committed."""
        if not self._queues.num_guided:
            return NONE_BROUGHT
        return {
            req_id: request.drafts.take(request.num_tokens, count)
            for req_id, count in self.drafts.items()
            if not (request := self.decodes[req_id]).traits.may_draft
        }

    def load(self) -> StepLoad:
        """Return the step's work; call it before the step is committed."""
        num_tokens, num_pairs = 0, 0.0
        for req_id, count in self.prefills.items():
            num_tokens += count
            num_pairs += count * (self._queues.unfinished[req_id].num_computed + count / 2)
        return StepLoad(num_tokens, self.num_decode_tokens, num_pairs)

    def _delays_tokens(self) -> bool:
        """Return True if some request is decoding, in this step or in another one in flight: then
        the step's prompt tokens are limited. Always False for a model whose prompts cannot be
        computed in chunks."""
        if self._whole_prompts:
            return False
        if not self._groups.is_empty:
            return True
        # After a jump forward or an adoption, a request is in no group until it is admitted again.
        return any(request.needs_admission for request in self._queues.prefilling.values())

    def _plan_decodes(self, *, before: int) -> None:
        """Plan the group whose turn it is, or the next one with a request that can run."""
        size = self._blocks.unit
        for group, ready in self._groups.in_turn(before):
            self.decodes = ready
            # Requests whose blocks are full.
            needy = [r for r in ready.values() if r.num_computed % size == 0]
            if needy:
                self._extend_each(needy)
            if self.decodes:
                self.group = group
                self._budget -= len(self.decodes)
                return

    def _plan_drafts(self) -> None:
        """Choose how many drafts each decoding request has, within the token budget."""
        if self._draft_lengths is None or self.group is None or not self.decodes:
            return
        if self._queues.num_refusing:
            return  # daemons take drafts and refusals in different steps
        wanted = self._draft_lengths.choose([*self.decodes.values()], self.group)
        left = self._budget - sum(wanted.values())
        if left >= 0:
            self.drafts, self._budget = {**wanted}, left
            return
        for req_id, most in wanted.items():
            count = min(most, self._budget)
            if count > 0:
                self.drafts[req_id] = count
                self._budget -= count

    def _extend_for_drafts(self) -> None:
        """Find blocks for drafts, with what the other tokens of the step have left: a request that
        lacks some has fewer drafts."""
        decodes = self.decodes
        lacking = [
            (request, count)
            for req_id, count in self.drafts.items()
            if (request := decodes[req_id]).num_computed + count >= request.blocks.end
        ]
        for request, count in lacking:
            req_id, given = request.id, self._blocks.extend(request, 1 + count)
            if given is None:
                left = request.blocks.end - request.num_computed - 1
                self.drafts[req_id] = min(count, left)
                if left <= 0:
                    del self.drafts[req_id]
                continue
            self._add_blocks(request, given)

    def _extend_ahead(self, draft_lengths: DraftLengths) -> None:
        """Find blocks for what a draft model computes at the step's end, behind the tokens of each
        request that samples: without them, the drafts of its next step are of less use."""
        if not draft_lengths.asks:
            return
        counts = {req_id: 1 + self.drafts.get(req_id, 0) for req_id in self.decodes}
        counts |= self.prefills
        admitted = {request.id for request in self.new}
        for req_id, count in counts.items():
            request = self._queues.unfinished[req_id]
            end = request.num_computed + count
            ahead = min(self._limits.num_lookahead_tokens, request.limit - 1 - end)
            if ahead > 0 and end >= request.num_tokens and request.traits.may_draft:
                given = self._blocks.extend(request, count + ahead)
                if given is not None and req_id not in admitted:  # an admission has them all
                    self._add_blocks(request, given)

    def _add_blocks(self, request: Request, given: Sequence[list[int]]) -> None:
        """Add to the new blocks of a request in the step."""
        for of_group, block_ids in zip(self.new_blocks, given, strict=False):
            if block_ids:
                of_group[request.id] = [*of_group.get(request.id, ()), *block_ids]

    def _extend_each(self, needy: list[Request]) -> None:
        """Find a block for the next token of each; those without one do not decode."""
        given = self._blocks.extend_all(needy)
        if given is not None:
            self.new_blocks = given
            return
        if len(needy) * len(self.new_blocks) > self._blocks.num_free:
            needy.sort(key=lambda request: (request.urgency, request.admission))
        for request in needy:
            if request.id in self.decodes and not self._extend(request, 1):
                del self.decodes[request.id]

    def _plan_prefills(self, chunk: int) -> None:
        for request in list(self._queues.prefilling.values()):
            begin = request.num_computed
            count = min(request.num_tokens - begin, self._num_open(begin))
            if not (
                self._has_room(count, chunk)
                and request.is_running
                and self._room.fits_output(request, begin + count)
            ):
                continue
            if not request.needs_admission:
                if self._extend(request, count):
                    self._prefill(request, count)
                continue
            size = self._room.size_of(request)
            if (
                self._room.fits_message(size)
                and self._room.fits_experts(request, begin)
                and self._extend(request, count)
            ):
                self._prefill(request, count)
                self._add_admission(request, size)
                self._drop_new_blocks(request)  # the admission has them all

    def _admit(self, chunk: int) -> None:
        """Admit waiting requests in order, as long as blocks, slots and tokens last."""
        while self._queues.waiting and self._num_open(0) > 0 and not self._queues.is_full:
            request = self._queues.waiting[0]
            if request.num_in_flight or request.num_void:
                return
            size = self._room.size_of(request)
            if not self._room.fits_message(size):
                return
            if request.extensions and not self._may_start(request):
                return
            prefix = self._search.find(request)
            num_cached = prefix.num_tokens
            fits = self._room.fits_experts(request, num_cached)
            if not (fits and self._blocks.can_hold(request, prefix)):
                return
            if self._loads is not None and self._loads.begin(request, prefix):
                continue
            count = min(request.num_tokens - num_cached, self._num_open(num_cached))
            is_cut = num_cached + count < request.num_tokens
            if not self._has_room(count, chunk) or (is_cut and self._is_nearly_full()):
                return
            if request.pools and not self._may_pool(request, num_cached + count):
                return
            self._blocks.begin(request, prefix, count)
            self._queues.start(request)
            self._add_admission(request, size)
            self._prefill(request, count)

    def _may_start(self, request: Request) -> bool:
        running = self._queues.running.values()
        others = (other.extensions for other in running)
        return may_start(request.extensions, others, self._limits.bounds)

    def _chunk(self, num_stages: int) -> int:
        """Return how many prompt tokens a step may have if it has several prompts: the budget. In a
        pipeline: the pending prompt tokens, spread over CHUNKS_PER_STAGE steps for each stage."""
        budget = self._limits.max_num_batched_tokens
        if num_stages == 1:
            return budget
        num_steps = CHUNKS_PER_STAGE * num_stages
        pending = 0
        unsent = chain(self._queues.prefilling.values(), self._queues.waiting)
        for request in islice(unsent, MAX_LOOKED_AT):
            pending += request.num_tokens - request.num_computed
            if pending >= num_steps * budget:
                break
        return max(PIPELINE_CHUNK, min(budget, pending // num_steps))

    def _num_open(self, begin: int) -> int:
        """Return how many tokens a prompt may add to the step after its first `begin` tokens."""
        most = self._limits.cut_at_border(begin, self._budget)
        return most if self._allowance is None else min(most, self._allowance.num_tokens(begin))

    def _has_room(self, count: int, chunk: int) -> bool:
        """Return True if the step may take count more prompt tokens: for one prompt up to the
        budget, for several up to a chunk."""
        return count > 0 and (not self.prefills or self._num_prefill_tokens + count <= chunk)

    def _is_nearly_full(self) -> bool:
        """Return True if the step should begin no prompt that it would have to cut."""
        is_little = self._budget * LEAST_CUT_DIVISOR < self._limits.max_num_batched_tokens
        return is_little and bool(self.prefills)

    def _may_pool(self, request: Request, end: int) -> bool:
        """Return True if a waiting request that pools may be computed up to its token `end`."""
        if self._whole_prompts and end < request.num_tokens:
            return False
        return self._room.fits_output(request, end)

    def _prefill(self, request: Request, count: int) -> None:
        self._room.compute(request, request.num_computed + count)
        if self._allowance is not None:
            self._allowance.take(request.num_computed, count)
        self.prefills[request.id] = count
        self._num_prefill_tokens += count
        self._budget -= count

    def _add_admission(self, request: Request, size: AdmissionSize) -> None:
        self._room.admit(request, size)
        self.new.append(request)

    def _extend(self, request: Request, count: int) -> bool:
        """Find blocks for `count` more tokens, preempting the least urgent requests if need be.

        Only requests that are less urgent than this one, or as urgent and admitted after it, are
        preempted; without any, this one waits. So the most urgent one always proceeds.
        """
        while (given := self._blocks.extend(request, count)) is None:
            if self._victims is None:
                self._victims = self._queues.victims()
            if self._victims[-1] is request:
                return False
            self._preempt(self._victims.pop())
        for of_group, block_ids in zip(self.new_blocks, given, strict=False):
            if block_ids:
                of_group[request.id] = block_ids
        return True

    def _drop_new_blocks(self, request: Request) -> None:
        for of_group in self.new_blocks:
            of_group.pop(request.id, None)

    def _preempt(self, victim: Request) -> None:
        self.decodes.pop(victim.id, None)
        freed = self.prefills.pop(victim.id, 0)
        self._num_prefill_tokens -= freed
        self._budget += freed + self.drafts.pop(victim.id, 0)
        self._drop_new_blocks(victim)
        self.new = [request for request in self.new if request is not victim]
        self.preempted.append(victim.id)
        self._blocks.preempt(victim)
        self._queues.requeue(victim)
