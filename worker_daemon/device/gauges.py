"""How busy and how warm a device is: read now and then by the thread that watches it."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from worker_daemon.device.nvml import CudaDevice, Nvml, open_device


@dataclass(frozen=True, slots=True)
class GaugeReading:
    """One reading; None where there is no such gauge."""

    utilization_percent: int | None
    temperature_c: int | None
    power_w: int | None


class Gauges(Protocol):
    """Used by one thread."""

    @property
    def is_on(self) -> bool:
        """Whether there is anything to read."""

    def read(self) -> GaugeReading | None:
        """Return what they show; None: nothing at the moment."""


class NoGauges:
    """Those of the CPU, or of a GPU without NVML."""

    is_on = False

    def read(self) -> GaugeReading | None:
        return None


class NvmlGauges:
    """One device's. A figure that NVML does not give (of a slice of a GPU, say) is left out."""

    is_on = True

    def __init__(self, handle: object, nvml: Nvml) -> None:
        self._handle = handle
        self._nvml = nvml

    def read(self) -> GaugeReading | None:
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
        return GaugeReading(utilization_percent=percent, temperature_c=celsius, power_w=watts)


def open_gauges(nvml: Nvml, device: CudaDevice) -> Gauges:
    """Return a GPU's gauges; without NVML there are none."""
    try:
        return NvmlGauges(open_device(nvml, device), nvml)
    except (nvml.NVMLError, ValueError):
        return NoGauges()
