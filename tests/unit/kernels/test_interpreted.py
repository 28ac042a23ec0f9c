"""Runs all interpreted modules in one process: see conftest.py."""

from pathlib import Path

import pytest

MODULES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(0)  # each test of the modules has a limit
def test_interpreted(interpret) -> None:
    assert MODULES
    interpret(MODULES)
