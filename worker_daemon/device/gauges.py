"""Gauges of a GPU: utilization, temperature and power, read from NVML by the device watch."""

from contextlib import suppress
from dataclasses import dataclass

from worker_daemon.device.nvml import CudaDevice, Nvml, open_device


@dataclass(frozen=True, slots=True)
class GaugeReading:
    """One reading; None for a gauge that the device lacks."""

    utilization_percent: int | None
    temperature_c: int | None
    power_w: int | None


class Gauges:
    """The gauges of one device. Used by one thread."""

    def __init__(self, handle: object, nvml: Nvml) -> None:
        self._handle = handle
        self._nvml = nvml

    def read(self) -> GaugeReading | None:
        """Read all gauges; None if none can be read. A figure that NVML does not report (for a MIG
        slice, say) is None."""
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
        return GaugeReading(utilization_percent=percent, temperature_c=celsius, power_w=watts)


def open_gauges(nvml: Nvml, device: CudaDevice) -> Gauges | None:
    """Return a GPU's gauges; None without NVML."""
    try:
        return Gauges(open_device(nvml, device), nvml)
    except (nvml.NVMLError, ValueError):
        return None
