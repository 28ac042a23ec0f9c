"""`python -m tests.support.leased_driver ENDPOINT TTL_S`: a driver of one daemon with the fake
worker, in a separate process, so that it can be stopped and killed. Attaches, makes the daemon
ready, and sends steps; writes a line for each, then the name of the error that ended it."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.kv_cache import KVCacheConfig
from tests.support.forked_processes import ForkedPopen
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

CONFIG = WorkerConfig(
    parallel=ParallelConfig(),
    model=ModelConfig(model="/m"),
    scheduler=SchedulerConfig(step_deadline_ms=5000),
    cache=CacheConfig(),
    graph=GraphConfig(),
)


def make_ready(group: WorkerGroup) -> None:
    """Make a daemon ready, from any state."""
    group.reset("CREATED")
    group.load_chain.init_device(CONFIG)
    group.load_chain.load_model(CONFIG)
    config = KVCacheConfig(num_blocks=2, block_size=16, groups=(), size_bytes=0)
    group.load_chain.initialize_from_config((config,))
    group.load_chain.compile_or_warm_up_model()


def admit(group: WorkerGroup) -> int:
    """Run the first step of a request; return the number of steps that the daemon has run."""
    prompt = np.zeros(1, np.int32)
    request = NewRequest("none", prompt, 1, 0, [1])
    return run(group, SchedulerOutput({"none": 1}, scheduled_new_reqs=[request]))


def decode(group: WorkerGroup) -> int:
    """Run the request's next step."""
    return run(group, SchedulerOutput({"none": 1}))


def run(group: WorkerGroup, output: SchedulerOutput) -> int:
    return group.execute_model(output).result().sampled["none"]


def main(endpoint: str, ttl_s: float) -> None:
    try:
        with WorkerGroup([endpoint], ParallelConfig(), lease=LeaseTerms(ttl_s=ttl_s)) as group:
            group.attach()
            make_ready(group)
            print(admit(group), flush=True)
            while True:
                print(decode(group), flush=True)
                time.sleep(0.005)
    except WorkerDaemonError as error:
        print(type(error).__name__, flush=True)
        raise SystemExit(3) from None


@contextmanager
def living_driver(endpoint: str, ttl_s: float) -> Iterator["subprocess.Popen[str]"]:
    """Start a driver, wait for its first steps, and end it on exit."""
    words = [sys.executable, "-m", "tests.support.leased_driver", endpoint, str(ttl_s)]
    with ForkedPopen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip().isdecimal()
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
