"""The kernel of grammar masks under Triton's interpreter; conftest.py runs it."""

import numpy as np
import pytest
import torch

from tests.support.mask_checks import check_masks
from worker_daemon.kernels.token_masks import BLOCK, masked


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 200, BLOCK + 45])
def test_masked_logits_equal_a_loop(vocab_size: int) -> None:
    rng = np.random.default_rng()
    for _ in range(3):
        check_masks(masked, rng, torch.device("cpu"), vocab_size)
