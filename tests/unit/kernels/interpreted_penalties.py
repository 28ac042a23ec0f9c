"""Kernels of penalties under Triton's interpreter against plain torch; conftest.py runs it."""

import pytest
import torch

from tests.support.penalty_checks import check_counts, check_drafts, check_penalized
from worker_daemon.kernels.penalties import BLOCK
from worker_daemon.kernels.sampling import TritonSampling

SAMPLING = TritonSampling(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 37), (5, BLOCK + 33)])
def test_penalties(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    seed = torch.seed() % 2**32
    check_penalized(SAMPLING, "cpu", num_rows, vocab_size, dtype, seed)


@pytest.mark.parametrize(("most", "dtype"), [(1, torch.bfloat16), (5, torch.float32)], ids=str)
def test_drafts(most: int, dtype: torch.dtype) -> None:
    check_drafts(SAMPLING, "cpu", 37, dtype, most, torch.seed() % 2**32)


@pytest.mark.parametrize("most", [1, 2, 6])
def test_counts(most: int) -> None:
    check_counts(SAMPLING, "cpu", 41, torch.seed() % 2**32, most)
