"""The times that the daemon's start takes, from the start of its process."""

import os
import time
from enum import StrEnum
from pathlib import Path


class StartPhase(StrEnum):
    """End of a part of the start."""

    BOUND = "bound"
    """The sockets are bound."""
    WORKER = "worker"
    """The worker is made, with the libraries that it needs."""


class StartupTimes:
    """Records when each phase ended. Each is recorded once; any thread may call it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds from the process's start to the end of each phase so far."""

    def reached(self, phase: StartPhase) -> None:
        """Record that a phase has ended."""
        self.seconds[phase] = process_age_s()


def process_age_s() -> float:
    """Return the seconds since this process was started, by the kernel (proc(5): starttime)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
