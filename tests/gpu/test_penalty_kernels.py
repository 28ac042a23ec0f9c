"""Kernels of penalties on the device: bit for bit those of plain torch there."""

import pytest
import torch

from tests.support.penalty_checks import check_counts, check_penalized
from worker_daemon.kernels.sampling import TritonSampling

SAMPLING = TritonSampling(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 331), (9, 128_256), (8, 151_936)])
def test_penalties(num_rows, vocab_size, dtype):
    check_penalized(SAMPLING, "cuda", num_rows, vocab_size, dtype, torch.seed() % 2**32)


@pytest.mark.parametrize("vocab_size", [331, 151_936])
def test_counts(vocab_size):
    check_counts(SAMPLING, "cuda", vocab_size, torch.seed() % 2**32)
