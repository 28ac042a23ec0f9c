"""Prefixes of requests whose blocks are scattered over the KV cache and host memory: every group
can serve what is found, and there is nothing longer."""

import random
from array import array

import pytest

from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_behind
from tests.support.exhaustive import seeds
from worker_client.scheduler.block_hashes import BlockHashes
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.outside_blocks import key_of
from worker_client.scheduler.prefix_search import OUTSIDE, PrefixSearch
from worker_client.scheduler.request import Request

BLOCK_SIZE = 4


class Outside:
    """Host memory that a step can load `room` blocks from."""

    def __init__(self):
        self.keys, self.room = set(), 1 << 30

    def held(self, keys):
        return self.keys.intersection(keys)


class Scattered:
    """A request, each of whose blocks is in the KV cache, in host memory, or nowhere."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        kinds = [BlockGroup(BLOCK_SIZE), *(BlockGroup(BLOCK_SIZE, rng.randint(1, 20)),) * 2]
        self.groups = tuple(rng.choices(kinds, k=rng.randint(1, 4)))
        limits = SchedulerLimits(4, 32, 512, 1000, BLOCK_SIZE, groups=self.groups)
        self.pool, self.outside = BlockPool(1000, len(self.groups)), Outside()
        self.hashes = BlockHashes(limits)
        tokens = array("i", [rng.randrange(300) for _ in range(rng.randint(1, 90))])
        self.request = Request("r", tokens, len(tokens), 512, ())
        self.search = PrefixSearch(limits, self.hashes, self.pool, self.outside)
        self.names = self.hashes.of(self.request)
        for group, kind in enumerate(self.groups):
            # Blocks that a window has passed go to others: mostly its first ones are nowhere.
            lost = rng.choice([0.0, 0.02, 0.1])
            first = 0 if kind.window is None else rng.randint(0, len(self.names))
            for index, name in enumerate(self.names):
                if rng.random() < (lost if index >= first else 0.5):
                    continue
                if rng.random() < 0.5:
                    (block_id,) = self.pool.allocate(1)
                    self.pool.remember(group, block_id, name)
                    self.pool.release([block_id])
                else:
                    self.outside.keys.add(key_of(group, name))

    def place(self, group, index):
        """A block's id, OUTSIDE, or None."""
        found = self.pool.find(group, self.names[index])
        if found is None and key_of(group, self.names[index]) in self.outside.keys:
            return OUTSIDE
        return found

    def needed(self, group, length):
        """The blocks that a prefix of so many blocks needs of a group; None: it lacks some."""
        behind = blocks_behind(length * BLOCK_SIZE, self.groups[group])
        own = [NULL_BLOCK] * behind + [self.place(group, i) for i in range(behind, length)]
        return None if None in own else own

    def longest(self):
        """The longest prefix that all groups can serve."""
        length = (len(self.request.tokens) - 1) // BLOCK_SIZE
        while any(self.needed(group, length) is None for group in range(len(self.groups))):
            length -= 1
        return length


@pytest.mark.parametrize("seed", seeds(60, of=2000))
def test_every_group_can_serve_what_is_found(seed):
    model = Scattered(seed)
    found, longest = model.search.find(model.request), model.longest()
    assert found.num_tokens == longest * BLOCK_SIZE, seed
    model.outside.room = model.rng.randint(0, 12)
    found = model.search.find(model.request)
    length, rest = divmod(found.num_tokens, BLOCK_SIZE)
    assert length <= longest and not rest
    assert sum(own.count(OUTSIDE) for own in found.by_group) <= model.outside.room
    for group, own in enumerate(found.by_group):
        assert [*own] == model.needed(group, length), (seed, group)
