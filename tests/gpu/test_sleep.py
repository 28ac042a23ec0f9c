"""Sleep on a GPU: memory goes back to the device and comes again under the same addresses, graphs
that were captured before replay after it, and what cannot be had changes nothing."""

import time

import numpy as np
import pytest
import torch

from benchmarks.stage_driver import StageDriver
from rpc_schema.errors import CapacityError
from rpc_schema.lifecycle import Discard, Sleep, WakeUp
from rpc_schema.step import ExecuteModel
from rpc_schema.weight_transfer import ReloadWeights
from worker_daemon.device.arena import open_arena
from worker_daemon.runner.cuda_graph import GraphedProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_SLOTS = 8
PROMPT_LEN = 60
NUM_TOKENS = 30
MIB = 1 << 20
SLACK = 32 * MIB
"""Of the driver's own: page tables, streams that are made at their first use."""
AWAKE = {"weights": "awake", "kv_cache": "awake"}


@pytest.fixture(scope="module")
def driver(qwen3):
    driver = StageDriver(
        qwen3, "cuda:0", max_model_len=1024, num_blocks=4096, enable_sleep_mode=True
    )
    driver.start()
    yield driver
    driver.leave()


@pytest.fixture
def prompt():
    rng = np.random.default_rng()
    return rng.integers(3, 1000, NUM_SLOTS * PROMPT_LEN).astype("<i4").tobytes()


def generate(driver, prompt):
    driver.worker.on_attach()
    slots = np.arange(NUM_SLOTS)
    message, _ = driver.prefill(slots, PROMPT_LEN, NUM_TOKENS)
    replies = [driver.worker.execute_model(message, [prompt])]
    bits = np.packbits(np.ones(NUM_SLOTS, np.bool_), bitorder="little").tobytes()
    for _ in range(NUM_TOKENS - 1):
        decode = ExecuteModel(**driver.ids(), total_num_scheduled_tokens=NUM_SLOTS, scheduled=bits)
        replies.append(driver.worker.execute_model(decode, []))
    return [reply.result()[0].sampled_token_ids for reply in replies]


def sleep(driver, level=1):
    return driver.worker.sleep(Sleep(**driver.ids(), level=level)).memory_tags


def wake(driver, *tags):
    return driver.worker.wake_up(WakeUp(**driver.ids(), tags=tags or None)).memory_tags


def addresses(driver):
    stage = driver.worker._model.stage
    tensors = [
        *(p.data for p in stage.parameters()),
        *stage.rotary,
        *(layer.cache for layer in driver.worker._serving.kv.layers),
    ]
    return [tensor.data_ptr() for tensor in tensors]


def kinds(driver):
    memory = driver.worker.describe().memory_bytes
    return {kind: memory[kind] for kind in ("weights", "buffers", "kv_cache", "host_backup")}


def on_device(driver):
    held = kinds(driver)
    return held["weights"] + held["buffers"] + held["kv_cache"]


def free_bytes():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def about(size, expected):
    return abs(size - expected) < SLACK


def test_an_arena_is_zero_and_takes_what_the_driver_takes():
    arena = open_arena(100 * MIB, 32 * MIB, torch.device("cuda:0"))
    tensor = arena.take((25 * MIB,), torch.float32)
    assert not tensor.any()
    tensor.normal_()
    full = free_bytes()
    address = tensor.data_ptr()
    arena.unmap_all()
    assert about(free_bytes() - full, 100 * MIB)
    arena.map_all()
    arena.zero()
    assert not tensor.any()
    assert tensor.data_ptr() == address
    assert about(free_bytes(), full)
    values = torch.randn(25 * MIB, device="cuda")
    tensor.copy_(values)
    assert torch.equal(tensor, values)
    arena.close()
    del values
    assert about(free_bytes() - full, 100 * MIB)


@pytest.mark.parametrize("order", [(), ("weights", "kv_cache"), ("kv_cache", "weights")])
def test_level_1_gives_all_back_and_the_same_graphs_the_same_tokens(
    driver, prompt, order, monkeypatch
):
    expected, where, held = generate(driver, prompt), addresses(driver), on_device(driver)
    assert isinstance(driver.worker._serving.runner._program, GraphedProgram)
    captured, replayed = [], []
    monkeypatch.setattr(GraphedProgram, "_record", lambda *args: captured.append(args))
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda self: (replayed.append(1), replay(self))
    )
    before = free_bytes()
    assert sleep(driver) == {"weights": "asleep", "kv_cache": "asleep"}
    assert on_device(driver) == 0
    assert free_bytes() - before > held - SLACK
    for tag in order:
        wake(driver, tag)
    assert wake(driver) == AWAKE
    assert about(free_bytes(), before)
    assert addresses(driver) == where
    assert generate(driver, prompt) == expected
    assert len(replayed) >= NUM_TOKENS - 1
    assert not captured


def test_level_2_keeps_buffers_and_graphs_read_the_weights_that_come_after(driver, prompt):
    expected, where = generate(driver, prompt), addresses(driver)
    stage = driver.worker._model.stage
    rotary = stage.rotary[0].clone()
    assert sleep(driver, 2) == {"weights": "discarded", "kv_cache": "asleep"}
    assert on_device(driver) == 0
    assert wake(driver) == {"weights": "lost", "kv_cache": "awake"}
    assert addresses(driver) == where
    assert torch.equal(stage.rotary[0], rotary)
    assert not any(parameter.data.any() for parameter in stage.parameters())
    assert not any(layer.cache.any() for layer in driver.worker._serving.kv.layers)
    driver.worker.reload_weights(ReloadWeights(**driver.ids()))
    assert driver.worker.describe().memory_tags == AWAKE
    assert generate(driver, prompt) == expected


def test_a_discarded_kv_cache_comes_back_empty(driver, prompt):
    expected = generate(driver, prompt)
    driver.worker.discard(Discard(**driver.ids(), tags=("kv_cache",)))
    assert kinds(driver)["kv_cache"] == 0
    wake(driver, "kv_cache")
    assert not any(layer.cache.any() for layer in driver.worker._serving.kv.layers)
    assert generate(driver, prompt) == expected


def test_waking_without_memory_leaves_all_asleep(driver, prompt):
    expected = generate(driver, prompt)
    kv_bytes = kinds(driver)["kv_cache"]
    sleep(driver)
    asleep = kinds(driver)
    ballast = torch.empty(free_bytes() - kv_bytes // 2, dtype=torch.uint8, device="cuda")
    free = free_bytes()
    for _ in range(2):
        with pytest.raises(CapacityError, match="memory"):
            wake(driver)
        assert kinds(driver) == asleep
        assert driver.worker.describe().memory_tags == {"weights": "asleep", "kv_cache": "asleep"}
        assert about(free_bytes(), free)
    del ballast
    assert wake(driver) == AWAKE
    assert generate(driver, prompt) == expected


def test_fifty_cycles_leave_every_byte_where_it_was(driver, prompt):
    expected, figures = generate(driver, prompt), []
    for _ in range(50):
        sleep(driver)
        asleep = kinds(driver), free_bytes()
        wake(driver)
        figures.append((asleep, kinds(driver), free_bytes()))
    assert figures[1] == figures[-1]
    assert generate(driver, prompt) == expected


def test_host_memory_is_ready_before_the_first_sleep_and_not_taken_again(driver):
    deadline = time.monotonic() + 60
    while kinds(driver)["host_backup"] < kinds(driver)["weights"] + kinds(driver)["buffers"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = kinds(driver)["host_backup"]
    sleep(driver)
    wake(driver)
    assert kinds(driver)["host_backup"] == before
