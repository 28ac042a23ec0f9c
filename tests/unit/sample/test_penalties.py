"""Penalties in plain torch, for samples behind drafts and rows that gain several tokens, against
loops."""

import pytest
import torch

from tests.support.penalty_checks import check_counts, check_drafts
from worker_daemon.sample.sampler import TorchSampling


@pytest.mark.parametrize("most", [1, 2, 6])
def test_counts(most):
    check_counts(TorchSampling(), "cpu", 41, torch.seed() % 2**32, most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [1, 5, 31])
def test_drafts(most, dtype):
    check_drafts(TorchSampling(), "cpu", 300, dtype, most, torch.seed() % 2**32)
