"""The kernels of drafts from text under Triton's interpreter; conftest.py runs it."""

import numpy as np
import pytest
import torch

from rpc_schema.config import SpeculativeConfig
from tests.support.text_checks import RandomRequests, check_ngram
from worker_daemon.drafting.registry import make_drafter
from worker_daemon.kernels.text_lookup import BLOCK, TritonTextKernels

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_drafts", "longest", "shortest", "vocab_size"),
    [(1, 1, 1, 2), (4, 4, 2, 3), (7, 32, 1, 1), (31, 4, 3, 2)],
)
def test_ngram(num_drafts: int, longest: int, shortest: int, vocab_size: int) -> None:
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
    )
    rng = np.random.default_rng(num_drafts)
    drafter = make_drafter(config, 4, 60, CPU, TritonTextKernels())
    check_ngram(drafter, RandomRequests(rng, 4, 60, num_drafts, vocab_size), config, CPU, 4)


def test_long_texts_are_divided() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    max_len = 2 * BLOCK + 100
    drafter = make_drafter(config, 3, max_len, CPU, TritonTextKernels())
    rng = np.random.default_rng(1)
    check_ngram(drafter, RandomRequests(rng, 3, max_len, 4, 20), config, CPU, 3)
