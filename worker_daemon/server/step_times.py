"""How long steps take: a mean over the last ones, taken where their outcomes are. Knows no socket,
no step and no clock."""

from typing import Final

MAX_STEPS: Final = 64
"""The mean is exact over so many steps; later it moves by this part of each new one."""


class StepTimes:
    """Written by one thread at a time, read by any."""

    __slots__ = ("_last_s", "_num_steps", "usual_s")

    def __init__(self) -> None:
        self.usual_s = 0.0
        """0 before the first step has ended."""
        self._num_steps = 0
        self._last_s = 0.0

    def add(self, began_s: float, ended_s: float) -> None:
        """Note a step, in seconds of time.monotonic. Steps overlap: a step counts from its begin or
        from the end of the one before it, whichever is later, so that idle time never counts."""
        # Plain comparisons: every step comes by here.
        begin_s = self._last_s if self._last_s > began_s else began_s
        took_s = ended_s - begin_s if ended_s > begin_s else 0.0
        self._last_s = ended_s
        if self._num_steps < MAX_STEPS:
            self._num_steps += 1
        self.usual_s += (took_s - self.usual_s) / self._num_steps
