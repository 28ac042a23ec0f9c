"""Counts of drafts that steps have verified (speculative decoding), for results and metrics."""

from itertools import accumulate


class DraftCounts:
    """Written by one thread at a time, read by any."""

    __slots__ = ("_by_accepted", "num_drafted")

    def __init__(self) -> None:
        self.num_drafted = 0
        """Drafts."""
        self._by_accepted = [0]
        """For each number of accepted drafts, how often a request had so many in a step."""

    def add(self, num_drafted: int, num_accepted: int, num_times: int = 1) -> None:
        """Count the drafts of a request in a step, at least one. num_accepted: leading ones;
        num_times: such requests."""
        while len(self._by_accepted) <= num_drafted:
            self._by_accepted.append(0)
        self._by_accepted[num_accepted] += num_times
        self.num_drafted += num_drafted * num_times

    def include(self, other: "DraftCounts") -> None:
        """Add the counts of another one."""
        missing = len(other._by_accepted) - len(self._by_accepted)
        self._by_accepted += [0] * missing
        for place, count in enumerate(other._by_accepted):
            self._by_accepted[place] += count
        self.num_drafted += other.num_drafted

    @property
    def num_verified(self) -> int:
        """Number of times that a request had drafts in a step."""
        return sum(self._by_accepted)

    @property
    def accepted_by_place(self) -> list[int]:
        """Accepted drafts at each place, from the first to the last that a request had."""
        return list(accumulate(reversed(self._by_accepted[1:])))[::-1]

    @property
    def num_accepted(self) -> int:
        """Accepted drafts."""
        return sum(self.accepted_by_place)
