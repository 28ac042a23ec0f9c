"""Lists the processes on a GPU and their memory, by NVML."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Final

from worker_daemon.device.nvml import Nvml, nvml_uuids

PROBE_BYTES: Final = 64 << 20
"""Memory that find_own allocates to find its own process in NVML's list."""


class DeviceProcesses:
    """The processes on one device. NVML stays open as long as the process lives."""

    def __init__(self, handle: object, nvml: Nvml) -> None:
        self._handle = handle
        self._nvml = nvml

    def used_bytes(self) -> dict[int, int] | None:
        """Return the bytes of each process, by NVML's pid, which in a container may be the host's;
        None if NVML does not report them."""
        used: dict[int, int] = {}
        nvml = self._nvml
        try:
            for entry in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if entry.usedGpuMemory is None:
                    return None
                used[entry.pid] = max(used.get(entry.pid, 0), entry.usedGpuMemory)
        except nvml.NVMLError:
            return None
        with suppress(nvml.NVMLError):  # not every device reports graphics processes
            for entry in nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle):
                used[entry.pid] = max(used.get(entry.pid, 0), entry.usedGpuMemory or 0)
        return used


def open_processes(nvml: Nvml, uuid: str) -> DeviceProcesses | None:
    """Return the processes of the device, or MIG slice, of this CUDA UUID; None if NVML is missing
    or does not list the device."""
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
    """Return the pid under which NVML lists this process; None if it cannot be found.

    pid: the process's own, which NVML lists under another number if the process lives in a
    container; own_bytes: a lower bound on its device memory. If NVML does not list that pid with at
    least own_bytes, the result is the one process that grows by PROBE_BYTES inside
    probe(PROBE_BYTES), which allocates them.
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
