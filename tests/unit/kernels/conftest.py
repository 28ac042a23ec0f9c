"""Kernels under Triton's interpreter run faster, round to FP8 as devices do (see
tests/support/interpreter.py), and overflow to infinity without a warning, as devices do too."""

import os
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Only in the processes that test_interpreted starts: the others need no Triton."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.support.interpreter import round_to_fp8, speed_up  # loads Triton

            speed_up(patch)
            round_to_fp8(patch)
        yield
