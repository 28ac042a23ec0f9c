"""Measures prompts that load from the host tier: `python -m benchmarks.host_tier --model DIR
[--device cuda] [--tokens 10000] [--prompts 20] [--decodes 64] [--decode-tokens 1500]
[--host-bytes N] [--kv-host-dir DIR] [--out FILE.json]`.

One daemon, whose KV cache holds fewer than all prompts. They are submitted one after the other,
twice: first computed, then loaded from host memory. Then the second round again, beside requests
that decode, whose inter-token latency is compared with that before and after it. Rates are those of
`worker-client status`: bytes over the time of the copies alone.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.local_group import devices_of, dummy_model, local_group
from rpc_schema.config import (
    CacheConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.host_tier import HostTierStatus
from rpc_schema.kv_cache import blocks_for
from rpc_schema.moved_blocks import BlockTraffic
from worker_client.driver import Driver
from worker_client.group.loading import LoadedGroup
from worker_client.launcher import serve_command
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup

BLOCK_SIZE = 16
DECODE_CONTEXT = 1000
QUIET_S = 1.5
"""Time of decodes alone, before the prompts and after them."""
PIN_WITHIN_S = 60.0


@dataclass
class Results:
    """When steps gave a prompt its token, and the decodes theirs; a Driver's on_result."""

    steps_at: list[float] = field(default_factory=list)
    """The moments of results with a decode's token."""
    tokens_at: dict[str, float] = field(default_factory=dict)
    """By request: the moment of its first token."""

    def take(self, result: StepResult) -> None:
        """Note a step's tokens."""
        now = time.monotonic()
        for req_id in result.req_ids:
            self.tokens_at.setdefault(req_id, now)
        if any(req_id.startswith("decode") for req_id in result.req_ids):
            self.steps_at.append(now)

    def intervals(self, begin: float, end: float) -> list[float]:
        """Return the times between the decodes' results in a span, in ms."""
        times = [at for at in self.steps_at if begin <= at <= end]
        return [1e3 * (after - before) for before, after in itertools.pairwise(times)]


@dataclass
class TierBench:
    """Prompts and the driver that serves them."""

    group: WorkerGroup
    driver: Driver
    results: Results
    prompts: list[np.ndarray[tuple[int], np.dtype[np.int32]]]
    loaded_tokens: dict[str, int] = field(default_factory=dict)

    def round(self, name: str) -> list[float]:
        """Submit the prompts one after the other; return their times to the first token, in ms."""
        times = []
        for number, prompt in enumerate(self.prompts):
            req_id = f"{name}-{number}"
            sampling = SamplingParams(ignore_eos=True)
            began = time.monotonic()
            self.driver.add_request(GenerationRequest(req_id, prompt, 1, sampling=sampling))
            while req_id not in self.results.tokens_at:
                self.step()
            times.append(1e3 * (self.results.tokens_at[req_id] - began))
        return times

    def step(self) -> None:
        """Take part in one step of the driver, and note what its requests loaded."""
        for output in self.driver.step() or ():
            self.loaded_tokens[output.req_id] = output.num_loaded_tokens

    def run_for(self, seconds: float) -> tuple[float, float]:
        """Step for some time; return when that was."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            self.step()
        return began, time.monotonic()

    def status(self) -> HostTierStatus:
        """Return the rank's tier."""
        (status,) = self.group.get_status()
        assert status.host_tier is not None
        return status.host_tier


def rate(after: BlockTraffic, before: BlockTraffic) -> float:
    """Return the GB/s of copies between two states."""
    num_us = after.num_us - before.num_us
    return (after.num_bytes - before.num_bytes) / num_us / 1e3 if num_us else 0.0


def worker_config(options: argparse.Namespace) -> WorkerConfig:
    """Return the group's configuration."""
    return WorkerConfig(
        parallel=ParallelConfig(),
        model=dummy_model(
            options.model,
            options.device,
            max(options.tokens, DECODE_CONTEXT + options.decode_tokens) + 1,
        ),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_host_memory_bytes=options.host_bytes),
    )


def run(
    group: WorkerGroup, model: LoadedGroup, config: WorkerConfig, options: argparse.Namespace
) -> dict[str, float]:
    """Measure; return the figures by name."""
    rng = np.random.default_rng()
    vocab_size = model.metadata.vocab_size

    def tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return rng.integers(3, vocab_size, count).astype(np.int32)

    results = Results()
    driver = Driver(group, Scheduler(scheduler_limits(model, config)), results.take)
    prompts = [tokens(options.tokens) for _ in range(options.prompts)]
    bench = TierBench(group, driver, results, prompts)
    began = time.monotonic()
    while options.device != "cpu" and not bench.status().is_pinned:
        if time.monotonic() > began + PIN_WITHIN_S:
            raise TimeoutError("the host tier's memory is not page-locked")
        time.sleep(0.2)
    found = {"pinned after, s": time.monotonic() - began}
    found["computed: TTFT, ms"] = statistics.median(bench.round("computed"))
    start = bench.status()
    found["loaded: TTFT, ms"] = statistics.median(bench.round("loaded"))
    for number in range(options.decodes):
        sampling = SamplingParams(ignore_eos=True)
        driver.add_request(
            GenerationRequest(
                f"decode-{number}",
                tokens(DECODE_CONTEXT),
                options.decode_tokens,
                sampling=sampling,
            )
        )
    while sum(name.startswith("decode") for name in results.tokens_at) < options.decodes:
        bench.step()
    quiet = results.intervals(*bench.run_for(QUIET_S))
    began = time.monotonic()
    found["loaded beside decodes: TTFT, ms"] = statistics.median(bench.round("beside"))
    busy = results.intervals(began, time.monotonic())
    quiet += results.intervals(*bench.run_for(QUIET_S))
    found["decodes: mean ITL, ms"] = statistics.fmean(quiet)
    found["decodes beside loads: mean ITL, ms"] = statistics.fmean(busy)
    end = bench.status()
    found["loads, GB/s"] = rate(end.loaded, start.loaded)
    found["stores, GB/s"] = rate(end.stored, start.stored)
    for name in ("loaded", "beside"):
        found[f"{name}: share of tokens"] = statistics.fmean(
            bench.loaded_tokens.get(f"{name}-{number}", 0) / options.tokens
            for number in range(options.prompts)
        )
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Start a daemon, measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--decode-tokens", type=int, default=1500)
    parser.add_argument("--host-bytes", type=int, default=32 << 30)
    parser.add_argument("--kv-host-dir", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    config = worker_config(options)
    prompt_blocks = blocks_for(options.tokens + 1, BLOCK_SIZE)
    decode_blocks = blocks_for(DECODE_CONTEXT + options.decode_tokens, BLOCK_SIZE)
    blocks = 2 * prompt_blocks + decode_blocks * options.decodes
    if prompt_blocks * options.prompts <= blocks:
        parser.error(f"--prompts: {options.prompts} fit into the KV cache that the decodes need")
    kept = [] if options.kv_host_dir is None else ["--kv-host-dir", str(options.kv_host_dir)]
    devices = devices_of(options.device)
    command = serve_command("--model-root", str(options.model.resolve().parent), *kept)
    with local_group(devices, options.model.resolve().parent, None, command) as (group, _):
        found = run(group, group.prepare(config, num_gpu_blocks=blocks), config, options)
    for name, value in found.items():
        print(f"{name:<40} {value:>10.3f}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
