"""`python -m benchmarks.compare_tokens BEFORE AFTER --model DIR [--device cuda:0|cpu]
[--dtypes A,B]`: compares the tokens and log probabilities of two checkouts, bit by bit.

Runs `worker-client generate` of each checkout on its own daemon, with dummy weights of one seed:
one request, then 64 greedy ones, 64 random ones, and prompts of mixed lengths, which are cut into
chunks. Each run loads the model again, so that none begins with blocks that an earlier one has
cached. Runs the first checkout twice, since a difference counts only where that one repeats itself.
Ends with 1 if tokens differ there.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare_workloads import SHARE, daemon_of, import_path
from worker_client.launcher import LocalDaemons

GREEDY = {"temperature": 0.0, "logprobs": 2}
RANDOM = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "logprobs": 2}
SEEN = ("token_ids", "logprobs")
BUDGET = ("--max-num-batched-tokens", "1024", "--max-model-len", "1024")


def requests(vocab_size: int) -> dict[str, list[dict[str, Any]]]:
    """Return the requests of each run: name and input lines."""
    rng = random.Random(4)

    def lines(count: int, longest: int, num_out: int, options: dict[str, Any]) -> Iterator[Any]:
        for index in range(count):
            length = longest if longest <= 32 else rng.randint(100, longest)
            prompt = [rng.randrange(vocab_size - 1) for _ in range(length)]
            line = {"id": str(index), "prompt_token_ids": prompt, "seed": index, **options}
            yield {**line, "max_tokens": num_out, "ignore_eos": True}

    return {
        "one request": list(lines(1, 32, 128, GREEDY)),
        "64 greedy": list(lines(64, 32, 64, GREEDY)),
        "64 random": list(lines(64, 32, 64, RANDOM)),
        "96 mixed": list(lines(96, 900, 64, RANDOM)),
    }


def generate(
    tree: Path, daemons: LocalDaemons, model: Path, file: Path, dtype: str
) -> dict[str, Any]:
    """Run a checkout's `worker-client generate` with nothing cached; return what is seen of each
    request."""
    command = [sys.executable, "-m", "worker_client", "generate", "--model", str(model)]
    output = file.with_suffix(".out")
    command += ["--endpoints", ",".join(daemons.endpoints), "--input", str(file)]
    command += ["--output", str(output), "--reload", "--load-format", "dummy", "--dtype", dtype]
    command += [*BUDGET, *SHARE]
    environment = {**os.environ, "PYTHONPATH": import_path(tree)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment)
    if done.returncode:
        raise RuntimeError(f"{done.stderr}\n{daemons.log_tail(0)}")
    results = [json.loads(line) for line in output.read_text().splitlines()]
    return {line["id"]: {field: line[field] for field in SEEN} for line in results}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """Return in how many requests the tokens differ, and in how many the log probabilities."""
    if one.keys() != other.keys():
        raise RuntimeError(f"the checkouts answered {len(one)} and {len(other)} requests")
    return [sum(one[key][field] != other[key][field] for key in one) for field in SEEN]


def main() -> None:
    """Print a line for each run of each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtypes", default="bfloat16")
    args = parser.parse_args()
    model = args.model.resolve()
    trees = [args.before.resolve(), args.after.resolve()]
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    wrong = 0
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = [stack.enter_context(daemon_of(t, args.device, model.parent)) for t in trees]
        for dtype, (name, made) in itertools.product(
            args.dtypes.split(","), requests(vocab_size).items()
        ):
            file = scratch / "requests.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in made))
            first, again, after = (
                generate(trees[side], sides[side], model, file, dtype) for side in (0, 0, 1)
            )
            num_tokens = sum(len(result["token_ids"]) for result in first.values())
            repeats, differs = differences(first, again), differences(first, after)
            wrong += differs[0] > 0 and repeats[0] == 0
            print(
                f"{model.name} {dtype} {name}: {num_tokens} tokens of {len(first)} requests; "
                f"requests whose tokens, log probabilities differ between the checkouts: "
                f"{differs[0]}, {differs[1]}; between two runs of the first: "
                f"{repeats[0]}, {repeats[1]}",
                flush=True,
            )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
