"""What tells one GPU of a host from another, asked of NVML. To be imported for GPUs only. Creates
no CUDA context."""

import logging
from typing import Protocol

import pynvml

from worker_daemon.device.total_memory import nvml_name

logger = logging.getLogger(__name__)


class Nvml(Protocol):
    """What is used of nvidia-ml-py."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...

    def nvmlDeviceGetUUID(self, handle: object) -> str: ...


def find_uuid(device: str, visible_devices: str | None, nvml: Nvml = pynvml) -> str:
    """Return the UUID, GPU-... or MIG-..., of cuda:N; visible_devices is CUDA_VISIBLE_DEVICES,
    where that is set. Empty where NVML does not tell: it is missing, say, or the device is."""
    try:
        nvml.nvmlInit()
        name = nvml_name(device, visible_devices)
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(name)
        )
        return str(nvml.nvmlDeviceGetUUID(handle))
    except (nvml.NVMLError, ValueError) as error:
        logger.warning("%s has no lock, since NVML does not know its UUID: %s", device, error)
        return ""
