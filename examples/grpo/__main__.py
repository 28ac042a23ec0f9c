"""`python -m examples.grpo`: 200 updates, which take two or three minutes on two cores. With
`--kills 20`, the run is done twice, once undisturbed and once with that many kills, and the two are
compared. Which processes die, and when, is up to `--seed`."""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from examples.grpo.run_files import RunFiles
from examples.grpo.supervisor import Supervisor, plan_kills


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo", description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="a new one, which is kept")
    given = parser.parse_args()
    root = given.directory or Path(tempfile.mkdtemp(prefix="grpo-"))
    try:
        run(root / "undisturbed", given.updates)
        if given.kills:
            run(root / "disturbed", given.updates, given.kills, given.seed)
            found = list(differences(root / "undisturbed", root / "disturbed", given.updates))
            say("\n".join(found) or "same tokens, log probabilities, rewards and policies")
            sys.exit(bool(found))
    finally:
        if given.directory is None:
            shutil.rmtree(root)


def run(directory: Path, num_updates: int, num_kills: int = 0, seed: int = 0) -> None:
    """Do a run, and print its rewards."""
    began = time.monotonic()
    with Supervisor(directory, num_updates) as supervisor:
        supervisor.run(plan_kills(seed, num_kills, num_updates, supervisor.names), say)
    say(f"{num_updates} updates in {time.monotonic() - began:.0f} s, {num_kills} kills")


def differences(one: Path, other: Path, num_updates: int) -> Iterator[str]:
    """Yield how two runs differ: their batches, which have all tokens, and their last policies."""
    files = RunFiles(one), RunFiles(other)
    for number in range(num_updates):
        batches = [run.read_batch(number) for run in files]
        for left, right in zip(*batches, strict=True):
            if left != right:
                yield f"batch {number}: {left} is not {right}"
    left, right = (run.policy(num_updates) / "model.safetensors" for run in files)
    if left.read_bytes() != right.read_bytes():
        yield f"policy {num_updates} differs"


def say(line: str) -> None:
    """Write a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
