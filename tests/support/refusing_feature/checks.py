"""Drivers of the copy with the refusing feature: requests with and without it are short of blocks,
lose their driver, and every token is transformers'."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.support.checkpoints import Checkpoint, NearTie, prompts
from tests.support.refusing_feature.plans import Outcome, Plan, Wanted
from tests.support.serving import worker_config
from tests.support.toy_feature.checks import path_of

NUM_BLOCKS = 15
"""Of four tokens: too few for all requests at once."""


def check_serving(tree: Path, endpoints: Sequence[str], checkpoint: Checkpoint) -> None:
    """Over a pipeline of all the daemons: a whole run, and one whose driver dies."""
    seed = random.randrange(1 << 30)
    wanted, expected = refusing_requests(checkpoint, random.Random(seed))
    config = worker_config(
        checkpoint.path, len(endpoints), max_num_batched_tokens=32, max_model_len=40
    )
    plan = Plan(list(endpoints), config, wanted, NUM_BLOCKS, adopt=False, dies_after=None)
    whole = live(tree, plan)
    assert whole is not None and whole.tokens == expected, seed
    assert whole.num_preemptions > 0, seed
    assert whole.num_refused > 10, seed
    live(tree, msgspec.structs.replace(plan, dies_after=12), code=9)
    rest = live(tree, msgspec.structs.replace(plan, adopt=True))
    assert rest is not None and rest.num_adopted > 0
    assert rest.tokens == expected, seed


def live(tree: Path, plan: Plan, code: int = 0) -> Outcome | None:
    """Run a driver of the copy; what it printed, where it ends as it should."""
    driver = subprocess.run(
        [sys.executable, "run.py", msgspec.json.encode(plan).decode()],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path_of(tree)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert driver.returncode == code, driver.stderr
    return msgspec.json.decode(driver.stdout, type=Outcome) if code == 0 else None


def refusing_requests(
    checkpoint: Checkpoint, rng: random.Random, count: int = 6
) -> tuple[list[Wanted], dict[str, list[int]]]:
    """Requests with their expected tokens; a third of them refuses nothing."""
    wanted: list[Wanted] = []
    expected: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts(rng.randrange(1 << 20), [5 + i % 9 for i in range(60)])):
        name, length = f"r{index}", 14 + index % 5
        try:
            expected[name] = checkpoint.greedy(prompt.tolist(), length)
        except NearTie:
            continue
        wanted.append(Wanted(name, prompt.tolist(), length, (60, 0, 25)[len(wanted) % 3]))
        if len(wanted) == count:
            return wanted, expected
    raise AssertionError("too few prompts have a clear continuation")
