"""Slots that other groups read or fill: nothing else takes them meanwhile, and none is lost."""

import itertools
import random
from types import SimpleNamespace

import pytest

from rpc_schema.kv_cache import BlockGroup
from tests.support.exhaustive import seeds
from worker_client.scheduler.block_exchange import HostBlockExchange
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.content_names import ContentNames
from worker_client.scheduler.host_tier import HostPlace
from worker_client.scheduler_output import SchedulerOutput

NUM_SLOTS, NUM_BLOCKS = 24, 16
PLAIN = (BlockGroup(4),)
WINDOWED = (BlockGroup(4), BlockGroup(4, 8), BlockGroup(4, 8))


def name_of(number, kind=0):
    return number.to_bytes(16, "little") + bytes([kind])


class Modelled:
    """The exchange of a tier, and what its slots must hold."""

    def __init__(self, seed, groups=PLAIN):
        self.rng = random.Random(seed)
        self.tier = HostPlace(NUM_SLOTS)
        self.pool = BlockPool(NUM_BLOCKS, len(groups), 0, self.tier.evict)
        self.names = ContentNames(groups, b"tag")
        self.wanted = []
        self.steps = SimpleNamespace(next=0, oldest=0, num_failures=0)
        self.exchange = HostBlockExchange(
            self.tier, self.pool, lambda req_id, num_more: self.wanted, self.names, self.steps
        )
        self.outgoing = self.exchange.outgoing
        self.num_kinds = len({*groups})
        self.filled_by = {}
        """Step that has filled contents."""
        self.outputs, self.slots = {}, {}
        """Steps in flight by number, and keys by slot."""
        self.asked, self.taken, self.reserved = {}, [], []
        self.num_names = self.num_prompts = self.num_filled = 0

    def new_names(self, count):
        self.num_names += count
        numbers = range(self.num_names - count, self.num_names)
        return [name_of(number, number % self.num_kinds) for number in numbers]

    def compute(self, *, keeps=None):
        """Send a step that fills the blocks of a few contents, which evicts others. keeps: it
        stores what it fills; None: at random."""
        self.outgoing.keep_filled()
        names = self.new_names(self.rng.randint(1, 3))
        keys = [self.names.keys_of(name) for name in names]
        blocks = [self.pool.allocate(len(own)) for own in keys]
        self.filled_by |= dict.fromkeys(names, self.steps.next)
        self.steps.next += 1
        if self.rng.random() < 0.5 if keeps is None else keeps:
            pairs = zip(itertools.chain(*keys), itertools.chain(*blocks), strict=True)
            self.outgoing.keep_filling(dict(pairs), ())
        output = SchedulerOutput(extensions=self.tier.take_moves(b"tag"))
        self.check_stores(output)
        self.outputs[self.steps.next - 1] = output
        for own, given in zip(keys, blocks, strict=True):
            for block_id, key in zip(given, own, strict=True):
                self.pool.remember(key[-1], block_id, key[:-1])
            self.pool.release(given)

    def settle(self):
        for _ in range(self.rng.randint(1, 2)):
            self.outputs.pop(self.steps.oldest, None)
            self.steps.oldest = min(self.steps.oldest + 1, self.steps.next)

    def fail(self):
        """All steps in flight fail."""
        self.tier.fail(self.outputs.values())
        self.pool.forget_all()
        for name in [n for n, step in self.filled_by.items() if step >= self.steps.oldest]:
            del self.filled_by[name]
        self.outputs.clear()
        self.steps.oldest = self.steps.next
        self.outgoing.release([each for each in self.taken if not self.is_there(each)])
        self.taken = [each for each in self.taken if self.is_there(each)]

    def is_there(self, contents):
        keys = self.names.keys_of(contents.name)
        return [self.tier.slots.get(key) for key in keys] == [*contents.slots]

    def want(self):
        """Contents that were computed, and some that will be."""
        self.num_prompts += 1
        first = max(0, self.num_names - self.rng.randrange(8))
        numbers = range(first, first + self.rng.randint(1, 4))
        names = [name_of(number, number % self.num_kinds) for number in numbers]
        self.asked[self.num_prompts] = sorted(names, key=lambda name: name[-1])
        self.outgoing.want(self.num_prompts, names)

    def take(self):
        for number, names in self.asked.items():
            for step, contents, end in self.outgoing.take(number):
                assert self.filled_by[contents.name] < end <= self.steps.next > step
                assert contents.name == names.pop(0)
                self.taken.append(contents)

    def drop(self):
        if self.asked:
            number = self.rng.choice([*self.asked])
            del self.asked[number]
            self.outgoing.drop(number)

    def release(self):
        if self.taken:
            self.outgoing.release([self.taken.pop(self.rng.randrange(len(self.taken)))])

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
                self.filled_by[contents.name] = -1
                self.slots |= self.keys_in([contents])
            else:
                self.exchange.give_back([contents.name])
                assert self.exchange.lacking("r") == [contents.name]

    def keys_in(self, held):
        """Slots with their keys."""
        blocks = self.exchange.blocks_of(held)
        return dict(zip(blocks.slots, blocks.keys, strict=True))

    def check_stores(self, output):
        """What a step stores goes to no slot of another group, but for contents that are kept there
        for it."""
        kept, reserved = self.keys_in(self.taken), self.keys_in(self.reserved)
        assert not reserved.keys() & kept.keys()
        for moves in output.extensions:
            num_before = len(moves.stored.slots) - moves.num_filled
            stored = zip(moves.stored.slots, moves.stored.hashes, strict=True)
            for place, (slot, key) in enumerate(stored):
                assert slot not in reserved
                assert kept.get(slot, key) == key
                filled_by = self.filled_by[self.names.name_of(key)]
                assert (filled_by == self.steps.next - 1) == (place >= num_before)
                self.num_filled += place >= num_before
                self.slots[slot] = key
        for slot, key in kept.items():  # at the latest this step has stored it
            assert self.slots[slot] == key
        assert self.exchange.num_slots <= NUM_SLOTS


