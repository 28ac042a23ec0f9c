"""`make run`: a small checkpoint, two daemons, a few prompts, the figures, a clean stop. Also an
example of the driver library."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.demo_model import make_demo_model
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import RequestOutput, Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

MODEL = Path("build/demo-model")
PROMPTS = ("The driver", "A worker daemon", "When the driver dies", "Each stage", "The")
SAMPLES_PER_PROMPT = 3
NEXT = f"""
What to try next (README.md, "Run", has more, and daemons that stay up):
.venv/bin/worker-client generate --model {MODEL} --prompt "The driver"
.venv/bin/worker-client bench --model {MODEL} --prompt "A request"
"""
SCHEDULER = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)


def main() -> None:
    make_demo_model(MODEL)
    devices = pick_devices()
    parallel = ParallelConfig(pipeline_parallel_size=len(devices))
    config = WorkerConfig(
        parallel=parallel,
        model=ModelConfig(model=str(MODEL.resolve())),
        scheduler=SCHEDULER,
        cache=CacheConfig(kv_cache_memory_bytes=64 << 20),
        graph=GraphConfig(),
    )
    say(f"starting {len(devices)} daemons on {', '.join(devices)}")
    began = time.monotonic()
    with (
        LocalDaemons(devices, MODEL.resolve().parent) as daemons,
        WorkerGroup(daemons.endpoints, parallel) as group,
    ):
        started = time.monotonic()
        group.attach()
        model = group.prepare(config)
        say(
            f"ready in {time.monotonic() - began:.1f} s (processes {started - began:.1f} s, "
            f"model {sum(model.seconds.values()):.1f} s)\n"
        )
        generate(Driver(group, Scheduler(scheduler_limits(model, config))))
        show_memory(group)
    say("stopped")
    say(NEXT)


def pick_devices() -> list[str]:
    """Return two GPUs, or one if there is only one, or the CPU twice."""
    num_gpus = torch.cuda.device_count()
    return [f"cuda:{index}" for index in range(min(2, num_gpus))] or ["cpu", "cpu"]


def generate(driver: Driver) -> None:
    """Continue each prompt with greedy and random sampling; print texts, then figures."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for prompt in PROMPTS:
        for sample in range(SAMPLES_PER_PROMPT):
            token_ids = np.array(tokenizer.encode(prompt).ids, np.int32)
            driver.add_request(
                GenerationRequest(
                    id=f"{prompt}/{sample}",
                    prompt=token_ids,
                    max_tokens=60,
                    sampling=SamplingParams(temperature=0.0 if sample == 0 else 0.9, seed=sample),
                )
            )
    began = time.monotonic()
    outputs = {output.req_id: output for output in driver.run()}
    seconds = time.monotonic() - began
    for prompt in PROMPTS:
        for sample in range(SAMPLES_PER_PROMPT):
            output = outputs[f"{prompt}/{sample}"]
            how = "greedy " if sample == 0 else "sampled"
            say(f"  {how}  {prompt}{tokenizer.decode(output.token_ids)}")
    show_figures(driver, list(outputs.values()), seconds)


def show_figures(driver: Driver, outputs: Sequence[RequestOutput], seconds: float) -> None:
    """Print the figures of the generation."""
    num_tokens = sum(len(output.token_ids) for output in outputs)
    first = [1e3 * (t.first_token - t.added) for t in driver.timings.values()]
    say(
        f"\n{len(outputs)} requests, {num_tokens} tokens in {seconds:.2f} s: "
        f"{num_tokens / seconds:.0f} tokens/s, {len(driver.records)} steps, "
        f"first token after {np.median(first):.0f} ms (median)"
    )


def show_memory(group: WorkerGroup) -> None:
    """Print each daemon's memory by use."""
    for status in group.get_status():
        uses = ", ".join(
            f"{use} {status.memory_bytes.get(use, 0) / 2**20:.1f} MiB"
            for use in ("weights", "kv_cache", "activations_peak")
        )
        say(f"rank {status.rank} on {status.device}: {uses}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
