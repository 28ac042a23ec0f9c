"""The watch for a GPU's faults by NVML, which reports them as XIDs."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final, Protocol

from worker_daemon.device.gpu_faults import LOST, Action, Fault, fault_of
from worker_daemon.device.nvml import CudaDevice, Nvml, open_device

RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of nvml.h, which older releases of nvidia-ml-py lack; older
drivers do not know it either."""
_RECOVERY: Final[Mapping[int, Action]] = MappingProxyType(
    {
        0: Action.NONE,
        1: Action.RESET_GPU,
        2: Action.REBOOT,
        4: Action.RESET_GPU,  # of this GPU's and its peers' work
        6: Action.RESET_GPU,  # of its bus
        7: Action.REBOOT,
    }
)
"""nvmlDeviceGpuRecoveryAction_t. 3 and 5 are the peers' and the fabric's: the GPU itself serves
on."""


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


class NvmlFaultWatch:
    """One device's XIDs. NVML stays open as long as the process lives."""

    def __init__(self, handle: object, events: object, nvml: Nvml) -> None:
        """events: a set with which the device is registered."""
        self._handle = handle
        self._events = events
        self._nvml = nvml
        self.is_on = True

    def wait(self, timeout_ms: int) -> Fault | None:
        """See FaultWatch. NVML that fails otherwise than for the GPU's sake ends the watch: that is
        no fault of the GPU's."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code == nvml.NVML_ERROR_TIMEOUT:
                return None
            self.is_on = False
            return LOST if code == nvml.NVML_ERROR_GPU_IS_LOST else None
        if event.eventType != nvml.nvmlEventTypeXidCriticalError:
            return None
        fault = fault_of(int(event.eventData))
        return fault.advised(self._recovery_action()) if fault.depends else fault

    def _recovery_action(self) -> Action | None:
        """What the driver says that the GPU needs at this moment; None where it does not say."""
        try:
            (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [RECOVERY_ACTION])
        except self._nvml.NVMLError:
            return None
        return _RECOVERY.get(int(field.value.uiVal)) if field.nvmlReturn == 0 else None

    def close(self) -> None:
        self.is_on = False
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)


def open_fault_watch(nvml: Nvml, device: CudaDevice) -> FaultWatch:
    """Watch a GPU. Where it cannot be watched, nothing is."""
    events = None
    try:
        handle = open_device(nvml, device)
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except (nvml.NVMLError, ValueError):
        if events is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)
        return NoFaultWatch()
    return NvmlFaultWatch(handle, events, nvml)