@pytest.mark.parametrize("groups", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("seed", seeds(4, of=100))
def test_slots_of_other_groups_are_left_alone(seed, groups):
    model = Modelled(seed, groups)
    calls = 3 * [model.compute, model.settle, model.want, model.take]
    calls += [model.drop, model.release, model.reserve, model.end]
    num_taken = 0
    for number in range(800):
        before = len(model.taken)
        (model.fail if number % 97 == 96 else model.rng.choice(calls))()
        num_taken += max(0, len(model.taken) - before)
    assert num_taken > 9 and model.num_filled > 0, seed
    for number in model.asked:
        model.outgoing.drop(number)
    model.outgoing.release(model.taken)
    model.exchange.give_back([each.name for each in model.reserved])
    assert model.exchange.num_slots == 0
    free = []
    while found := model.exchange.reserve(model.new_names(1)):
        free += found
    slots = model.exchange.blocks_of(free).slots
    assert len({*slots}) == len(slots) > NUM_SLOTS - len(groups), seed


def test_contents_are_sent_with_the_step_that_stores_them_and_right_once_it_is_the_oldest():
    model = Modelled(0)
    names = [name_of(number) for number in range(9)]
    model.outgoing.want(1, names)
    model.compute(keeps=False)
    filled = [*model.filled_by]
    assert model.outgoing.take(1) == []
    model.compute(keeps=False)
    taken = model.outgoing.take(1)
    assert [(each.step, each.contents.name) for each in taken] == [(1, name) for name in filled]
    assert not model.outgoing.are_filled(1)
    model.steps.oldest = 1
    assert model.outgoing.are_filled(1)
    assert {*model.slots.values()} == {key for name in filled for key in model.names.keys_of(name)}
    model.fail()
    assert model.outgoing.take(1) == [] and not model.outgoing.has_kept(1)


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
    model.outgoing.want(1, [name])
    model.outgoing.keep_filled()
    assert not model.outgoing.has_kept(1) and not model.tier.has_moves
    model.tier.evict({block_id: first})
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
