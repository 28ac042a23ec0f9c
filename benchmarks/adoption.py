"""Measures the time from a killed driver to the next one's tokens: `python -m benchmarks.adoption
--model DIR [--device cuda|cpu] [--pp P] [--tp T] [--requests N] [--prompt-len N] [--cycles N]
[--out FILE]`.

Local daemons with dummy weights of the shapes in the model's config.json. A driver with N
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
from tempfile import TemporaryFile
from typing import IO

import msgspec
import numpy as np

from benchmarks.local_group import devices_of
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.errors import WorkerError
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup

MAX_MODEL_LEN = 4096
WARM_TOKENS = 20
LINES_TOLD = 20
"""Last lines of a driver's output to show if it ends too early."""
ATTACH_TRIES_S = 10.0
"""Limit on the wait for the dead driver's lease."""


class Plan(msgspec.Struct, frozen=True):
    """The plan that both drivers receive."""

    endpoints: list[str]
    config: WorkerConfig
    num_requests: int
    prompt_len: int
    adopt: bool = False


class Report(msgspec.Struct, frozen=True):
    """Times of time.monotonic() in the second driver."""

    started: float
    attached: float
    prepared: float
    adopted: float
    first_tokens: float
    num_requests: int
    num_computed_tokens: int


def drive(plan: Plan, started: float) -> None:
    """Run a driver: the first serves until it is killed, the second reports and ends."""
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        attach(group, plan)
        attached = time.monotonic()
        loaded = group.prepare(plan.config)
        prepared = time.monotonic()
        scheduler = Scheduler(scheduler_limits(loaded, plan.config))
        if not plan.adopt:
            serve(Driver(group, scheduler, Warmth(plan.num_requests)), plan)
            return
        driver = Driver(group, scheduler)
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
    """Attach as soon as the daemons allow it."""
    deadline = time.monotonic() + ATTACH_TRIES_S
    while True:
        try:
            group.attach(keep_requests=plan.adopt)
        except WorkerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


class Warmth:
    """Detects when every request has decoded for a while, by tokens instead of steps, since in a
    pipeline each step decodes only part of the requests."""

    def __init__(self, num_requests: int) -> None:
        self._missing = {str(index): WARM_TOKENS for index in range(num_requests)}

    def __call__(self, result: StepResult) -> None:
        if not self._missing:
            return
        for req_id in self._missing.keys() & set(result.req_ids):
            self._missing[req_id] -= 1
            if not self._missing[req_id]:
                del self._missing[req_id]
        if not self._missing:
            sys.stdout.write("decoding\n")
            sys.stdout.flush()


def serve(driver: Driver, plan: Plan) -> None:
    """Decode until this process is killed."""
    rng = np.random.default_rng()
    for index in range(plan.num_requests):
        prompt = rng.integers(3, 1000, plan.prompt_len).astype(np.int32)
        max_tokens = MAX_MODEL_LEN - plan.prompt_len
        driver.add_request(
            GenerationRequest(
                str(index), prompt, max_tokens=max_tokens, sampling=SamplingParams(ignore_eos=True)
            )
        )
    while driver.busy:
        driver.step()
    raise SystemExit("all requests have ended, and this driver was not killed")


def start(plan: Plan, errors: IO[str]) -> "subprocess.Popen[str]":
    """Start a driver's process, which writes its errors to `errors`."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.adoption",
        "--drive",
        msgspec.json.encode(plan).decode(),
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)


def first_line(which: str, driver: "subprocess.Popen[str]", errors: IO[str]) -> str:
    """Return the first line that a driver prints.

    Raises:
        RuntimeError: it ended before; the text has its exit status and last output.
    """
    assert driver.stdout is not None
    if line := driver.stdout.readline():
        return line
    status = driver.wait()
    errors.seek(0)
    said = "".join(errors.readlines()[-LINES_TOLD:]).rstrip() or "nothing"
    raise RuntimeError(f"the {which} driver has ended with {status}, and said: {said}")


def cycle(plan: Plan) -> dict[str, float]:
    """Kill one driver, and let another take over; return seconds."""
    with TemporaryFile("w+") as errors:
        first = start(plan, errors)
        first_line("first", first, errors)
        time.sleep(random.random() * 0.2)
        os.kill(first.pid, signal.SIGKILL)
        killed = time.monotonic()
        first.wait()
    with TemporaryFile("w+") as errors:
        second = start(msgspec.structs.replace(plan, adopt=True), errors)
        report = msgspec.json.decode(first_line("second", second, errors), type=Report)
        if status := second.wait():
            raise RuntimeError(f"the second driver has ended with {status} after its report")
    if report.num_requests != plan.num_requests:
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
    """Read the command line, run, and print."""
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
    devices = devices_of(options.device, options.pp * options.tp)
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
