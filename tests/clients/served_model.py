"""Runs in the server's environment: trains the model, writes what transformers says of texts, and
serves the model. argv: a directory."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients import documents as d
from tests.support.trained_model import chat, train_model

CASES = [
    (d.HELLO, " one two three"),
    (d.COUNT, " three two one"),
    ("Hello", ", world."),
    ("one two", " three four five"),
]
"""Contexts and continuations."""


def main(directory: Path) -> None:
    """Become the server."""
    model = directory / d.MODEL
    train_model(
        model,
        [
            chat(d.HELLO, answer=d.HELLO_ANSWER),
            chat(d.COUNT, answer=d.COUNT_ANSWER),
            chat(d.PERSON, answer=d.PERSON_ANSWER),
            chat(d.WEATHER, answer=d.CALL),
            chat(
                d.WEATHER,
                f"<|assistant|>{d.CALL}",
                f"<|tool|>{d.WEATHER_RESULT}",
                answer=d.WEATHER_ANSWER,
            ),
        ],
    )
    (directory / "likelihoods.json").write_text(json.dumps(likelihoods(model)))
    words = [sys.executable, "-m", "worker_client", "serve", "--model", str(model)]
    options = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--port",
        "0",
        "--api-key",
        "key-of-clients",
    ]
    os.execv(sys.executable, [*words, *options])


def likelihoods(model: Path) -> list[tuple[str, str, float]]:
    """Return the log likelihood of each continuation after its context."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model)
    found = []
    for context, continuation in CASES:
        before = tokenizer(context)["input_ids"]
        ids = tokenizer(context + continuation)["input_ids"]
        with torch.no_grad():
            rows = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(before), len(ids))
        found.append((context, continuation, sum(float(rows[p - 1, ids[p]]) for p in places)))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
