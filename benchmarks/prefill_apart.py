"""Measures prompts that another group computes: `python -m benchmarks.prefill_apart --model DIR
[--device cuda] [--tokens 8000] [--tokens-out 256] [--chunk 2048] [--tier-memory device]
[--tier-bytes N] [--prompts 8] [--decodes 32] [--rounds 3] [--prompt-every 0.4] [--requests 32]
[--out FILE.json]`.

Two daemons of one host: the first decodes, the second computes prompts. Measured are the times to
the first two tokens on idle groups (the first one comes from the group that computes the prompt:
what a move and a load add is that of the second), the inter-token latency of requests that decode
(alone, beside prompts of the other group, and beside the same prompts in their own), and the
throughput of both, beside that of two groups that share the requests. Prompts are new each time. On
a CPU, at a small size:

    python -m worker_client.cli.demo_model build/demo-model
    python -m benchmarks.prefill_apart --model build/demo-model --device cpu --tokens 300 \\
        --tokens-out 20 --chunk 64 --tier-bytes 64000000 --prompts 3 --decodes 4 --rounds 1 \\
        --requests 6
"""

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.local_group import devices_of, dummy_model
from rpc_schema.config import (
    CacheConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.host_tier import HostTierStatus
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.group.loading import LoadedGroup
from worker_client.launcher import LocalDaemons
from worker_client.replicas.prefill_group import PrefillThread
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup

BLOCK_SIZE = 16
DECODE_CONTEXT = 512
PROMPT_TOKENS_OUT = 4
"""Tokens of a prompt that comes beside decodes: they show its end, and are no load of their own."""
PIN_WITHIN_S = 60.0
SWITCH_S = 0.001
"""Longest time for which a thread of this process keeps the others waiting: the server's."""


@dataclass
class Clock:
    """When requests got their tokens; a Driver's on_result."""

    first_at: dict[str, float] = field(default_factory=dict)
    last_at: dict[str, float] = field(default_factory=dict)
    decode_itl_ms: list[float] = field(default_factory=list)
    """Times between two tokens of requests that decode all the time."""
    num_tokens: int = 0

    def take(self, result: StepResult) -> None:
        """Note a step's tokens."""
        now = time.monotonic()
        for req_id in result.req_ids:
            if req_id not in self.first_at:
                self.first_at[req_id] = now
            elif req_id.startswith("decode"):
                self.decode_itl_ms.append(1e3 * (now - self.last_at[req_id]))
            self.last_at[req_id] = now
        self.num_tokens += len(result.req_ids)


class Requests:
    """Requests of new random prompts."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng()
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def new(self, kind: str, tokens_in: int, tokens_out: int) -> GenerationRequest:
        """Return one whose id begins with kind."""
        prompt = self._rng.integers(3, self._vocab_size, tokens_in).astype(np.int32)
        name = f"{kind}-{next(self._numbers)}"
        return GenerationRequest(name, prompt, tokens_out, sampling=SamplingParams(ignore_eos=True))


@dataclass
class Bench:
    """The group that decodes, and how large everything is."""

    group: WorkerGroup
    limits: SchedulerLimits
    requests: Requests
    options: argparse.Namespace

    def driver(self, prefill: PrefillThread | None) -> tuple[Driver, Clock]:
        """Return a driver of the group, and what notes its tokens."""
        clock, options = Clock(), DriverOptions(keeps_prefixes=False, prefill=prefill)
        return Driver(self.group, Scheduler(self.limits), clock.take, options=options), clock

    def ttft_ms(self, prefill: PrefillThread | None) -> list[tuple[float, float, float]]:
        """Return the times to the first token of prompts, one after the other, to the second one,
        and how long each was held for the other group; the first prompt, which opens what is
        needed, does not count."""
        driver, clock = self.driver(prefill)
        times = []
        for _ in range(self.options.prompts + 1):
            request = self.requests.new("prompt", self.options.tokens, 2)
            held_before = 0.0 if prefill is None else prefill.counts.held.total
            began = time.monotonic()
            driver.add_request(request)
            drain(driver)
            held = 0.0 if prefill is None else prefill.counts.held.total - held_before
            first, second = (of[request.id] - began for of in (clock.first_at, clock.last_at))
            times.append((1e3 * first, 1e3 * second, 1e3 * held))
        return times[1:]

    def decode_itl_ms(self, prefill: PrefillThread | None, every_s: float | None) -> Clock:
        """Decode, while a prompt comes every so many seconds; None: none comes."""
        options, all_of = self.options, Clock()
        driver, clock = self.driver(prefill)
        driver.add_request(self.requests.new("prompt", options.tokens, 1))  # opens the link
        drain(driver)
        for _ in range(options.rounds):
            decodes = [
                self.requests.new("decode", DECODE_CONTEXT, options.tokens_out)
                for _ in range(options.decodes)
            ]
            left = set[str]()
            for request in decodes:
                driver.add_request(request)
                left.add(request.id)
            while any(request.id not in clock.first_at for request in decodes):
                left -= {output.req_id for output in driver.step()}
            clock.decode_itl_ms.clear()
            prompts, due = deque[GenerationRequest](), time.monotonic()
            while left:
                if every_s is not None and time.monotonic() >= due:
                    due += every_s
                    prompts.append(self.requests.new("prompt", options.tokens, PROMPT_TOKENS_OUT))
                    driver.add_request(prompts[-1])
                left -= {output.req_id for output in driver.step()}
            all_of.decode_itl_ms += clock.decode_itl_ms
            all_of.num_tokens += sum(prompt.id in clock.first_at for prompt in prompts)
            drain(driver)
        return all_of

    def rate(self, prefill: PrefillThread | None, count: int) -> float:
        """Return the tokens a second of so many requests that come at once."""
        driver, clock = self.driver(prefill)
        driver.add_request(self.requests.new("prompt", self.options.tokens, 1))
        drain(driver)
        clock.num_tokens, began = 0, time.monotonic()
        for _ in range(count):
            options = self.options
            driver.add_request(self.requests.new("whole", options.tokens, options.tokens_out))
        drain(driver)
        return clock.num_tokens / (max(clock.last_at.values()) - began)

    def tier(self) -> HostTierStatus:
        """Return the rank's tier."""
        (status,) = self.group.get_status()
        assert status.host_tier is not None
        return status.host_tier


def drain(driver: Driver) -> None:
    """Run until nothing is left."""
    for _ in driver.run():
        pass


def worker_config(options: argparse.Namespace) -> WorkerConfig:
    """Return the configuration of each group."""
    length = max(options.tokens, DECODE_CONTEXT) + options.tokens_out + 1
    return WorkerConfig(
        parallel=ParallelConfig(),
        model=dummy_model(options.model, options.device, length),
        scheduler=SchedulerConfig(
            max_num_seqs=min(256, options.chunk), max_num_batched_tokens=options.chunk
        ),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            kv_host_memory_bytes=options.tier_bytes,
            kv_tier_memory=options.tier_memory,
        ),
    )


