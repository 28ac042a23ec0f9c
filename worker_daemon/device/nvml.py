"""NVIDIA's management library: loading it, finding a device in it, and what is asked once. Creates
no CUDA context.

NVML counts its users in a process. What watches a device (gauges, faults, processes, health) opens
it and leaves it open as long as the process lives; a figure asked for once closes it again.
"""

import logging
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from worker_daemon.errors import ConfigError

_INDEX: Final = re.compile(r"[0-9]{1,3}")
_UUID_KINDS: Final = ("GPU", "MIG")

logger = logging.getLogger(__name__)


class Utilization(Protocol):
    """Percent of the last moments."""

    gpu: int


class MemoryInfo(Protocol):
    """Bytes."""

    total: int
    reserved: int
    """For the driver and the firmware: no program gets it."""


class ProcessInfo(Protocol):
    """One process on a device."""

    pid: int
    usedGpuMemory: int | None
    """Bytes; None where NVML may not tell."""


class FieldUnion(Protocol):
    """A union; the members that are used of it."""

    uiVal: int


class FieldValue(Protocol):
    """One field of a device."""

    nvmlReturn: int
    value: FieldUnion


class EventData(Protocol):
    """One event of a set."""

    eventType: int
    eventData: int


class Nvml(Protocol):
    """The calls of nvidia-ml-py that are made here. Every call may raise NVMLError."""

    NVMLError: type[Exception]
    NVML_ERROR_GPU_IS_LOST: int
    NVML_ERROR_TIMEOUT: int
    NVML_TEMPERATURE_GPU: int
    nvmlEventTypeXidCriticalError: int
    nvmlMemory_v2: int

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...

    def nvmlDeviceGetUUID(self, handle: object) -> str: ...

    def nvmlDeviceGetPciInfo(self, handle: object) -> object: ...

    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int) -> MemoryInfo: ...

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> Sequence[ProcessInfo]: ...

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: object) -> Sequence[ProcessInfo]: ...

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Utilization: ...

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int: ...

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int: ...

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int: ...

    def nvmlDeviceGetFieldValues(
        self, handle: object, fields: Sequence[int]
    ) -> Sequence[FieldValue]: ...

    def nvmlEventSetCreate(self) -> object: ...

    def nvmlDeviceRegisterEvents(self, handle: object, types: int, events: object) -> None: ...

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> EventData: ...

    def nvmlEventSetFree(self, events: object) -> None: ...


class CudaDevice(NamedTuple):
    """A device as CUDA counts them."""

    name: str
    """cuda:N."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES, where that is set: N counts its entries, which are indices or UUIDs.
    Without it N is NVML's index."""


def load_nvml() -> Nvml:
    """Return nvidia-ml-py. To be called for GPUs only."""
    import pynvml  # a daemon on the CPU does without

    bindings: Nvml = pynvml
    return bindings


def open_device(nvml: Nvml, device: CudaDevice) -> object:
    """Open NVML and return the device's handle.

    Raises:
        ValueError: it is no GPU, or not one of the visible ones.
        NVMLError: NVML is missing or lost, or does not know it.
    """
    name = _nvml_name(device)
    nvml.nvmlInit()
    return _handle(nvml, name)


def nvml_uuids(uuid: str) -> tuple[str, ...]:
    """Return what NVML may call a device, or a slice of one: CUDA leaves out which of them it is,
    or says so in front."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    return tuple(f"{kind}-{bare}" for kind in _UUID_KINDS)


def find_uuid(nvml: Nvml, device: CudaDevice) -> str:
    """Return a device's UUID, GPU-... or MIG-...; empty where NVML does not tell: it is missing,
    say, or the device is."""
    try:
        return str(nvml.nvmlDeviceGetUUID(open_device(nvml, device)))
    except (nvml.NVMLError, ValueError) as error:
        logger.warning("%s has no lock, since NVML does not know its UUID: %s", device.name, error)
        return ""


def total_memory_bytes(nvml: Nvml, device: CudaDevice) -> int:
    """Return the memory of a device that programs can have.

    Raises:
        ConfigError: there is no such device here, or nobody to ask.
    """
    try:
        name = _nvml_name(device)
        nvml.nvmlInit()
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, name), nvml.nvmlMemory_v2)
            return int(info.total) - int(info.reserved)
        finally:
            nvml.nvmlShutdown()
    except ValueError as error:
        raise _no_memory(device, str(error)) from None
    except nvml.NVMLError as error:
        raise _no_memory(device, f"it cannot be asked for its memory: {error}") from None


def _nvml_name(device: CudaDevice) -> str:
    """Return the index or UUID by which NVML knows a device."""
    kind, _, digits = device.name.partition(":")
    if kind != "cuda" or not _INDEX.fullmatch(digits):
        raise ValueError("only a GPU, cuda:N, can be asked for its memory")
    if device.visible_devices is None:
        return digits
    names = [entry.strip() for entry in device.visible_devices.split(",")]
    if int(digits) >= len(names):
        raise ValueError(f"CUDA_VISIBLE_DEVICES names {len(names)} devices")
    return names[int(digits)]


def _handle(nvml: Nvml, name: str) -> object:
    if _INDEX.fullmatch(name):
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _no_memory(device: CudaDevice, why: str) -> ConfigError:
    return ConfigError(
        why, field="device", value=device.name, fix="give the device's bytes as --memory-bytes"
    )
