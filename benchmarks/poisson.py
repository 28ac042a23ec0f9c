"""Measures latency under load, with and without a target for inter-token latency:
`python -m benchmarks.poisson --model DIR [--max-itl-ms 30,50] [--workload poisson_8rps] [--rate 8]
[--seconds 60] [--tokens-in 1000] [--tokens-out 200] [--seed 2] [--pp P] [--tp T]
[--out FILE.json]`.

Starts P x T daemons once. Requests arrive by a seeded Poisson process while the driver runs, first
without a target, then the same ones with each target. Every pass has an empty prefix cache, and a
discarded pass of a few requests comes first.

TTFT runs from a request's arrival, not from the moment at which the driver took it between two
steps, to the result with its first token. ITL is the time between the results with two consecutive
tokens of a request; percentiles are over all of them. Both include client and wire. On a CPU, at a
small size:

    python -m worker_client.cli.demo_model build/demo-model
    python -m benchmarks.poisson --model build/demo-model --device cpu --rate 2 --seconds 10 \\
        --tokens-in 400 --tokens-out 30 --max-itl-ms 40
"""

import argparse
import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks import workloads
from benchmarks.local_group import devices_of, dummy_model, local_group
from benchmarks.workloads import TimedRequest
from rpc_schema.config import (
    CacheConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.group.loading import LoadedGroup
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup

NUM_DISCARDED = 4
"""Requests of the discarded pass."""
BLOCK_SIZE = 16

JsonFigure: TypeAlias = dict[str, str | float]


@dataclass
class Latencies:
    """Latencies of a pass, in seconds."""

    seconds: float = 0.0
    """From the first arrival's due time to the last token."""
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


class TokenClock:
    """Notes the moments of all tokens: a Driver's on_result."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._last: dict[str, float] = {}
        """Moment of a request's last token."""
        self._arrived: dict[str, float] = {}
        """Moment of arrival of a request without a token."""

    def arrived(self, req_id: str, at: float) -> None:
        """Note that a request came at a moment of time.monotonic()."""
        self._arrived[req_id] = at

    def take(self, result: StepResult) -> None:
        """Note the tokens of a step."""
        now = time.monotonic()
        for req_id in result.req_ids:
            arrived = self._arrived.pop(req_id, None)
            if arrived is None:
                self._latencies.itl_s.append(now - self._last[req_id])
            else:
                self._latencies.ttft_s.append(now - arrived)
            self._last[req_id] = now
        self._latencies.num_tokens += len(result.req_ids)


def serve(
    group: WorkerGroup, limits: SchedulerLimits, requests: Sequence[TimedRequest]
) -> Latencies:
    """Serve requests as they arrive, until all have ended."""
    latencies = Latencies()
    clock = TokenClock(latencies)
    driver = Driver(
        group, Scheduler(limits), clock.take, options=DriverOptions(keeps_prefixes=False)
    )
    numbers = itertools.count()
    waiting = deque(requests)
    began = time.monotonic()
    while waiting or driver.busy:
        while waiting and began + waiting[0].arrival_s <= time.monotonic():
            arrival_s, prompt, num_out = waiting.popleft()
            req_id = str(next(numbers))
            clock.arrived(req_id, began + arrival_s)
            tokens = np.array(prompt, np.int32)
            driver.add_request(
                GenerationRequest(req_id, tokens, num_out, sampling=SamplingParams(ignore_eos=True))
            )
        if driver.busy:
            driver.step()
        elif waiting:
            time.sleep(max(0.0, began + waiting[0].arrival_s - time.monotonic()))
    latencies.seconds = time.monotonic() - began - (requests[0].arrival_s if requests else 0.0)
    for _ in driver.run():  # the daemons forget the last requests
        pass
    return latencies


def figures(title: str, latencies: Latencies) -> Iterator[JsonFigure]:
    """Yield TTFT and ITL at p50 and p99 in ms, and the rate of tokens; names begin with title."""
    for kind, values in (("ttft", latencies.ttft_s), ("itl", latencies.itl_s)):
        for percentile in (50, 99):
            value = float(np.percentile(values, percentile)) * 1e3 if values else 0.0
            yield {"name": f"{title}: {kind} p{percentile}", "value": value, "unit": "ms"}
    rate = latencies.num_tokens / max(latencies.seconds, 1e-9)
    yield {"name": f"{title}: rate", "value": rate, "unit": "tok/s out"}


def worker_config(options: argparse.Namespace) -> WorkerConfig:
    """Return the configuration of the group."""
    length = options.tokens_in + options.tokens_out
    return WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=options.pp, tensor_parallel_size=options.tp),
        model=dummy_model(options.model, options.device, length),
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE),
    )


def run(
    group: WorkerGroup, model: LoadedGroup, config: WorkerConfig, options: argparse.Namespace
) -> list[JsonFigure]:
    """Serve the workload without a target and with each; print and return the figures."""
    sizes = (options.rate, options.seconds, options.tokens_in, options.tokens_out)
    vocab_size = model.metadata.vocab_size
    requests = workloads.poisson(vocab_size, *sizes, seed=options.seed)
    serve(group, scheduler_limits(model, config), requests[:NUM_DISCARDED])
    found: list[JsonFigure] = []
    for max_itl_ms in (None, *options.max_itl_ms):
        limits = scheduler_limits(model, config, max_itl_ms=max_itl_ms)
        target = "no target" if max_itl_ms is None else f"target {max_itl_ms:g} ms"
        title = f"{options.title}, {target}"
        own = list(figures(title, serve(group, limits, requests)))
        for figure in own:
            print(f"{figure['name']:<64} {figure['value']:>10.1f} {figure['unit']}", flush=True)
        found += own
    return found


def read_targets(text: str) -> list[float]:
    """Return the targets of `MS,MS,...`."""
    return [float(part) for part in text.split(",") if part.strip()]


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; sizes that are not given are those of the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--workload", choices=workloads.ARRIVALS, default="poisson_8rps")
    parser.add_argument("--max-itl-ms", type=read_targets, default=[50.0], help="MS,MS,...")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--seconds", type=float, help="time over which requests arrive")
    parser.add_argument("--tokens-in", type=int)
    parser.add_argument("--tokens-out", type=int)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    names = ("rate", "seconds", "tokens_in", "tokens_out")
    sizes = workloads.ARRIVALS[options.workload]
    for name, value in zip(names, sizes, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.title = options.workload
    if sizes != (options.rate, options.seconds, options.tokens_in, options.tokens_out):
        tokens = f"{options.tokens_in} in, {options.tokens_out} out"
        options.title = f"poisson_{options.rate:g}rps, {options.seconds:g} s, {tokens}"
    return options


def main() -> None:
    """Run the workload; with --out write its figures."""
    options = parse_options()
    config = worker_config(options)
    devices = devices_of(options.device, config.parallel.world_size)
    with local_group(devices, options.model.resolve().parent, config.parallel) as (group, _):
        found = run(group, group.prepare(config), config, options)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
