"""Structured output with and without jump forward:
`python -m benchmarks.jump_forward [--model DIR] [--device cuda|cpu] [--requests 1 8 64]`.

Serves as many requests at once, with dummy weights and a schema of long property names, with every
token sampled and then with jumps; each twice, the second pass counts. Prints seconds, steps and the
seconds of a step. If jumps cost a large batch time, MIXED_STEP_COST
(client/worker_client/structured/masked_steps.py) is too low.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.local_group import devices_of, local_group
from benchmarks.structured import make_model
from rpc_schema.config import (
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.structured.grammars import GrammarLimits, Grammars

NAMES = [f"the measured value of quantity number {index}" for index in range(12)]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 6} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def requests(count: int) -> list[GenerationRequest]:
    """Return the requests."""
    rng = np.random.default_rng(1)
    grammar = read_structured_output({"json": SCHEMA})
    return [
        GenerationRequest(
            id=str(index),
            prompt=rng.integers(100, 200, 32).astype(np.int32),
            max_tokens=1000,
            sampling=SamplingParams(temperature=1.0, seed=index, structured_outputs=grammar),
        )
        for index in range(count)
    ]


def main() -> None:
    """Measure, and print a line for each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--model", type=Path, default=here / "models" / "llama-8b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(args.model.resolve(), Path(scratch), max_vocab_size=vocab_size)
        config = WorkerConfig(
            parallel=ParallelConfig(),
            model=ModelConfig(model=str(model), load_format="dummy", max_model_len=2048),
            scheduler=SchedulerConfig(max_num_seqs=64),
        )
        with local_group(devices_of(args.device), model.parent) as (group, _):
            loaded = group.prepare(config)
            ends = loaded.metadata.eos_token_ids
            for max_jump in (0, 1024, 0, 1024):
                limits = GrammarLimits(max_jump=max_jump)
                grammars = Grammars(model, vocab_size, ends, limits)
                for count in args.requests:
                    driver = Driver(
                        group,
                        Scheduler(scheduler_limits(loaded, config)),
                        options=DriverOptions(grammars, keeps_prefixes=False),
                    )
                    for request in requests(count):
                        driver.add_request(request)
                    began = time.perf_counter()
                    num_tokens = sum(len(output.token_ids) for output in driver.run())
                    seconds = time.perf_counter() - began
                    num_steps = len(driver.records)
                    print(
                        f"{count:3} requests, jumps of at most {max_jump:4}: {seconds:7.3f} s, "
                        f"{num_steps:5} steps of {seconds / num_steps * 1e3:6.2f} ms, "
                        f"{num_tokens / seconds:9.1f} tok/s",
                        flush=True,
                    )
                grammars.close()


if __name__ == "__main__":
    main()
