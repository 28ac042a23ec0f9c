"""Memory of the device, measured: snapshots, and the profile that tells how much is left for the KV
cache. Snapshots come from a source (memory_sources.py). All figures are bytes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from worker_daemon.errors import CapacityError

DISTURBANCE_BYTES: Final = 32 << 20
"""A process that takes or frees less than this while a profile runs does not disturb it."""

UNKNOWN_PROCESS: Final = 0
"""In place of a pid: memory was freed, and NVML does not say by whom."""

_MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """One moment."""

    total: int
    free: int
    """Of the whole device, whoever uses the rest."""
    allocated: int
    """By this process's tensors."""
    peak: int
    """Highest allocated since the last reset."""
    reserved: int = 0
    """What this process's allocator has of the device, tensors or not."""
    reserved_peak: int = 0
    """Highest reserved since the last reset."""
    others: Mapping[int, int] | None = field(default=None, hash=False)
    """What other processes have, by pid, as far as they are known; None where that cannot be
    told."""


@dataclass(frozen=True, slots=True)
class ForeignChange:
    """Memory that another process took, or freed where num_bytes is negative."""

    pid: int
    """UNKNOWN_PROCESS where it cannot be told."""
    num_bytes: int

    def __str__(self) -> str:
        name = f"process {self.pid}" if self.pid != UNKNOWN_PROCESS else "an unknown process"
        verb = "took" if self.num_bytes > 0 else "freed"
        return f"{name} {verb} {abs(self.num_bytes)} bytes"


class MemorySource(Protocol):
    """Where snapshots come from."""

    def snapshot(self) -> MemorySnapshot:
        """Measure now."""

    def reset_peak(self) -> None:
        """Let peak begin again from what is allocated now, with caches emptied."""

    def budget(self, baseline: MemorySnapshot, utilization: float) -> int:
        """Return the bytes that this worker may use. Raises CapacityError where they are not
        free."""

    def limit_kv_cache(self, available: int) -> int:
        """Return how much of the available bytes a KV cache should take at most."""

    def own_bytes(self, now: MemorySnapshot) -> int:
        """Return what this process has of the device; with that of the others, where theirs cannot
        be told."""

    def taken_since(self, before: MemorySnapshot, now: MemorySnapshot) -> int:
        """Return what this process has taken in between; negative where it has given back."""

    def foreign_changes(
        self, before: MemorySnapshot, now: MemorySnapshot
    ) -> tuple[ForeignChange, ...]:
        """Return what other processes took or freed in between, small amounts left out."""


def request_memory(baseline: MemorySnapshot, utilization: float) -> int:
    """Return the bytes that this worker may use: a share of the device's total.

    Raises:
        CapacityError: less than that is free at the baseline.
    """
    requested = math.ceil(baseline.total * utilization)
    if baseline.free < requested:
        share = math.floor(baseline.free / baseline.total * 100) / 100
        raise CapacityError(
            f"{baseline.free} of {baseline.total} bytes are free, {requested} are asked for"
            f"{_name_holders(baseline.others or {})}",
            field="gpu_memory_utilization",
            value=utilization,
            fix=f"at most {share}, or free memory that other processes hold",
        )
    return requested


def _name_holders(others: Mapping[int, int]) -> str:
    largest = sorted(others.items(), key=lambda entry: -entry[1])[:_MOST_NAMED]
    return "".join(f", process {pid} has {num_bytes}" for pid, num_bytes in largest)


def device_bytes_taken(before: MemorySnapshot, now: MemorySnapshot) -> int:
    """Return what this process has taken of a device in between.

    That is what the device has less, apart from what the others took; and it is no less than what
    the allocator has more, which holds too where others freed memory and nobody says so, and where
    the driver's figures lag behind.
    """
    taken = before.free - now.free
    if before.others is not None and now.others is not None:
        taken -= sum(now.others.values()) - sum(before.others.values())
    return max(taken, now.reserved - before.reserved)


def foreign_changes(before: MemorySnapshot, now: MemorySnapshot) -> tuple[ForeignChange, ...]:
    """Return what other processes took or freed of a device in between, the largest first.

    Where nobody knows who has what, only this is seen: that more is free than this process gave
    back.
    """
    if before.others is None or now.others is None:
        freed = (now.free - before.free) - (before.reserved - now.reserved)
        changes = {UNKNOWN_PROCESS: -freed} if freed > 0 else {}
    else:
        had, have = before.others, now.others
        changes = {pid: have.get(pid, 0) - had.get(pid, 0) for pid in {*had, *have}}
    found = [
        ForeignChange(pid, change)
        for pid, change in changes.items()
        if abs(change) >= DISTURBANCE_BYTES
    ]
    return tuple(sorted(found, key=lambda change: (-abs(change.num_bytes), change.pid)))


@dataclass(slots=True)
class MemoryProfile:
    """What the largest step took. Filled when profile() ends."""

    consumed: int = 0
    """Growth since the baseline that stays: weights, library workspaces."""
    transient: int = 0
    """What the step had beside that at its peak, what the allocator took for it included."""
    pinned: int = 0
    """What the allocator keeps of it although no tensor is there: part of consumed."""
    free: int = 0
    """What the device has free after it."""
    changes: Sequence[ForeignChange] = ()
    """What others took or freed while it ran."""

    def available(self, budget: int, graphs: int) -> int:
        """Return what is left for a KV cache of a budget, and of the device, beside the largest
        step and graphs of so many bytes; negative where that is too little."""
        return min(budget - self.consumed, self.free) - self.transient - graphs


@contextmanager
def profile(source: MemorySource, baseline: MemorySnapshot) -> Iterator[MemoryProfile]:
    """Measure what happens inside: run the largest step there.

    The allocator's peak counts, not the tensors' alone: what it takes of the device for them is
    more by rounding and by gaps.
    """
    result = MemoryProfile()
    source.reset_peak()
    before = source.snapshot()
    yield result
    at_peak = source.snapshot()
    source.reset_peak()
    after = source.snapshot()
    result.consumed = max(0, source.taken_since(baseline, after))
    result.transient = max(
        0, at_peak.peak - after.allocated, at_peak.reserved_peak - after.reserved
    )
    result.pinned = max(0, after.reserved - after.allocated)
    result.free = after.free
    result.changes = source.foreign_changes(before, after)
