"""The device that NVML is asked for, and the use of its answer, with a fake NVML."""

import re
import types
from pathlib import Path

import pynvml
import pytest

from rpc_schema.errors import ConfigError
from worker_daemon import device
from worker_daemon.device.nvml import CudaDevice, load_nvml, total_memory_bytes


class NvmlTrouble(Exception):
    pass


class PlayedNvml:
    """Two devices, of 1,000 and 2,000 bytes, 10 of which the driver keeps."""

    NVMLError = NvmlTrouble
    nvmlMemory_v2 = 2
    totals = types.MappingProxyType({0: 1000, 1: 2000, "GPU-b": 2000})

    def __init__(self, *, present=True):
        self.present = present
        self.num_open = 0

    def nvmlInit(self):
        if not self.present:
            raise NvmlTrouble("NVML Shared Library Not Found")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._find(index)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._find(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle, version):
        assert version == self.nvmlMemory_v2
        return types.SimpleNamespace(total=self.totals[handle], reserved=10)

    def _find(self, key):
        if key not in self.totals:
            raise NvmlTrouble("Not Found")
        return key


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:0", None, 990),
        ("cuda:1", None, 1990),
        ("cuda:0", "1", 1990),
        ("cuda:1", "1, 0", 990),
        ("cuda:0", "GPU-b", 1990),
    ],
)
def test_what_programs_can_have_of_the_device_that_cuda_means(device, visible, expected):
    nvml = PlayedNvml()
    assert total_memory_bytes(nvml, CudaDevice(device, visible)) == expected
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("device", "visible", "words"),
    [
        ("cpu", None, "only a GPU"),
        ("cuda", None, "only a GPU"),
        ("cuda:-1", None, "only a GPU"),
        ("cuda:x", None, "only a GPU"),
        ("cuda:4294967296", None, "only a GPU"),
        ("cuda:0", "4294967296", "Not Found"),
        ("cuda:2", None, "Not Found"),
        ("cuda:1", "0", "names 1 devices"),
        ("cuda:0", "GPU-none", "Not Found"),
    ],
)
def test_an_unknown_device_names_the_way_out(device, visible, words):
    nvml = PlayedNvml()
    with pytest.raises(ConfigError, match=words) as caught:
        total_memory_bytes(nvml, CudaDevice(device, visible))
    assert caught.value.value == device
    assert "--memory-bytes" in caught.value.fix
    assert nvml.num_open == 0


def test_no_driver_is_said():
    with pytest.raises(ConfigError, match=r"Not Found.*--memory-bytes"):
        total_memory_bytes(PlayedNvml(present=False), CudaDevice("cuda:0", None))


def test_what_is_used_of_nvml_is_there():
    sources = [path.read_text() for path in Path(device.__file__).parent.glob("*.py")]
    used = {name for text in sources for name in re.findall(r"\bnvml\.(nvml\w+|NVML\w+)", text)}
    assert used >= {"nvmlInit", "NVMLError"}
    assert load_nvml() is pynvml
    assert all(hasattr(pynvml, name) for name in used)
