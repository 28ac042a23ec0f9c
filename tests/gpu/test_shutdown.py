"""However a daemon on a GPU ends, the GPU's memory is back at its baseline, and no shared memory is
left."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import WorkerDaemonError
from tests.support.command_line import start_daemon, wait_for_daemons
from tests.support.gpu_generation import make_requests, worker_config
from tests.support.serving import connect, scheduler_limits
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLACK_BYTES = 64 << 20
"""Of the driver's own, which comes and goes with other processes."""
DRAIN_S = 10.0
BASELINE_S = 5.0


def shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir() if p.lstat().st_uid == os.geteuid()}


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("signals", "exit_code"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGKILL], -signal.SIGKILL),
    ],
    ids=["SIGTERM", "SIGTERM twice", "SIGKILL"],
)
def test_memory_is_back_at_its_baseline(llama, tmp_path, signals, exit_code, busy):
    endpoint = f"ipc://{tmp_path}/d/w"
    free, shared = torch.cuda.mem_get_info()[0], shared_memory()
    process = start_daemon(
        tmp_path, "--endpoint", endpoint, "--device", "cuda:0", "--model-root", str(llama.parent)
    )
    try:
        wait_for_daemons([endpoint], [process])
        config = worker_config(llama, ParallelConfig(), "bfloat16")
        with connect([endpoint], config, num_gpu_blocks=None) as (group, loaded):
            driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
            for request in make_requests(32, max_tokens=400 if busy else 30):
                driver.add_request(request)
            for _ in range(20):
                driver.step()
            assert free - torch.cuda.mem_get_info()[0] > 2 << 30
            if not busy:
                list(driver.run())
            began = time.monotonic()
            for number in signals:
                process.send_signal(number)
                time.sleep(0.02)
            if busy:
                with pytest.raises(WorkerDaemonError):
                    list(driver.run())
            code = process.wait(DRAIN_S + 5)
        took_s = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    assert code in (exit_code, 0) if len(signals) > 1 else code == exit_code
    assert took_s < DRAIN_S
    while free - torch.cuda.mem_get_info()[0] > SLACK_BYTES:
        assert time.monotonic() - began < took_s + BASELINE_S, "the memory does not come back"
        time.sleep(0.05)
    print(f"exit {code} after {took_s:.2f} s, memory after {time.monotonic() - began:.2f} s")
    assert shared_memory() <= shared
