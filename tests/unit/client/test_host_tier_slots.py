"""The scheduler's view of the host tier, against a rank that does what it says: what it loads is
there, and what failed or was evicted is not."""

import random

import numpy as np
import pytest

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from tests.support.exhaustive import seeds
from worker_client.scheduler import host_tier
from worker_client.scheduler.host_tier import HostPlace
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.cached_blocks import CachedBlocks

NUM_BLOCKS = 12
TAG = b"tag"


class Rank:
    """Host memory, and the KV cache's blocks, by the steps in flight."""

    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.slots = {}
        self.blocks = {}

    def run(self, output):
        """Do what a step says, and check that it can be done."""
        for moves in output.extensions:
            stored, loaded = moves.stored, moves.loaded
            assert len({*stored.block_ids}) == len(stored.block_ids)
            assert len({*loaded.block_ids}) == len(loaded.block_ids)
            assert len({*stored.slots}) == len(stored.slots)
            assert not {*stored.slots} & {*loaded.slots}
            assert all(0 <= slot < self.num_slots for slot in (*stored.slots, *loaded.slots))
            for block, slot, key in zip(*stored, strict=True):
                assert self.blocks[block] == key
                self.slots[slot] = key
            for block, slot, key in zip(*loaded, strict=True):
                assert self.slots[slot] == key
                self.blocks[block] = key


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("seed", seeds(3, of=40))
def test_what_is_loaded_is_there(seed, num_slots):
    rng = random.Random(seed)
    tier, rank = HostPlace(num_slots), Rank(num_slots)
    names, num_loaded = iter(range(1 << 30)), 0
    for _ in range(300):
        taken = set()
        for _ in range(rng.randint(0, 3)):
            block = rng.choice([b for b in range(NUM_BLOCKS) if b not in taken])
            taken.add(block)
            if block in rank.blocks:
                tier.evict({block: rank.blocks[block]})
            there = [key for key in rank.slots.values() if key in tier]
            if there and rng.random() < 0.6:
                key = rng.choice(there)
                tier.keep([key])
                tier.load({block: key})
                num_loaded += 1
        output = SchedulerOutput(extensions=tier.take_moves(TAG))
        if rng.random() < 0.1:  # it fails: the rank may have done what it says, or not
            tier.fail([output])
            if rng.random() < 0.5:
                rank.run(output)
            for block in taken:
                rank.blocks.pop(block, None)
            continue
        rank.run(output)
        loaded = {b for moves in output.extensions for b in moves.loaded.block_ids}
        for block in taken - loaded:  # computed by the step
            rank.blocks[block] = b"%d" % next(names)
        if rng.random() < 0.1:
            tier.forget(rng.sample([*rank.slots.values()], min(2, len(rank.slots))))
        if rng.random() < 0.03:
            tier.forget_all()
    assert num_loaded > 20, seed


def test_the_least_recently_used_goes_first():
    tier = HostPlace(3)
    for number in range(3):
        tier.evict({1: b"%d" % number})
        tier.take_moves(TAG)
    tier.keep([b"0"])
    tier.load({5: b"0"})
    tier.evict({2: b"3"})
    assert [key in tier for key in (b"0", b"1", b"2")] == [True, False, True]


def test_contents_that_are_there_are_not_stored_again():
    tier = HostPlace(2)
    tier.evict({1: b"a"})
    (moves,) = tier.take_moves(TAG)
    assert moves.stored.hashes == (b"a",)
    tier.evict({4: b"a"})
    assert tier.take_moves(TAG) == ()


def test_failed_stores_are_forgotten():
    tier = HostPlace(4)
    tier.evict({1: b"a"})
    sent = SchedulerOutput(extensions=tier.take_moves(TAG))
    tier.evict({2: b"b"})
    failed = SchedulerOutput(extensions=tier.take_moves(TAG))
    tier.evict({3: b"c"})
    tier.fail([failed])
    assert [key in tier for key in (b"a", b"b", b"c")] == [True, False, False]
    tier.fail([sent])
    assert b"a" not in tier


def test_a_next_driver_fills_the_slots_between():
    tier = HostPlace(6)
    assert tier.slots.restore(CachedBlocks.of([4, 1], [b"x", b"y"])) == 2
    assert b"x" in tier
    assert b"y" in tier
    for number in range(4):
        tier.evict({number: b"%d" % number})
    (moves,) = tier.take_moves(TAG)
    assert sorted(moves.stored.slots) == [0, 2, 3, 5]


def test_slots_of_a_larger_tier_are_left_out():
    tier = HostPlace(2)
    restored = CachedBlocks(np.array([1, 5], np.int32), np.zeros((2, 4), np.uint8))
    assert tier.slots.restore(restored) == 1


def test_a_step_moves_no_more_than_a_message_holds(monkeypatch):
    assert HostPlace(4).room == MAX_MOVED_BLOCKS
    monkeypatch.setattr(host_tier, "MAX_MOVED_BLOCKS", 2)
    tier = HostPlace(4)
    for number in range(3):
        tier.evict({number: b"%d" % number})
    (moves,) = tier.take_moves(TAG)
    assert len(moves.stored.block_ids) == 2
