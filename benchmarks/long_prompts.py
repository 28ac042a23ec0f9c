"""Measures what long prompts cost the requests that decode beside them: `python -m
benchmarks.long_prompts --model DIR [--device cuda] [--tokens 30000,100000] [--prompts 2]
[--decodes 32] [--max-itl-ms 50] [--out FILE.json]`.

Prompts of each length are submitted one after the other beside requests that decode, without a
target for the inter-token latency and with each. The first prompt under a target is not counted: a
scheduler has to learn what its steps cost.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.host_tier import Results
from benchmarks.local_group import devices_of, dummy_model, local_group
from benchmarks.poisson import JsonFigure, read_targets
from rpc_schema.config import ParallelConfig, SchedulerConfig, WorkerConfig
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.group.loading import LoadedGroup
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

DECODE_CONTEXT = 1000
DECODE_TOKENS = 4000
"""Tokens that a request may generate: it is aborted when the prompts are done."""


def measure(
    group: WorkerGroup,
    model: LoadedGroup,
    config: WorkerConfig,
    options: argparse.Namespace,
    num_tokens: int,
    max_itl_ms: float | None,
) -> list[JsonFigure]:
    """Serve the prompts of one length; return the figures."""
    rng = np.random.default_rng()

    def request(req_id: str, num_in: int, num_out: int) -> GenerationRequest:
        tokens = rng.integers(3, model.metadata.vocab_size, num_in).astype(np.int32)
        return GenerationRequest(req_id, tokens, num_out, sampling=SamplingParams(ignore_eos=True))

    results = Results()
    limits = scheduler_limits(model, config, max_itl_ms=max_itl_ms)
    driver = Driver(
        group, Scheduler(limits), results.take, options=DriverOptions(keeps_prefixes=False)
    )
    decodes = [f"decode-{number}" for number in range(options.decodes)]
    for req_id in decodes:
        driver.add_request(request(req_id, DECODE_CONTEXT, DECODE_TOKENS))
    while not all(req_id in results.tokens_at for req_id in decodes):
        driver.step()
    first_token_ms, began_at = list[float](), 0.0
    num_learning = 0 if max_itl_ms is None else 1
    for number in range(options.prompts + num_learning):
        req_id, began = f"prompt-{number}", time.monotonic()
        if number == num_learning:
            began_at = began
        driver.add_request(request(req_id, num_tokens, 1))
        while req_id not in results.tokens_at:
            driver.step()
        if number >= num_learning:
            first_token_ms.append(1e3 * (results.tokens_at[req_id] - began))
    itl_ms = results.intervals(began_at, time.monotonic())
    for req_id in decodes:
        driver.abort_request(req_id)
    for _ in driver.run():
        pass
    target = "no target" if max_itl_ms is None else f"target {max_itl_ms:g} ms"
    title = f"{num_tokens} tokens beside {options.decodes} decodes, {target}"
    found = {
        "ttft p50": float(np.median(first_token_ms)),
        "itl p50": float(np.percentile(itl_ms, 50)),
        "itl p99": float(np.percentile(itl_ms, 99)),
        "itl max": max(itl_ms),
    }
    figures: list[JsonFigure] = [
        {"name": f"{title}: {name}", "value": value, "unit": "ms"} for name, value in found.items()
    ]
    for figure in figures:
        print(f"{figure['name']:<64} {figure['value']:>10.1f} {figure['unit']}", flush=True)
    return figures


def main(words: Sequence[str] | None = None) -> None:
    """Start a daemon, measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tokens", default="30000,100000", help="N,N,...")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--decodes", type=int, default=32)
    parser.add_argument("--max-itl-ms", type=read_targets, default=[50.0], help="MS,MS,...")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    lengths = [int(part) for part in options.tokens.split(",")]
    config = WorkerConfig(
        parallel=ParallelConfig(),
        model=dummy_model(
            options.model, options.device, max(*lengths, DECODE_CONTEXT + DECODE_TOKENS) + 1
        ),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
    )
    figures: list[JsonFigure] = []
    with local_group(devices_of(options.device), options.model.resolve().parent) as (group, _):
        model = group.prepare(config)
        for num_tokens in lengths:
            for target in (None, *options.max_itl_ms):
                figures += measure(group, model, config, options, num_tokens, target)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
