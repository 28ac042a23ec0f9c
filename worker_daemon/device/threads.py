"""How many threads torch computes with: the user's number, or a share of the cores that this
process may use. Knows no model."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


class Threads(NamedTuple):
    """A choice, and the reason to log with it."""

    num: int
    why: str


def choose_threads(wanted: int | None, local_world_size: int, most: int) -> Threads:
    """Return how many threads a daemon computes with.

    Args:
        wanted: the user's number (OMP_NUM_THREADS), which wins.
        local_world_size: the number of daemons that share this host's cores.
        most: torch's own number, which other variables may have lowered.
    """
    if wanted is not None:
        return Threads(wanted, f"OMP_NUM_THREADS={wanted}")
    cores = usable_cores()
    num = max(1, min(cores // local_world_size, most))
    why = f"{cores} usable cores, {local_world_size} daemons; OMP_NUM_THREADS sets another number"
    return Threads(num, why)


def use_threads(threads: Threads) -> None:
    """Have torch compute with them, on the calling thread."""
    torch.set_num_threads(threads.num)


def usable_cores(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Return how many cores this process may keep busy: those of its affinity, as far as the CPU
    quota of its cgroup (version 2) and of those around it goes."""
    limits = [float(len(os.sched_getaffinity(0)))]
    with suppress(OSError):
        inner = cgroups / _path_of(own_cgroup.read_text())
        for directory in (inner, *inner.parents):
            if directory.is_relative_to(cgroups):
                limits += _quota(directory / "cpu.max")
    return max(1, math.ceil(min(limits)))


def _path_of(cgroup: str) -> str:
    """The path in a line `0::/PATH`; empty without one, or where it lies outside of our root."""
    paths = [line[3:].lstrip("/") for line in cgroup.splitlines() if line.startswith("0::")]
    return paths[0] if paths and ".." not in paths[0] else ""


def _quota(file: Path) -> list[float]:
    """The cores in `QUOTA PERIOD`; nothing where there is no limit, or no such file."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = file.read_text().split()
        return [int(quota) / int(period)]
    return []
