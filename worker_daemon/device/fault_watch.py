"""Watches a GPU for faults, which NVML reports as XIDs."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from worker_daemon.device.gpu_faults import LOST, Action, Fault, fault_of
from worker_daemon.device.nvml import CudaDevice, Nvml, open_device

RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of nvml.h, missing from older releases of nvidia-ml-py and
older drivers."""
_RECOVERY: Final[Mapping[int, Action]] = MappingProxyType(
    {
        0: Action.NONE,
        1: Action.RESET_GPU,
        2: Action.REBOOT,
        4: Action.RESET_GPU,  # after draining the work of this GPU and its peers
        6: Action.RESET_GPU,  # by a reset of its bus
        7: Action.REBOOT,
    }
)
"""nvmlDeviceGpuRecoveryAction_t. 3 and 5 concern the peers and the fabric: the GPU itself keeps
serving."""


class FaultWatch:
    """The XIDs of one device. Used by one thread. NVML stays open as long as the process lives."""

    def __init__(self, handle: object, events: object, nvml: Nvml) -> None:
        """events: an event set in which the device is registered."""
        self._handle = handle
        self._events = events
        self._nvml = nvml
        self.is_on = True
        """False once the watch has ended."""

    def wait(self, timeout_ms: int) -> Fault | None:
        """Return the next fault; None if none came in that time, or if the watch has ended. A
        failure of NVML itself ends the watch: it is not a fault of the GPU."""
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
        """Return the recovery action that the driver reports now; None if it reports none."""
        try:
            (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [RECOVERY_ACTION])
        except self._nvml.NVMLError:
            return None
        return _RECOVERY.get(int(field.value.uiVal)) if field.nvmlReturn == 0 else None

    def close(self) -> None:
        """End the watch."""
        self.is_on = False
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)


def open_fault_watch(nvml: Nvml, device: CudaDevice) -> FaultWatch | None:
    """Watch a GPU; None if NVML cannot watch it."""
    events = None
    try:
        handle = open_device(nvml, device)
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except (nvml.NVMLError, ValueError):
        if events is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)
        return None
    return FaultWatch(handle, events, nvml)
