"""Kernels under Triton's interpreter run faster, and round to FP8 as devices do; see
tests/support/interpreter.py."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Only in the processes that test_interpreted starts: the others need no Triton."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.support.interpreter import round_to_fp8, speed_up  # loads Triton

            speed_up(patch)
            round_to_fp8(patch)
        yield
