"""Times the rules on tokens on a CUDA device: `python -m benchmarks.token_rules [--rows 64]
[--model DIR]`.

Each case samples a token for every row, with the same rules in all rows, from bf16 logits of the
Llama 8B shape. `us` is device time, `host_us` the host time of a call, and `more_us` the time that
the rules add to greedy sampling from logits. The floor of penalties is what they must move at 4.5
TB/s: the logits and the counts read, float32 written and read again.

With --model, decode_bs64 with dummy weights follows: without rules, and with penalties and biases
on every row, the better of two passes each, in one group. Target: 0.97 of the rate without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import torch
import triton.testing

from benchmarks import workloads
from benchmarks.e2e import OPTIONS, bench
from benchmarks.kernels import host_us
from rpc_schema.step import NewRequestData
from worker_client.launcher import LocalDaemons
from worker_client.requests import SamplingParams
from worker_daemon.backend import choose_backend
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.sample_rows import BY_LOGITS, SampleRows
from worker_daemon.runner.scheduled_step import NO_STEP_VALUES, StepLimits

HBM_BYTES_PER_S: Final = 4.5e12
VOCAB_SIZE: Final = 128_256
SERVED: Final = "decode_bs64"
NUM_TOKENS: Final = 512

PENALTIES: Final = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
}
BIASES: Final = {"logit_bias": {7 * token: 0.5 for token in range(1024)}}

CASES: Final = {
    "greedy by logits": SamplingParams(),
    "penalties": SamplingParams(**PENALTIES),  # type: ignore[arg-type]
    "1 bias": SamplingParams(logit_bias={5: 1.0}),
    "1,024 biases": SamplingParams(**BIASES),  # type: ignore[arg-type]
    "penalties and 1,024 biases": SamplingParams(**PENALTIES, **BIASES),  # type: ignore[arg-type]
    "4,096 allowed tokens": SamplingParams(allowed_token_ids=tuple(range(4096))),
    "256 bad words": SamplingParams(bad_words=tuple((t, t + 1, t + 2) for t in range(256))),
}


def admitted(params: SamplingParams, num_rows: int, device: torch.device) -> StepParts:
    """Return parts with a request in each row."""
    limits = StepLimits(num_rows, 8192, 8192, VOCAB_SIZE, 16, 64)
    parts = make_parts(limits, device, choose_backend(device).sampling)
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, VOCAB_SIZE, NUM_TOKENS).astype(np.int32) for _ in range(num_rows)]
    requests = [
        NewRequestData(
            slot=slot,
            req_id=f"r{slot}",
            num_tokens=NUM_TOKENS,
            num_prompt_tokens=NUM_TOKENS // 2,
            num_computed_tokens=0,
            extensions=params.extensions(),
        )
        for slot in range(num_rows)
    ]
    parts.admit(requests, tokens)
    return parts


def sampled_rows(parts: StepParts, num_rows: int, device: torch.device) -> SampleRows:
    """Return all rows, at the position after their known tokens."""
    slots = np.arange(num_rows)
    positions = np.full(num_rows, NUM_TOKENS, np.int32)
    on_device = torch.from_numpy(slots.astype(np.int32)).to(device)
    return SampleRows(
        slots_np=slots,
        generations=np.ones_like(slots),
        positions_np=positions,
        used=parts.used_by(slots) | BY_LOGITS,
        slots=on_device,
        token_indices=on_device,
        positions=torch.from_numpy(positions).to(device),
        delivery=None,
    )


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    num_rows = args.rows
    device = torch.device("cuda")
    logits = torch.randn(num_rows, VOCAB_SIZE, device=device).to(torch.bfloat16)
    floor = num_rows * VOCAB_SIZE * (2 + 2 + 4 + 4) / HBM_BYTES_PER_S * 1e6
    base = None
    sys.stderr.write(f"{torch.cuda.get_device_name(device)}; floor of penalties {floor:.1f} us\n")
    for name, params in CASES.items():
        parts = admitted(params, num_rows, device)
        rows = sampled_rows(parts, num_rows, device)

        def choose(parts: StepParts = parts, rows: SampleRows = rows) -> None:
            parts.sample(logits, rows, NO_STEP_VALUES)

        us = 1e3 * float(triton.testing.do_bench_cudagraph(choose))
        base = us if base is None else base
        line = {"case": name, "rows": num_rows, "us": us, "more_us": us - base}
        sys.stdout.write(json.dumps({**line, "host_us": host_us(choose)}) + "\n")
    if args.model is not None:
        serve(args.model.resolve())


def serve(model: Path) -> None:
    """Print the rates of decode_bs64 without rules and with them."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    plain = [json.loads(line) for line in workloads.json_lines(workloads.make(SERVED, vocab_size))]
    biases = {str(token): 0.5 for token in range(0, vocab_size, vocab_size // 16)}
    rules = {**PENALTIES, "logit_bias": biases}
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalDaemons(["cuda:0"], model.parent) as daemons,
    ):
        base = None
        for name, more in (("without rules", {}), ("penalties and biases", rules)):
            requests = Path(scratch) / "requests.jsonl"
            requests.write_text("".join(json.dumps({**line, **more}) + "\n" for line in plain))
            passes = [bench(model, daemons.endpoints, requests, list(OPTIONS)) for _ in range(3)]
            rate = max(done["out_tok_s"] for done in passes[1:])
            base = rate if base is None else base
            line = {"case": name, "workload": SERVED, "tok_s": rate, "share": rate / base}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
