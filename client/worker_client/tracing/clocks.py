"""Clocks of other processes, measured by round trips: the offset of each from ours, with a bound on
its error. Pure.

A reply carries the other clock's time at some moment between request and reply. If that moment is
taken as the middle, the offset is wrong by at most half the round trip, even if the two directions
take different times. Of several round trips the fastest has the smallest bound (the minimum filter
of NTP, RFC 5905 section 10).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

NUM_ROUND_TRIPS = 32


class Offset(NamedTuple):
    """Offset of another clock from ours, in nanoseconds."""

    at_ns: int
    """Time of the measurement, by the other clock."""
    ahead_ns: int
    bound_ns: int
    """Bound on the error of ahead_ns."""


def measure(
    ask: Callable[[], int],
    own_clock: Callable[[], int] = time.monotonic_ns,
    num_round_trips: int = NUM_ROUND_TRIPS,
) -> Offset:
    """Ask another clock for its time num_round_trips times; return the offset of the fastest
    answer."""
    return min(
        (_ask_once(ask, own_clock) for _ in range(num_round_trips)),
        key=lambda offset: offset.bound_ns,
    )


def _ask_once(ask: Callable[[], int], own_clock: Callable[[], int]) -> Offset:
    begin = own_clock()
    theirs = ask()
    end = own_clock()
    # Rounded up, twice: for the middle and for its half.
    return Offset(theirs, theirs - (begin + end) // 2, (end - begin) // 2 + 1)


class ClockMap:
    """Conversion from another clock to ours, by one or two measurements. Between them, and beyond,
    the offset changes linearly, as it does if the clocks' rates differ."""

    def __init__(self, first: Offset, last: Offset | None = None) -> None:
        last = first if last is None else last
        span = last.at_ns - first.at_ns
        self.bound_ns = max(first.bound_ns, last.bound_ns)
        """Bound on the error at the measurements."""
        self._at_ns = first.at_ns
        self._ahead_ns = first.ahead_ns
        self._drift = (last.ahead_ns - first.ahead_ns) / span if span > 0 else 0.0

    def to_ours(self, theirs_ns: int) -> int:
        """Return our clock's time at their time."""
        drifted = round(self._drift * (theirs_ns - self._at_ns))
        return theirs_ns - self._ahead_ns - drifted
