"""Drafts that the driver brings for a request, by their positions."""

from collections.abc import Sequence
from typing import Final, NamedTuple


class ExpectedDrafts(NamedTuple):
    """Tokens that a request's next steps may have as drafts (ExpectingScheduler). They hold at
    their positions alone: a request that has lost tokens before the first one has none of them, and
    one that has gained some has the others."""

    token_ids: Sequence[int] = ()
    first: int = 0
    """Position of the first of these."""
    num_forced: int = 0
    """Number of leading ones that are accepted for certain."""

    def count_from(self, place: int) -> int:
        """Return how many there are for the positions from `place` on."""
        return self._count(place, len(self.token_ids))

    def count_forced_from(self, place: int) -> int:
        """Return how many of those are accepted for certain, the first ones."""
        return self._count(place, self.num_forced)

    def from_place(self, place: int, count: int) -> Sequence[int]:
        """Return the first `count` of those, which there are."""
        return self.token_ids[place - self.first : place - self.first + count]

    def _count(self, place: int, length: int) -> int:
        return max(0, self.first + length - place) if place >= self.first else 0


NO_DRAFTS_EXPECTED: Final = ExpectedDrafts()
