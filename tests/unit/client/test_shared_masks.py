"""Masks of requests in a message: each request's own, and equal ones once."""

import numpy as np
import pytest

from worker_client.steps.masks import MAX_COMPARED, StepMasks
from worker_client.steps.step_fault import StepFault


def random_mask(rng, num_words):
    """Dense, or with a single token, as where a grammar leaves one."""
    if rng.random() < 0.5:
        return rng.integers(-(2**31), 2**31, num_words, dtype=np.int32)
    mask = np.zeros(num_words, np.int32)
    mask[rng.integers(num_words)] = 1 << rng.integers(31)
    return mask


def given(rng, mask):
    """The same words in the forms in which a driver may have them."""
    form = rng.integers(4)
    if form == 0:
        return mask
    if form == 1:
        return mask.copy().view(np.uint32)
    if form == 2:
        return np.stack([mask, mask])[1]
    return np.stack([mask, ~mask], axis=1)[:, 0]  # not contiguous


@pytest.mark.parametrize("num_distinct", [1, 3, MAX_COMPARED, 40])
@pytest.mark.parametrize("num_words", [1, 97, 500])
def test_each_request_gets_its_mask_and_equal_ones_are_sent_once(num_distinct, num_words):
    rng = np.random.default_rng()
    for _ in range(10):
        contents = [random_mask(rng, num_words) for _ in range(num_distinct)]
        names = [f"r{number}" for number in range(int(rng.integers(1, 60)))]
        chosen = {name: contents[rng.integers(num_distinct)] for name in names}
        masks = {name: given(rng, mask) for name, mask in chosen.items()}
        slots = rng.permutation(100)[: len(names)].tolist()
        slot_of = dict(zip(names, slots, strict=True))
        gone = names[0]
        slot_of.pop(gone)
        given_masks = StepMasks(masks).encode(slot_of)
        if not slot_of:
            assert given_masks is None
            continue
        extension, (frame,) = given_masks
        words = np.frombuffer(frame, "<i4").reshape(-1, num_words)
        indices = np.frombuffer(extension.indices, "<u2").tolist()
        sent = dict(zip(np.frombuffer(extension.slots, "<u2").tolist(), indices, strict=True))
        assert sent.keys() == set(slot_of.values())
        for name, slot in slot_of.items():
            assert np.array_equal(words[sent[slot]], chosen[name])
        staying = [name for name in names if name != gone]
        fewest = len({chosen[name].tobytes() for name in staying})
        assert fewest <= len(words) <= len({id(masks[name]) for name in staying})
        if num_distinct <= MAX_COMPARED:
            assert len(words) == fewest
        assert set(indices) == set(range(len(words)))


def test_masks_of_two_lengths_are_refused():
    masks = {"a": np.zeros(3, np.int32), "b": np.zeros(4, np.int32)}
    fault = StepMasks(masks).encode({"a": 1, "b": 2})
    assert isinstance(fault, StepFault)
    assert (fault.field, fault.req_id) == ("masks", "a")
    assert "[3, 4]" in fault.message


def test_masks_of_several_samples_are_shared_by_all_that_name_them():
    """However many have a single token: requests at one place of a grammar need as few as one."""
    each = [np.zeros(500, np.int32) for _ in range(3 * MAX_COMPARED)]
    for token, mask in enumerate(each):
        mask[token + 1] = 1
    masks = {f"r{number}": each[number % 3 :] for number in range(40)}
    slot_of = {name: slot for slot, name in enumerate(masks)}
    extension, (frame,) = StepMasks(masks).encode(slot_of)
    assert len(frame) == 4 * 500 * len(each)
    words = np.frombuffer(frame, "<i4").reshape(-1, 500)
    slots, indices = (np.frombuffer(raw, "<u2") for raw in (extension.slots, extension.indices))
    for name, slot in slot_of.items():
        assert np.array_equal(words[indices[slots == slot]], np.stack(masks[name]))


@pytest.mark.parametrize("mask", [[[1, 2]], [np.zeros((2, 3), np.int32)], np.zeros(3), None])
def test_what_is_no_mask_is_refused(mask):
    fault = StepMasks({"a": mask}).encode({"a": 1})
    assert isinstance(fault, StepFault)
    assert (fault.field, fault.req_id) == ("masks", "a")