@contextmanager
def opened(
    endpoint: str, config: WorkerConfig, num_blocks: int | None
) -> Iterator[tuple[WorkerGroup, LoadedGroup]]:
    """Attach to a daemon and load what it has not."""
    with WorkerGroup([endpoint], config.parallel) as group:
        group.attach(force=True)
        yield group, group.prepare(config, num_gpu_blocks=num_blocks)


def wait_pinned(group: WorkerGroup) -> None:
    """Wait until the host tier's memory is page-locked."""
    until = time.monotonic() + PIN_WITHIN_S
    while not all(each.host_tier and each.host_tier.is_pinned for each in group.get_status()):
        if time.monotonic() > until:
            raise TimeoutError("the host tier's memory is not page-locked")
        time.sleep(0.2)


def percentiles(name: str, clock: Clock) -> Iterator[tuple[str, float]]:
    """Yield those of the times between tokens, and the prompts that came meanwhile."""
    for percentile in (50, 99, 99.9):
        value = float(np.percentile(clock.decode_itl_ms, percentile))
        yield f"{name} p{percentile}, ms", value
    yield f"{name} prompts meanwhile", clock.num_tokens


def moved_rate(tier: HostTierStatus) -> float:
    """Return the GB/s of blocks that have come from the other group."""
    return tier.received.num_bytes / max(1, tier.received.num_us) / 1e3


