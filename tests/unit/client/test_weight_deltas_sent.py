"""What a trainer sends of tensors that have changed."""

import random

import pytest
import torch

from worker_client.trainer.deltas import SentTensors, SparseDelta, as_tensors, find_change

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_makes_the_new_tensor_of_the_old_one(dtype):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(40, 7, generator=generator).to(dtype)
    new = old.clone()
    places = torch.randperm(280, generator=generator)[:9]
    new.view(-1)[places] = torch.randn(9, generator=generator).to(dtype)
    delta = find_change(old, new)
    assert isinstance(delta, SparseDelta)
    assert delta.indices.dtype == torch.int32
    assert (delta.indices.diff() > 0).all()
    made = old.clone()
    made.view(-1)[delta.indices.long()] = delta.values
    assert made.view(torch.uint8).equal(new.view(torch.uint8))
    assert find_change(new, new.clone()) is None
    strided = new.t().contiguous().t()
    assert find_change(new, strided) is None


def test_bits_are_compared():
    old = torch.tensor([0.0, torch.nan, 1.0] + [0.0] * 9)
    new = old.clone()
    assert find_change(old, new) is None
    new[0] = -0.0
    delta = find_change(old, new)
    assert delta.indices.tolist() == [0]
    assert delta.values.signbit().tolist() == [True]


def test_a_whole_tensor_is_sent_where_it_is_smaller():
    old = torch.zeros(30, dtype=torch.bfloat16)
    new = old.clone()
    new[:9] = 1
    assert isinstance(find_change(old, new), SparseDelta)  # 9 * 6 bytes of 60
    new[9] = 1
    assert find_change(old, new) is new
    for other in (None, old.view(3, 10), old.float()):
        assert find_change(other, new) is new


def test_the_copy_follows_what_was_sent():
    sent, tensor = SentTensors(), torch.randn(20, 5)
    for step in range(4):
        changes = sent.changes({"a": tensor, "b": torch.ones(3)})
        assert changes.keys() == ({"a", "b"} if step == 0 else {"a"})
        assert sent.changes({"a": tensor, "b": torch.ones(3)}).keys() == changes.keys()
        sent.record(changes)
        assert sent.changes({"a": tensor}) == {}
        tensor[step, step] += 1  # of the trainer's tensor, not of the copy


def test_indices_come_first():
    delta = SparseDelta(torch.arange(2), torch.zeros(2))
    tensors = as_tensors({"a": delta, "b": torch.ones(3), "c": delta})
    assert list(tensors) == ["a.indices", "c.indices", "a.values", "b", "c.values"]
