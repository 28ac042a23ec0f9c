"""Properties of determine_available_memory on a real device: the number can be allocated, it does
not depend on allocations before the baseline, and it includes this process's later ones. Other
processes are distinguished if NVML reports them."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.stage_driver import (
    BLOCK_SIZE,
    StageDriver,
    wait,
)
from rpc_schema import lifecycle
from rpc_schema.config import CacheConfig
from rpc_schema.errors import CapacityError
from worker_daemon.device.memory_sources import memory_source
from worker_daemon.runner.warmup import largest_step
from worker_daemon.worker.memory_ledger import CUSHION_BYTES
from worker_daemon.worker.serving import Serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
MAX_LEN = 4096
MIB = 1 << 20
GIB = 1 << 30
TOLERANCE = 48 * MIB
"""The CUDA driver allocates at least 2 MiB at a time, for code and graph arguments."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen3-0.6b", "llama-8b"):
        shutil.copytree(MODELS / name, root / name)
    return root


@pytest.fixture(scope="module")
def begin(models):
    """(model, utilization) -> a context with a StageDriver whose model is loaded. Libraries and
    kernels are loaded before the first: their memory is never freed."""

    @contextmanager
    def loaded(model="qwen3-0.6b", utilization=0.5):
        cache = CacheConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=utilization)
        driver = StageDriver(models / model, "cuda:0", max_model_len=MAX_LEN, cache=cache)
        try:
            driver.load()
            yield driver
        finally:
            if driver.worker.describe().memory_bytes:
                driver.leave()

    with loaded() as driver:
        driver.profile()
        driver.serve(1000)
    return loaded


def run_largest_step(driver, num_blocks):
    driver.worker.on_attach()
    state = driver.worker._serving.runner.state
    message = lifecycle.CompileOrWarmUpModel(**driver.ids())
    step = largest_step(message, state.limits, state.parts.heaviest)
    assert state.limits.num_blocks == num_blocks
    wait(driver.worker.execute_model(step.message, step.arrays))


def free_bytes():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def ballast(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-8b"])
def test_the_number_can_be_had_on_a_device_that_has_no_more(begin, model, record_property):
    """Fill the device until only the request and a reserve are free. The
    utilization share holds, including graphs and code that is loaded late."""
    total = torch.cuda.mem_get_info()[1]
    requested = total // 2
    filling = ballast(free_bytes() - requested - CUSHION_BYTES)
    with begin(model) as driver:
        found = driver.profile()
        num_blocks = found.available_bytes // driver.block_bytes()
        assert num_blocks > 1000
        driver.serve(num_blocks)
        for _ in range(3):
            run_largest_step(driver, num_blocks)
        torch.cuda.synchronize()
        described = driver.worker.describe()
        kinds = dict(described.memory_bytes)
        figures = {
            "model": model,
            "estimated_graphs": found.graph_bytes,
            "largest_step": found.activation_peak_bytes,
            "advice": [
                described.kv_cache_advice.request_bytes,
                described.kv_cache_advice.card_bytes,
            ],
            "available": found.available_bytes,
            **kinds,
        }
        print(json.dumps(figures))
        assert described.kv_cache_advice.request_bytes >= found.available_bytes - CUSHION_BYTES
        assert kinds["graphs"] <= found.graph_bytes + CUSHION_BYTES
        named = ("weights", "kv_cache", "graphs", "activations", "context", "others")
        used = sum(kinds.get(kind, 0) for kind in named)
        assert used == pytest.approx(total - kinds["free"], abs=TOLERANCE)
    del filling


def test_what_lies_there_before_the_baseline_changes_nothing_until_it_is_too_much(begin):
    with begin() as driver:
        expected = driver.profile().available_bytes
    for size in (3 * GIB, 11 * GIB):
        before = ballast(size)
        with begin() as driver:
            assert driver.profile().available_bytes == pytest.approx(expected, abs=TOLERANCE)
        del before
    total = torch.cuda.mem_get_info()[1]
    before = ballast(free_bytes() - total // 2 + GIB)
    with pytest.raises(CapacityError, match="bytes are free") as caught, begin():
        pass
    assert caught.value.field == "gpu_memory_utilization"
    del before
    free_bytes()


def test_what_is_taken_after_the_baseline_is_missing(begin):
    with begin() as driver:
        expected = driver.profile().available_bytes
        size = int(np.random.default_rng().integers(GIB, 9 * GIB))
        after = ballast(size)
        assert expected - driver.profile().available_bytes == pytest.approx(size, abs=TOLERANCE)
        del after
        assert driver.profile().available_bytes == pytest.approx(expected, abs=TOLERANCE)


def test_a_profile_pins_nothing(begin):
    """No small tensor of the largest step or of the graphs pins a large allocator block."""
    with begin() as driver:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        driver.profile()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before <= TOLERANCE
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        assert unused <= 64 * MIB


@pytest.mark.parametrize("which", ["request_bytes", "card_bytes"])
def test_the_advice_can_be_followed(begin, which):
    with begin() as driver:
        driver.profile()
        driver.serve(1000)
        description = driver.worker.describe()
        assert description.memory_bytes["graphs"] > 0
        advised = getattr(description.kv_cache_advice, which)
    with begin() as driver:
        driver.profile()
        num_blocks = advised // driver.block_bytes()
        driver.serve(num_blocks)
        for _ in range(3):
            run_largest_step(driver, num_blocks)
        torch.cuda.synchronize()


OTHER = """
import sys, torch
held = torch.ones(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    held = None
    torch.cuda.empty_cache()
    held = torch.ones(int(line), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("done", flush=True)
"""


@pytest.fixture
def other():
    """(bytes): makes another process hold this much device memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"

    def hold(num_bytes):
        process.stdin.write(f"{num_bytes}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    yield hold
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def test_a_process_that_moves_meanwhile_is_seen_and_not_counted(begin, other, monkeypatch):
    with begin() as driver:
        expected = driver.profile().available_bytes
        run = Serving.run_largest_step

        def profile_while_other_goes_to(num_bytes):
            def moving(serving, message):
                other(num_bytes)
                run(serving, message)

            monkeypatch.setattr(Serving, "run_largest_step", moving)
            return driver.profile()

        names_others = memory_source(torch.device("cuda:0")).snapshot().others is not None
        print(f"NVML names processes here: {names_others}")
        took = profile_while_other_goes_to(6 * GIB)
        freed = profile_while_other_goes_to(MIB)
        assert [change.num_bytes for change in freed.changes] == [
            pytest.approx(-6 * GIB, abs=TOLERANCE)
        ]
        # Memory that another process freed adds no room, even if NVML names it.
        assert freed.available_bytes <= expected + TOLERANCE
        if not names_others:
            return
        assert freed.available_bytes == pytest.approx(expected, abs=TOLERANCE)
        assert took.available_bytes == pytest.approx(expected, abs=TOLERANCE)
        (change,) = took.changes
        assert change.num_bytes == pytest.approx(6 * GIB, abs=TOLERANCE)
        assert change.pid == freed.changes[0].pid > 0
