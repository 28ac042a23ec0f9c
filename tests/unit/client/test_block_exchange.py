"""Slots that other groups read or fill: nothing else takes them meanwhile, and none is lost."""

import random

import pytest

from rpc_schema.kv_cache import BlockGroup
from tests.support.exhaustive import seeds
from worker_client.scheduler.block_exchange import ContentNames, HostBlockExchange
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.host_tier import TierSlots
from worker_client.scheduler.outside_blocks import key_of

NUM_SLOTS, NUM_BLOCKS = 24, 16
PLAIN = (BlockGroup(4),)
WINDOWED = (BlockGroup(4), BlockGroup(4, 8), BlockGroup(4, 8))


def name_of(number, kind=0):
    return number.to_bytes(16, "little") + bytes([kind])


class Modelled:
    """The exchange of a tier, and what its slots must hold."""

    def __init__(self, seed, groups=PLAIN):
        self.rng = random.Random(seed)
        self.tier = TierSlots(NUM_SLOTS)
        self.pool = BlockPool(NUM_BLOCKS, len(groups), 0, self._evict)
        self.names = ContentNames(groups, b"tag")
        self.wanted = []
        self.exchange = HostBlockExchange(
            self.tier, self.pool, lambda req_id: self.wanted, self.names
        )
        self.num_kinds = len({*groups})
        self.staged, self.reserved = [], []
        self.num_names = 0

    def _evict(self, block_id, group, block_hash):
        self.tier.evict(key_of(group, block_hash), block_id)

    def new_names(self, count):
        self.num_names += count
        numbers = range(self.num_names - count, self.num_names)
        return [name_of(number, number % self.num_kinds) for number in numbers]

    def compute(self):
        """Fill the blocks of a few contents, which evicts others."""
        for name in self.new_names(self.rng.randint(1, 3)):
            keys = self.names.keys_of(name)
            blocks = self.pool.allocate(len(keys))
            for block_id, key in zip(blocks, keys, strict=True):
                self.pool.remember(key[-1], block_id, key[:-1])
            self.pool.release(blocks)

    def stage(self):
        numbers = [self.rng.randrange(max(1, self.num_names)) for _ in range(2)]
        staged = self.exchange.stage([name_of(n, n % self.num_kinds) for n in numbers])
        assert len(staged) == 2 or not (staged and self.exchange.needs_all)
        self.staged += staged

    def release(self):
        if self.staged:
            self.exchange.release([self.staged.pop(self.rng.randrange(len(self.staged))).name])

    def reserve(self):
        names = self.new_names(self.rng.randint(1, 3))
        reserved = self.exchange.reserve(names)
        assert len(reserved) == len(names) or not (reserved and self.exchange.needs_all)
        self.reserved += reserved

    def end(self):
        if self.reserved:
            contents = self.reserved.pop(self.rng.randrange(len(self.reserved)))
            self.wanted = self.names.keys_of(contents.name)
            assert self.exchange.lacking("r") == [contents.name]
            if self.rng.random() < 0.5:
                self.exchange.fill([contents.name])
                assert self.exchange.lacking("r") == []
            else:
                self.exchange.give_back([contents.name])
                assert self.exchange.lacking("r") == [contents.name]

    def keys_in(self, held):
        """Slots with their keys."""
        blocks = self.exchange.blocks_of(held)
        return dict(zip(blocks.slots, blocks.keys, strict=True))

    def check(self):
        """What the next step stores goes to no slot of another group, but for contents that are
        kept there for it."""
        kept, reserved = self.keys_in(self.staged), self.keys_in(self.reserved)
        assert not reserved.keys() & kept.keys()
        for moves in self.tier.take_moves(b"tag"):
            for slot, name in zip(moves.stored.slots, moves.stored.hashes, strict=True):
                assert slot not in reserved
                assert kept.get(slot, name) == name
        assert self.exchange.num_slots <= NUM_SLOTS


@pytest.mark.parametrize("groups", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("seed", seeds(4, of=100))
def test_slots_of_other_groups_are_left_alone(seed, groups):
    model = Modelled(seed, groups)
    calls = (model.compute, model.stage, model.release, model.reserve, model.end)
    for _ in range(400):
        model.rng.choice(calls)()
        model.check()
    for slot, key in model.keys_in(model.staged).items():
        assert model.tier.pin(key, None) == slot, seed
        model.tier.unpin(key)
    model.exchange.release([each.name for each in model.staged])
    model.exchange.give_back([each.name for each in model.reserved])
    assert model.exchange.num_slots == 0
    free = []
    while found := model.exchange.reserve(model.new_names(1)):
        free += found
    slots = model.exchange.blocks_of(free).slots
    assert len({*slots}) == len(slots) > NUM_SLOTS - len(groups), seed


def test_contents_that_come_after_all_were_forgotten_are_not_used():
    model = Modelled(0)
    names = model.new_names(2)
    model.wanted = [key for name in names for key in model.names.keys_of(name)]
    model.exchange.reserve(names)
    model.tier.forget_all()
    model.exchange.fill(names)
    assert model.exchange.lacking("r") == names
    assert len(model.exchange.reserve(model.new_names(NUM_SLOTS))) == NUM_SLOTS


def test_contents_on_their_way_or_here_are_not_asked_for_again():
    model = Modelled(0)
    first, second, third = model.new_names(3)
    assert [each.name for each in model.exchange.reserve([first, second])] == [first, second]
    assert [each.name for each in model.exchange.reserve([second, third])] == [third]
    model.exchange.fill([first])
    assert model.exchange.reserve([first]) == []


def test_contents_that_one_kv_group_lacks_come_whole():
    """Those of the other KV group stay where they are."""
    model = Modelled(0, WINDOWED)
    name = name_of(7, 1)
    first, second = model.wanted = model.names.keys_of(name)
    (block_id,) = model.pool.allocate(1)
    model.pool.remember(first[-1], block_id, first[:-1])
    assert model.exchange.lacking("r") == [name]
    assert model.exchange.stage([name]) == []
    (moves,) = model.tier.take_moves(b"tag")
    assert moves.stored.hashes == (first,)
    (held,) = model.exchange.reserve([name])
    model.exchange.fill([name])
    assert model.exchange.lacking("r") == []
    assert model.tier.pin(first, None) == moves.stored.slots[0] != held.slots[0]
    assert model.tier.pin(second, None) == held.slots[1]
    model.wanted = []
    free = model.exchange.reserve(model.new_names(NUM_SLOTS)[::2])
    assert held.slots[0] in model.exchange.blocks_of(free).slots


def test_without_room_for_all_none_come():
    model = Modelled(0, WINDOWED)
    names = [name_of(number, 1) for number in range(NUM_SLOTS // 2 + 1)]
    assert model.exchange.reserve(names) == []
    assert model.exchange.num_slots == 0
    assert len(model.exchange.reserve(names[1:])) == NUM_SLOTS // 2
