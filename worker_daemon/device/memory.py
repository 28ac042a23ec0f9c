"""Memory of the device, measured: snapshots, and the profile that tells how much is left for the KV
cache.

Two sources with one interface: CUDA's driver and allocator, and on the CPU the process's own
resident memory. All figures are bytes.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from worker_daemon.errors import CapacityError

HOST_KV_CACHE_LIMIT_BYTES = 4 << 30
"""What a CPU daemon offers for KV unless told otherwise: host memory is not its own to fill."""


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


class CudaMemory:
    """The driver's figures for the device and torch's for this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def snapshot(self) -> MemorySnapshot:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemorySnapshot(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
        )

    def reset_peak(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def budget(self, baseline: MemorySnapshot, utilization: float) -> int:
        return request_memory(baseline, utilization)

    def limit_kv_cache(self, available: int) -> int:
        return available


class HostMemory:
    """Linux's figures for the host and this process."""

    def snapshot(self) -> MemorySnapshot:
        host = _read_kib(Path("/proc/meminfo"))
        process = _read_kib(Path("/proc/self/status"))
        return MemorySnapshot(
            total=host["MemTotal"],
            free=host["MemAvailable"],
            allocated=process["VmRSS"],
            peak=process["VmHWM"],
        )

    def reset_peak(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def budget(self, baseline: MemorySnapshot, utilization: float) -> int:
        return math.ceil(baseline.free * utilization)

    def limit_kv_cache(self, available: int) -> int:
        return min(available, HOST_KV_CACHE_LIMIT_BYTES)


def memory_source(device: torch.device) -> MemorySource:
    """Return the source for a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def request_memory(baseline: MemorySnapshot, utilization: float) -> int:
    """Return the bytes that this worker may use: a share of the device's total.

    Raises:
        CapacityError: less than that is free at the baseline.
    """
    requested = math.ceil(baseline.total * utilization)
    if baseline.free < requested:
        share = math.floor(baseline.free / baseline.total * 100) / 100
        raise CapacityError(
            f"{baseline.free} of {baseline.total} bytes are free, {requested} are asked for",
            field="gpu_memory_utilization",
            value=utilization,
            fix=f"at most {share}, or free memory that other processes hold",
        )
    return requested


@dataclass(slots=True)
class MemoryProfile:
    """What the largest step took. Filled when profile() ends."""

    consumed: int = 0
    """Growth since the baseline that stays: weights, library workspaces."""
    transient: int = 0
    """What the step had beside that at its peak."""


@contextmanager
def profile(source: MemorySource, baseline: MemorySnapshot) -> Iterator[MemoryProfile]:
    """Measure what happens inside: run the largest step there."""
    result = MemoryProfile()
    source.reset_peak()
    yield result
    peak = source.snapshot().peak
    source.reset_peak()
    after = source.snapshot()
    result.consumed = max(0, baseline.free - after.free)
    result.transient = max(0, peak - after.allocated)


def _read_kib(path: Path) -> dict[str, int]:
    """Parse lines of `Name:  123 kB` to bytes."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB"}
