"""Whether the kernel has killed for want of memory where a daemon runs: the counter of its cgroup
(version 2), as this host shows it. Knows no daemon."""

import contextlib
from pathlib import Path

PROCESSES = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class CgroupOomKills:
    """Of one cgroup: of all of its processes, so that a rise while one of them was killed names the
    likely cause, and no more."""

    def __init__(self, events: Path) -> None:
        """events: its memory.events."""
        self._events = events
        self._before = _read(events)

    def since(self) -> int:
        """How many since the object was made; 0 also where nobody knows."""
        return max(0, _read(self._events) - self._before)


def oom_kills_of(pid: int) -> CgroupOomKills:
    """Return the counter for a process of this host that lives."""
    group = ""
    with contextlib.suppress(OSError):
        lines = (PROCESSES / str(pid) / "cgroup").read_text().splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "")
    return CgroupOomKills(CGROUPS / group.lstrip("/") / "memory.events")


def _read(events: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in events.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
