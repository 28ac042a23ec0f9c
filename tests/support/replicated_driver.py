"""`python -m tests.support.replicated_driver PLAN`: a driver of several replicas that begins all
requests, takes some steps with each replica, and kills itself while further ones are in flight."""

import os
import signal
import subprocess
import sys

import msgspec
import numpy as np

from rpc_schema.config import WorkerConfig
from tests.support.flat_requests import flat_request
from worker_client.driver import Driver
from worker_client.replicas.group import DataParallelGroup
from worker_client.scheduler import Scheduler, scheduler_limits


class ReplicaPlan(msgspec.Struct, frozen=True):
    prompts: dict[str, list[int]]
    """By request."""
    num_steps: int


class Plan(msgspec.Struct, frozen=True):
    endpoints: list[str]
    config: WorkerConfig
    replicas: list[ReplicaPlan]
    max_tokens: int
    num_gpu_blocks: int


def run_and_die(plan: Plan) -> None:
    """Run a driver in another process until it has killed itself."""
    command = [sys.executable, "-m", __name__, msgspec.json.encode(plan).decode()]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def main(plan: Plan) -> None:
    """Do what the plan says."""
    group = DataParallelGroup(plan.endpoints, plan.config.parallel)
    group.attach(force=True)
    loaded = group.prepare(plan.config, num_gpu_blocks=plan.num_gpu_blocks, reload=True)
    for replica, model, own in zip(group.replicas, loaded, plan.replicas, strict=True):
        driver = Driver(replica, Scheduler(scheduler_limits(model, plan.config)))
        for req_id, prompt in own.prompts.items():
            prompt_ids = np.array(prompt, np.int32)
            driver.add_request(flat_request(req_id, prompt_ids, plan.max_tokens))
        for _ in range(own.num_steps):
            driver.step()
        driver._fill()
        assert replica.num_in_flight == replica.max_in_flight
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
