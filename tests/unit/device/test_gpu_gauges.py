"""A GPU's gauges, over a scripted NVML, and the thread that reads them."""

import time
from types import SimpleNamespace

import pynvml
import pytest

from worker_daemon.device.gauges import GaugeReading, open_gauges
from worker_daemon.device.gpu_faults import Fault, fault_of
from worker_daemon.device.nvml import CudaDevice
from worker_daemon.server.health.device_watch import DeviceWatch


class FakeNvml:
    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *fails: str) -> None:
        self._fails = fails

    def _check(self, name: str) -> None:
        if name in self._fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self._check("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._check("rates")
        return SimpleNamespace(gpu=87, memory=3)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._check("temperature")
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check("power")
        return 402_750


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ((), GaugeReading(87, 61, 402)),
        (("rates",), GaugeReading(None, 61, 402)),
        (("rates", "temperature", "power"), None),
    ],
)
def test_what_nvml_does_not_give_is_left_out(fails, expected):
    gauges = open_gauges(FakeNvml(*fails), CudaDevice("cuda:0", None))
    assert gauges.read() == expected


@pytest.mark.parametrize(("device", "fails"), [("cpu", ()), ("cuda:4", ()), ("cuda:0", ("init",))])
def test_without_nvml_there_are_none(device, fails):
    assert open_gauges(FakeNvml(*fails), CudaDevice(device, "0,1")) is None


def test_gauges_are_read_though_no_fault_can_be_watched_for():
    device = CudaDevice("cuda:0", None)
    watch = DeviceWatch(lambda: None, print, lambda: open_gauges(FakeNvml(), device))
    watch.thread.start()
    until = time.monotonic() + 10
    while watch.load is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert watch.load == GaugeReading(87, 61, 402)
    watch.stop()
    assert watch.thread.join_within(5)


class ScriptedWatch:
    """Reports some faults, and then loses NVML."""

    def __init__(self, *xids: int) -> None:
        self._xids = list(xids)
        self.is_on = True

    def wait(self, timeout_ms: int) -> Fault | None:
        self.is_on = len(self._xids) > 1
        return fault_of(self._xids.pop(0)) if self._xids else None

    def close(self) -> None:
        self.is_on = False


def test_faults_are_counted_by_xid():
    faults = []
    watch = DeviceWatch(lambda: ScriptedWatch(31, 94, 31), faults.append, lambda: None)
    watch.thread.start()
    assert watch.thread.join_within(10)
    assert watch.xids == {31: 2, 94: 1} and len(faults) == 3
