"""Measures replicas of a model: `python -m benchmarks.replicas --model DIR [--replicas N]
[--ways one,shared,apart] [--workloads A,B] [--eager] [--device cpu] [--trace DIR]
[--out FILE.json]`.

- one: a single replica with the workload of one.
- shared: N replicas in lockstep that share experts, one driver.
- apart: N replicas with their own drivers, each on a thread.

Workloads are mixed256, decode_bs256 and others of workloads.FIXED with N times as many requests,
and `skewed`: mixed256 with every eighth request four times as long. Each request goes to the
replica that has got the fewest tokens, or by the lockstep scheduler's rule. The figure is generated
tokens in all over the time from the first request to the last token, loading and warm-up excluded.
The times of steps are summed up by kind: a decode has one token of each of its requests. With
--trace, also device time by kind of kernel of decodes of all requests, but not of replicas apart.
"""

import argparse
import gzip
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import workloads
from benchmarks.local_group import devices_of
from benchmarks.trace_table import tabulate
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.lifecycle import Status
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons, serve_command
from worker_client.replicas.group import DataParallelGroup
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.tracing.run_times import StepTiming
from worker_client.worker_group import WorkerGroup

WAYS = ("one", "shared", "apart")
MAX_MODEL_LEN = 16384
STEP_DEADLINE_MS = 60_000
LONGER, EVERY = 4, 8
"""Every eighth request of a skewed workload is four times as long."""
TRACED_STEPS = 16
SHOWN_KERNELS = 25


@dataclass(frozen=True)
class Steps:
    """The steps of one kind, of all drivers."""

    count: int
    median_ms: float
    """Of the time from the result before to its own."""
    total_s: float
    tokens: int


@dataclass(frozen=True)
class Run:
    """One workload, one way."""

    way: str
    workload: str
    num_replicas: int
    num_requests: int
    tokens_in: int
    tokens_out: int
    seconds: float
    steps: dict[str, Steps]
    providers: dict[str, str]
    """Those of rank 0."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all replicas."""
        return self.tokens_out / self.seconds


def make_requests(name: str, count: int, vocab_size: int) -> list[GenerationRequest]:
    """Return the requests of a workload for so many replicas."""
    if name in ("mixed256", "skewed"):
        made = workloads.mixed(vocab_size, 256 * count)
    else:
        requests, num_in, num_out = {**workloads.FIXED, **workloads.NAMED}[name]
        made = workloads.fixed(vocab_size, requests * count, num_in, num_out)
    if name == "skewed":
        made = [
            (prompt * LONGER, num_out * LONGER) if index % EVERY == 0 else (prompt, num_out)
            for index, (prompt, num_out) in enumerate(made)
        ]
    return as_requests(made)


def as_requests(made: workloads.Workload) -> list[GenerationRequest]:
    """Return greedy requests that ignore the end of a sequence."""
    return [
        GenerationRequest(
            id=str(index),
            prompt=np.array(prompt, np.int32),
            max_tokens=num_out,
            sampling=SamplingParams(ignore_eos=True),
        )
        for index, (prompt, num_out) in enumerate(made)
    ]


def divided(requests: Sequence[GenerationRequest], count: int) -> list[list[GenerationRequest]]:
    """Divide requests, in their order, so that replicas have about as many tokens."""
    parts: list[list[GenerationRequest]] = [[] for _ in range(count)]
    sizes = [0] * count
    for request in requests:
        place = sizes.index(min(sizes))
        parts[place].append(request)
        sizes[place] += len(request.prompt) + request.max_tokens
    return parts


def serve(driver: Driver, requests: Sequence[GenerationRequest]) -> int:
    """Serve requests, and return the number of generated tokens."""
    for request in requests:
        driver.add_request(request)
    tokens = sum(len(output.token_ids) for output in driver.run())
    if driver.num_failures:
        raise RuntimeError(f"{driver.num_failures} steps have failed")
    return tokens


def serve_apart(drivers: Sequence[Driver], requests: Sequence[GenerationRequest]) -> int:
    """Serve requests on replicas at the same time, each on a thread."""
    tokens, errors = [0] * len(drivers), list[BaseException]()

    def run(place: int, own: Sequence[GenerationRequest]) -> None:
        try:
            tokens[place] = serve(drivers[place], own)
        except BaseException as error:
            errors.append(error)

    parts = enumerate(divided(requests, len(drivers)))
    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(tokens)


def sum_up(records: Sequence[StepTiming]) -> dict[str, Steps]:
    """Return the steps by kind."""
    found: dict[str, Steps] = {}
    for kind in sorted({record.kind for record in records}):
        own = [record for record in records if record.kind == kind]
        times = [record.interval_s for record in own]
        found[kind] = Steps(
            len(own),
            statistics.median(times) * 1e3,
            sum(times),
            sum(record.num_tokens for record in own),
        )
    return found


@dataclass
class Replicas:
    """Loaded replicas, and what serves requests on them."""

    num_replicas: int
    new_drivers: Callable[[], list[Driver]]
    get_status: Callable[[], list[Status]]

    def measure(self, way: str, name: str, vocab_size: int) -> Run:
        """Serve one workload, and print its figures."""
        requests = make_requests(name, self.num_replicas, vocab_size)
        drivers = self.new_drivers()
        began = time.monotonic()
        if len(drivers) == 1:
            tokens = serve(drivers[0], requests)
        else:
            tokens = serve_apart(drivers, requests)
        seconds = time.monotonic() - began
        run = Run(
            way,
            name,
            self.num_replicas,
            len(requests),
            sum(len(request.prompt) for request in requests),
            tokens,
            seconds,
            sum_up([record for driver in drivers for record in driver.records]),
            dict(self.get_status()[0].providers),
        )
        show(run)
        return run


