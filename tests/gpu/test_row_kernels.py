"""The row kernels on a GPU."""

import pytest
import torch

from tests.support.row_checks import (
    check_corrections,
    check_gather,
    check_verified,
    check_writes,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_tokens", [1, 7, 256, 8192])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_gather(num_tokens: int, block_size: int) -> None:
    check_gather("cuda", num_tokens, block_size, seed=num_tokens)


@pytest.mark.parametrize("num_values", [1, 256, 3000])
def test_writes(num_values: int) -> None:
    check_writes("cuda", num_values, seed=num_values)


@pytest.mark.parametrize("num_seqs", [1, 256, 1024])
def test_corrections(num_seqs: int) -> None:
    check_corrections("cuda", num_seqs, seed=num_seqs)


@pytest.mark.parametrize(("num_seqs", "most"), [(1, 4), (17, 1), (130, 31)])
def test_verified(num_seqs: int, most: int) -> None:
    check_verified("cuda", num_seqs, most, seed=num_seqs)
