"""Writes a seeded workload as JSON lines: id, prompt_token_ids, max_tokens, ignore_eos."""

import argparse
import json
import random
import sys

FIXED = {  # name: (requests, tokens in, tokens out)
    "decode_bs1": (1, 32, 512),
    "decode_bs64": (64, 32, 256),
    "decode_bs256": (256, 32, 256),
    "prefill_1x8192": (1, 8192, 1),
    "prefill_8x8192": (8, 8192, 1),
}


def mixed(vocab_size: int, count: int = 256, seed: int = 0) -> list[tuple[list[int], int]]:
    """count requests of 100-1024 tokens in and 100-1024 out."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(0, vocab_size - 1) for _ in range(rng.randint(100, 1024))],
            rng.randint(100, 1024),
        )
        for _ in range(count)
    ]


def fixed(
    vocab_size: int, count: int, num_in: int, num_out: int, seed: int = 1
) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(0, vocab_size - 1) for _ in range(num_in)], num_out) for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["mixed256", *FIXED])
    parser.add_argument("--vocab-size", type=int, required=True)
    args = parser.parse_args()
    requests = (
        mixed(args.vocab_size)
        if args.name == "mixed256"
        else fixed(args.vocab_size, *FIXED[args.name])
    )
    for i, (prompt, num_out) in enumerate(requests):
        line = {"id": str(i), "prompt_token_ids": prompt, "max_tokens": num_out, "ignore_eos": True}
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
