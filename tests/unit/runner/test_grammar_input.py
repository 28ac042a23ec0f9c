"""Grammar masks against loops over bits, and their refusals."""

import numpy as np
import pytest
import torch

from worker_daemon.errors import InvalidStepError
from worker_daemon.runner.grammar_input import apply_masks, read_masks

CPU = torch.device("cpu")


def pack(allowed):
    """bool [M, V] -> int32 words, bit by bit."""
    num_words = -(-allowed.shape[1] // 32)
    words = np.zeros((allowed.shape[0], num_words), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.astype("<u4").tobytes()


def random_masks(rng, num_masks, vocab_size):
    allowed = rng.random((num_masks, vocab_size)) < rng.uniform(0.05, 0.9)
    allowed[np.arange(num_masks), rng.integers(0, vocab_size, num_masks)] = True
    return allowed


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
def test_masked_logits_equal_a_loop(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for _ in range(20):
        slots = rng.permutation(40)[: rng.integers(1, 12)].astype(np.int64)
        masked = rng.permutation(np.append(slots, rng.permutation(np.arange(40, 50))[:2]))
        masked = masked[: rng.integers(1, masked.size + 1)]
        allowed = random_masks(rng, masked.size, vocab_size)
        masks = read_masks(masked.astype("<u2").tobytes(), [pack(allowed)], vocab_size)
        logits = rng.standard_normal((slots.size, vocab_size)).astype(np.float32)
        expected = logits.copy()
        for slot, row in zip(masked, allowed, strict=True):
            for index in np.flatnonzero(slots == slot):
                expected[index, ~row] = -np.inf
        out = apply_masks(torch.from_numpy(logits), masks.for_slots(slots, CPU))
        assert np.array_equal(out.numpy(), expected)


def test_no_mask_of_the_step_changes_nothing():
    logits = torch.randn(2, 40)
    none = read_masks(b"", [], 40)
    assert none.for_slots(np.array([1, 2]), CPU) is None
    other = read_masks(b"\7\0", [pack(np.ones((1, 40), np.bool_))], 40)
    assert other.for_slots(np.array([1, 2]), CPU) is None
    assert apply_masks(logits, None) is logits


def test_bits_behind_the_vocabulary_are_ignored():
    words = np.full((1, 2), -1, "<i4").tobytes()
    assert read_masks(b"\0\0", [words], 33).allowed.shape == (1, 33)
    only_behind = np.array([[0, 2]], "<i4").tobytes()
    with pytest.raises(InvalidStepError, match="no bit set"):
        read_masks(b"\0\0", [only_behind], 33)


@pytest.mark.parametrize(
    ("mask_slots", "arrays", "field"),
    [
        (b"\1", [bytes(8)], "mask_slots"),
        (b"\1\0", [], "masks"),
        (b"", [b""], "masks"),
        (b"\1\0", [b"\1" * 4], "masks"),
        (b"\1\0", [b"\1" * 12], "masks"),
        (b"\1\0", [b"\1" * 8, b"\1" * 8], "masks"),
        (b"\1\0\2\0", [b"\1" * 8], "masks"),
        (b"\1\0\2\0", [b"\1" * 8 + bytes(8)], "masks"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask_slots, arrays, field):
    with pytest.raises(InvalidStepError) as refused:
        read_masks(mask_slots, arrays, vocab_size=40)
    assert refused.value.field == field
