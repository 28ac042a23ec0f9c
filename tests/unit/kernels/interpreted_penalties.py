"""Kernels of penalties under Triton's interpreter against plain torch; conftest.py runs it."""

import pytest
import torch

from tests.support.penalty_checks import check_counts, check_penalized
from worker_daemon.kernels.penalties import BLOCK
from worker_daemon.kernels.sampling import TritonSampling

SAMPLING = TritonSampling(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 37), (5, BLOCK + 33)])
def test_penalties(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    seed = torch.seed() % 2**32
    check_penalized(SAMPLING, "cpu", num_rows, vocab_size, dtype, seed)


def test_counts() -> None:
    check_counts(SAMPLING, "cpu", 41, torch.seed() % 2**32)
