"""The pool of KV blocks, with and without checkpoints of states, against a model of it: which
blocks are given, to which places of a request, and whose contents are found."""

import random
from collections import OrderedDict

import pytest

from tests.support.exhaustive import seeds
from worker_client.scheduler.block_pool import BlockPool

NUM_OPERATIONS = 400


class PoolModel:
    """A pool in plain lists: free blocks by the time at which they were freed."""

    def __init__(self, num_blocks, every):
        self.every = every
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.free = list(self.refs)
        self.block_of = {}

    def has_checkpoint(self, block_id):
        return bool(self.every) and block_id % self.every == 0

    def take(self, index):
        """Allocate for a place of a request's blocks of the first group; None: of another."""
        is_border = bool(self.every) and index is not None and (index + 1) % self.every == 0
        wanted = [each for each in self.free if self.has_checkpoint(each) == is_border]
        block_id = (wanted or self.free)[0]
        self.free.remove(block_id)
        self.refs[block_id] = 1
        self.forget(block_id)
        return block_id

    def release(self, block_ids):
        for block_id in reversed(block_ids):
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                self.free.append(block_id)

    def hold(self, block_ids):
        for block_id in block_ids:
            self.refs[block_id] += 1
            if block_id in self.free:
                self.free.remove(block_id)

    def remember(self, block_id, name, *, at_border):
        known = self.block_of.get(name)
        is_better = at_border and self.has_checkpoint(block_id)
        if known is None or (is_better and not self.has_checkpoint(known)):
            self.block_of[name] = block_id

    def forget(self, block_id):
        self.block_of = {n: each for n, each in self.block_of.items() if each != block_id}


def rank_some(rng, ranked, model):
    """Let some more of the free blocks be known as those that go next."""
    if rng.random() < 0.3:
        count = rng.randint(0, 5)
        firsts = ranked.behind_next(count)
        assert firsts == model.free[ranked.num_next :][:count]
        ranked.add_next(len(firsts))


@pytest.mark.parametrize(
    ("every", "tells"), [(0, True), *((every, False) for every in (0, 1, 2, 3, 7, 50))]
)
@pytest.mark.parametrize("seed", seeds(2, of=20))
def test_blocks_are_those_of_the_model(every, seed, tells):
    rng = random.Random(100 * every + seed)
    num_blocks, evicted = rng.choice([8, 31, 60]), {}
    pool = BlockPool(num_blocks, 2, every, evicted.update if tells else None)
    model, held, names, blocks_of = PoolModel(num_blocks, every), [], 0, OrderedDict()
    for _ in range(NUM_OPERATIONS):
        if pool.ranked is not None:
            rank_some(rng, pool.ranked, model)
        assert pool.num_free == len(model.free) == sum(not n for n in model.refs.values())
        found = {name: pool.find(0, name) for name in blocks_of}
        assert found == {name: model.block_of.get(name) for name in blocks_of}
        choice = rng.random()
        if choice < 0.35:
            index, count = rng.randrange(6), rng.randrange(1 + min(5, pool.num_free))
            before = {each: name + b"\0" for name, each in model.block_of.items()}
            evicted.clear()
            if every and rng.random() < 0.7:
                given = pool.allocate_from(index, count)
                wanted = [model.take(index + i) for i in range(count)]
            else:
                given, wanted = pool.allocate(count), [model.take(None) for _ in range(count)]
            assert given == wanted
            assert evicted == {i: before[i] for i in given if tells and i in before}
            held.append(given)
        elif choice < 0.6 and held:
            own = held.pop(rng.randrange(len(held)))
            pool.release(own)
            model.release(own)
        elif choice < 0.8 and any(held):
            block_id = rng.choice([each for own in held for each in own])
            at_border = every > 0 and rng.random() < 0.5
            if block_id in model.block_of.values():
                continue
            if rng.random() < 0.6:
                names += 1
            name = blocks_of[str(names).encode()] = str(names).encode()
            if at_border:
                pool.remember_border(block_id, name)
            else:
                pool.remember(0, block_id, name)
            model.remember(block_id, name, at_border=at_border)
        elif model.block_of:
            own = rng.sample(sorted(model.block_of.values()), 1)
            pool.hold(own)
            model.hold(own)
            held.append(own)


def test_blocks_without_checkpoints_are_those_of_one_queue():
    """Ids of models without states are as they were: ascending, then in the order of release."""
    pool = BlockPool(6, 1)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first, second) == ([1, 2], [3, 4, 5])
    pool.release(second)
    pool.release(first)
    assert pool.allocate(5) == [5, 4, 3, 2, 1]


def test_a_restored_block_is_the_last_of_its_kind():
    pool = BlockPool(9, 1, 4)
    assert pool.restore(0, 4, b"border") and pool.restore(0, 1, b"other")
    assert not pool.restore(0, 8, b"border") and not pool.restore(0, 4, b"again")
    assert pool.allocate_from(3, 1) == [8] and pool.find(0, b"border") == 4
    assert pool.allocate(6) == [2, 3, 5, 6, 7, 1] and pool.find(0, b"other") is None
    assert pool.num_free == 1 and pool.allocate(1) == [4] and pool.find(0, b"border") is None


@pytest.mark.parametrize(("every", "group", "found"), [(4, 0, 8), (4, 1, 3), (0, 0, 3)])
def test_of_equal_blocks_that_with_a_checkpoint_is_restored(every, group, found):
    """Only those of the first group have any."""
    pool = BlockPool(9, 2, every)
    assert pool.restore(group, 3, b"equal")
    assert pool.restore(group, 8, b"equal") == (found == 8)
    assert pool.find(group, b"equal") == found
    assert not pool.restore(group, 5, b"equal")
