"""How long steps have taken of late, and which one takes far longer. Sampled by the guard thread,
so that a step itself costs nothing."""

import math
from typing import Final

from worker_daemon.server.progress import Stamp

SLOW_FACTOR: Final = 8.0
SLOW_AT_LEAST_S: Final = 1.0
_WEIGHT: Final = 0.2
"""Of the newest sample."""


class Pace:
    """A moving average of the time between two steps."""

    def __init__(self) -> None:
        self.usual_s = 0.0
        """0 before the first step."""
        self._last_seq = 0
        self._since = 0.0
        self._reported: Stamp | None = None

    def sample(self, last_seq: int, stamp: Stamp, now: float) -> None:
        """Take in how far the steps have come. stamp: what runs now."""
        count = last_seq - self._last_seq
        if count > 0 and self._since:
            took_s = (now - self._since) / count
            self.usual_s = (
                took_s if not self.usual_s else self.usual_s + _WEIGHT * (took_s - self.usual_s)
            )
        if count or stamp.idle or not self._since:
            self._since = now
        self._last_seq = last_seq

    def slow_at(self, stamp: Stamp) -> float:
        """When this step will have taken far longer than the others did, by the monotonic clock;
        never for what is idle or has been told of, and as long as no step has ended."""
        if stamp is self._reported or stamp.idle or not self.usual_s:
            return math.inf
        return stamp.since + max(SLOW_AT_LEAST_S, SLOW_FACTOR * self.usual_s)

    def is_slow(self, stamp: Stamp, now: float) -> bool:
        """Whether this step takes far longer than the others did; told once a step."""
        if now < self.slow_at(stamp):
            return False
        self._reported = stamp
        return True
