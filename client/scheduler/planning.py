"""What the next step computes: first come, first served, decodes before prefills. Finds blocks for
it, preempts and admits; what it computes counts only once the scheduler commits it."""

from dataclasses import dataclass, field
from itertools import chain, islice

from client.scheduler.interface import SchedulerLimits
from client.scheduler.pipeline import Pipeline
from client.scheduler.request import Request
from client.scheduler.request_blocks import RequestBlocks
from client.scheduler.roster import Roster
from client.slots import MAX_ADMITTED_TOKENS

PIPELINE_CHUNK = 2048
"""Fewest prompt tokens of several prompts for which a pipeline's step is closed. Later stages wait
for the first step, and earlier ones for the last, so that steps should be short while there are few
tokens; but a product of fewer rows is less than its best."""

CHUNKS_PER_STAGE = 2
"""Steps a stage over which prompts are spread while each has PIPELINE_CHUNK tokens or more."""

MAX_LOOKED_AT = 1024
"""Waiting prompts that are looked at for that."""


@dataclass(slots=True)
class Step:
    """A step in the making."""

    budget: int
    """Tokens that it may still take."""
    chunk: int
    """Tokens that several prompts may have together."""
    group: int | None = None
    """The pipeline's group that decodes."""
    decodes: dict[str, Request] = field(default_factory=dict)
    prefills: dict[str, int] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    new: list[Request] = field(default_factory=list)
    num_admitted_tokens: int = 0
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the workers."""
        return not (self.decodes or self.prefills or self.preempted)

    def has_room(self, count: int) -> bool:
        """Whether it may take so many more prompt tokens: of one prompt what the budget allows, of
        several a chunk."""
        return count > 0 and (not self.prefills or self.num_prefill_tokens + count <= self.chunk)

    def can_admit(self, request: Request) -> bool:
        """Whether all tokens of a request still fit into its message."""
        return self.num_admitted_tokens + len(request.tokens) <= MAX_ADMITTED_TOKENS

    def admit(self, request: Request) -> None:
        """Tell the workers of a request, with all its tokens and blocks."""
        self.new.append(request)
        self.num_admitted_tokens += len(request.tokens)
        self.new_blocks.pop(request.id, None)

    def prefill(self, request: Request, count: int) -> None:
        """Compute so many tokens of a prompt."""
        self.prefills[request.id] = count
        self.num_prefill_tokens += count
        self.budget -= count

    def preempt(self, victim: Request) -> None:
        """Compute nothing of a request, and let the workers forget it."""
        self.decodes.pop(victim.id, None)
        freed = self.prefills.pop(victim.id, 0)
        self.num_prefill_tokens -= freed
        self.budget += freed
        self.new_blocks.pop(victim.id, None)
        self.new = [request for request in self.new if request is not victim]
        self.preempted.append(victim.id)


class Planner:
    """Decides one step after the other; holds nothing from one to the next."""

    def __init__(
        self, limits: SchedulerLimits, roster: Roster, blocks: RequestBlocks, pipeline: Pipeline
    ) -> None:
        self._max_tokens = limits.max_num_batched_tokens
        self._block_size = limits.block_size
        self._roster = roster
        self._blocks = blocks
        self._pipeline = pipeline

    def plan(self) -> Step:
        """Return the next step; it may be empty."""
        step = Step(self._max_tokens, self._chunk())
        self._plan_decodes(step, ahead=False)
        self._plan_prefills(step)
        if not step.preempted:
            self._admit(step)
        if step.is_empty:
            self._plan_decodes(step, ahead=True)
        return step

    def _plan_decodes(self, step: Step, *, ahead: bool) -> None:
        """Plan the group whose turn it is, or the next one with somebody to run."""
        for group, ready in self._pipeline.in_turn(ahead=ahead):
            step.decodes = {request.id: request for request in ready}
            self._find_decode_blocks(step, ready)
            if step.decodes:
                step.group = group
                step.budget -= len(step.decodes)
                return

    def _find_decode_blocks(self, step: Step, ready: list[Request]) -> None:
        size = self._block_size
        needy = [r for r in ready if r.num_computed == len(r.blocks.ids) * size]
        if len(needy) > self._blocks.num_free:
            needy.sort(key=lambda request: request.admission)
        for request in needy:
            if request.id in step.decodes and not self._extend(step, request, 1):
                del step.decodes[request.id]

    def _plan_prefills(self, step: Step) -> None:
        for request in list(self._roster.prefilling.values()):
            count = min(request.num_tokens - request.num_computed, step.budget)
            if (
                step.has_room(count)
                and request.is_running
                and (not request.unannounced or step.can_admit(request))
                and self._extend(step, request, count)
            ):
                step.prefill(request, count)
                if request.unannounced:
                    step.admit(request)

    def _extend(self, step: Step, request: Request, count: int) -> bool:
        """Find blocks for `count` more tokens, preempting the latest admitted where need be.

        Only requests admitted after this one are preempted; without any, this one waits.
        """
        missing = self._blocks.num_missing(request, count)
        while missing > self._blocks.num_free:
            victim = next(reversed(self._roster.running.values()))
            if victim is request:
                return False
            step.preempt(victim)
            victim.num_preemptions += 1
            self._blocks.remember(victim)
            self._roster.requeue([victim])
        if missing > 0:
            step.new_blocks[request.id] = self._blocks.extend(request, count)
        return True

    def _admit(self, step: Step) -> None:
        """Admit waiting requests in order, as long as blocks, slots and tokens last."""
        while self._roster.waiting and step.budget > 0 and not self._roster.is_full:
            request = self._roster.waiting[0]
            if request.num_in_flight or request.num_void or not step.can_admit(request):
                return
            prefix = self._blocks.find_prefix(request)
            if not self._blocks.can_hold(request, prefix):
                return
            count = min(request.num_tokens - len(prefix) * self._block_size, step.budget)
            if not step.has_room(count):
                return
            self._blocks.begin(request, prefix)
            self._blocks.extend(request, count)
            self._roster.start(request)
            step.admit(request)
            step.prefill(request, count)

    def _chunk(self) -> int:
        """How many tokens several prompts share a step with: the budget, or in a pipeline their
        part of all that wait."""
        num_stages = self._pipeline.num_stages
        if num_stages == 1:
            return self._max_tokens
        num_steps = CHUNKS_PER_STAGE * num_stages
        pending = 0
        unsent = chain(self._roster.prefilling.values(), self._roster.waiting)
        for request in islice(unsent, MAX_LOOKED_AT):
            pending += request.num_tokens - request.num_computed
            if pending >= num_steps * self._max_tokens:
                break
        return max(PIPELINE_CHUNK, min(self._max_tokens, pending // num_steps))
