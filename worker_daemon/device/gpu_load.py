"""What a thread that watches a device may read of it now and then. Knows no NVML."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """What the gauges showed; None where there is none."""

    utilization_percent: int | None
    temperature_c: int | None
    power_w: int | None


class Gauges(Protocol):
    """Used by one thread."""

    @property
    def is_on(self) -> bool:
        """Whether there is anything to read."""

    def read(self) -> GpuLoad | None:
        """Return what they show; None: nothing at the moment."""


class NoGauges:
    """A device that has none: the CPU, or a GPU without NVML."""

    is_on = False

    def read(self) -> GpuLoad | None:
        return None
