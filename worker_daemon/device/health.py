"""Whether a device can still be looked after, apart from whether it computes: NVML may be lost (to
a container whose device cgroup is renewed, say) while CUDA works. Knows no worker."""

from typing import Protocol

import torch


class DeviceHealth(Protocol):
    """Asked by the guard thread now and then."""

    def check(self) -> str:
        """Return what is amiss; empty: nothing."""


class NoHealth:
    """A device that nobody watches: the CPU."""

    def check(self) -> str:
        return ""


class HandleSource(Protocol):
    """What is used of nvidia-ml-py."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...

    def nvmlDeviceGetPciInfo(self, handle: object) -> object: ...


class NvmlHealth:
    """Asks NVML for a device that it has known before."""

    def __init__(self, uuid: str, nvml: HandleSource) -> None:
        """uuid: with its kind, GPU- or MIG-."""
        self._uuid = uuid
        self._nvml = nvml

    def check(self) -> str:
        """See DeviceHealth. NVML is opened anew each time: one that was lost may have come back."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByUUID(self._uuid))
        except nvml.NVMLError as error:
            return f"NVML is lost: {error}"
        return ""


def open_health(device: torch.device) -> DeviceHealth:
    """Return what watches a device: nothing for the CPU, or where NVML does not know the device to
    begin with."""
    if device.type != "cuda":
        return NoHealth()
    import pynvml  # a daemon on the CPU does without

    for kind in ("GPU", "MIG"):
        bare = str(torch.cuda.get_device_properties(device).uuid)
        health = NvmlHealth(f"{kind}-{bare.removeprefix('GPU-').removeprefix('MIG-')}", pynvml)
        if not health.check():
            return health
    return NoHealth()
