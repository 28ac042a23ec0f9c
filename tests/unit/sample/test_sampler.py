"""The sampler: its distribution, its filters against transformers' processors, and rows that
ignore each other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.sampling_checks import (
    CHI_SQUARE_SETTINGS,
    check_distribution,
    draw,
    make_metadata,
    pick,
    reference_probs,
)
from worker_daemon.contracts.layer_ops import NO_TOKEN
from worker_daemon.sample.sampler import TorchSampling

TORCH = TorchSampling()


@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "top_p": 0.8}, {"temperature": 0.0}])
def test_rows_without_a_number_to_choose_by_give_no_token_and_leave_the_others_alone(settings):
    logits, metadata = torch.randn(6, 50), make_metadata(6, **settings)
    before = TORCH.tokens(logits, metadata)
    logits[1, 17], logits[3], logits[4, 0] = torch.nan, torch.nan, torch.inf
    after = TORCH.tokens(logits, metadata)
    assert after[[1, 3, 4]].tolist() == [NO_TOKEN] * 3
    others = [0, 2, 5]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("settings", CHI_SQUARE_SETTINGS)
def test_distribution_passes_a_chi_square_test(settings, vary):
    check_distribution(TORCH, "cpu", settings, vary)


def test_filters_keep_exactly_what_transformers_keeps():
    generator = torch.Generator().manual_seed(5)
    rng = np.random.default_rng(5)
    for _ in range(60):
        logits = torch.randn(24, generator=generator) * 2
        settings = {
            "temperature": float(rng.uniform(0.3, 2.0)),
            "top_k": int(rng.integers(0, 30)),
            "top_p": float(rng.choice([1.0, rng.uniform(0.05, 0.99)])),
            "min_p": float(rng.choice([0.0, rng.uniform(0.001, 0.5)])),
        }
        allowed = set(torch.nonzero(reference_probs(logits, **settings)).flatten().tolist())
        seen = set(draw(TORCH, logits, 3000, **settings).tolist())
        assert seen <= allowed
        probs = reference_probs(logits, **settings)
        assert {int(t) for t in torch.nonzero(probs > 0.01).flatten()} <= seen


def random_batch(num_rows, vocab_size, seed):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    metadata = make_metadata(
        num_rows,
        temperature=torch.from_numpy(rng.choice([0.0, 0.5, 1.0, 1.9], num_rows)),
        top_k=torch.from_numpy(rng.choice([0, 1, 5, 50, 10**6], num_rows)),
        top_p=torch.from_numpy(rng.choice([1.0, 0.9, 0.3], num_rows)),
        min_p=torch.from_numpy(rng.choice([0.0, 0.02, 0.3], num_rows)),
        seeds=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)),
        positions=torch.from_numpy(rng.integers(0, 2**17, num_rows)),
    )
    return logits, metadata


@pytest.mark.parametrize("vocab_size", [61, 512, 1003])
def test_a_row_does_not_depend_on_the_batch(vocab_size):
    logits, metadata = random_batch(48, vocab_size, seed=vocab_size)
    together = TORCH.tokens(logits, metadata)
    alone = [TORCH.tokens(logits[[r]], pick(metadata, [r])) for r in range(48)]
    assert torch.equal(torch.cat(alone), together)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    assert torch.equal(TORCH.tokens(logits[order], pick(metadata, order)), together[order])
    assert torch.equal(TORCH.tokens(logits[5:16], pick(metadata, slice(5, 16))), together[5:16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_width_give_the_tokens_of_the_same_values(dtype):
    logits, metadata = random_batch(48, 301, seed=5)
    logits = logits.to(dtype)
    half, full = TORCH.tokens(logits, metadata), TORCH.tokens(logits.float(), metadata)
    assert torch.equal(half, full)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    metadata = make_metadata(2, temperature=0.0)
    assert TORCH.tokens(logits, metadata).tolist() == [1, 0]
    assert TORCH.tokens(logits, replace(metadata, any_random=False)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 1e-30},
        {"top_k": 1, "top_p": 1e-6, "min_p": 1.0},
    ],
)
def test_the_likeliest_token_always_stays(settings):
    logits = torch.randn(200, 33, generator=torch.Generator().manual_seed(11))
    tokens = TORCH.tokens(logits, make_metadata(200, **settings))
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_a_row_that_allows_nothing_gives_no_token(settings):
    logits = torch.randn(2, 4)
    logits[0] = -torch.inf
    tokens = TORCH.tokens(logits, make_metadata(2, **settings))
    assert tokens[0] == NO_TOKEN
