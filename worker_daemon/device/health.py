"""Whether a device can still be looked after, apart from whether it computes: NVML may be lost (to
a container whose device cgroup is renewed, say) while CUDA works, or say that the device is slowed
down."""

from typing import Final, Protocol

import torch

from worker_daemon.device.nvml import Nvml, load_nvml, nvml_uuids

SLOWDOWNS: Final = {
    0x08: "the hardware slows it down",
    0x20: "it is too hot (software)",
    0x40: "it is too hot (hardware)",
    0x80: "the power supply asks for less (power brake)",
}
"""nvml.h's nvmlClocksEventReason bits, in words. The power cap (0x04) is none of them: large GPUs
run into it whenever they are busy."""


class DeviceHealth(Protocol):
    """Asked by the guard thread now and then."""

    def check(self) -> str:
        """Return what is amiss; empty: nothing."""


class NoHealth:
    """A device that nobody watches: the CPU."""

    def check(self) -> str:
        return ""


class NvmlHealth:
    """Asks NVML for a device that it has known before."""

    def __init__(self, uuid: str, nvml: Nvml) -> None:
        """uuid: with its kind, GPU- or MIG-."""
        self._uuid = uuid
        self._nvml = nvml

    def check(self) -> str:
        """See DeviceHealth. NVML is opened anew each time: one that was lost may have come back."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            nvml.nvmlDeviceGetPciInfo(handle)
        except nvml.NVMLError as error:
            return f"NVML is lost: {error}"
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except nvml.NVMLError:  # a slice of a device has no clocks of its own
            return ""
        words = [word for bit, word in SLOWDOWNS.items() if reasons & bit]
        return f"the device is throttled: {', '.join(words)}" if words else ""


def open_health(device: torch.device) -> DeviceHealth:
    """Return what watches a device: nothing for the CPU, or where NVML does not know the device to
    begin with."""
    if device.type != "cuda":
        return NoHealth()
    nvml = load_nvml()
    for uuid in nvml_uuids(str(torch.cuda.get_device_properties(device).uuid)):
        health = NvmlHealth(uuid, nvml)
        if not health.check():
            return health
    return NoHealth()
