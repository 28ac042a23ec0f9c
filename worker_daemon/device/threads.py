"""Chooses the number of torch's threads: the user's number, or a share of the usable cores."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from worker_daemon.device.host_limits import CGROUPS, OWN_CGROUP, own_cgroups


class Threads(NamedTuple):
    """The number of threads, and the reason to log with it."""

    num: int
    why: str


def choose_threads(wanted: int | None, local_world_size: int, most: int) -> Threads:
    """Choose the number of a daemon's compute threads.

    Args:
        wanted: the user's number (OMP_NUM_THREADS), which wins.
        local_world_size: the number of daemons that share this host's cores.
        most: torch's default, which other variables may have lowered.
    """
    if wanted is not None:
        return Threads(wanted, f"OMP_NUM_THREADS={wanted}")
    cores = usable_cores()
    num = max(1, min(cores // local_world_size, most))
    why = f"{cores} usable cores, {local_world_size} daemons; OMP_NUM_THREADS sets another number"
    return Threads(num, why)


def usable_cores(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Return the number of cores this process may use: those of its affinity, limited by the CPU
    quotas of its control group (version 2) and of that group's ancestors."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group in own_cgroups(cgroups, own_cgroup):
        limits += _quota(group / "cpu.max")
    return max(1, math.ceil(min(limits)))


def _quota(file: Path) -> list[float]:
    """Parse the cores in `QUOTA PERIOD`; empty if there is no limit, or no such file."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = file.read_text().split()
        return [int(quota) / int(period)]
    return []
