"""Device memory by process, with a fake NVML and a fake own process."""

import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rpc_schema.errors import CapacityError
from tests.support.driven_memory import GIB, MIB, DrivenMemory
from tests.support.waiting import PATIENCE_S
from worker_daemon.device.memory import (
    DISTURBANCE_BYTES,
    ForeignChange,
    foreign_changes,
    request_memory,
)
from worker_daemon.device.processes import PROBE_BYTES, find_own, open_processes


class NvmlTrouble(Exception):
    pass


class PlayedNvml:
    """One device; compute and graphics processes as {pid: bytes}."""

    NVMLError = NvmlTrouble

    def __init__(self, name="GPU-aa", compute=(), graphics=()):
        self.name, self.compute, self.graphics = name, dict(compute), dict(graphics)

    def nvmlInit(self):
        if self.name is None:
            raise NvmlTrouble("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.name:
            raise NvmlTrouble("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self.listed(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return self.listed(self.graphics)

    def listed(self, processes):
        if processes is None:
            raise NvmlTrouble("Not Supported")
        return [SimpleNamespace(pid=p, usedGpuMemory=b) for p, b in processes.items()]


@pytest.mark.parametrize("name", ["GPU-aa", "MIG-aa"])
@pytest.mark.parametrize("uuid", ["aa", "GPU-aa", "MIG-aa"])
def test_a_device_or_a_slice_of_one_is_found_by_what_cuda_calls_it(name, uuid):
    processes = open_processes(PlayedNvml(name, {1: 5, 2: 7}, {2: 6, 3: 1}), uuid)
    assert processes.used_bytes() == {1: 5, 2: 7, 3: 1}


@pytest.mark.parametrize("name", [None, "GPU-bb"])
def test_without_nvml_or_the_device_nobody_is_named(name):
    assert open_processes(PlayedNvml(name), "aa") is None


def test_what_nvml_may_not_tell_is_not_guessed():
    nvml = PlayedNvml(compute={1: 5})
    processes = open_processes(nvml, "aa")
    nvml.graphics = None
    assert processes.used_bytes() == {1: 5}
    nvml.compute = {1: 5, 2: None}
    assert processes.used_bytes() is None
    nvml.compute = None
    assert processes.used_bytes() is None


class Card:
    """Processes as NVML numbers them, and the probe of one of them."""

    def __init__(self, used, prober):
        self.used, self.prober = used, prober

    def used_bytes(self):
        return dict(self.used)

    @contextmanager
    def probing(self, num_bytes):
        self.used[self.prober] += num_bytes
        yield
        self.used[self.prober] -= num_bytes


def find(card, pid=42, own_bytes=3 * MIB):
    return find_own(card.used_bytes, pid, own_bytes, card.probing)


def test_a_process_finds_itself_by_its_pid():
    assert find(Card({42: 3 * MIB, 7: GIB}, prober=7)) == 42


def test_a_process_in_a_container_finds_itself_by_what_it_takes():
    """NVML reports pids outside of the container."""
    card = Card({31337: 400 * MIB, 7: GIB}, prober=31337)
    assert find(card) == 31337
    assert card.used[31337] == 400 * MIB
    stranger = Card({42: MIB, 31337: 400 * MIB}, prober=31337)  # another one with our number
    assert find(stranger) == 31337


def test_a_process_that_cannot_tell_itself_apart_names_nobody():
    card = Card({31337: 400 * MIB, 7: GIB}, prober=31337)
    probing = card.probing

    @contextmanager
    def both(num_bytes):
        with probing(num_bytes):
            card.used[7] += PROBE_BYTES
            yield

    card.probing = both
    assert find(card) is None
    assert find_own(lambda: None, 42, 0, card.probing) is None


def snapshots(before, after, *, names_others=True, given_back=0):
    memory = DrivenMemory(names_others=names_others)
    memory.tensors = 10 * GIB
    memory.others = before
    first = memory.snapshot()
    memory.others = after
    memory.give(given_back)
    return first, memory.snapshot()


def test_changes_name_everybody_who_came_went_or_moved():
    before = {1: GIB, 2: GIB, 3: GIB, 4: GIB}
    after = {1: GIB + DISTURBANCE_BYTES - 1, 2: 3 * GIB, 4: GIB - DISTURBANCE_BYTES, 5: 4 * GIB}
    assert foreign_changes(*snapshots(before, after)) == (
        ForeignChange(5, 4 * GIB),
        ForeignChange(2, 2 * GIB),
        ForeignChange(3, -GIB),
        ForeignChange(4, -DISTURBANCE_BYTES),
    )
    assert str(ForeignChange(3, -5)) == "process 3 freed 5 bytes"
    assert str(ForeignChange(0, 5)) == "an unknown process took 5 bytes"


def test_without_names_only_memory_that_was_freed_is_seen():
    def unnamed(before, after, **options):
        return foreign_changes(*snapshots(before, after, names_others=False, **options))

    assert unnamed({1: GIB}, {}) == (ForeignChange(0, -GIB),)
    assert unnamed({1: GIB}, {1: 2 * GIB}) == ()
    assert unnamed({1: GIB}, {1: GIB}, given_back=4 * GIB) == ()


def test_a_request_that_is_not_free_names_the_largest_holders():
    memory = DrivenMemory()
    memory.others = {pid: pid * GIB for pid in range(1, 6)}
    with pytest.raises(CapacityError) as caught:
        request_memory(memory.snapshot(), 0.9)
    text = str(caught.value)
    assert f"process 5 has {5 * GIB}, process 4 has {4 * GIB}, process 3" in text
    assert "process 2" not in text


def test_a_daemon_on_the_cpu_never_asks_nvml():
    code = (
        "import worker_daemon.device.nvml as nvml\n"
        "nvml.load_nvml = None\n"  # whoever asks, fails
        "import torch, worker_daemon.server.assembly as daemon, worker_daemon.worker.worker\n"
        "from worker_daemon.device.health import open_health\n"
        "from worker_daemon.device.memory_sources import memory_source\n"
        "memory_source(torch.device('cpu')).snapshot()\n"
        "open_health(torch.device('cpu'))()\n"
        "assert daemon.open_gauges('cpu') is None\n"
        "assert daemon.open_fault_watch('cpu') is None\n"
        "print(repr(daemon.find_gpu('cpu')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "''"
