"""The watch for XIDs, over an NVML that tells what it is told to."""

from collections import deque
from types import SimpleNamespace

import pynvml
import pytest

from worker_daemon.device.fault_watch import Nvml, open_fault_watch
from worker_daemon.device.gpu_faults import LOST, XIDS, Action, fault_of


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
    watch = open_fault_watch(device, visible, nvml)
    assert nvml.registered == [(handle, pynvml.nvmlEventTypeXidCriticalError, "events")]
    watch.close()
    assert not watch.is_on and nvml.open_sets == 0


def test_faults_come_in_order_and_silence_is_none():
    nvml = FakeNvml()
    nvml.events += [94, -pynvml.NVML_ERROR_TIMEOUT, 79, 4711]
    watch = open_fault_watch("cuda:0", None, nvml)
    got = [watch.wait(1) for _ in range(5)]
    assert [fault and fault.xid for fault in got] == [94, None, 79, 4711, None]
    assert [fault.action.ends_gpu for fault in got if fault] == [False, True, False]
    assert watch.is_on


def test_gpu_that_nvml_has_lost():
    nvml = FakeNvml()
    nvml.events.append(-pynvml.NVML_ERROR_GPU_IS_LOST)
    watch = open_fault_watch("cuda:0", None, nvml)
    assert watch.wait(1) == LOST
    assert LOST.action.ends_gpu and not watch.is_on


def test_nvml_that_is_lost_is_no_fault_of_the_gpu():
    nvml = FakeNvml()
    nvml.events.append(-pynvml.NVML_ERROR_UNKNOWN)
    watch = open_fault_watch("cuda:0", None, nvml)
    assert watch.wait(1) is None
    assert not watch.is_on


@pytest.mark.parametrize("fails", ["init", "handle", "create", "register", "visible"])
def test_where_nothing_can_be_watched_nothing_is(fails):
    nvml = FakeNvml(fails)
    watch = open_fault_watch("cuda:0" if fails != "visible" else "cuda:3", "1", nvml)
    if fails == "handle":
        assert watch.wait(1) is None
    assert (watch.is_on, nvml.open_sets) == (False, 0)
    watch.close()


def test_what_is_used_of_nvml_is_there():
    used = {name for name in vars(Nvml) if name.startswith("nvml")} | set(Nvml.__annotations__)
    assert used >= {"nvmlInit", "NVMLError"}
    assert all(hasattr(pynvml, name) for name in used)


@pytest.mark.parametrize("xid", [46, 48, 64, 74, 79, 95, 119, 140])
def test_xids_that_end_the_gpu(xid):
    fault = fault_of(xid)
    assert fault.action in (Action.RESET_GPU, Action.REBOOT)
    assert str(fault).startswith(f"XID {xid}: ") and fault.action.value in str(fault)


def test_xids_of_one_program_do_not_end_others():
    assert not any(fault_of(xid).action.ends_gpu for xid in (13, 31, 43, 45, 63, 94, 4711))
    assert 4711 not in XIDS
