"""Device health as NVML reports it: NVML can be lost while CUDA still works (a container's device
cgroup is rewritten, say), or report that the device is throttled."""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import torch

from worker_daemon.device.nvml import Nvml, load_nvml, nvml_uuids

SLOWDOWNS: Final = {
    0x08: "the hardware slows it down",
    0x20: "it is too hot (software)",
    0x40: "it is too hot (hardware)",
    0x80: "the power supply asks for less (power brake)",
}
"""Descriptions of nvml.h's nvmlClocksEventReason bits. The power cap (0x04) is left out: large GPUs
reach it whenever they are busy."""

CheckDevice: TypeAlias = Callable[[], str]
"""Returns the device's problem; empty if none. Called by the guard thread at intervals."""


def check_nvml_device(nvml: Nvml, uuid: str) -> str:
    """Return the problem that NVML reports for a device; empty if none.

    Opens NVML on each call: one that was lost may be back. uuid: with its kind, GPU- or MIG-.
    """
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        nvml.nvmlDeviceGetPciInfo(handle)
    except nvml.NVMLError as error:
        return f"NVML is lost: {error}"
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:  # a MIG slice has no separate clocks
        return ""
    words = [word for bit, word in SLOWDOWNS.items() if reasons & bit]
    return f"the device is throttled: {', '.join(words)}" if words else ""


def no_check() -> str:
    """Report no problem: for the CPU, and for a GPU that NVML does not list."""
    return ""


def open_health(device: torch.device) -> CheckDevice:
    """Return the health check of a device: no_check for the CPU, or if NVML does not list the
    device at start."""
    if device.type != "cuda":
        return no_check
    nvml = load_nvml()
    for uuid in nvml_uuids(str(torch.cuda.get_device_properties(device).uuid)):
        if not check_nvml_device(nvml, uuid):
            return partial(check_nvml_device, nvml, uuid)
    return no_check
