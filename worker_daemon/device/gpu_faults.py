"""What the GPU's driver reports as an XID, and which of them end the daemon. Knows no process, no
socket and no NVML.

Buckets are the immediate actions of NVIDIA's catalogue for A100 and later
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html); its health checks reset a
GPU after 46 and 48.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Protocol


class Action(Enum):
    """What NVIDIA asks for."""

    NONE = "nothing"
    RESTART_APP = "restart the application"
    RESET_GPU = "reset the GPU"
    REBOOT = "reboot the host"

    @property
    def ends_gpu(self) -> bool:
        """Whether no process may use the GPU before."""
        return self in (Action.RESET_GPU, Action.REBOOT)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happened to the GPU."""

    xid: int
    """0 where NVML says no more than that the GPU is lost."""
    what: str
    action: Action

    def __str__(self) -> str:
        name = f"XID {self.xid}" if self.xid else "NVML"
        return f"{name}: {self.what}; NVIDIA's advice: {self.action.value}"


LOST: Final = Fault(0, "the GPU is lost", Action.REBOOT)

XIDS: Final[Mapping[int, tuple[str, Action]]] = MappingProxyType(
    {
        13: ("graphics engine exception", Action.RESTART_APP),
        31: ("memory page fault", Action.RESTART_APP),
        32: ("invalid or corrupted push buffer", Action.RESTART_APP),
        43: ("the GPU stopped processing a program's work", Action.RESTART_APP),
        45: ("a program's work was removed", Action.NONE),
        46: ("the GPU stopped processing", Action.RESET_GPU),
        48: ("double-bit ECC error", Action.RESET_GPU),
        62: ("the GPU's own controller halted", Action.RESET_GPU),
        63: ("a row of memory is to be remapped", Action.NONE),
        64: ("a row of memory cannot be remapped", Action.RESET_GPU),
        69: ("graphics engine class error", Action.RESTART_APP),
        74: ("NVLink error", Action.RESET_GPU),
        79: ("the GPU has fallen off the bus", Action.REBOOT),
        92: ("many single-bit ECC errors", Action.NONE),
        94: ("contained ECC error", Action.RESTART_APP),
        95: ("uncontained ECC error", Action.RESET_GPU),
        109: ("context switch timed out", Action.RESET_GPU),
        119: ("the GPU's system processor does not answer", Action.RESET_GPU),
        120: ("the GPU's system processor failed", Action.RESET_GPU),
        140: ("uncorrected ECC error", Action.RESET_GPU),
    }
)


def fault_of(xid: int) -> Fault:
    """Return what an XID means. One that is not known is reported and ends nothing."""
    what, action = XIDS.get(xid, ("see NVIDIA's catalogue", Action.NONE))
    return Fault(xid, what, action)


class FaultWatch(Protocol):
    """Used by one thread."""

    @property
    def is_on(self) -> bool:
        """Whether there is anything to wait for."""

    def wait(self, timeout_ms: int) -> Fault | None:
        """Return the next fault, or None if there was none in that time, or the watch has
        ended."""

    def close(self) -> None:
        """End the watch."""


class NoFaultWatch:
    """Where there is no NVML, or it tells of no XIDs."""

    is_on = False

    def wait(self, timeout_ms: int) -> Fault | None:
        return None

    def close(self) -> None:
        return None
