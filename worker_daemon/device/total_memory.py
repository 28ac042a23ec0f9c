"""How much memory a GPU has, asked of NVML: no CUDA context is created for it. Knows no model."""

import re
from typing import Final, Protocol

import pynvml

from worker_daemon.errors import ConfigError

_INDEX: Final = re.compile(r"[0-9]{1,3}")


class MemoryInfo(Protocol):
    """NVML's figures, in bytes."""

    total: int
    reserved: int
    """For the driver and the firmware: no program gets it."""


class Nvml(Protocol):
    """What is used of nvidia-ml-py."""

    NVMLError: type[Exception]
    nvmlMemory_v2: int

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...

    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int) -> MemoryInfo: ...


def total_memory_bytes(device: str, visible_devices: str | None, nvml: Nvml = pynvml) -> int:
    """Return the memory of a device that programs can have.

    Args:
        device: cuda:N.
        visible_devices: CUDA_VISIBLE_DEVICES, where that is set: N counts its entries, which are
            indices or UUIDs. Without it N is NVML's index.

    Raises:
        ConfigError: there is no such device here, or nobody to ask.
    """
    try:
        name = nvml_name(device, visible_devices)
    except ValueError as error:
        raise _unknown(device, str(error)) from None
    try:
        nvml.nvmlInit()
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(_handle(name, nvml), nvml.nvmlMemory_v2)
            return int(info.total) - int(info.reserved)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise _unknown(device, f"it cannot be asked for its memory: {error}") from None


def nvml_name(device: str, visible_devices: str | None) -> str:
    """Return the index or UUID by which NVML knows a device; arguments as of total_memory_bytes.

    Raises:
        ValueError: it is no GPU, or not one of the visible ones.
    """
    kind, _, digits = device.partition(":")
    if kind != "cuda" or not _INDEX.fullmatch(digits):
        raise ValueError("only a GPU, cuda:N, can be asked for its memory")
    if visible_devices is None:
        return digits
    names = [entry.strip() for entry in visible_devices.split(",")]
    if int(digits) >= len(names):
        raise ValueError(f"CUDA_VISIBLE_DEVICES names {len(names)} devices")
    return names[int(digits)]


def _handle(name: str, nvml: Nvml) -> object:
    if _INDEX.fullmatch(name):
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _unknown(device: str, why: str) -> ConfigError:
    return ConfigError(
        why, field="device", value=device, fix="give the device's bytes as --memory-bytes"
    )
