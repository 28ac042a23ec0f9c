"""Failing steps on a GPU: out of memory, with eager steps and with graphs, and a lost device."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.stage_driver import StageDriver
from rpc_schema.config import ParallelConfig
from rpc_schema.errors import CapacityError, OutOfMemoryError
from rpc_schema.step import ExecuteModel
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.gpu_generation import make_requests, worker_config
from tests.support.serving import connect, scheduler_limits
from worker_client.driver import Driver
from worker_client.errors import LaunchError, StepFailed, WorkerDied
from worker_client.scheduler import Scheduler
from worker_host.exit_codes import ExitCode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_SLOTS = 8
PROMPT_LEN = 1000
"""Enough tokens that the step runs without a graph and takes more than SPARE_BYTES."""
NUM_TOKENS = 12
ROUNDS = 100
SPARE_BYTES = 48 << 20
SLACK_BYTES = 64 << 20
"""Of the driver's own, which comes and goes with other processes."""
LEFT_BYTES = 1 << 20
"""Less than any matrix of the model; its embedding alone has 311 MB."""


@pytest.fixture
def driver(qwen3):
    made = StageDriver(qwen3, "cuda:0", max_model_len=2048, num_blocks=2048)
    made.start()
    yield made
    made.leave()


@contextmanager
def starved(spare_bytes: int) -> Iterator[None]:
    """Limits the memory of this process's tensors for a while."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + spare_bytes
    torch.cuda.set_per_process_memory_fraction(limit / total, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def prefill(driver):
    message, _ = driver.prefill(np.arange(NUM_SLOTS), PROMPT_LEN, NUM_TOKENS)
    return msgspec.structs.replace(message, resync=b"")


def decodes(driver, count):
    bits = np.packbits(np.ones(NUM_SLOTS, np.bool_), bitorder="little").tobytes()
    replies = []
    for _ in range(count):
        message = ExecuteModel(**driver.ids(), total_num_scheduled_tokens=NUM_SLOTS, scheduled=bits)
        replies.append(driver.worker.execute_model(message, []))
    return [reply.result()[0].sampled_token_ids for reply in replies]


def serve(driver, prompt):
    first = driver.worker.execute_model(prefill(driver), [prompt]).result()[0]
    return [first.sampled_token_ids, *decodes(driver, NUM_TOKENS - 1)]


def test_hundred_steps_without_memory_leave_it_as_it_was(driver):
    rng = np.random.default_rng()
    prompt = rng.integers(3, 1000, NUM_SLOTS * PROMPT_LEN).astype("<i4").tobytes()
    expected = serve(driver, prompt)
    figures = []
    with starved(SPARE_BYTES):
        for _ in range(ROUNDS):
            with pytest.raises(OutOfMemoryError) as failed:
                driver.worker.execute_model(prefill(driver), [prompt])
            assert failed.value.needed_bytes > SPARE_BYTES // 2
            del failed
            torch.cuda.synchronize()
            figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(figures)) == 1
    assert serve(driver, prompt) == expected


def test_graphs_need_no_memory(driver):
    """Existing rows continue while a prompt fails: their decodes replay graphs."""
    rng = np.random.default_rng()
    prompt = rng.integers(3, 1000, NUM_SLOTS * PROMPT_LEN).astype("<i4").tobytes()
    expected = serve(driver, prompt)
    first = driver.worker.execute_model(prefill(driver), [prompt]).result()[0]
    tokens = [first.sampled_token_ids]
    with starved(1 << 20):
        tokens += decodes(driver, NUM_TOKENS - 1)
    assert tokens == expected


def test_load_without_memory_leaves_the_device_as_it_was(qwen3):
    """Since InitDevice, which makes the context and cuBLAS's workspaces: those of earlier workers
    of this process are there for good, 32 MiB for each one's stream of captures."""
    failing = StageDriver(qwen3, "cuda:0", max_model_len=2048, num_blocks=64)
    failing.init_device()
    allocated, free = memory_in_use()
    with starved(600 << 20), pytest.raises(CapacityError, match="the weights do not fit"):
        failing.load_model()
    left, free_now = memory_in_use()
    assert left - allocated < LEFT_BYTES
    assert free - free_now < SLACK_BYTES
    failing.load_model()
    failing.leave()


def memory_in_use():
    """Bytes of this process's tensors, and the free ones of the device, without any garbage."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def test_lost_device_ends_the_process_in_time(llama, tmp_path):
    """A device assert in the middle of a run; the memory of the GPU comes back."""
    free = torch.cuda.mem_get_info()[0]
    with FaultyDaemons(
        1, llama.parent, tmp_path, ready_timeout_s=120.0, device="cuda:0"
    ) as daemons:
        config = worker_config(llama, ParallelConfig(), "bfloat16")
        with connect(daemons.endpoints, config, num_gpu_blocks=None) as (group, loaded):
            results = []
            driver = Driver(group, Scheduler(scheduler_limits(group, loaded)), results.append)
            for request in make_requests(16, max_tokens=200):
                driver.add_request(request)
            for _ in range(20):
                driver.step()
            num_good = len(results)
            daemons.faults[0].put(Fault("execute_model", "assert"))
            began = time.monotonic()
            with pytest.raises((StepFailed, WorkerDied)):
                list(driver.run())
        exit_code = await_exit(daemons)
        took_s = time.monotonic() - began
        log = daemons.log_tail(0)
        print(f"a device assert ended the process after {took_s:.2f} s")
    assert exit_code == ExitCode.CONTEXT_LOST, log
    assert took_s < 4.0  # 2 s from the error, which a driver's own waits may come before
    assert log.count("the process ends with 86") == 1
    assert len(results) - num_good < 200
    deadline = time.monotonic() + 5.0
    while free - torch.cuda.mem_get_info()[0] > SLACK_BYTES:
        assert time.monotonic() < deadline, "the memory does not come back"
        time.sleep(0.05)


def await_exit(daemons):
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            daemons.check_alive()
        except LaunchError as error:
            return error.exit_code
        time.sleep(0.01)
    return None
