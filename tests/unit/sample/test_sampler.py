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
from worker_daemon.sample.sampler import NO_LOGPROBS, TorchSampling, build_bans, sample

TORCH = TorchSampling()


@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "top_p": 0.8}, {"temperature": 0.0}])
@pytest.mark.parametrize("num_logprobs", [NO_LOGPROBS, 2])
def test_rows_without_a_number_to_choose_by_give_no_token_and_leave_the_others_alone(
    settings, num_logprobs
):
    logits = torch.randn(6, 50)
    metadata = replace(make_metadata(6, **settings), num_logprobs=num_logprobs)
    before = sample(logits, metadata, TORCH)
    logits[1, 17], logits[3], logits[4, 0] = torch.nan, torch.nan, torch.inf
    after = sample(logits, metadata, TORCH)
    assert after.token_ids[[1, 3, 4]].tolist() == [NO_TOKEN] * 3
    others = [0, 2, 5]
    assert torch.equal(after.token_ids[others], before.token_ids[others])
    if num_logprobs != NO_LOGPROBS:
        assert torch.equal(after.logprobs.logprobs[others], before.logprobs.logprobs[others])


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
    together = sample(logits, metadata, TORCH).token_ids
    alone = [sample(logits[[r]], pick(metadata, [r]), TORCH).token_ids for r in range(48)]
    assert torch.equal(torch.cat(alone), together)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        sample(logits[order], pick(metadata, order), TORCH).token_ids, together[order]
    )
    assert torch.equal(
        sample(logits[5:16], pick(metadata, slice(5, 16)), TORCH).token_ids, together[5:16]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_width_give_the_tokens_of_the_same_values(dtype):
    logits, metadata = random_batch(48, 301, seed=5)
    logits = logits.to(dtype)
    metadata = replace(metadata, num_logprobs=3)
    half, full = sample(logits, metadata, TORCH), sample(logits.float(), metadata, TORCH)
    assert torch.equal(half.token_ids, full.token_ids)
    assert torch.equal(half.logprobs.logprobs, full.logprobs.logprobs)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    metadata = make_metadata(2, temperature=0.0)
    assert sample(logits, metadata, TORCH).token_ids.tolist() == [1, 0]
    assert sample(logits, replace(metadata, any_random=False), TORCH).token_ids.tolist() == [1, 0]


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
    tokens = sample(logits, make_metadata(200, **settings), TORCH).token_ids
    assert torch.equal(tokens, logits.argmax(-1))


def test_stop_tokens_are_banned_until_min_tokens_are_there():
    rows, tokens = build_bans([0, 4, 5, 9], [5, 5, 5, 0], [[2, 3], [2], [2, 3], [2]])
    assert list(zip(rows.tolist(), tokens.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 2)]
    logits = torch.zeros(4, 6)
    logits[:, 2], logits[:, 3] = 50.0, 40.0
    before = logits.clone()
    for temperature, allowed in ((0.0, {0}), (1.0, {0, 1, 4, 5})):
        metadata = make_metadata(4, temperature, bans=(rows, tokens))
        ids = sample(logits, metadata, TORCH).token_ids.tolist()
        assert ids[0] in allowed
        assert ids[1:] == [3, 2, 2]
    assert torch.equal(logits, before)
    assert [array.size for array in build_bans([], [], [])] == [0, 0]


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_a_row_that_allows_nothing_gives_no_token(settings):
    bans = (np.zeros(4, np.int64), np.arange(4))
    tokens = sample(torch.randn(2, 4), make_metadata(2, bans=bans, **settings), TORCH).token_ids
    assert tokens[0] == NO_TOKEN


def test_logprobs_are_those_of_the_raw_logits():
    logits, metadata = random_batch(20, 97, seed=21)
    bans = (np.arange(20), logits.argmax(-1).numpy())
    metadata = replace(
        metadata,
        num_logprobs=5,
        ban_rows=torch.from_numpy(bans[0]),
        ban_token_ids=torch.from_numpy(bans[1]),
    )
    output = sample(logits, metadata, TORCH)
    exact = logits.double().log_softmax(-1)
    logprobs = output.logprobs
    assert logprobs.token_ids.shape == logprobs.logprobs.shape == (20, 6)
    assert torch.equal(logprobs.token_ids[:, 0].long(), output.token_ids)
    assert torch.equal(logprobs.token_ids[:, 1:].long(), exact.topk(5).indices)
    expected = exact.gather(1, logprobs.token_ids.long())
    assert torch.allclose(logprobs.logprobs.double(), expected, atol=1e-5)
    for row, token in enumerate(output.token_ids.tolist()):
        assert logprobs.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
    assert (logprobs.ranks > 1).all()


def test_zero_logprobs_report_the_sampled_token_alone():
    logits, metadata = random_batch(3, 40, seed=22)
    output = sample(logits, replace(metadata, num_logprobs=0), TORCH)
    assert output.logprobs.token_ids.shape == (3, 1)
    assert sample(logits, metadata, TORCH).logprobs is None