def run(endpoints: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Measure; yield the figures by name, as they come."""
    config, blocks = worker_config(options), options.num_blocks
    sources = list[Driver]()
    """The driver of the group that computes prompts."""

    @contextmanager
    def open_driver() -> Iterator[Driver]:
        with opened(endpoints[1], config, blocks) as (group, model):
            if options.device != "cpu":
                wait_pinned(group)
            driver_options = DriverOptions(keeps_prefixes=False)
            scheduler = Scheduler(scheduler_limits(model, config))
            sources.append(Driver(group, scheduler, options=driver_options))
            yield sources[-1]

    def replica(rates: list[float], start: threading.Barrier) -> None:
        with opened(endpoints[1], config, blocks) as (group, model):
            bench = Bench(group, scheduler_limits(model, config), requests, options)
            start.wait()
            rates.append(bench.rate(None, options.requests // 2))

    with opened(endpoints[0], config, blocks) as (group, model):
        requests = Requests(model.metadata.vocab_size)
        bench = Bench(group, scheduler_limits(model, config), requests, options)
        if options.device != "cpu":
            wait_pinned(group)
        yield from measure_alone(bench)
        with PrefillThread(open_driver) as prefill:
            prefill.wait_opened()
            yield from measure_apart(bench, prefill, sources[-1])
        rates, start = list[float](), threading.Barrier(2)
        other = threading.Thread(target=replica, args=(rates, start))
        other.start()
        start.wait(PIN_WITHIN_S)
        rates.append(bench.rate(None, options.requests - options.requests // 2))
        other.join()
        yield "rate of two groups, tok/s out", sum(rates)


def medians(times: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the median of each column."""
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def measure_alone(bench: Bench) -> Iterator[tuple[str, float]]:
    """Measure one group that computes prompts and decodes."""
    first, second, _ = medians(bench.ttft_ms(None))
    yield "TTFT alone, ms", first
    yield "second token alone, ms", second
    yield from percentiles("ITL of decodes alone:", bench.decode_itl_ms(None, None))
    beside = bench.decode_itl_ms(None, bench.options.prompt_every)
    yield from percentiles("ITL beside prompts of their own group:", beside)


def measure_apart(
    bench: Bench, prefill: PrefillThread, source: Driver
) -> Iterator[tuple[str, float]]:
    """Measure the group beside the other one, whose driver is source."""
    times = bench.ttft_ms(prefill)
    computed = [*source.timings.values()][-len(times) :]
    first, second, held = medians(times)
    yield "TTFT apart, ms", first
    yield "second token apart, ms", second
    yield "of that held for the other group, ms", held
    yield (
        "of that computed there, ms",
        statistics.median(1e3 * (each.finished - each.added) for each in computed),
    )
    yield "moves, GB/s", moved_rate(bench.tier())
    beside = bench.decode_itl_ms(prefill, bench.options.prompt_every)
    yield from percentiles("ITL beside prompts of the other group:", beside)
    yield "rate apart, tok/s out", bench.rate(prefill, bench.options.requests)
    tier = bench.tier()
    yield "moves of all, GB/s", moved_rate(tier)
    yield "blocks received", tier.num_received
    yield "blocks read by CUDA IPC", tier.num_mapped
    yield "blocks invalid or failed", tier.num_invalid + tier.num_failed
    for end, count in sorted(prefill.counts.prompts.items()):
        yield f"prompts: {end}", count


def main(words: Sequence[str] | None = None) -> None:
    """Start the daemons, measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--tokens-out", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--tier-memory", choices=["host", "device"], default="device")
    parser.add_argument("--tier-bytes", type=int, default=12 << 30)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--decodes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-every", type=float, default=0.4, help="seconds")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, help="KV blocks of a group; default: what fits")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    if options.device == "cpu" and options.num_blocks is None:
        options.num_blocks = 4096
    found: dict[str, float] = {}
    sys.setswitchinterval(SWITCH_S)
    devices = devices_of(options.device, 2)
    with LocalDaemons(devices, options.model.resolve().parent) as daemons:
        try:
            for name, value in run(daemons.endpoints, options):
                found[name] = value
                print(f"{name:<48} {value:>12.3f}", flush=True)
        except BaseException:
            for rank in range(len(devices)):
                print(f"# log of rank {rank}\n{daemons.log_tail(rank)}", flush=True)
            raise
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
