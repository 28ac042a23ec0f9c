"""Grammar masks against loops over bits, and their refusals."""

import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError
from rpc_schema.sampling import GrammarMasks
from rpc_schema.step import NO_TOKEN
from tests.support.sample_rows import sample_rows
from worker_daemon.runner.parts.grammar_masks import GrammarMasksPart
from worker_daemon.runner.parts.interface import PartContext
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")


def limits(vocab_size):
    return StepLimits(64, 64, 64, vocab_size, 4, 8)


def uint16s(values):
    return np.array(values, "<u2").tobytes()


def read(slots, words, vocab_size, indices=None):
    """indices: each slot's mask; None: one mask for each slot, in order."""
    part = GrammarMasksPart(PartContext(limits(vocab_size), CPU, True, True, TorchSampling()))
    indices = range(len(slots)) if indices is None else indices
    extension = GrammarMasks(slots=uint16s(slots), indices=uint16s(indices))
    return part, part.check_step(extension, [words], limits(vocab_size))


def masked(part, masks, logits, slots):
    return part.adjust_logits(logits, sample_rows(slots), masks)


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
        named = rng.permutation(np.append(slots, rng.permutation(np.arange(40, 50))[:2]))
        named = named[: rng.integers(1, named.size + 1)]
        allowed = random_masks(rng, rng.integers(1, named.size + 1), vocab_size)
        indices = rng.integers(0, allowed.shape[0], named.size)
        part, masks = read(named, pack(allowed), vocab_size, indices)
        logits = rng.standard_normal((slots.size, vocab_size)).astype(np.float32)
        expected = logits.copy()
        for slot, mask in zip(named, indices, strict=True):
            for index in np.flatnonzero(slots == slot):
                expected[index, ~allowed[mask]] = -np.inf
        out = masked(part, masks, torch.from_numpy(logits), slots)
        assert np.array_equal(out.numpy(), expected)


def test_no_mask_of_the_step_changes_nothing():
    logits, slots = torch.randn(2, 40), np.array([1, 2])
    part, other = read([7], pack(np.ones((1, 40), np.bool_)), 40)
    assert masked(part, other, logits, slots) is logits
    assert masked(part, None, logits, slots) is logits


def test_bits_behind_the_vocabulary_are_ignored():
    logits, slots = torch.randn(1, 33), np.array([0])
    part, masks = read([0], np.full((1, 2), -1, "<i4").tobytes(), 33)
    assert torch.equal(masked(part, masks, logits, slots), logits)


def test_a_row_whose_mask_allows_no_token_gets_none_and_the_others_theirs():
    for words in ([[0, 0]], [[0, 2]]):  # the second has a bit behind the vocabulary
        parts = make_parts(limits(33), CPU, TorchSampling())
        frame = np.array([*words, [-1, -1]], "<i4").tobytes()
        masks = GrammarMasks(slots=uint16s([5, 6]), indices=uint16s([0, 1]))
        step_values = parts.check_step((masks,), [frame], limits(33))
        logits = torch.randn(3, 33)
        sampled = parts.sample(logits, sample_rows(np.array([4, 5, 6])), step_values)
        expected = logits.argmax(dim=1).tolist()
        assert sampled.token_ids.tolist() == [expected[0], NO_TOKEN, expected[2]]


@pytest.mark.parametrize(
    ("slots", "indices", "frames", "field", "value"),
    [
        (b"\1", uint16s([0]), [bytes(8)], "masks.slots", "1 bytes"),
        (uint16s([1]), b"\0\0\0", [bytes(8)], "masks.indices", "3 bytes"),
        (uint16s([1]), uint16s([0]), [], "arrays", None),
        (b"", b"", [b"x"], "masks", "a frame of 1 bytes"),
        (b"", b"", [bytes(8)], "masks", "a frame of 8 bytes"),
        (uint16s([1]), uint16s([0]), [b"\1" * 4], "masks", "a frame of 4 bytes"),
        (uint16s([1]), uint16s([0]), [b"\1" * 12], "masks", "a frame of 12 bytes"),
        (uint16s([1]), uint16s([0]), [b"\1" * 16], "masks", "a frame of 16 bytes"),
        (uint16s([1]), uint16s([0]), [b"\1" * 8, b"\1" * 8], "arrays", None),
        (uint16s([1, 2]), uint16s([0, 1]), [b"\1" * 8], "masks.indices", 1),
        (uint16s([1, 2]), uint16s([0, 65535]), [b"\1" * 16], "masks.indices", 65535),
        (uint16s([1]), uint16s([0]), [b""], "masks.indices", 0),
        (uint16s([1, 2]), uint16s([0]), [b"\1" * 8], "masks.indices", "1 values"),
        (uint16s([1]), uint16s([0, 0]), [b"\1" * 8], "masks.indices", "2 values"),
        (uint16s([1]), b"", [b"\1" * 8], "masks.indices", "0 values"),
        (uint16s([1, 1]), uint16s([0, 1]), [b"\1" * 16], "masks.slots", [1, 1]),
    ],
)
def test_masks_that_do_not_fit_are_refused(slots, indices, frames, field, value):
    parts = make_parts(limits(40), CPU, TorchSampling())
    masks = GrammarMasks(slots=slots, indices=indices)
    with pytest.raises(InvalidStepError) as refused:
        parts.check_step((masks,), frames, limits(40))
    assert refused.value.field == field
    assert value is None or refused.value.value == value
    assert refused.value.fix


def test_a_step_has_masks_once():
    parts = make_parts(limits(40), CPU, TorchSampling())
    one = GrammarMasks(slots=uint16s([0]), indices=uint16s([0]))
    with pytest.raises(InvalidStepError) as refused:
        parts.check_step((one, one), [b"\1" * 8] * 2, limits(40))
    assert (refused.value.field, refused.value.value) == ("extensions", "GrammarMasks")
