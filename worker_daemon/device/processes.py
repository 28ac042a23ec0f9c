"""Which processes have how much of a GPU's memory, asked of NVML."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Final

from worker_daemon.device.nvml import Nvml, nvml_uuids

PROBE_BYTES: Final = 64 << 20
"""What find_own takes to see which of the processes has it."""


class DeviceProcesses:
    """The processes on one device. NVML stays open as long as the process lives."""

    def __init__(self, handle: object, nvml: Nvml) -> None:
        self._handle = handle
        self._nvml = nvml

    def used_bytes(self) -> dict[int, int] | None:
        """Return the bytes of each process, by the pid that NVML gives it, which in a container may
        be the host's; None where NVML does not tell."""
        used: dict[int, int] = {}
        nvml = self._nvml
        try:
            for entry in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if entry.usedGpuMemory is None:
                    return None
                used[entry.pid] = max(used.get(entry.pid, 0), entry.usedGpuMemory)
        except nvml.NVMLError:
            return None
        with suppress(nvml.NVMLError):  # not every device draws
            for entry in nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle):
                used[entry.pid] = max(used.get(entry.pid, 0), entry.usedGpuMemory or 0)
        return used


def open_processes(nvml: Nvml, uuid: str) -> DeviceProcesses | None:
    """Return the processes of the device, or slice of one, that CUDA gives this UUID; None where
    there is no NVML or it knows no such device."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    for name in nvml_uuids(uuid):
        with suppress(nvml.NVMLError):
            return DeviceProcesses(nvml.nvmlDeviceGetHandleByUUID(name), nvml)
    return None


def find_own(
    used_bytes: Callable[[], Mapping[int, int] | None],
    pid: int,
    own_bytes: int,
    probe: Callable[[int], AbstractContextManager[object]],
) -> int | None:
    """Return the pid under which this process is listed, or None if that cannot be told.

    pid is its own, which NVML lists as another number where this process lives in a container;
    own_bytes is what it has of the device at least. Then it is the one that has PROBE_BYTES more
    while it is inside probe(PROBE_BYTES), which takes them.
    """
    before = used_bytes()
    if before is None:
        return None
    if before.get(pid, -1) >= own_bytes:
        return pid
    with probe(PROBE_BYTES):
        now = used_bytes() or {}
    grown = [name for name, used in now.items() if used - before.get(name, 0) >= PROBE_BYTES]
    return grown[0] if len(grown) == 1 else None
