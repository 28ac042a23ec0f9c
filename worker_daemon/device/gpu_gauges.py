"""How busy and how warm a GPU is, asked of NVML. To be imported for GPUs only: the CPU has no NVML.
Knows no process and no socket; creates no CUDA context."""

from contextlib import suppress
from typing import Protocol

import pynvml

from worker_daemon.device.gpu_load import Gauges, GpuLoad, NoGauges
from worker_daemon.device.total_memory import nvml_name


class Utilization(Protocol):
    """NVML's figures, in percent of the last moments."""

    gpu: int


class Nvml(Protocol):
    """What is used of nvidia-ml-py."""

    NVMLError: type[Exception]
    NVML_TEMPERATURE_GPU: int

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Utilization: ...

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int: ...

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int: ...


class NvmlGauges:
    """One device's. A figure that NVML does not give (of a slice of a GPU, say) is left out."""

    is_on = True

    def __init__(self, handle: object, nvml: Nvml) -> None:
        self._handle = handle
        self._nvml = nvml

    def read(self) -> GpuLoad | None:
        """See Gauges."""
        nvml, handle = self._nvml, self._handle
        percent = celsius = watts = None
        with suppress(nvml.NVMLError):
            percent = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with suppress(nvml.NVMLError):
            celsius = int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        with suppress(nvml.NVMLError):
            watts = int(nvml.nvmlDeviceGetPowerUsage(handle)) // 1000
        if percent is None and celsius is None and watts is None:
            return None
        return GpuLoad(utilization_percent=percent, temperature_c=celsius, power_w=watts)


def open_gauges(device: str, visible_devices: str | None, nvml: Nvml = pynvml) -> Gauges:
    """Return a device's gauges, cuda:N; visible_devices is CUDA_VISIBLE_DEVICES, where that is set.
    Without NVML there are none."""
    try:
        nvml.nvmlInit()
        name = nvml_name(device, visible_devices)
        if name.isdecimal():
            return NvmlGauges(nvml.nvmlDeviceGetHandleByIndex(int(name)), nvml)
        return NvmlGauges(nvml.nvmlDeviceGetHandleByUUID(name), nvml)
    except (nvml.NVMLError, ValueError):
        return NoGauges()
