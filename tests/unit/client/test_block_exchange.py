"""Slots that other groups read or fill: nothing else takes them meanwhile, and none is lost."""

import random

import pytest

from tests.support.exhaustive import seeds
from worker_client.scheduler.block_exchange import HostBlockExchange
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.host_tier import TierSlots
from worker_client.scheduler.outside_blocks import key_of

NUM_SLOTS, NUM_BLOCKS = 12, 8


def key(number):
    return key_of(0, number.to_bytes(16, "little"))


class Modelled:
    """The exchange of a tier, and what its slots must hold."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.tier = TierSlots(NUM_SLOTS)
        self.pool = BlockPool(NUM_BLOCKS, 1, 0, self._evict)
        self.exchange = HostBlockExchange(self.tier, self.pool, lambda req_id: [])
        self.staged, self.reserved = [], []
        self.num_keys = 0

    def _evict(self, block_id, group, block_hash):
        self.tier.evict(key_of(group, block_hash), block_id)

    def new_keys(self, count):
        self.num_keys += count
        return [key(number) for number in range(self.num_keys - count, self.num_keys)]

    def compute(self):
        """Fill a few blocks, which evicts others."""
        blocks = self.pool.allocate(self.rng.randint(1, 3))
        for block_id, name in zip(blocks, self.new_keys(len(blocks)), strict=True):
            self.pool.remember(0, block_id, name[:-1])
        self.pool.release(blocks)

    def stage(self):
        known = [key(self.rng.randrange(max(1, self.num_keys))) for _ in range(2)]
        staged = self.exchange.stage(known)
        self.staged += staged

    def release(self):
        if self.staged:
            self.exchange.release([self.staged.pop(self.rng.randrange(len(self.staged))).key])

    def reserve(self):
        self.reserved += self.exchange.reserve(self.new_keys(self.rng.randint(1, 3)))

    def end(self):
        if self.reserved:
            block = self.reserved.pop(self.rng.randrange(len(self.reserved)))
            if self.rng.random() < 0.5:
                self.exchange.fill([block.key])
                assert block.key in self.tier
            else:
                self.exchange.give_back([block.key])
                assert block.key not in self.tier

    def check(self):
        """What the next step stores goes to no slot of another group, but for contents that are
        kept there for it."""
        kept = {block.slot: block.key for block in self.staged}
        assert not {block.slot for block in self.reserved} & kept.keys()
        for moves in self.tier.take_moves(b"tag"):
            for slot, name in zip(moves.stored.slots, moves.stored.hashes, strict=True):
                assert slot not in {block.slot for block in self.reserved}
                assert kept.get(slot, name) == name
        assert self.exchange.num_slots <= NUM_SLOTS


@pytest.mark.parametrize("seed", seeds(5, of=100))
def test_slots_of_other_groups_are_left_alone(seed):
    model = Modelled(seed)
    calls = (model.compute, model.stage, model.release, model.reserve, model.end)
    for _ in range(400):
        model.rng.choice(calls)()
        model.check()
    for block in model.staged:
        assert model.tier.pin(block.key, None) == block.slot, seed
        model.exchange.release([block.key, block.key])
    model.exchange.give_back([block.key for block in model.reserved])
    assert model.exchange.num_slots == 0
    free = model.exchange.reserve(model.new_keys(NUM_SLOTS + 1))
    assert len({block.slot for block in free}) == len(free) == NUM_SLOTS, seed


def test_contents_that_come_after_all_were_forgotten_are_not_used():
    model = Modelled(0)
    names = model.new_keys(2)
    model.exchange.reserve(names)
    model.tier.forget_all()
    model.exchange.fill(names)
    assert names[0] not in model.tier
    assert len(model.exchange.reserve(model.new_keys(NUM_SLOTS))) == NUM_SLOTS


def test_contents_on_their_way_are_not_asked_for_twice():
    model = Modelled(0)
    first, second, third = model.new_keys(3)
    assert [each.key for each in model.exchange.reserve([first, second])] == [first, second]
    assert [each.key for each in model.exchange.reserve([third, second])] == [third]
    model.exchange.fill([first])
    assert model.exchange.reserve([first]) == []
