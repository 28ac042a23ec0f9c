"""Devices by name, memory figures, and what a profile makes of them."""

import mmap
import os

import pytest
import torch

from rpc_schema.errors import CapacityError, ConfigError
from tests.support.driven_memory import DrivenMemory
from worker_daemon.device.init import device_name, open_device, supports
from worker_daemon.device.memory import (
    MemorySnapshot,
    profile,
    request_memory,
)
from worker_daemon.device.memory_sources import (
    HOST_KV_CACHE_LIMIT_BYTES,
    HostMemory,
    memory_source,
)
from worker_daemon.device.threads import choose_threads, usable_cores

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def threads():
    """Puts torch's thread count back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_daemons_of_a_host_share_its_cores():
    cores = len(os.sched_getaffinity(0))
    for sharing in (1, 2, cores, 4 * cores):
        assert open_device("cpu", choose_threads(None, sharing, cores)) == CPU
        assert torch.get_num_threads() == max(1, min(usable_cores(), cores) // sharing)
    open_device("cpu", choose_threads(None, 1, 1))
    assert torch.get_num_threads() == 1
    assert choose_threads(7, 4, 1) == (7, "OMP_NUM_THREADS=7")
    assert torch.get_float32_matmul_precision() == "highest"
    assert device_name(CPU) == "CPU"


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"a/b": "max 100000", "a": "150000 100000"}, 2),
        ({"a/b": "50000 100000", "a": "max 100000"}, 1),
        ({"": "100000 100000"}, 1),
        ({"a/b": "nonsense", "other": "1 100000"}, 3),
    ],
)
def test_cores_are_those_of_the_container(tmp_path, monkeypatch, quotas, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    own = tmp_path / "own"
    own.write_text("1:cpu:/x\n0::/a/b\n")
    for path, quota in quotas.items():
        (tmp_path / "fs" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path / "fs", own) == cores


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["", "cpu:x", "gpu", "mps", "meta", "cuda:999", "CPU"])
def test_unknown_devices_are_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="'cpu'") as caught:
        open_device(name, choose_threads(1, 1, 1))
    assert (caught.value.field, caught.value.value) == ("device", name)


def test_the_host_computes_in_every_dtype():
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    assert all(supports(CPU, dtype) for dtype in dtypes)


@pytest.mark.parametrize(
    ("capability", "is_supported"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
)
def test_gpus_convert_fp8_from_compute_capability_8_9_on(monkeypatch, capability, is_supported):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports(torch.device("cuda:0"), torch.float8_e4m3fn) == is_supported


def test_host_figures_are_bytes_of_this_machine_and_process():
    source = memory_source(CPU)
    now = source.snapshot()
    assert now.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < now.free < now.total
    assert 0 < now.allocated <= now.peak


def test_host_peak_remembers_what_is_gone_until_it_is_reset():
    source = HostMemory()
    source.reset_peak()
    before = source.snapshot()
    with mmap.mmap(-1, 96 * MIB) as region:
        region.write(b"\1" * (96 * MIB))
    after = source.snapshot()
    assert after.peak - before.allocated > 90 * MIB
    assert after.allocated < after.peak - 80 * MIB
    source.reset_peak()
    assert source.snapshot().peak < after.peak - 80 * MIB


def test_a_host_offers_a_share_of_what_is_free_and_no_more_than_its_limit():
    source = HostMemory()
    baseline = MemorySnapshot(total=1000, free=501, allocated=0, peak=0)
    assert source.budget(baseline, 0.5) == 251
    assert source.budget(baseline, 1.0) == 501
    assert source.limit_kv_cache(12345) == 12345
    assert source.limit_kv_cache(10 * HOST_KV_CACHE_LIMIT_BYTES) == HOST_KV_CACHE_LIMIT_BYTES
    assert source.limit_kv_cache(-5) == -5


def test_a_device_share_that_is_not_free_is_refused_with_one_that_is():
    baseline = MemorySnapshot(total=1000, free=799, allocated=0, peak=0)
    assert request_memory(baseline, 0.799) == 799
    with pytest.raises(CapacityError) as caught:
        request_memory(baseline, 0.8)
    assert caught.value.field == "gpu_memory_utilization"
    assert "0.79" in caught.value.fix
    assert request_memory(baseline, 0.79) <= baseline.free


def test_a_profile_splits_what_stays_from_what_was_there_for_a_while():
    memory = DrivenMemory(total=1000)
    memory.take(10)
    baseline = memory.snapshot()
    memory.take(200)
    with profile(memory, baseline) as result:
        assert memory.num_resets == 1
        memory.step(230)
        memory.take(30)
        memory.pinned = 7
    assert (result.consumed, result.transient, result.pinned) == (237, 200, 7)
    assert result.free == 1000 - 10 - 200 - 30 - 7
    assert memory.num_resets == 2
    assert result.available(budget=500, graphs=50) == 500 - 237 - 200 - 50
    assert result.available(budget=1000, graphs=50) == result.free - 200 - 50


def test_memory_that_others_gave_back_is_no_negative_consumption():
    memory = DrivenMemory(total=1000, names_others=False)
    memory.others = {1: 400}
    baseline = memory.snapshot()
    with profile(memory, baseline) as result:
        memory.others = {}
    assert (result.consumed, result.transient) == (0, 0)


def test_a_profile_that_fails_says_what_failed():
    memory = DrivenMemory()
    with pytest.raises(ZeroDivisionError), profile(memory, memory.snapshot()):
        raise ZeroDivisionError
