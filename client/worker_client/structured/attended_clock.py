"""Time limits of what a thread attends to now and then."""

import time
from typing import Final

MOST_UNATTENDED_S: Final = 1.0
"""Time that counts of a longer one between two readings."""


class AttendedClock:
    """A clock that stands still while nobody reads it, but for MOST_UNATTENDED_S. What a driver
    waits for is not late only because the driver did something else meanwhile, such as replacing a
    daemon. Belongs to one thread."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self._read_at = time.monotonic()

    def read(self) -> float:
        """Return the seconds since the clock was made."""
        now = time.monotonic()
        self._time_s += min(now - self._read_at, MOST_UNATTENDED_S)
        self._read_at = now
        return self._time_s