def trace_decodes(
    group: WorkerGroup, driver: Driver, requests: Sequence[GenerationRequest]
) -> None:
    """Print the device time of decodes on each rank. The daemons have a directory for traces."""
    for request in requests:
        driver.add_request(request)
    while not driver.records or driver.records[-1].kind != "decode":
        driver.step()
    for profiled in (False, True):  # the first steps are warm-up
        driver.pause()
        while driver.num_in_flight:
            driver.step()
        if profiled:
            group.profiling.start("decodes")
        driver.resume()
        first = len(driver.records)
        while len(driver.records) < first + TRACED_STEPS:
            driver.step()
    driver.pause()
    while driver.num_in_flight:
        driver.step()
    num_steps = len(driver.records) - first
    for rank, reply in enumerate(group.profiling.stop()):
        with gzip.open(reply.file, "rt") as file:
            table = tabulate(json.load(file), num_steps)
        print(f"rank {rank}: {table.step_us / 1e3:.2f} ms, {table.kernels_per_step:.0f} kernels")
        for name, us in [*table.groups.items(), *list(table.kernels.items())[:SHOWN_KERNELS]]:
            print(f"        {us / 1e3:>9.3f} ms  {name[:90]}")
    driver.resume()
    list(driver.run())


def config_of(
    options: argparse.Namespace, parallel: ParallelConfig, *, shares: bool
) -> WorkerConfig:
    """Return the configuration of every replica."""
    return WorkerConfig(
        parallel=parallel,
        model=ModelConfig(
            model=str(options.model),
            dtype="float32" if options.device == "cpu" else "bfloat16",
            load_format="dummy",
            max_model_len=options.max_model_len,
            enable_expert_parallel=shares,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            step_deadline_ms=STEP_DEADLINE_MS,
        ),
        cache=CacheConfig(),
        graph=GraphConfig(enforce_eager=options.eager),
    )


def measure_way(way: str, options: argparse.Namespace, vocab_size: int) -> list[Run]:
    """Start daemons, load the model, and serve all workloads one way."""
    shares, count = way == "shared", 1 if way == "one" else options.replicas
    parallel = ParallelConfig(data_parallel_size=count, data_parallel_lockstep=shares and count > 1)
    config, root = config_of(options, parallel, shares=shares), options.model.parent
    blocks = {"num_gpu_blocks": options.num_gpu_blocks}

    def driver_of(group: WorkerGroup, scheduler: Scheduler | LockstepScheduler) -> Driver:
        return Driver(group, scheduler, max_history=None)

    runs = []
    traces = [] if options.trace is None else ["--profile-dir", str(options.trace)]
    command = serve_command("--model-root", str(root), *traces)
    with LocalDaemons(devices_of(options.device, count), root, command=command) as daemons:
        if way == "apart":
            with DataParallelGroup(daemons.endpoints, parallel) as replicas:
                replicas.attach()
                loaded = replicas.prepare(config, **blocks)
                own = [scheduler_limits(each, config) for each in loaded]
                ready = Replicas(
                    count,
                    lambda: [
                        driver_of(group, Scheduler(limits))
                        for group, limits in zip(replicas.replicas, own, strict=True)
                    ],
                    replicas.get_status,
                )
                runs = [ready.measure(way, name, vocab_size) for name in options.workloads]
        else:
            with WorkerGroup(daemons.endpoints, parallel) as group:
                group.attach()
                limits = scheduler_limits(group.prepare(config, **blocks), config)

                def new_driver() -> list[Driver]:
                    schedulers = [Scheduler(limits) for _ in range(count)]
                    one = schedulers[0] if count == 1 else LockstepScheduler(schedulers)
                    return [driver_of(group, one)]

                ready = Replicas(count, new_driver, group.get_status)
                runs = [ready.measure(way, name, vocab_size) for name in options.workloads]
                if options.trace is not None:
                    decodes = workloads.fixed(vocab_size, options.max_num_seqs * count, 32, 64)
                    trace_decodes(group, new_driver()[0], as_requests(decodes))
    return runs


def show(run: Run) -> None:
    """Print a run."""
    print(
        f"{run.way:<7} {run.workload:<13} {run.num_replicas} replicas, {run.num_requests} requests:"
        f" {run.tokens_per_s:>10.0f} tok/s out in all, {run.seconds:.2f} s",
        flush=True,
    )
    for kind, steps in run.steps.items():
        print(
            f"        {kind:<8} {steps.count:>6} steps, median {steps.median_ms:.2f} ms,"
            f" {steps.total_s:.2f} s, {steps.tokens} tokens",
            flush=True,
        )
    exchange = run.providers.get("experts", "no experts are shared")
    print(f"        {run.providers['graphs']} graphs; {exchange}", flush=True)


def main() -> None:
    """Measure all ways; with --out write a list of runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--workloads", default="mixed256")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--num-gpu-blocks", type=int, help="default: what fits")
    parser.add_argument("--trace", type=Path, help="a directory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trace is not None:
        options.trace = options.trace.resolve()
    options.model, options.workloads = options.model.resolve(), options.workloads.split(",")
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    ways = options.ways.split(",")
    runs = [run for way in ways for run in measure_way(way, options, vocab_size)]
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()
