"""Greedy tokens under Triton's interpreter against torch's argmax; conftest.py runs it."""

import pytest
import torch

from worker_daemon.kernels import argmax
from worker_daemon.kernels.argmax import BLOCK, greedy_tokens
from worker_daemon.layers.torch_ops import likeliest

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def reference(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The first column that holds the row's maximum."""
    real = logits[:, :vocab_size].float()
    return (real == real.amax(dim=1, keepdim=True)).int().argmax(dim=1)


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width"),
    [(1, 5, 5), (3, BLOCK, BLOCK), (2, 3 * BLOCK + 7, 3 * BLOCK + 64), (20, 30, 40)],
)
def test_the_largest_logit(dtype: torch.dtype, num_rows: int, vocab_size: int, width: int) -> None:
    logits = torch.randn(num_rows, width).to(dtype)
    logits[:, vocab_size:] = 100.0
    assert torch.equal(greedy_tokens(logits, vocab_size), reference(logits, vocab_size))


@DTYPES
def test_the_lowest_of_equals_in_every_part(dtype: torch.dtype) -> None:
    vocab_size = 4 * BLOCK + 100
    for _ in range(4):
        logits = torch.randint(-3, 3, (2, vocab_size)).to(dtype)
        tied = torch.randint(vocab_size, (2, 3))
        logits.scatter_(1, tied, 9.0)
        assert torch.equal(greedy_tokens(logits, vocab_size), tied.amin(dim=1))


@pytest.mark.parametrize(
    ("dtype", "is_split"),
    [(torch.float32, True), (torch.float16, True), (torch.bfloat16, False)],
    ids=str,
)
def test_rows_without_a_number_to_choose_by(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_split: bool
) -> None:
    """Rows that are split over programs, and rows that are not, as where there are many."""
    if not is_split:
        monkeypatch.setattr(argmax, "ENOUGH_PROGRAMS", 4)
    vocab_size = 2 * BLOCK + 3
    logits = torch.randn(7, vocab_size).to(dtype)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, :BLOCK] = -torch.inf
    logits[3, 17] = torch.nan
    logits[4, 5000] = torch.inf
    logits[5] = -torch.inf
    logits[5, BLOCK + 9] = -60000.0
    logits[6, -1] = torch.nan
    padded = torch.full((8, vocab_size + 5), torch.nan, dtype=dtype)
    padded[:7, :vocab_size] = logits
    padded[7:, :vocab_size] = 1.0
    tokens = greedy_tokens(padded, vocab_size).tolist()
    assert [tokens[row] for row in (0, 1, 3, 4, 6)] == [-1] * 5
    assert tokens[2] == reference(logits[[2]], vocab_size).item()
    assert tokens[5] == BLOCK + 9
    assert tokens[7] == 0
    assert torch.equal(likeliest(padded[:, :vocab_size]).int(), torch.tensor(tokens).int())


def test_rows_of_a_larger_tensor() -> None:
    whole = torch.randn(9, 700)
    logits = whole[::2, 3:603]
    assert torch.equal(greedy_tokens(logits, 600), reference(logits, 600))


def test_no_rows() -> None:
    assert greedy_tokens(torch.empty(0, 100), 100).shape == (0,)
