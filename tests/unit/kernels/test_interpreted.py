"""Runs the interpreted modules that take little time, in one process: see conftest.py."""

from pathlib import Path

import pytest

from tests.unit.kernels.conftest import ALONE

MODULES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


def test_modules_that_run_alone_are_there() -> None:
    assert {path.name for path in MODULES} > ALONE


@pytest.mark.slow
@pytest.mark.timeout(0)  # each test of the modules has a limit
def test_interpreted(interpret) -> None:
    interpret([path for path in MODULES if path.name not in ALONE])
