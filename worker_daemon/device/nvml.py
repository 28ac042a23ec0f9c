"""NVIDIA's management library (NVML): loads it, finds a device in it, and answers one-off queries.
Creates no CUDA context.

NVML is reference-counted in a process. The watchers of a device (gauges, faults, processes, health)
open it for the life of the process; a one-off query closes it again.
"""

import logging
import re
from typing import Any, Final, NamedTuple, TypeAlias

from rpc_schema.errors import ConfigError
from worker_daemon.errors import config_error

_INDEX: Final = re.compile(r"[0-9]{1,3}")
_UUID_KINDS: Final = ("GPU", "MIG")

logger = logging.getLogger(__name__)


Nvml: TypeAlias = Any
"""The module of nvidia-ml-py, which is untyped. Every call may raise NVMLError."""


class CudaDevice(NamedTuple):
    """A device by its CUDA index."""

    name: str
    """cuda:N."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES if set: then N is an index into its entries, which are indices or UUIDs.
    Otherwise N is NVML's index."""


def load_nvml() -> Nvml:
    """Import and return nvidia-ml-py. Call it only for GPUs."""
    import pynvml  # a daemon on the CPU does not need it

    return pynvml


def open_device(nvml: Nvml, device: CudaDevice) -> object:
    """Open NVML and return the device's handle.

    Raises:
        ValueError: the device is not a GPU, or not visible.
        NVMLError: NVML is missing or lost, or does not list the device.
    """
    name = _nvml_name(device)
    nvml.nvmlInit()
    return _handle(nvml, name)


def nvml_uuids(uuid: str) -> tuple[str, ...]:
    """Return the names that NVML may have for a device or a MIG slice: CUDA reports the UUID with
    or without its kind."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    return tuple(f"{kind}-{bare}" for kind in _UUID_KINDS)


def find_uuid(nvml: Nvml, device: CudaDevice) -> str:
    """Return a device's UUID, GPU-... or MIG-...; empty if NVML or the device is missing."""
    try:
        return str(nvml.nvmlDeviceGetUUID(open_device(nvml, device)))
    except (nvml.NVMLError, ValueError) as error:
        logger.warning("%s has no lock, since NVML does not know its UUID: %s", device.name, error)
        return ""


def total_memory_bytes(nvml: Nvml, device: CudaDevice) -> int:
    """Return the memory of a device that programs can use.

    Raises:
        ConfigError: there is no such device here, or no NVML.
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
        raise _no_memory(device, f"NVML cannot report its memory: {error}") from None


def _nvml_name(device: CudaDevice) -> str:
    """Return the index or UUID of a device in NVML."""
    kind, _, digits = device.name.partition(":")
    if kind != "cuda" or not _INDEX.fullmatch(digits):
        raise ValueError("only a GPU, cuda:N, reports its memory")
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
    return config_error("device", device.name, why, "give the device's bytes as --memory-bytes")
