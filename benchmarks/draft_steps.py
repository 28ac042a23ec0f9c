"""Times steps that verify drafts against decodes: python -m benchmarks.draft_steps --device cuda:0.

The drafts are looked up on the device in random texts, so almost all are refused: this is what a
step costs, not what drafts gain. A step is sent before the last one's outcome is known, as drivers
do; its corrections are those of the step before.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.stage_driver import StageDriver, bitmap, wait
from rpc_schema.config import SpeculativeConfig
from rpc_schema.step import ExecuteModel

MODELS = Path(__file__).parent / "models"
NUM_WARM, NUM_TIMED = 12, 40
PROMPT_LEN = 1000


class Timed(NamedTuple):
    """A measurement."""

    num_seqs: int
    num_drafts: int
    ms: float
    """Median milliseconds from one result to the next."""
    tokens_a_row: float
    """Mean tokens that a row gains in a step."""


def measure(driver: StageDriver, num_seqs: int, num_drafts: int) -> Timed:
    """Run steps of num_seqs rows with num_drafts drafts each."""
    most = NUM_WARM + NUM_TIMED + 4
    driver.admit(num_seqs, PROMPT_LEN, (most + 4) * (1 + num_drafts))
    slots = np.arange(num_seqs)
    refused: deque[np.ndarray[tuple[int], np.dtype[np.int64]]] = deque()
    in_flight, times, gained = deque(), [], 0
    for step in range(NUM_WARM + NUM_TIMED):
        by = refused.popleft() if refused else np.zeros(num_seqs, np.int64)
        in_flight.append(driver.worker.execute_model(_step(driver, slots, num_drafts, by), []))
        if len(in_flight) == 2:
            reply, _ = in_flight.popleft().result()
            times.append(time.perf_counter())
            counts = np.frombuffer(reply.num_sampled or b"\1" * num_seqs, np.uint8)
            refused.append(1 + num_drafts - counts.astype(np.int64))
            gained += int(counts.sum()) if step >= NUM_WARM else 0
    wait(in_flight.popleft())
    ms = float(np.median(np.diff(times[-NUM_TIMED:]))) * 1e3
    return Timed(num_seqs, num_drafts, ms, gained / num_seqs / NUM_TIMED)


def _step(
    driver: StageDriver,
    slots: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    num_drafts: int,
    refused: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> ExecuteModel:
    pairs = _pairs(slots, np.full_like(slots, num_drafts))
    return ExecuteModel(
        **driver.ids(),
        total_num_scheduled_tokens=slots.size * (1 + num_drafts),
        scheduled=bitmap(slots),
        num_scheduled_tokens=_pairs(slots, np.full_like(slots, 1 + num_drafts)),
        num_drafts=pairs if num_drafts else b"",
        corrections=_pairs(slots[refused > 0], refused[refused > 0]),
    )


def _pairs(
    slots: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    values: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> bytes:
    return np.stack([slots, values], axis=1).astype("<i4").tobytes()


def run(model: str, device: str, most: int, batches: list[int]) -> Iterator[Timed]:
    """Yield the measurements of one model."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=most)
    driver = StageDriver(MODELS / model, device, 4096, num_blocks=24_000, speculative=speculative)
    driver.start()
    for num_seqs in batches:
        for num_drafts in (0, 1, 2, 3, 4, most):
            if num_drafts <= most and (num_drafts < most or num_drafts > 4 or most <= 4):
                yield measure(driver, num_seqs, num_drafts)
    driver.leave()


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--most", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found, alone = [], 0.0
    for timed in run(args.model, args.device, args.most, args.batches):
        alone = timed.ms if timed.num_drafts == 0 else alone
        print(
            f"{timed.num_seqs:4d} rows, {timed.num_drafts} drafts: {timed.ms:7.3f} ms, "
            f"{timed.ms / alone:5.2f}x, {timed.tokens_a_row:.2f} tokens a row",
            flush=True,
        )
        found.append(timed._asdict())
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
