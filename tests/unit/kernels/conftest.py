"""Runs the kernels on the CPU under Triton's interpreter, in processes of their own: Triton reads
TRITON_INTERPRET when it is imported, and set here it would reach every other test and daemon.

interpreted_*.py are their tests; test_interpreted.py runs them in one process, as each loads torch,
transformers and Triton anew. There, kernels run faster, round to FP8 as devices do (see
tests/support/interpreter.py), and overflow to infinity without a warning, as devices do too."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


def is_interpreting() -> bool:
    """Say whether this process is one that interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def interpret(request: pytest.FixtureRequest) -> Callable[[Sequence[Path]], None]:
    """interpret(modules): run their tests in one process; fail with its output if one fails. No
    limit on the whole: each test has one."""

    def run(modules: Sequence[Path]) -> None:
        environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        if request.config.getoption("--exhaustive"):
            command.append("--exhaustive")
        done = subprocess.run(
            [*command, *map(str, modules)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(done.stdout + done.stderr, pytrace=False)

    return run


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Only in the processes that interpret: the others need no Triton."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        if is_interpreting():
            from tests.support.interpreter import round_to_fp8, speed_up  # loads Triton

            speed_up(patch)
            round_to_fp8(patch)
        yield
