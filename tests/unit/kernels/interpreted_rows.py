"""The row kernels under Triton's interpreter; conftest.py runs it."""

import pytest

from tests.support.row_checks import (
    check_corrections,
    check_gather,
    check_verified,
    check_writes,
)


@pytest.mark.parametrize(("num_tokens", "block_size"), [(1, 16), (5, 1), (128, 8), (300, 32)])
def test_gather(num_tokens: int, block_size: int) -> None:
    check_gather("cpu", num_tokens, block_size, seed=num_tokens)


@pytest.mark.parametrize("num_values", [1, 17, 260])
def test_writes(num_values: int) -> None:
    check_writes("cpu", num_values, seed=num_values)


@pytest.mark.parametrize("num_seqs", [1, 17, 260])
def test_corrections(num_seqs: int) -> None:
    check_corrections("cpu", num_seqs, seed=num_seqs)


@pytest.mark.parametrize(("num_seqs", "most"), [(1, 4), (17, 1), (130, 31)])
def test_verified(num_seqs: int, most: int) -> None:
    check_verified("cpu", num_seqs, most, seed=num_seqs)
