"""From a killed driver to the next one's tokens: `python -m benchmarks.adoption --model DIR
[--device cuda|cpu] [--pp P] [--tp T] [--requests N] [--prompt-len N] [--cycles N] [--out FILE]`.

Local daemons with made-up weights of the shapes in the model's config.json. A driver with N
requests is killed (SIGKILL) while they decode; another process attaches, adopts them and takes one
step's tokens. Prints the medians of times from the kill, and from the new process's start.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from client.driver import Driver
from client.errors import RemoteError
from client.launcher import LocalDaemons
from client.requests import GenerationRequest
from client.scheduler import Scheduler, scheduler_limits
from client.worker_group import WorkerGroup
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)

MAX_MODEL_LEN = 4096
WARM_RESULTS = 20
ATTACH_TRIES_S = 10.0
"""So long is the dead driver's lease waited for."""


class Plan(msgspec.Struct, frozen=True):
    """What both drivers are told."""

    endpoints: list[str]
    config: WorkerConfig
    num_requests: int
    prompt_len: int
    adopt: bool = False


class Report(msgspec.Struct, frozen=True):
    """Moments of time.monotonic() in the second driver."""

    started: float
    attached: float
    prepared: float
    adopted: float
    first_tokens: float
    num_requests: int
    num_computed_tokens: int


def drive(plan: Plan, started: float) -> None:
    """Be a driver: the first serves until it is killed, the second reports and ends."""
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        attach(group, plan)
        attached = time.monotonic()
        loaded = group.prepare(plan.config)
        prepared = time.monotonic()
        scheduler = Scheduler(scheduler_limits(loaded, plan.config))
        driver = Driver(group, scheduler)
        if not plan.adopt:
            serve(driver, plan)
            return
        requests = group.adopt_requests()
        scheduler.adopt_requests(requests)
        adopted = time.monotonic()
        driver.step()
        report = Report(
            started,
            attached,
            prepared,
            adopted,
            time.monotonic(),
            len(requests),
            sum(request.num_computed_tokens for request in requests),
        )
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
        for future in group._steps.pending:
            future.result()
        group.detach()


def attach(group: WorkerGroup, plan: Plan) -> None:
    """Attach, as soon as the daemons let us."""
    deadline = time.monotonic() + ATTACH_TRIES_S
    while True:
        try:
            group.attach(keep_requests=plan.adopt)
        except RemoteError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def serve(driver: Driver, plan: Plan) -> None:
    """Decode until somebody kills us; say when all do."""
    rng = np.random.default_rng()
    for index in range(plan.num_requests):
        prompt = rng.integers(3, 1000, plan.prompt_len).astype(np.int32)
        max_tokens = MAX_MODEL_LEN - plan.prompt_len
        driver.add_request(
            GenerationRequest(str(index), prompt, max_tokens=max_tokens, ignore_eos=True)
        )
    num_full = 0
    while driver.busy:
        driver.step()
        num_full += driver.records[-1].num_requests == plan.num_requests
        if num_full == WARM_RESULTS:
            sys.stdout.write("decoding\n")
            sys.stdout.flush()


def start(plan: Plan) -> "subprocess.Popen[str]":
    """Start a driver's process."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.adoption",
        "--drive",
        msgspec.json.encode(plan).decode(),
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def cycle(plan: Plan) -> dict[str, float]:
    """Kill one driver, and let another take over; return seconds."""
    first = start(plan)
    assert first.stdout is not None
    if first.stdout.readline() != "decoding\n":
        raise RuntimeError("the first driver has ended")
    time.sleep(random.random() * 0.2)
    os.kill(first.pid, signal.SIGKILL)
    killed = time.monotonic()
    first.wait()
    second = start(msgspec.structs.replace(plan, adopt=True))
    assert second.stdout is not None
    report = msgspec.json.decode(second.stdout.readline(), type=Report)
    if second.wait() or report.num_requests != plan.num_requests:
        raise RuntimeError(f"{report.num_requests} of {plan.num_requests} requests were adopted")
    return {
        "kill_to_tokens": report.first_tokens - killed,
        "start_to_tokens": report.first_tokens - report.started,
        "attach": report.attached - report.started,
        "prepare": report.prepared - report.attached,
        "adopt": report.adopted - report.prepared,
        "first_step": report.first_tokens - report.adopted,
        "kv_tokens_kept": report.num_computed_tokens,
    }


def main() -> None:
    """Read the command line, run, print."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drive")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=500)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.drive:
        drive(msgspec.json.decode(options.drive, type=Plan), started)
        return
    model = options.model.resolve()
    count = options.pp * options.tp
    devices = [f"cuda:{i}" if options.device == "cuda" else "cpu" for i in range(count)]
    parallel = ParallelConfig(pipeline_parallel_size=options.pp, tensor_parallel_size=options.tp)
    config = WorkerConfig(
        parallel=parallel,
        model=ModelConfig(model=str(model), load_format="dummy", max_model_len=MAX_MODEL_LEN),
        scheduler=SchedulerConfig(),
        cache=CacheConfig(),
        graph=GraphConfig(),
    )
    with LocalDaemons(devices, model.parent) as daemons:
        plan = Plan(daemons.endpoints, config, options.requests, options.prompt_len)
        cycles = [cycle(plan) for _ in range(options.cycles)]
    medians = {name: statistics.median(run[name] for run in cycles) for name in cycles[0]}
    result = {"medians": medians, "cycles": cycles}
    print(json.dumps(medians, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
