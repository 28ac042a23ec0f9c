"""Measures what drafts of a given acceptance gain: python -m benchmarks.draft_gain --device cuda:0.

The drafts are the rows' own outputs, recorded before, with a share of wrong tokens
(replay_drafter.py); verification decides. The outputs are recorded in steps of the same shape, all
drafts refused: with random weights the largest logits lie so close that other kernels, which round
in another order, would choose other tokens.
"""

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import numpy as np
import torch

from benchmarks.draft_steps import MODELS, measure
from benchmarks.replay_drafter import Mistakes, Recording, ReplayDrafter
from benchmarks.stage_driver import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, StageDriver, bitmap, wait
from rpc_schema.config import SpeculativeConfig
from rpc_schema.step import ExecuteModel
from worker_daemon.contracts.arrays import Int64s
from worker_daemon.drafting.row_texts import DraftLimits
from worker_daemon.runner.output import PendingOutput

PROMPT_LEN = 1040
"""Beyond a bound of lengths (kernels/tiles.py:length_bounds), which would change the kernels."""
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 100_000
"""Wrong drafts are tokens below this."""
NUM_TOKENS = 160
"""Tokens of each row that are recorded, and gained again with drafts."""


class Gain(NamedTuple):
    """A measurement."""

    num_seqs: int
    share: float
    """Wrong drafts."""
    alone_ms: float
    """Milliseconds of a decode."""
    step_ms: float
    """Mean milliseconds of a step with drafts."""
    tokens_a_row: float
    factor: float
    """Tokens per second, divided by those of decodes."""
    agreed: float
    """Share of the rows that gave the recorded output."""


class Rows:
    """Rows of random prompts, which are admitted again and again."""

    def __init__(self, driver: StageDriver, num_seqs: int, num_drafts: int) -> None:
        self._driver, self._num_drafts = driver, num_drafts
        self.slots = np.arange(num_seqs)
        at_once = MAX_NUM_BATCHED_TOKENS // PROMPT_LEN
        room = (NUM_TOKENS + 8) * (1 + num_drafts)
        self._admissions = [
            driver.prefill(self.slots[first : first + at_once], PROMPT_LEN, room)
            for first in range(0, num_seqs, at_once)
        ]
        texts = b"".join(tokens for _, tokens in self._admissions)
        self.prompts = np.frombuffer(texts, "<i4").reshape(num_seqs, PROMPT_LEN)

    def run(self) -> tuple[list[list[int]], float, float]:
        """Admit the rows, and run steps until each has NUM_TOKENS tokens. Return these, the mean
        milliseconds of a step, and the mean tokens that a row gains in one."""
        worker, outputs = self._driver.worker, [list[int]() for _ in self.slots]
        worker.on_attach()
        for message, tokens in self._admissions:
            again = msgspec.structs.replace(message, **self._driver.ids())
            reply = worker.execute_model(again, [tokens])
            assert reply is not None, "the only stage answers every step"
            self._take(outputs, reply)
        in_flight: deque[PendingOutput | None] = deque()
        refused: deque[Int64s] = deque()
        began, num_steps, first = time.perf_counter(), 0, sum(map(len, outputs))
        while min(map(len, outputs)) < NUM_TOKENS:
            by = refused.popleft() if refused else np.zeros_like(self.slots)
            in_flight.append(worker.execute_model(self._step(by), []))
            if len(in_flight) == 2:
                oldest = in_flight.popleft()
                assert oldest is not None, "the only stage answers every step"
                counts = self._take(outputs, oldest)
                refused.append(1 + self._num_drafts - counts)
                num_steps += 1
        seconds, gained = time.perf_counter() - began, sum(map(len, outputs)) - first
        wait(in_flight.popleft())
        per_row = gained / num_steps / self.slots.size
        return [own[:NUM_TOKENS] for own in outputs], seconds * 1e3 / num_steps, per_row

    def _take(self, outputs: list[list[int]], pending: PendingOutput) -> Int64s:
        reply, _ = pending.result()
        tokens = np.frombuffer(reply.sampled_token_ids, "<i4").tolist()
        slots = np.flatnonzero(
            np.unpackbits(np.frombuffer(reply.slots, np.uint8), bitorder="little")
        ).tolist()
        counts = np.frombuffer(reply.num_sampled or b"\1" * len(slots), np.uint8)
        for slot, count in zip(slots, counts.tolist(), strict=True):
            outputs[slot] += tokens[:count]
            del tokens[:count]
        return counts.astype(np.int64)

    def _step(self, refused: Int64s) -> ExecuteModel:
        slots, count = self.slots, self._num_drafts
        return ExecuteModel(
            **self._driver.ids(),
            total_num_scheduled_tokens=slots.size * (1 + count),
            scheduled=bitmap(slots),
            num_scheduled_tokens=_pairs(slots, np.full_like(slots, 1 + count)),
            num_drafts=_pairs(slots, np.full_like(slots, count)),
            corrections=_pairs(slots[refused > 0], refused[refused > 0]),
        )


def _pairs(slots: Int64s, values: Int64s) -> bytes:
    return np.stack([slots, values], axis=1).astype("<i4").tobytes()


def gain(
    driver: StageDriver, drafter: ReplayDrafter, num_seqs: int, num_drafts: int, share: float
) -> Gain:
    """Measure rows whose drafts are wrong with this probability."""
    drafter.load([], Mistakes(share, VOCAB_SIZE))
    alone = measure(driver, num_seqs, 0).ms
    rows = Rows(driver, num_seqs, num_drafts)
    recorded, _, _ = rows.run()
    recordings = [
        Recording(prompt, output)
        for prompt, output in zip(rows.prompts.tolist(), recorded, strict=True)
    ]
    drafter.load(recordings, Mistakes(share, VOCAB_SIZE, seed=num_seqs))
    outputs, step_ms, tokens = rows.run()
    agreed = sum(map(list.__eq__, outputs, recorded)) / num_seqs
    return Gain(num_seqs, share, alone, step_ms, tokens, tokens * alone / step_ms, agreed)


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limits = DraftLimits(MAX_NUM_SEQS, MAX_MODEL_LEN, args.drafts)
    num_recorded = max(args.batches) * NUM_TOKENS
    drafter, found = ReplayDrafter(limits, num_recorded, torch.device(args.device)), []
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=args.drafts)
    with mock.patch("worker_daemon.worker.serving.make_drafter", lambda *_: drafter):
        driver = StageDriver(
            MODELS / args.model,
            args.device,
            MAX_MODEL_LEN,
            num_blocks=24_000,
            speculative=speculative,
        )
        driver.start()
        for num_seqs in args.batches:
            found.append(gain(driver, drafter, num_seqs, args.drafts, args.share))
            print(found[-1], flush=True)
        driver.leave()
    if args.json is not None:
        args.json.write_text(json.dumps([each._asdict() for each in found], indent=1))


if __name__ == "__main__":
    main()
