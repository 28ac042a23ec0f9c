"""Sampling kernels under Triton's interpreter against plain torch; conftest.py runs it."""

import numpy as np
import pytest
import torch

from tests.support.sampling_checks import (
    KINDS,
    check_against_torch,
    check_boundary,
    check_rows_are_independent,
    make_metadata,
    pick,
    random_logits,
    random_metadata,
)
from worker_daemon.kernels import sampling as kernels
from worker_daemon.kernels.sampling import LIST_BLOCK, READ_BLOCK, TritonSampling
from worker_daemon.sample.sampler import TorchSampling

pytestmark = pytest.mark.each_value  # make test-all runs every combination

SAMPLING = TritonSampling(torch.device("cpu"))
LONG = READ_BLOCK + LIST_BLOCK + 77


def fresh():
    return np.random.default_rng()


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [*((kind, 37) for kind in KINDS), ("wide", 1500), ("ties", 1500)],
)
def test_mixed_rows(kind: str, vocab_size: int) -> None:
    rng = fresh()
    logits = random_logits(kind, 3, vocab_size, rng)
    check_against_torch(SAMPLING, logits, random_metadata(3, rng))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("close", {"top_p": 0.6}),
        ("flat", {"top_k": 2500}),
        ("ties", {"top_k": 3000, "top_p": 0.5, "min_p": 0.001}),
    ],
    ids=str,
)
def test_thresholds_among_more_tokens_than_one_block_holds(
    kind: str, settings: dict[str, float]
) -> None:
    check_boundary(SAMPLING, random_logits(kind, 1, LONG, fresh())[0], **settings)


@pytest.mark.parametrize("top_k", [0, 3500])
def test_any_top_p_among_more_tokens_than_one_block_holds(top_k: int) -> None:
    rng = fresh()
    top_p = float(rng.uniform(0.5, 0.98))
    check_boundary(SAMPLING, random_logits("flat", 1, LONG, rng)[0], top_k=top_k, top_p=top_p)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 60, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 30},
        {"temperature": 1.5, "min_p": 0.02, "top_p": 0.9},
    ],
    ids=str,
)
def test_thresholds(settings: dict[str, float]) -> None:
    check_boundary(SAMPLING, random_logits("flat", 1, 400, fresh())[0] * 2, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_rows_of_a_larger_tensor(dtype: torch.dtype) -> None:
    rng = fresh()
    whole = random_logits("flat", 6, 700, rng).to(dtype)
    whole[:, 603:] = 100.0
    check_against_torch(SAMPLING, whole[::2, 3:603], random_metadata(3, rng))


def test_columns_of_any_stride() -> None:
    rng = fresh()
    metadata = pick(random_metadata(11, rng), slice(None, None, 3))
    check_against_torch(SAMPLING, random_logits("flat", 4, 300, rng), metadata)


def test_bans_and_a_row_that_allows_nothing() -> None:
    rng = fresh()
    logits = random_logits("peaked", 6, 200, rng)
    logits[4:] = -torch.inf
    best = logits.argmax(dim=1)
    logits[torch.arange(4), best[:4]] = -torch.inf
    metadata = make_metadata(
        6,
        temperature=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        top_k=torch.tensor([0, 0, 5, 0, 5, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 1.0]),
    )
    tokens = SAMPLING.tokens(logits, metadata)
    assert torch.equal(tokens, TorchSampling().tokens(logits, metadata))
    assert (tokens[:4] != best[:4]).all()
    assert tokens[4:].tolist() == [-1, -1]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of inf - inf
@pytest.mark.parametrize("vocab_size", [100, READ_BLOCK + 33])
def test_rows_without_a_number_to_choose_by_leave_the_others_alone(vocab_size: int) -> None:
    rng = fresh()
    logits, metadata = random_logits("flat", 6, vocab_size, rng), random_metadata(6, rng)
    expected = TorchSampling().tokens(logits, metadata)
    assert (expected >= 0).all()
    logits[1, rng.integers(vocab_size)] = torch.nan
    logits[2] = torch.nan
    logits[3, rng.integers(vocab_size)] = torch.inf
    logits[5, -1] = torch.nan
    expected[[1, 2, 3, 5]] = -1
    assert torch.equal(SAMPLING.tokens(logits, metadata), expected)
    assert torch.equal(TorchSampling().tokens(logits, metadata), expected)


def test_rows_are_independent() -> None:
    rng = fresh()
    check_rows_are_independent(
        SAMPLING, random_logits("flat", 4, 300, rng), random_metadata(4, rng)
    )


def test_rows_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    top_k = torch.zeros(18)
    top_k[[0, 16, 17]] = 5
    metadata = make_metadata(18, top_k=top_k, seeds=torch.arange(18))
    logits = random_logits("flat", 18, 40, fresh())
    together = SAMPLING.tokens(logits, metadata)
    monkeypatch.setattr(kernels, "MAX_LISTED", 16 * 40)
    assert torch.equal(SAMPLING.tokens(logits, metadata), together)


def test_unneeded_flags_change_nothing() -> None:
    metadata = make_metadata(6, min_p=0.05, seeds=torch.arange(6))
    logits = random_logits("flat", 6, 500, fresh())
    assert torch.equal(
        SAMPLING.tokens(logits, metadata), SAMPLING.tokens(logits, pick(metadata, slice(None)))
    )


def test_a_vocabulary_of_one_token() -> None:
    assert SAMPLING.tokens(torch.zeros(3, 1), random_metadata(3, fresh())).tolist() == [0, 0, 0]


def test_no_rows() -> None:
    assert SAMPLING.tokens(torch.empty(0, 100), make_metadata(0)).shape == (0,)
