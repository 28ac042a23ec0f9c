"""The drafts of one request: those that its next steps may have, those in flight, and what has
become of the others."""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from worker_client.scheduler.drafting.expected_drafts import NO_DRAFTS_EXPECTED, ExpectedDrafts
from worker_client.scheduler_output import DraftOutcome

NO_DRAFTS: Final = DraftOutcome(0, 0)


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """Owned by a request. Two callers count in it without a call, which they would make for each
    request of each step: DecodeGroups.commit, and Request.gain_run."""

    num_in_flight: int = 0
    num_drafted: int = 0
    """Drafts of its steps with results."""
    num_accepted: int = 0
    """Those of them that are its tokens, as soon as all tokens of their step are taken."""
    row: int = -1
    """DraftLengths owns it; -1: the request has not decoded yet."""
    expected: ExpectedDrafts = NO_DRAFTS_EXPECTED
    """Tokens that its next steps may have as drafts, if the device makes none for it. Their
    positions count the drafts in flight as Request.num_tokens does."""
    _accepted_end: int = field(default=0, init=False)
    """Position after the last accepted one of a step whose tokens are taken one by one."""
    _forced_in_flight: deque[int] = field(default_factory=deque, init=False)
    """Number of certain drafts in each step in flight that has some of `expected`."""

    def expect(self, tokens: Sequence[int], place: int, num_forced: int, stops: Set[int]) -> None:
        """Note tokens that may follow at the positions from `place` on, behind those in flight, up
        to one of `stops`. num_forced: leading ones that are accepted for certain."""
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        self.expected = ExpectedDrafts(tokens[:end], place, min(num_forced, end))

    def take(self, place: int, count: int) -> Sequence[int]:
        """Return the drafts of a step that is about to be sent, from a position on: the first of
        the expected tokens."""
        self._forced_in_flight.append(min(count, self.expected.count_forced_from(place)))
        return self.expected.from_place(place, count)

    def take_outcome(self, outcome: DraftOutcome, num_known: int, *, is_void: bool) -> DraftOutcome:
        """Note what has become of the drafts of a step, before its tokens. num_known: tokens that
        the request has; is_void: it ignores those of the step. Return the outcome of those that
        were guesses, and were put to the test."""
        num_drafted, num_accepted = outcome
        self.num_in_flight -= num_drafted
        if not is_void:
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self._accepted_end = num_known + num_accepted
        if not self._forced_in_flight:
            return outcome
        num_forced = self._forced_in_flight.popleft()
        if is_void or num_accepted < num_forced:
            return NO_DRAFTS
        return DraftOutcome(num_drafted - num_forced, num_accepted - num_forced)

    def num_accepted_of(self, num_tokens: int) -> int:
        """Return how many accepted ones are among the tokens of a request that has so many: it may
        have ended before the last one of a step."""
        return self.num_accepted - max(0, self._accepted_end - num_tokens)

    def lose_steps(self) -> None:
        """Note that the steps in flight have failed."""
        self.num_in_flight = 0
        self._forced_in_flight.clear()
