"""Faults of a GPU, which its driver reports as XIDs, and the action that each needs.

Actions are the column "Resolution Bucket (Immediate Action)" of NVIDIA's catalog for A100 and
later, as of October 2025 (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html):
RESTART_APP, RESET_GPU, and RESTART_BM or RESTART_VM, which are REBOOT here. IGNORE and
CONTACT_SUPPORT (for XIDs that the catalog calls unused) are NONE. If the catalog names a workflow
instead, the action depends on more than the XID: then NVML's recovery action decides. Without one
the table's fallback applies: a reset for 48, as in NVIDIA's health checks
(https://docs.nvidia.com/health-validation/reference/checks/xid.md), and nothing for the others,
since a fault that affects us also fails our calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final


class Action(Enum):
    """The action that NVIDIA recommends."""

    NONE = "nothing"
    RESTART_APP = "restart the application"
    RESET_GPU = "reset the GPU"
    REBOOT = "reboot the host"

    @property
    def ends_gpu(self) -> bool:
        """True if no process may use the GPU before the action."""
        return self in (Action.RESET_GPU, Action.REBOOT)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    xid: int
    """0 if NVML reports a lost GPU without an XID."""
    what: str
    action: Action
    depends: bool = False
    """The action depends on more than the XID: `action` is a fallback."""

    def __str__(self) -> str:
        name = f"XID {self.xid}" if self.xid else "NVML"
        return f"{name}: {self.what}; NVIDIA's advice: {self.action.value}"

    def advised(self, action: Action | None) -> "Fault":
        """Return the fault with NVML's recovery action, if there is one and it is needed."""
        return self if action is None or not self.depends else replace(self, action=action)


LOST: Final = Fault(0, "the GPU is lost", Action.REBOOT)

_COPY_ENGINES: Final = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO_ENGINES: Final = (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139)

XIDS: Final[Mapping[int, tuple[str, Action]]] = MappingProxyType(
    {
        8: ("the GPU stopped processing", Action.RESTART_APP),
        11: ("invalid or corrupted push buffer", Action.RESTART_APP),
        13: ("graphics engine exception", Action.RESTART_APP),
        25: ("invalid or illegal push buffer", Action.RESTART_APP),
        31: ("memory page fault", Action.RESTART_APP),
        32: ("invalid or corrupted push buffer", Action.RESTART_APP),
        37: ("driver firmware error", Action.NONE),
        38: ("driver firmware error", Action.NONE),
        43: ("the GPU stopped processing a program's work", Action.NONE),
        44: ("graphics engine fault during a context switch", Action.NONE),
        46: ("the GPU stopped processing", Action.RESET_GPU),
        54: ("auxiliary power is not connected", Action.NONE),
        62: ("the GPU's own controller halted", Action.RESET_GPU),
        63: ("a row of memory is to be remapped", Action.NONE),
        64: ("a row of memory cannot be remapped", Action.RESET_GPU),
        66: ("illegal access by the driver", Action.NONE),
        67: ("illegal access by the driver", Action.NONE),
        69: ("graphics engine class error", Action.RESTART_APP),
        78: ("virtual GPU start error", Action.NONE),
        79: ("the GPU has fallen off the bus", Action.REBOOT),
        80: ("corrupted data sent to the GPU", Action.RESTART_APP),
        92: ("many single-bit ECC errors", Action.NONE),
        93: ("the InfoROM is worn", Action.NONE),
        94: ("contained memory error", Action.RESTART_APP),
        95: ("uncontained memory error", Action.RESET_GPU),
        109: ("context switch timed out", Action.RESET_GPU),
        110: ("security fault", Action.RESET_GPU),
        119: ("the GPU's system processor does not answer", Action.RESET_GPU),
        120: ("the GPU's system processor failed", Action.RESET_GPU),
        121: ("chip-to-chip link error", Action.NONE),
        136: ("NVLink training failed", Action.RESET_GPU),
        137: ("NVLink privilege error: a peer's access was refused", Action.NONE),
        140: ("unrecovered ECC error", Action.RESET_GPU),
        141: ("CUDA fast path error", Action.NONE),
        143: ("GPU initialization error", Action.RESET_GPU),
        151: ("key rotation error", Action.REBOOT),
        155: ("NVLink error defined by software", Action.RESET_GPU),
        156: ("a resource is to be retired", Action.RESET_GPU),
        157: ("a resource cannot be retired", Action.NONE),
        158: ("the GPU does not answer", Action.RESET_GPU),
        159: ("CHI error without data", Action.NONE),
        160: ("a channel is to be retired", Action.NONE),
        161: ("a channel cannot be retired", Action.NONE),
        **dict.fromkeys(_COPY_ENGINES, ("copy engine error", Action.RESTART_APP)),
        **dict.fromkeys(_VIDEO_ENGINES, ("video engine error", Action.RESTART_APP)),
    }
)
"""XIDs whose action is fixed."""

WORKFLOWS: Final[Mapping[int, tuple[str, Action]]] = MappingProxyType(
    {
        45: ("a program's work was removed", Action.NONE),
        48: ("double-bit ECC error", Action.RESET_GPU),
        74: ("NVLink error", Action.NONE),
        **dict.fromkeys(range(144, 151), ("NVLink error", Action.NONE)),
        154: ("the action that the GPU needs to recover has changed", Action.NONE),
    }
)
"""XIDs whose action depends on more; these actions are the fallback."""


def fault_of(xid: int) -> Fault:
    """Return the fault of an XID. An unknown one is reported and ends nothing."""
    if xid in WORKFLOWS:
        return Fault(xid, *WORKFLOWS[xid], depends=True)
    return Fault(xid, *XIDS.get(xid, ("see NVIDIA's catalog", Action.NONE)))
