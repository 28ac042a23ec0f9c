"""The kernel of grammar masks on a GPU against a loop over bits, and what it never does."""

import numpy as np
import pytest
import torch

from tests.support.mask_checks import check_masks
from worker_daemon.backend import choose_backend
from worker_daemon.sample.sampler import TorchSampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def sampling():
    found = choose_backend(torch.device("cuda")).sampling
    assert found.name == "triton"
    return found


@pytest.mark.parametrize("vocab_size", [1, 33, 4096, 9001])
def test_masked_logits_equal_a_loop(sampling, vocab_size):
    rng = np.random.default_rng()
    for _ in range(5):
        check_masks(sampling.masked, rng, torch.device("cuda"), vocab_size)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(64, 128_256), (300, 151_936)])
def test_large_batches_are_torchs(sampling, num_rows, vocab_size):
    logits = torch.randn(num_rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    words = torch.randint(
        -(2**31), 2**31 - 1, (num_rows, -(-vocab_size // 32)), device="cuda", dtype=torch.int32
    )
    mask_of_row = torch.randperm(num_rows, device="cuda").int() - num_rows // 4
    mask_of_row.clamp_(min=-1)
    expected = TorchSampling().masked(logits, words, mask_of_row)
    assert torch.equal(sampling.masked(logits, words, mask_of_row), expected)


def test_nothing_waits_for_the_device(sampling):
    logits = torch.randn(8, 1000, device="cuda")
    words = torch.full((3, 32), -1, dtype=torch.int32, device="cuda")
    mask_of_row = torch.tensor([0, 1, 2, -1, -1, 0, 1, 2], dtype=torch.int32, device="cuda")
    sampling.masked(logits, words, mask_of_row)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.masked(logits, words, mask_of_row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
