"""The kernels of drafts from text under Triton's interpreter; conftest.py runs it."""

import numpy as np
import pytest
import torch

from rpc_schema.config import SpeculativeConfig
from tests.support.text_checks import RandomRequests, as_gained, check_ngram, check_suffix
from worker_daemon.contracts.drafting import KeptTable, Matching
from worker_daemon.drafting.registry import make_drafter
from worker_daemon.drafting.torch_text import TorchTextKernels
from worker_daemon.kernels import suffix_lookup
from worker_daemon.kernels.text_lookup import BLOCK, TritonTextKernels

CPU = torch.device("cpu")


SHAPES = pytest.mark.parametrize(
    ("num_drafts", "longest", "shortest", "vocab_size"),
    [(1, 1, 1, 2), (4, 4, 2, 3), (7, 32, 1, 1), (31, 4, 3, 2)],
)


@SHAPES
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


@pytest.mark.parametrize(
    ("num_drafts", "longest", "shortest", "vocab_size"),
    [
        (1, 1, 1, 2),
        (3, 4, 2, 3),
        pytest.param(7, 32, 1, 1, marks=pytest.mark.exhaustive),
        pytest.param(31, 4, 3, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_suffix(num_drafts: int, longest: int, shortest: int, vocab_size: int) -> None:
    config = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
        max_kept_tokens=1024,
    )
    rng = np.random.default_rng(num_drafts)
    drafter = make_drafter(config, 4, 90, CPU, TritonTextKernels())
    requests = RandomRequests(rng, 4, 90, num_drafts, vocab_size)
    check_suffix(drafter, requests, config, CPU, 5, longest=20)


def test_long_searches_are_divided_and_the_oldest_output_goes() -> None:
    """Each row's text and the kept output have several blocks, and the votes several parts. Steps
    begin more pages than are kept."""
    config = SpeculativeConfig(
        method="suffix", num_speculative_tokens=31, max_kept_tokens=3 * suffix_lookup.BLOCK
    )
    max_len = 2 * suffix_lookup.BLOCK + 100
    kernels = (TritonTextKernels(), TorchTextKernels())
    ours, theirs = (make_drafter(config, 130, max_len, CPU, each) for each in kernels)
    requests = RandomRequests(np.random.default_rng(1), 130, max_len, 31, 9)
    slots = requests.begin(ours, 1.0, longest=max_len - 500)
    theirs.begin(slots, [np.array(requests.texts[row], np.int32) for row in slots])
    for number in range(12):
        gained = as_gained(requests.gain(), 31, CPU, requests.texts)
        # Every other step keeps what a decode has read: not yet all that rows have gained.
        lag = torch.arange(gained.rows.shape[0], dtype=torch.int32) % 9
        ends = gained.lengths - lag if number % 2 else None
        for drafter in (ours, theirs):
            drafter._texts.gain(gained)
            drafter._kernels.keep(drafter._texts.table, drafter._kept, gained.rows, ends)
    for name in KeptTable.__slots__:
        assert torch.equal(getattr(ours._kept, name), getattr(theirs._kept, name))
    few, matching = gained.rows[:2], Matching(4, 2, 3)
    mine, known = (
        drafter._kernels.vote(drafter._texts.table, drafter._kept, few, matching)
        for drafter in (ours, theirs)
    )
    assert mine.tolist() == known.tolist()
