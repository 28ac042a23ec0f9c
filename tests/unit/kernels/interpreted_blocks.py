"""Moved blocks under Triton's interpreter against torch; conftest.py runs it."""

import random

import pytest
import torch

from worker_daemon.contracts.block_kernels import PageShape
from worker_daemon.kernels.moved_blocks import TritonBlockKernels
from worker_daemon.runner.torch_blocks import TorchBlockKernels

OURS, REFERENCE = TritonBlockKernels(), TorchBlockKernels()


def random_words(*shape):
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


@pytest.mark.parametrize("num_words", [1, 6, 2048, 2500])
def test_blocks_are_copied_and_filled(num_words):
    num_pages, num_blocks = random.randint(1, 3), 7
    pages = random_words(num_pages, num_blocks, num_words).transpose(0, 1)  # as in a KV cache
    block_ids = torch.randperm(num_blocks)[:4].int()
    found, expected = (torch.zeros(4, num_pages * num_words + 3).int() for _ in range(2))
    for kernels, rows in ((OURS, found), (REFERENCE, expected)):
        kernels.gather(pages, block_ids, rows[:, 2:-1])
    assert found.equal(expected)
    rows, ours, theirs = random_words(4, num_pages * num_words + 3), pages.clone(), pages.clone()
    OURS.scatter(rows[:, 1:-2], block_ids, ours)
    REFERENCE.scatter(rows[:, 1:-2], block_ids, theirs)
    assert ours.equal(theirs) and not ours.equal(pages)
    are_meant = torch.tensor([True, False, False, True])
    OURS.fill(ours, block_ids, are_meant, -1)
    REFERENCE.fill(theirs, block_ids, are_meant, -1)
    assert ours.equal(theirs) and (ours[block_ids[0].item()] == -1).all()


@pytest.mark.parametrize("has_stored", [False, True])
@pytest.mark.parametrize(
    "shape", [PageShape(1, 1, 5000), PageShape(32, 8, 64), PageShape(3, 2, 7), PageShape(2, 1, 1)]
)
def test_parts_are_summed_up(shape, has_stored):
    num_pages = random.randint(1, 3)
    num_parts = num_pages * shape.num_parts
    stored = random_words(3, 2 * num_parts + 3)[:, 1:-2] if has_stored else None
    rows = random_words(3, num_pages * shape.num_words + 5)[:, 2:-3]
    keys = torch.randint(-(2**62), 2**62, (shape.num_words,))
    found, expected = (torch.zeros(3, 2 + num_parts, dtype=torch.int64) for _ in range(2))
    OURS.sum_parts(rows, keys, shape, found[:, 1:-1], stored)
    REFERENCE.sum_parts(rows, keys, shape, expected[:, 1:-1], stored)
    assert found.equal(expected) and found[:, 1:-1].ne(0).all()
    ours = random_words(num_pages, 7, shape.num_words).transpose(0, 1)  # as in a KV cache
    theirs, block_ids = ours.clone(), torch.randperm(7)[:3].int()
    found.zero_()
    OURS.deliver(rows, block_ids, ours, keys, shape, found[:, 1:-1], stored)
    REFERENCE.scatter(rows, block_ids, theirs)
    assert found.equal(expected) and ours.equal(theirs)
