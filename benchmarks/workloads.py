"""Makes the seeded workloads: as lengths, and as the JSON lines that `worker-client bench --input`
reads (`python -m benchmarks.workloads NAME --vocab-size V`). Runs nothing."""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

FIXED = {  # name: (requests, tokens in, tokens out)
    "decode_bs1": (1, 32, 512),
    "decode_bs64": (64, 32, 256),
    "decode_bs256": (256, 32, 256),
    "prefill_1x8192": (1, 8192, 1),
    "prefill_8x8192": (8, 8192, 1),
}
NAMES = (*FIXED, "mixed256")
NAMED = {  # run only if named: see also POOLING
    "decode_bs16": (16, 100, 256),
    "long_32x8000": (32, 8000, 256),
    "long_4x30000": (4, 30000, 64),  # needs --options "--max-model-len 32768"
    "agents_32x4000": (32, 4000, 512),
}
POOLING = {  # the same prompts, first to sample a token each, then to embed them
    "prefill_512x512": (512, 512, 1),
    "embed_512x512": (512, 512, 0),
}
ARRIVALS = {  # name: (requests a second, seconds, tokens in, tokens out)
    "poisson_8rps": (8.0, 60.0, 1000, 200),
}

Workload = list[tuple[list[int], int]]
"""Prompt and number of tokens to generate for each request; 0: embed."""


def make(name: str, vocab_size: int) -> Workload:
    """Return a workload by name."""
    sizes = {**FIXED, **NAMED, **POOLING}
    return mixed(vocab_size) if name == "mixed256" else fixed(vocab_size, *sizes[name])


def mixed(vocab_size: int, count: int = 256, seed: int = 0) -> Workload:
    """Return count requests of 100-1024 tokens in and 100-1024 out."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(0, vocab_size - 1) for _ in range(rng.randint(100, 1024))],
            rng.randint(100, 1024),
        )
        for _ in range(count)
    ]


def fixed(vocab_size: int, count: int, num_in: int, num_out: int, seed: int = 1) -> Workload:
    """Return count requests of the same lengths."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(0, vocab_size - 1) for _ in range(num_in)], num_out) for _ in range(count)
    ]


class TimedRequest(NamedTuple):
    """A request of a workload whose requests arrive over time."""

    arrival_s: float
    """Time since the workload began."""
    prompt: list[int]
    num_out: int


def poisson(
    vocab_size: int, rate: float, seconds: float, num_in: int, num_out: int, seed: int = 2
) -> list[TimedRequest]:
    """Return the requests of a Poisson process, in order of arrival: `rate` a second on average,
    over so many seconds."""
    rng = random.Random(seed)
    requests: list[TimedRequest] = []
    arrival_s = rng.expovariate(rate)
    while arrival_s < seconds:
        prompt = [rng.randrange(0, vocab_size - 1) for _ in range(num_in)]
        requests.append(TimedRequest(arrival_s, prompt, num_out))
        arrival_s += rng.expovariate(rate)
    return requests


def json_lines(workload: Workload) -> Iterator[str]:
    """Yield one line per request: greedy and ignoring end of sequence, or embedded."""
    for i, (prompt, num_out) in enumerate(workload):
        line: dict[str, object] = {"id": str(i), "prompt_token_ids": prompt}
        line |= (
            {"max_tokens": num_out, "ignore_eos": True}
            if num_out
            else {"pooling": {"task": "embed"}}
        )
        yield json.dumps(line, separators=(",", ":")) + "\n"


def main() -> None:
    """Write a workload to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*NAMES, *NAMED, *POOLING))
    parser.add_argument("--vocab-size", type=int, required=True)
    args = parser.parse_args()
    sys.stdout.writelines(json_lines(make(args.name, args.vocab_size)))


if __name__ == "__main__":
    main()
