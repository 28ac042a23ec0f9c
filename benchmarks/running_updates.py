"""Measures what an update of all weights costs requests that run: `python -m
benchmarks.running_updates --model DIR [--requests 64] [--tokens-in 2000] [--device cuda:0]
[--out FILE.json]`.

A daemon holds dummy weights of the shapes in the model's config.json, in bfloat16; this process is
driver and trainer, whose tensors are on the same GPU (ipc; on a CPU gloo). All requests decode;
then all weights are replaced with running="keep", and "recompute". `pause` is the longest time
without a token around the update, `decode` the median step before it. A recompute is measured
beside the prefill of as many tokens: the same requests' first steps, on an empty cache.
"""

import argparse
import bisect
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from benchmarks.local_group import local_group
from benchmarks.weight_update import make_tensors
from rpc_schema.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.trainer.sender import WeightSender
from worker_client.worker_group import WorkerGroup

ROUNDS = 3
NUM_BEFORE = 60
"""Steps with all requests before each update, and after it."""
Running = Literal["keep", "recompute"]


class Update(NamedTuple):
    """An update under running requests, in seconds."""

    running: Running
    decode_s: float
    """Median step before it."""
    pause_s: float
    """Longest time from one step's tokens to the next one's, with the update between."""
    send_s: float
    """WeightSender.send."""


class Tokens:
    """The times of steps' results."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.req_ids = set[str]()
        """Requests that have a token."""

    def note(self, result: StepResult) -> None:
        """Note a result."""
        self.times.append(time.monotonic())
        self.req_ids.update(result.req_ids)

    def longest(self, since: float) -> float:
        """Return the longest time between two results, of which the second came after `since`."""
        last = bisect.bisect_left(self.times, since)
        return max(later - sooner for sooner, later in pairwise(self.times[max(0, last - 1) :]))


def make_config(options: argparse.Namespace) -> WorkerConfig:
    """Return the configuration of the daemon, whose GPU the trainer's tensors share."""
    return WorkerConfig(
        parallel=ParallelConfig(),
        model=ModelConfig(
            model=str(options.model),
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=options.tokens_in + options.tokens_out,
        ),
        scheduler=SchedulerConfig(max_num_seqs=options.requests),
        cache=CacheConfig(gpu_memory_utilization=0.5),
    )


def make_requests(options: argparse.Namespace, vocab_size: int) -> list[GenerationRequest]:
    """Return requests with random prompts."""
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            id=str(index),
            prompt=rng.integers(vocab_size, size=options.tokens_in),
            max_tokens=options.tokens_out,
            sampling=SamplingParams(ignore_eos=True),
        )
        for index in range(options.requests)
    ]


def measure(group: WorkerGroup, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests, and update the weights under them."""
    config = make_config(options)
    loaded = group.prepare(config)
    scheduler = Scheduler(scheduler_limits(loaded, config))
    tokens = Tokens()
    driver = Driver(group, scheduler, on_result=tokens.note)
    is_gpu = options.device != "cpu"
    trainer = torch.device(options.device)
    tensors = make_tensors(options.model, trainer)
    found = list[Update]()
    with WeightSender(group, "ipc" if is_gpu else "gloo", device=trainer, timeout_s=120) as sender:
        sender.connect()
        prompts = make_requests(options, loaded.metadata.vocab_size)
        began = time.monotonic()
        for request in prompts:
            driver.add_request(request)
        while len(tokens.req_ids) < len(prompts):
            driver.step()
        prefill_s = time.monotonic() - began
        for running in ("keep", "recompute"):
            for _ in range(ROUNDS):
                found.append(update(driver, sender, tensors, tokens, running))
                if running == "recompute":
                    print(group.weights.recomputed, flush=True)
        recomputed = group.weights.recomputed
        for request in prompts:
            driver.abort_request(request.id)
        for _ in driver.run():
            pass
    tensors.clear()
    return {
        "prefill_s": prefill_s,
        "prefilled": options.requests * options.tokens_in,
        "recomputed": None if recomputed is None else recomputed.num_tokens,
        "recompute_s": None if recomputed is None else recomputed.seconds,
        "updates": [each._asdict() for each in found],
    }


def update(
    driver: Driver, sender: WeightSender, tensors: Any, tokens: Tokens, running: Running
) -> Update:
    """Update all weights between steps of all requests."""
    for _ in range(NUM_BEFORE):
        driver.step()
    decode_s = statistics.median(np.diff(tokens.times[-NUM_BEFORE // 2 :]).tolist())
    began = time.monotonic()
    sender.send(tensors, running=running)
    send_s = time.monotonic() - began
    for _ in range(NUM_BEFORE // 2):
        driver.step()
    made = Update(running, decode_s, tokens.longest(began), send_s)
    print(made, flush=True)
    return made


def main() -> None:
    """Measure, print, and write the figures with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens-in", type=int, default=2000)
    parser.add_argument("--tokens-out", type=int, default=1000)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    with local_group([options.device], options.model.parent) as (group, _):
        found = measure(group, options)
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
