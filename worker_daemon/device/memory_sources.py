"""Sources of memory figures: the CUDA driver, torch's allocator and NVML for a GPU; Linux for
the CPU."""

import gc
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from worker_daemon.device.host_limits import MEMINFO, STATUS, read_sizes
from worker_daemon.device.memory import (
    ForeignChange,
    MemorySnapshot,
    MemorySource,
    device_bytes_taken,
    foreign_changes,
    request_memory,
)
from worker_daemon.device.nvml import load_nvml
from worker_daemon.device.processes import find_own, open_processes

HOST_KV_CACHE_LIMIT_BYTES = 4 << 30
"""Default limit on a CPU daemon's KV cache, since host memory is shared."""

_CONSISTENT_READS: Final = 4


def memory_source(device: torch.device) -> MemorySource:
    """Return the source for a device, whose context must exist."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


class HostMemory:
    """Linux's figures for the host and this process. Changes of other processes are not reported:
    host memory changes all the time, and this process's own memory is known exactly."""

    def snapshot(self) -> MemorySnapshot:
        host = read_sizes(MEMINFO)
        process = read_sizes(STATUS)
        return MemorySnapshot(
            total=host["MemTotal"],
            free=host["MemAvailable"],
            allocated=process["VmRSS"],
            peak=process["VmHWM"],
            reserved=process["VmRSS"],
            reserved_peak=process["VmHWM"],
            others={},
        )

    def reset_peak(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def budget(self, baseline: MemorySnapshot, utilization: float) -> int:
        return math.ceil(baseline.free * utilization)

    def limit_kv_cache(self, available: int) -> int:
        return min(available, HOST_KV_CACHE_LIMIT_BYTES)

    def own_bytes(self, now: MemorySnapshot) -> int:
        return now.allocated

    def taken_since(self, before: MemorySnapshot, now: MemorySnapshot) -> int:
        return now.allocated - before.allocated

    def foreign_changes(
        self, before: MemorySnapshot, now: MemorySnapshot
    ) -> tuple[ForeignChange, ...]:
        return ()


class CudaMemory:
    """The CUDA driver's figures for the device, torch's for this process, NVML's for other ones.

    Owned by the worker; used on the step thread.
    """

    def __init__(self, device: torch.device) -> None:
        """The device's context must exist: NVML lists processes that have one."""
        self._device = device
        self._own_pid: int | None = None
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._processes = open_processes(load_nvml(), uuid)
        if self._processes is not None:
            reserved = torch.cuda.memory_reserved(device)
            self._own_pid = find_own(
                self._processes.used_bytes, os.getpid(), reserved, self._probing
            )

    def snapshot(self) -> MemorySnapshot:
        torch.cuda.synchronize(self._device)
        (free, total), others = self._read()
        return MemorySnapshot(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
            reserved=torch.cuda.memory_reserved(self._device),
            reserved_peak=torch.cuda.max_memory_reserved(self._device),
            others=others,
        )

    def reset_peak(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def budget(self, baseline: MemorySnapshot, utilization: float) -> int:
        return request_memory(baseline, utilization)

    def limit_kv_cache(self, available: int) -> int:
        return available

    def own_bytes(self, now: MemorySnapshot) -> int:
        return now.total - now.free - sum((now.others or {}).values())

    def taken_since(self, before: MemorySnapshot, now: MemorySnapshot) -> int:
        return device_bytes_taken(before, now)

    def foreign_changes(
        self, before: MemorySnapshot, now: MemorySnapshot
    ) -> tuple[ForeignChange, ...]:
        return foreign_changes(before, now)

    def _read(self) -> tuple[tuple[int, int], Mapping[int, int] | None]:
        """Return the free and total memory, and other processes' memory at the same moment: read
        again until the processes' figures do not change in between."""
        others = self._others()
        for _ in range(_CONSISTENT_READS):
            info, again = torch.cuda.mem_get_info(self._device), self._others()
            if again == others:
                break
            others = again
        return info, others

    def _others(self) -> Mapping[int, int] | None:
        if self._processes is None or self._own_pid is None:
            return None
        used = self._processes.used_bytes()
        if used is None or self._own_pid not in used:
            return None
        return {pid: num_bytes for pid, num_bytes in used.items() if pid != self._own_pid}

    @contextmanager
    def _probing(self, num_bytes: int) -> Iterator[None]:
        """Allocate that much device memory for the duration of the block, if it is free."""
        torch.cuda.empty_cache()
        probe: torch.Tensor | None = None
        with suppress(torch.OutOfMemoryError):
            probe = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        yield
        del probe
        torch.cuda.empty_cache()
