"""Measures what it costs to return the experts of tokens: `python -m benchmarks.returned_experts
--model DIR [--workload decode_bs64] [--rounds 3] [--device cuda:0] [--out FILE.json]`.

A daemon with dummy weights of the shapes in config.json serves a workload (workloads.py) with a
Driver in this process: loaded without enable_return_routed_experts; loaded with it, while no
request asks for experts, and while all do. The first pass of each is thrown away.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import workloads
from benchmarks.local_group import local_group
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
from worker_client.worker_group import WorkerGroup

MAX_MODEL_LEN = 4096


class Served(NamedTuple):
    """The passes of a workload."""

    keeps: bool
    """The model is loaded with enable_return_routed_experts."""
    returns: bool
    """The requests ask for their experts."""
    tok_s: float
    """Median of the output tokens per second."""
    passes: list[float]


def measure(group: WorkerGroup, options: argparse.Namespace) -> list[Served]:
    """Serve the workload in all three ways."""
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    workload = workloads.make(options.workload, vocab_size)
    found = []
    for keeps in (False, True):
        config = WorkerConfig(
            parallel=ParallelConfig(),
            model=ModelConfig(
                model=str(options.model),
                dtype="bfloat16",
                load_format="dummy",
                max_model_len=MAX_MODEL_LEN,
                enable_return_routed_experts=keeps,
            ),
            scheduler=SchedulerConfig(max_num_seqs=256),
            cache=CacheConfig(gpu_memory_utilization=0.9),
        )
        limits = scheduler_limits(group.prepare(config, reload=True), config)
        for returns in (False, True) if keeps else (False,):
            passes = []
            for number in range(1 + options.rounds):
                driver = Driver(group, Scheduler(limits))
                began = time.perf_counter()
                for index, (prompt, num_out) in enumerate(workload):
                    driver.add_request(
                        GenerationRequest(
                            id=f"{number}-{index}",
                            prompt=prompt,
                            max_tokens=num_out,
                            sampling=SamplingParams(ignore_eos=True),
                            routed_experts=returns,
                        )
                    )
                for output in driver.run():
                    assert (output.routed_experts is not None) == returns
                passes.append(sum(num for _, num in workload) / (time.perf_counter() - began))
            found.append(Served(keeps, returns, statistics.median(passes[1:]), passes))
            print(found[-1], f"{found[-1].tok_s / found[0].tok_s - 1:+.2%}", flush=True)
    return found


def main() -> None:
    """Measure, print, and write the figures with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", default="decode_bs64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    with local_group([options.device], options.model.parent) as (group, _):
        found = measure(group, options)
    if options.out is not None:
        options.out.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
