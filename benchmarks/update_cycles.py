"""Repeats what a rollout does, sleep, wake_up, new weights and a few tokens: `python -m
benchmarks.update_cycles --model DIR [--cycles 1000] [--seconds S] [--device cuda:0] [--out FILE]`.

A daemon on the first GPU holds dummy weights of the shapes in config.json, in bfloat16; this
process is driver and trainer, with two sets of weights on the same GPU (ipc; on a CPU gloo), which
it sends in turn. Sleep is of level 1 and 2 in turn. Tokens must be those that the same weights gave
in the first cycles. No cycle begins after S seconds. Memory is the whole device's, and the resident
sets of both processes, from the end of the tenth cycle on.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from benchmarks.local_group import LocalGroup, local_group
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
from worker_client.trainer.sender import SendBackend, WeightSender

NUM_FIRST = 10
"""Cycles after which memory is to be flat."""
NUM_PROMPTS = 4
NUM_OUT = 32
MIB = 1 << 20


class Memory(NamedTuple):
    """MiB in use."""

    device: float
    daemon: float
    driver: float


def generate(driver: Driver, prompts: list[list[int]], name: str) -> list[list[int]]:
    """Return the tokens that each prompt gives."""
    for index, prompt in enumerate(prompts):
        driver.add_request(
            GenerationRequest(
                id=f"{name}-{index}",
                prompt=prompt,
                max_tokens=NUM_OUT,
                sampling=SamplingParams(ignore_eos=True),
            )
        )
    tokens = {output.req_id: output.token_ids for output in driver.run()}
    return [list(tokens[f"{name}-{index}"]) for index in range(len(prompts))]


def measure(local: LocalGroup, options: argparse.Namespace) -> dict[str, object]:
    """Run the cycles."""
    group = local.group
    trainer = torch.device(options.device)
    config = WorkerConfig(
        parallel=ParallelConfig(),
        model=ModelConfig(
            model=str(options.model),
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=1024,
            enable_sleep_mode=True,
        ),
        scheduler=SchedulerConfig(max_num_seqs=64),
        cache=CacheConfig(gpu_memory_utilization=0.2),
    )
    loaded = group.prepare(config)
    scheduler = Scheduler(scheduler_limits(loaded, config))
    driver = Driver(group, scheduler, max_history=256)
    sets = [make_tensors(options.model, trainer)]
    sets.append({name: tensor.flip(0).contiguous() for name, tensor in sets[0].items()})
    rng = np.random.default_rng(3)
    prompts = rng.integers(loaded.metadata.vocab_size, size=(NUM_PROMPTS, 20)).tolist()
    (pid,) = local.daemons.pids
    processes = [psutil.Process(pid), psutil.Process()]

    def memory() -> Memory:
        used = 0.0
        if trainer.type == "cuda":
            free, total = torch.cuda.mem_get_info(trainer)
            used = (total - free) / MIB
        return Memory(used, *(process.memory_info().rss / MIB for process in processes))

    expected: list[list[list[int]]] = []
    seconds, samples = [], []
    engine: SendBackend = "ipc" if trainer.type == "cuda" else "gloo"
    with WeightSender(group, engine, device=trainer, timeout_s=120) as sender:
        ends_s = time.monotonic() + options.seconds
        for number in range(options.cycles):
            began = time.monotonic()
            if began > ends_s:
                break
            group.memory.sleep(1 if number // 2 % 2 else 2)
            scheduler.forget_prefixes()
            group.memory.wake_up()
            sender.send(sets[number % 2])
            seconds.append(time.monotonic() - began)
            tokens = generate(driver, prompts, str(number))
            if number < len(sets):
                expected.append(tokens)
            assert tokens == expected[number % 2], f"cycle {number} gave other tokens"
            if number + 1 >= NUM_FIRST:
                samples.append(memory())
            if number % 100 == 99:
                print(f"{number + 1} cycles, {samples[-1]}", flush=True)
    assert expected[0] != expected[1]
    first, last = samples[0], samples[-1]
    return {
        "cycles": len(seconds),
        "median_s": statistics.median(seconds),
        "after_tenth_mib": first._asdict(),
        "at_the_end_mib": last._asdict(),
        "growth_mib": {name: last[at] - first[at] for at, name in enumerate(Memory._fields)},
        "device_most_mib": max(sample.device for sample in samples),
    }


def main() -> None:
    """Measure, print, and write the figures with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    with local_group([options.device], options.model.parent) as local:
        found = measure(local, options)
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
