"""Device memory figures: snapshots, and the profile that determines the memory left for the KV
cache. Snapshots come from a source (memory_sources.py). All figures are bytes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from rpc_schema.errors import CapacityError

DISTURBANCE_BYTES: Final = 32 << 20
"""A process that allocates or frees less than this during a profile does not disturb it."""

UNKNOWN_PROCESS: Final = 0
"""Stands in for a pid: memory was freed, and NVML does not report by which process."""

_MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory figures of one moment."""

    total: int
    free: int
    """Free memory of the device, counting all processes."""
    allocated: int
    """Memory of this process's tensors."""
    peak: int
    """Highest allocated since the last reset."""
    reserved: int = 0
    """Device memory of this process's allocator, used by tensors or not."""
    reserved_peak: int = 0
    """Highest reserved since the last reset."""
    others: Mapping[int, int] | None = field(default=None, hash=False)
    """Memory of other processes by pid; None if unknown."""


@dataclass(frozen=True, slots=True)
class ForeignChange:
    """Memory that another process allocated, or freed if num_bytes is negative."""

    pid: int
    """UNKNOWN_PROCESS if it is not known."""
    num_bytes: int

    def __str__(self) -> str:
        name = f"process {self.pid}" if self.pid != UNKNOWN_PROCESS else "an unknown process"
        verb = "took" if self.num_bytes > 0 else "freed"
        return f"{name} {verb} {abs(self.num_bytes)} bytes"


class MemorySource(Protocol):
    """A source of snapshots."""

    def snapshot(self) -> MemorySnapshot:
        """Measure now."""

    def reset_peak(self) -> None:
        """Reset the peak to the memory allocated now, with caches emptied."""

    def budget(self, baseline: MemorySnapshot, utilization: float) -> int:
        """Return the bytes that this worker may use. Raises CapacityError if they are not free."""

    def limit_kv_cache(self, available: int) -> int:
        """Return the share of the available bytes that a KV cache may take."""

    def own_bytes(self, now: MemorySnapshot) -> int:
        """Return the device memory of this process, or of all processes if this one's is
        unknown."""

    def taken_since(self, before: MemorySnapshot, now: MemorySnapshot) -> int:
        """Return the memory that this process allocated in between; negative if it freed more."""

    def foreign_changes(
        self, before: MemorySnapshot, now: MemorySnapshot
    ) -> tuple[ForeignChange, ...]:
        """Return the memory that other processes allocated or freed in between, without small
        amounts."""


def request_memory(baseline: MemorySnapshot, utilization: float) -> int:
    """Return the bytes that this worker may use: a share of the device's total.

    Raises:
        CapacityError: less than that is free at the baseline.
    """
    requested = math.ceil(baseline.total * utilization)
    if baseline.free < requested:
        share = math.floor(baseline.free / baseline.total * 100) / 100
        problem = (
            f"{baseline.free} of {baseline.total} bytes are free, {requested} are asked for"
            f"{_name_holders(baseline.others or {})}"
        )
        fix = f"at most {share}, or free memory that other processes hold"
        raise CapacityError(problem, field="gpu_memory_utilization", value=utilization, fix=fix)
    return requested


def _name_holders(others: Mapping[int, int]) -> str:
    largest = sorted(others.items(), key=lambda entry: -entry[1])[:_MOST_NAMED]
    return "".join(f", process {pid} has {num_bytes}" for pid, num_bytes in largest)


def device_bytes_taken(before: MemorySnapshot, now: MemorySnapshot) -> int:
    """Return the device memory that this process allocated in between.

    That is the decrease of the free memory minus the growth of the other processes. It is at least
    the growth of this process's allocator, which holds even if another process freed memory
    unnoticed, or if the driver's figures lag.
    """
    taken = before.free - now.free
    if before.others is not None and now.others is not None:
        taken -= sum(now.others.values()) - sum(before.others.values())
    return max(taken, now.reserved - before.reserved)


def foreign_changes(before: MemorySnapshot, now: MemorySnapshot) -> tuple[ForeignChange, ...]:
    """Return the device memory that other processes allocated or freed in between, the largest
    first.

    Without per-process figures, the only visible change is that more memory became free than this
    process freed.
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
    """The memory that the largest step takes. Filled when profile() ends."""

    consumed: int = 0
    """Permanent growth since the baseline: weights, library workspaces."""
    transient: int = 0
    """Memory that the step allocates on top of that at its peak, the allocator's overhead
    included."""
    pinned: int = 0
    """Memory that the allocator caches without a tensor in it: part of consumed."""
    free: int = 0
    """Free device memory after the step."""
    changes: Sequence[ForeignChange] = ()
    """Changes of other processes during the step."""

    def available(self, budget: int, graphs: int) -> int:
        """Return the bytes left for a KV cache, within a budget and the device's free memory, after
        the largest step and graphs of this many bytes; negative if nothing is left."""
        return min(budget - self.consumed, self.free) - self.transient - graphs


@contextmanager
def profile(source: MemorySource, baseline: MemorySnapshot) -> Iterator[MemoryProfile]:
    """Measure the body of the with statement, which runs the largest step.

    The allocator's peak counts, not that of the tensors: rounding and gaps add to what it
    allocates.
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
