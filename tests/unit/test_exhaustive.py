"""Which tests run without --exhaustive: as many as have each value of each parameter."""

import random
import subprocess
import sys
from pathlib import Path

from tests.support.exhaustive import covering

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest

@pytest.mark.each_value
@pytest.mark.parametrize("x", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("y", "abcd")
class TestGrid:
    def test_grid(self, x, y): pass

    def test_another(self, x, y): pass

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", "ab")
def test_unmarked(x, y): pass

@pytest.mark.each_value
def test_without_parameters(): pass

@pytest.mark.exhaustive
def test_long(): pass
"""


def run(directory: Path, *arguments: str) -> str:
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  exhaustive\n  each_value\n")
    (directory / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "tests.support.exhaustive"]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_only_exhaustive_runs_run_all(tmp_path):
    assert run(tmp_path).startswith("13 passed, 17 deselected")
    assert run(tmp_path, "--exhaustive").startswith("30 passed in")


def test_few_combinations_have_each_value():
    for _ in range(100):
        sizes = [random.randint(1, 6) for _ in range(random.randint(1, 4))]
        drawn = [[random.randrange(size) for size in sizes] for _ in range(random.randint(1, 60))]
        combinations = {
            number: {f"p{place}": str(value) for place, value in enumerate(values)}
            for number, values in enumerate(drawn)
        }
        values = {item for chosen in combinations.values() for item in chosen.items()}
        kept = covering(combinations)
        assert {item for key in kept for item in combinations[key].items()} == values
        assert len(kept) <= len(values)
        assert kept == covering(combinations)
