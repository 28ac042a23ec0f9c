"""Which step takes far longer than others did. Asked by the guard thread."""

import math
from typing import Final

from worker_daemon.server.progress import Stamp
from worker_daemon.server.step_times import StepTimes

SLOW_FACTOR: Final = 8.0
SLOW_AT_LEAST_S: Final = 1.0


class Pace:
    """Judges a step by the times of those before it, and tells of each once."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._reported: Stamp | None = None

    def slow_at(self, stamp: Stamp) -> float:
        """When this step will have taken far longer than the others did, by the monotonic clock;
        never for what is idle or has been told of, and as long as no step has ended."""
        usual_s = self._times.usual_s
        if stamp is self._reported or stamp.idle or not usual_s:
            return math.inf
        return stamp.since + max(SLOW_AT_LEAST_S, SLOW_FACTOR * usual_s)

    def is_slow(self, stamp: Stamp, now: float) -> bool:
        """Whether this step takes far longer than the others did; told once a step."""
        if now < self.slow_at(stamp):
            return False
        self._reported = stamp
        return True
