"""Runs the kernels on the CPU under Triton's interpreter, in processes of their own: Triton reads
TRITON_INTERPRET when it is imported, and set here it would reach every other test and daemon.

interpreted_*.py are their tests. Each of ALONE is one test, by its file, so that a run spreads them
over its processes; test_interpreted.py runs all others in one, as each process loads torch and
Triton anew. In these processes kernels run faster, round to FP8 as devices do (see
tests/support/interpreter.py), and overflow to infinity without a warning, as devices do too."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
ALONE = frozenset(
    f"interpreted_{subject}.py" for subject in ("attention", "experts", "fp8", "layers", "rotated")
)
"""Modules that take long."""


def is_interpreting() -> bool:
    """Say whether this process is one that interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class InterpretedModule(pytest.File):
    """A module of tests that is one test here."""

    def collect(self) -> Iterator[pytest.Item]:
        yield InterpretedTests.from_parent(self, name="interpreted")


class InterpretedTests(pytest.Item):
    """Fails if one test of the module does."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        self.add_marker(pytest.mark.slow)
        self.add_marker(pytest.mark.timeout(0))  # each test of the module has a limit

    def runtest(self) -> None:
        run_interpreted([self.path], self.config)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style=None):
        """The failure is what the process printed."""
        if excinfo.errisinstance(pytest.fail.Exception):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector):
    collectors = yield
    if file_path.name in ALONE and not is_interpreting():
        return [InterpretedModule.from_parent(parent, path=file_path)]
    return collectors


@pytest.fixture
def interpret(request: pytest.FixtureRequest) -> Callable[[Sequence[Path]], None]:
    """interpret(modules): fails if one of their tests does."""
    return lambda modules: run_interpreted(modules, request.config)


def run_interpreted(modules: Sequence[Path], config: pytest.Config) -> None:
    """Run the modules' tests in one process; fail with its output. No limit on the whole: each
    test has one."""
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    if config.getoption("--exhaustive"):
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


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Only in the processes that interpret: the others need no Triton."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        if is_interpreting():
            from tests.support.interpreter import round_to_fp8, speed_up  # loads Triton

            speed_up(patch)
            round_to_fp8(patch)
        yield
