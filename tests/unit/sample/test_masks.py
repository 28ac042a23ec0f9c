"""The torch path's masks against a loop over bits."""

import numpy as np
import pytest
import torch

from tests.support.mask_checks import check_masks
from worker_daemon.sample.sampler import TorchSampling


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_masked_logits_equal_a_loop(vocab_size):
    rng = np.random.default_rng()
    for _ in range(10):
        check_masks(TorchSampling().masked, rng, torch.device("cpu"), vocab_size)
