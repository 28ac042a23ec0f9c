"""Measures decoding with a JSON schema on some of 64 rows, relative to decoding without:
`python -m benchmarks.structured [--model DIR] [--tokenizer FILE] [--device cuda|cpu] [--pp P]
[--tp T] [--tokens N]`.

Serves 64 requests with 0, 8 and 64 masked rows, each twice, in one group with dummy weights, and
uses the second pass. Tokens per second over the whole run, as in benchmarks/e2e.py. The schema has
no end within the run. Without --tokenizer the tokenizer is generated: random words, as many as the
model's vocabulary size. Also times filling 64 masks on this host, which must be well below a
step's time.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.e2e import OPTIONS, bench
from benchmarks.local_group import devices_of
from rpc_schema.structured import StructuredOutput
from worker_client.launcher import LocalDaemons
from worker_client.structured.grammars import Grammars
from worker_client.structured.matchers import GrammarMatcher

NUM_ROWS = 64
MASKED = (0, 8, 64)
TARGETS = {8: 0.97, 64: 0.90}
SCHEMA = {
    "type": "array",
    "minItems": 2000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "size", "tags", "ok"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}


def make_model(
    source: Path, directory: Path, *, max_vocab_size: int, tokenizer: Path | None = None
) -> Path:
    """Copy a model's config.json, and copy or generate a tokenizer for it; return the copy."""
    made = directory / source.name
    made.mkdir()
    shutil.copy(source / "config.json", made)
    if tokenizer is not None:
        shutil.copy(tokenizer, made / "tokenizer.json")
        return made
    size = min(json.loads((source / "config.json").read_text())["vocab_size"], max_vocab_size)
    rng = random.Random(0)
    vocab = {letter: token for token, letter in enumerate(sorted(_letters()))}
    syllables = ["an", "be", "co", "di", "en", "fa", "ri", "st", "ing", "er", '":', "00", "{", ","]
    while len(vocab) < size:
        word = "".join(rng.choices(syllables, k=rng.randint(1, 5)))
        vocab.setdefault(
            rng.choice(["Ġ", ""]) + word + rng.choice(["", "s", str(len(vocab))]), len(vocab)
        )
    generated = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    generated.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    generated.decoder = decoders.ByteLevel()
    generated.save(str(made / "tokenizer.json"))
    return made


def _letters() -> list[str]:
    letters: list[str] = pre_tokenizers.ByteLevel.alphabet()
    return letters


def lines(vocab_size: int, num_masked: int, num_tokens: int) -> Iterator[str]:
    """Yield the requests."""
    rng = random.Random(1)
    for index in range(NUM_ROWS):
        line: dict[str, object] = {
            "id": str(index),
            "prompt_token_ids": [rng.randrange(vocab_size - 1) for _ in range(32)],
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }
        if index < num_masked:
            line["structured_outputs"] = {"json": SCHEMA}
        yield json.dumps(line) + "\n"


def begun(grammars: Grammars, grammar: StructuredOutput, count: int) -> list[GrammarMatcher]:
    """Return matchers of a grammar, once it is compiled."""
    compiled = grammars.compile(grammar)
    while not compiled.done():
        grammars.proceed(0.01)
    return [grammars.begin(grammar) for _ in range(count)]


def await_masks(grammars: Grammars, matchers: list[GrammarMatcher]) -> None:
    """Wait until all matchers have their masks."""
    grammars.proceed()
    while not all(matcher.is_ready for matcher in matchers):
        grammars.proceed(0.01)


def any_token(matcher: GrammarMatcher, rng: random.Random) -> int:
    """Return a random token that a matcher allows."""
    if matcher.forced:
        return matcher.forced[0]
    assert matcher.mask is not None, matcher.error
    word = rng.choice(matcher.mask.nonzero()[0].tolist())
    bits = int(matcher.mask[word]) & 0xFFFFFFFF
    return int(32 * word + rng.choice([bit for bit in range(32) if bits >> bit & 1]))


def fill_ms(model: Path, vocab_size: int, eos_token_id: int) -> tuple[float, float]:
    """Return the mean and the longest time until all rows' masks are there, for random texts."""
    grammars = Grammars(model, vocab_size, [eos_token_id])
    grammar = StructuredOutput(kind="json", text=json.dumps(SCHEMA))
    matchers, rng = begun(grammars, grammar, NUM_ROWS), random.Random(2)
    seconds = []
    for _ in range(60):
        for matcher in matchers:
            grammars.take(matcher, [any_token(matcher, rng)])
        began = time.perf_counter()
        await_masks(grammars, matchers)
        seconds.append(time.perf_counter() - began)
    grammars.close()
    return statistics.mean(seconds) * 1e3, max(seconds) * 1e3


def main() -> None:
    """Measure, and print a line for each share of masked rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--model", type=Path, default=here / "models" / "llama-8b")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json that fits the model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    vocab_size, ends = config["vocab_size"], config["eos_token_id"]
    options = [*OPTIONS, "--pipeline-parallel-size", str(args.pp)]
    options += ["--tensor-parallel-size", str(args.tp)]
    devices = devices_of(args.device, args.pp * args.tp)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(
            args.model.resolve(),
            Path(scratch),
            max_vocab_size=vocab_size,
            tokenizer=args.tokenizer,
        )
        mean, slowest = fill_ms(model, vocab_size, ends)
        print(f"filling {NUM_ROWS} masks: {mean:.2f} ms, at most {slowest:.2f}", flush=True)
        rates = {}
        with LocalDaemons(devices, model.parent) as daemons:
            for num_masked in MASKED:
                requests = Path(scratch) / f"{num_masked}.jsonl"
                requests.write_text("".join(lines(vocab_size, num_masked, args.tokens)))
                for _ in range(2):
                    result = bench(model, daemons.endpoints, requests, options)
                rates[num_masked] = result["out_tok_s"]
                share = rates[num_masked] / rates[0]
                target = TARGETS.get(num_masked, 1.0)
                verdict = "" if share >= target else f"  BELOW THE TARGET OF {target:.0%}"
                print(
                    f"{num_masked:3} of {NUM_ROWS} rows masked: {rates[num_masked]:10.1f} tok/s"
                    f"  {share:6.1%} of unmasked{verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
