"""The steps of a scheduler that have no result yet, and what is learned from when they get it."""

from collections import deque

from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.planning import Step
from worker_client.scheduler.step_budget import StepBudget


class OpenSteps:
    """Numbers the steps. Owned by a scheduler; others may read the attributes."""

    def __init__(
        self, step_budget: StepBudget | None = None, draft_lengths: DraftLengths | None = None
    ) -> None:
        """step_budget, draft_lengths: are told of each step and of its end; None: absent."""
        self.next = 0
        """Number of the next step."""
        self.num_failures = 0
        """Times that steps in flight have failed."""
        self.numbers: deque[int] = deque()
        """Numbers of the steps in flight, oldest first."""
        self._step_budget = step_budget
        self._draft_lengths = draft_lengths

    @property
    def oldest(self) -> int:
        """The number of the oldest step in flight, or of the next one."""
        return self.numbers[0] if self.numbers else self.next

    def first_after(self, num_sent: int) -> int:
        """Return the number of the first step behind the num_sent oldest ones in flight."""
        return self.numbers[num_sent] if num_sent < len(self.numbers) else self.next

    def add(self, step: Step) -> int:
        """Note a step that is sent, before its tokens count as computed; return its number."""
        number = self.next
        if self._step_budget is not None:
            self._step_budget.sent(step.load())
        if self._draft_lengths is not None:
            self._draft_lengths.sent(
                number,
                len(step.decodes),
                step.num_decode_tokens,
                only_decodes=not step.prefills,
                group=step.group or 0,
            )
        self.numbers.append(number)
        self.next = number + 1
        return number

    def end_oldest(self) -> None:
        """Note that the oldest step in flight has its result."""
        if self.numbers:
            self.numbers.popleft()
        if self._step_budget is not None:
            self._step_budget.done()
        if self._draft_lengths is not None:
            self._draft_lengths.done()

    def fail(self, count: int) -> None:
        """Note that the `count` newest steps will have no result."""
        self.num_failures += 1
        for _ in range(count):
            self.numbers.pop()
        if self._step_budget is not None:
            self._step_budget.failed(count)
        if self._draft_lengths is not None:
            self._draft_lengths.failed(count)
