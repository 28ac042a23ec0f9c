"""Measures how grammar masks travel: `python -m benchmarks.mask_messages [--rows R] [--steps N]`.

Rows of one JSON schema follow random texts over a generated tokenizer of 151,936 tokens. For each
step a process encodes and sends its SampleTokens over ipc, and another receives and reads it, up to
the upload. Prints distinct masks, bytes and both processes' CPU time a step; computing the masks is
not counted.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import zmq
from torch import Tensor

from benchmarks.structured import SCHEMA, any_token, await_masks, begun, make_model
from rpc_schema.codec import decode_step, encode_step
from rpc_schema.sampling import GrammarMasks
from rpc_schema.step import SampleTokens
from rpc_schema.structured import StructuredOutput
from worker_client.steps.masks import StepMasks
from worker_client.structured.grammars import GrammarLimits, Grammars
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.parts.grammar_masks import GrammarMasksPart
from worker_daemon.runner.parts.interface import PartContext
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.sample.sampler import TorchSampling

VOCAB_SIZE = 151_936
SAMPLED = GrammarLimits(max_jump=0)
"""No forced tokens: each step has a mask."""
Spawn = multiprocessing.get_context("spawn")


class Uploading(TorchSampling):
    """Leaves the masks' kernel out."""

    def masked(self, logits: Tensor, words: Tensor, mask_of_row: Tensor) -> Tensor:
        """Return the logits."""
        return logits


def masks_of_steps(model: Path, num_rows: int, num_steps: int) -> list[list[Int32s]]:
    """Return each step's masks; rows with equal texts share theirs, as in a driver."""
    grammars, rng = Grammars(model, VOCAB_SIZE, [VOCAB_SIZE - 1], SAMPLED), random.Random(2)
    grammar = StructuredOutput(kind="json", text=json.dumps(SCHEMA))
    matchers = begun(grammars, grammar, num_rows)
    texts: list[tuple[int, ...]] = [()] * num_rows
    steps = []
    for _ in range(num_steps):
        masks = [np.array(matcher.mask) for matcher in matchers]
        words = dict(zip(texts, masks, strict=True))
        steps.append([words[text] for text in texts])
        tokens = [any_token(matcher, rng) for matcher in matchers]
        for matcher, token in zip(matchers, tokens, strict=True):
            grammars.take(matcher, [token])
        await_masks(grammars, matchers)
        texts = [(*text, token) for text, token in zip(texts, tokens, strict=True)]
    grammars.close()
    return steps


def receive(endpoint: str, num_rows: int, num_steps: int, results: Connection) -> None:
    """Read messages as a daemon does, and send back the CPU seconds of each."""
    torch.set_num_threads(1)
    limits = StepLimits(num_rows, num_rows, 64, VOCAB_SIZE, 16, 4)
    part = GrammarMasksPart(PartContext(limits, torch.device("cpu"), True, True, Uploading()))
    slots, none = np.arange(num_rows), torch.zeros(0, dtype=torch.int32)
    ones = np.ones(num_rows, np.int64)
    rows = SampleRows(slots, ones, ones.astype(np.int32), 0, none, none, none, None)
    logits = torch.zeros(num_rows, 1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        results.send(0.0)
        for _ in range(num_steps):
            socket.poll()
            began = time.process_time()
            frames = [frame.buffer for frame in socket.recv_multipart(copy=False)[1:]]
            message = decode_step(frames)
            assert isinstance(message, SampleTokens)
            masks = message.extensions[0]
            assert isinstance(masks, GrammarMasks)
            brought = part.check_step(masks, frames[1:], limits)
            part.adjust_logits(logits, rows, brought)
            results.send(time.process_time() - began)


def measure(steps: Sequence[Sequence[Int32s]]) -> tuple[list[int], list[float], list[float]]:
    """Return bytes, and CPU seconds of sender and receiver, of each step."""
    num_rows, (ours, theirs) = len(steps[0]), Spawn.Pipe()
    names = [f"request-{row}" for row in range(num_rows)]
    slot_of = {name: slot for slot, name in enumerate(names)}
    sizes, sending, reading = [], [], []
    with tempfile.TemporaryDirectory() as scratch, zmq.Context() as context:
        arguments = (f"ipc://{scratch}/s", num_rows, len(steps), theirs)
        receiver = Spawn.Process(target=receive, args=arguments, daemon=True)
        receiver.start()
        ours.recv()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(arguments[0])
            for seq, masks in enumerate(steps):
                began = time.process_time()
                sent = StepMasks(dict(zip(names, masks, strict=True))).encode(slot_of)
                assert isinstance(sent, tuple), "every row has a mask, and they are right"
                extension, arrays = sent
                request = SampleTokens(
                    epoch=1, link=1, seq=seq + 1, step_seq=seq, extensions=(extension,)
                )
                frames = encode_step(request, arrays)
                socket.send_multipart(frames)
                reading.append(ours.recv())
                sending.append(time.process_time() - began)
                sizes.append(sum(len(frame) for frame in frames))
        receiver.join()
    return sizes, sending, reading


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
        (Path(scratch) / "made").mkdir()
        model = make_model(source, Path(scratch) / "made", max_vocab_size=VOCAB_SIZE)
        steps = masks_of_steps(model, args.rows, args.steps)
    distinct = [len({mask.tobytes() for mask in masks}) for masks in steps]
    print(f"distinct masks a step: median {statistics.median(distinct)}, most {max(distinct)}")
    for name, masks in (
        ("random texts", steps),
        ("equal texts", [[own[0]] * args.rows for own in steps]),
        ("all differ", [_differing(own) for own in steps]),
    ):
        sizes, sending, reading = measure(masks)
        print(
            f"{name:>12}: {statistics.mean(sizes):11,.0f} bytes a step, CPU time, median: "
            f"driver {statistics.median(sending) * 1e6:6.0f} us, "
            f"daemon {statistics.median(reading) * 1e6:6.0f} us",
            flush=True,
        )


def _differing(masks: Sequence[Int32s]) -> list[Int32s]:
    """Return one mask, changed in another word for each row."""
    made = [masks[0].copy() for _ in masks]
    for row, mask in enumerate(made):
        mask[7 * row + 3] ^= row + 1
    return made


if __name__ == "__main__":
    main()
