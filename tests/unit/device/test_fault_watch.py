"""The watch for XIDs, over a scripted NVML."""

from collections import deque
from types import SimpleNamespace

import pynvml
import pytest

from worker_daemon.device.fault_watch import RECOVERY_ACTION, open_fault_watch
from worker_daemon.device.gpu_faults import LOST, WORKFLOWS, XIDS, Action, fault_of
from worker_daemon.device.nvml import CudaDevice

DEVICE = CudaDevice("cuda:0", None)


class FakeNvml:
    """Events to come are XIDs, or codes of NVML's errors as negative numbers."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_TIMEOUT = pynvml.NVML_ERROR_TIMEOUT
    NVML_ERROR_GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
    nvmlEventTypeXidCriticalError = pynvml.nvmlEventTypeXidCriticalError

    def __init__(self, fails: str = "") -> None:
        self.events: deque[int] = deque()
        self.registered: list[object] = []
        self.open_sets = 0
        self.recovery: int | None = None
        """The driver's verdict; None: it has none."""
        self._fails = fails

    def _call(self, name: str) -> None:
        if self._fails == name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._call("handle")
        return f"gpu {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"gpu {uuid}"

    def nvmlEventSetCreate(self) -> str:
        self._call("create")
        self.open_sets += 1
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: str) -> None:
        self._call("register")
        self.registered.append((handle, types, events))

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        event = self.events.popleft() if self.events else -self.NVML_ERROR_TIMEOUT
        if event < 0:
            raise pynvml.NVMLError(-event)
        return SimpleNamespace(eventType=self.nvmlEventTypeXidCriticalError, eventData=event)

    def nvmlEventSetFree(self, events: str) -> None:
        self.open_sets -= 1

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[SimpleNamespace]:
        assert (handle, fields) == ("gpu 0", [RECOVERY_ACTION])
        self._call("fields")
        value = SimpleNamespace(uiVal=self.recovery or 0)
        code = 0 if self.recovery is not None else pynvml.NVML_ERROR_NOT_SUPPORTED
        return [SimpleNamespace(nvmlReturn=code, value=value)]


@pytest.mark.parametrize(
    ("device", "visible", "handle"),
    [
        ("cuda:2", None, "gpu 2"),
        ("cuda:1", "3,5", "gpu 5"),
        ("cuda:0", "GPU-0af3", "gpu GPU-0af3"),
    ],
)
def test_the_daemon_s_device_is_watched(device, visible, handle):
    nvml = FakeNvml()
    watch = open_fault_watch(nvml, CudaDevice(device, visible))
    assert nvml.registered == [(handle, pynvml.nvmlEventTypeXidCriticalError, "events")]
    watch.close()
    assert not watch.is_on and nvml.open_sets == 0


def test_faults_come_in_order_and_silence_is_none():
    nvml = FakeNvml()
    nvml.events += [94, -pynvml.NVML_ERROR_TIMEOUT, 79, 4711]
    watch = open_fault_watch(nvml, DEVICE)
    got = [watch.wait(1) for _ in range(5)]
    assert [fault and fault.xid for fault in got] == [94, None, 79, 4711, None]
    assert [fault.action.ends_gpu for fault in got if fault] == [False, True, False]
    assert watch.is_on


def test_gpu_that_nvml_has_lost():
    nvml = FakeNvml()
    nvml.events.append(-pynvml.NVML_ERROR_GPU_IS_LOST)
    watch = open_fault_watch(nvml, DEVICE)
    assert watch.wait(1) == LOST
    assert LOST.action.ends_gpu and not watch.is_on


def test_nvml_that_is_lost_is_no_fault_of_the_gpu():
    nvml = FakeNvml()
    nvml.events.append(-pynvml.NVML_ERROR_UNKNOWN)
    watch = open_fault_watch(nvml, DEVICE)
    assert watch.wait(1) is None
    assert not watch.is_on


@pytest.mark.parametrize("fails", ["init", "handle", "create", "register", "visible"])
def test_where_nothing_can_be_watched_nothing_is(fails):
    nvml = FakeNvml(fails)
    device = CudaDevice("cuda:0" if fails != "visible" else "cuda:3", "1")
    assert open_fault_watch(nvml, device) is None
    assert nvml.open_sets == 0


@pytest.mark.parametrize(
    ("xids", "action"),
    [
        ((46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158), Action.RESET_GPU),
        ((79, 151), Action.REBOOT),
        ((8, 11, 13, 25, 31, 32, 39, 60, 69, 80, 85, 94, 96, 105, 126, 135), Action.RESTART_APP),
        ((37, 43, 44, 63, 66, 92, 93, 121, 137, 141, 157, 160, 1, 99999), Action.NONE),
    ],
)
def test_actions_are_the_catalogue_s(xids, action):
    for xid in xids:
        fault = fault_of(xid)
        assert (fault.xid, fault.action, fault.depends) == (xid, action, False)
        assert str(fault).startswith(f"XID {xid}: ") and action.value in str(fault)
        assert fault.action.ends_gpu == (action in (Action.RESET_GPU, Action.REBOOT))
        assert fault.advised(Action.REBOOT) == fault


@pytest.mark.parametrize(
    ("xid", "recovery", "action"),
    [
        (48, None, Action.RESET_GPU),
        (48, 0, Action.NONE),
        (74, None, Action.NONE),
        (74, 1, Action.RESET_GPU),
        (149, 4, Action.RESET_GPU),
        (45, 3, Action.NONE),
        (154, 2, Action.REBOOT),
        (154, 7, Action.REBOOT),
        (154, 99, Action.NONE),
        (94, 1, Action.RESTART_APP),
    ],
)
def test_where_the_number_does_not_tell_the_driver_is_asked(xid, recovery, action):
    nvml = FakeNvml()
    nvml.recovery = recovery
    nvml.events.append(xid)
    assert open_fault_watch(nvml, DEVICE).wait(1).action is action


def test_driver_that_cannot_be_asked_changes_nothing():
    nvml = FakeNvml("fields")
    nvml.events += [48, 74]
    watch = open_fault_watch(nvml, DEVICE)
    assert [watch.wait(1).action for _ in range(2)] == [Action.RESET_GPU, Action.NONE]
    assert watch.is_on


def test_tables_do_not_overlap():
    assert not XIDS.keys() & WORKFLOWS.keys()
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == RECOVERY_ACTION
