"""What a request of vLLM's can load from host memory, compared with what a plain search finds."""

import random

import pytest

from rpc_schema.errors import ErrorCode, error_of_rank
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_behind
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.vllm.offloaded_blocks import OffloadedBlocks

GROUPS = {
    "one": [BlockGroup(4)],
    "window": [BlockGroup(4, 10)],
    "several": [BlockGroup(8), BlockGroup(4, 9), BlockGroup(4, 20)],
}
HASHES = [bytes((n,)) * 32 for n in range(20)]
"""Of every 4 tokens."""


class Prefixes:
    """What the daemons have in host memory."""

    def __init__(self):
        self.held = {}
        self.error = None

    def get(self, tag, *, in_host_tier):
        assert in_host_tier
        if self.error is not None:
            raise self.error
        found = self.held.get(tag, {})
        return CachedBlocks.of(list(found), list(found.values()))


def name_of(block_hash, group):
    return block_hash + bytes((group,))


def made(groups, prefixes=None):
    return OffloadedBlocks(prefixes or Prefixes(), name_of, groups, 200, b"tag")


def seen(groups, first, end):
    """Every block that a request which begins with `end` tokens needs beside those before first:
    group, index and name."""
    return [
        (number, index, name_of(HASHES[(index + 1) * group.block_size // 4 - 1], number))
        for number, group in enumerate(groups)
        for index in range(end // group.block_size)
        if index >= first // group.block_size and index >= blocks_behind(end, group)
    ]


@pytest.mark.parametrize("kind", GROUPS)
def test_a_request_loads_the_longest_prefix_that_is_there(kind):
    groups, seed = GROUPS[kind], random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, lengths = random.Random(seed), set()
    unit = max(group.block_size for group in groups)
    for _ in range(60):
        tier = made(groups)
        everything = [
            name for _, _, name in seen([BlockGroup(g.block_size) for g in groups], 0, 80)
        ]
        lost = rng.choice([0.0, 0.02, 0.1])
        held = [name for name in everything if rng.random() >= lost]
        for block_id, name in enumerate(held, 1):
            tier.evict(name, block_id)
        (moves,) = tier.take_moves()
        slot_of = dict(zip(moves.stored.hashes, moves.stored.slots, strict=True))
        first, known = rng.randrange(0, 81, 4), rng.randint(1, 81)
        ends = [
            end
            for end in range(first + unit, known, unit)
            if first % unit == 0 and all(name in slot_of for _, _, name in seen(groups, first, end))
        ]
        count = tier.find(HASHES, first, known)
        assert count == max(ends, default=first) - first, seed
        lengths.add(count)
        if not count:
            assert tier.take_moves() == (), seed
            continue
        needed = {(g, i): name for g, i, name in seen(groups, first, first + count)}
        blocks = [
            [
                500 + 100 * g + i if (g, i) in needed else NULL_BLOCK
                for i in range((first + count) // group.block_size)
            ]
            for g, group in enumerate(groups)
        ]
        tier.load(HASHES, first, first + count, blocks)
        (moves,) = tier.take_moves()
        loaded = {block: (s, n) for block, s, n in zip(*moves.loaded, strict=True)}
        assert loaded == {
            500 + 100 * g + i: (slot_of[name], name) for (g, i), name in needed.items()
        }, seed
    assert len(lengths) > 2, seed


def test_what_daemons_have_is_read_and_what_is_forgotten_for_good_is_not():
    prefixes, groups = Prefixes(), GROUPS["one"]
    prefixes.held[b"tag"] = {3: name_of(HASHES[0], 0), 0: name_of(HASHES[1], 0)}
    tier = made(groups, prefixes)
    assert tier.find(HASHES, 0, 20) == 0
    assert tier.read() == 2
    assert tier.find(HASHES, 0, 20) == 8
    tier.distrust(HASHES, first=4)
    assert tier.find(HASHES, 0, 20) == 4
    assert tier.read() == 2
    tier.begin_anew()
    assert tier.find(HASHES, 0, 20) == 0
    assert (tier.read(), tier.find(HASHES, 0, 20)) == (0, 0)


def test_a_planned_step_still_loads_what_is_forgotten_meanwhile():
    prefixes, groups = Prefixes(), GROUPS["one"]
    prefixes.held[b"tag"] = {3: name_of(HASHES[0], 0)}
    tier = made(groups, prefixes)
    tier.read()
    assert tier.find(HASHES, 0, 20) == 4
    tier.load(HASHES, 0, 4, [[7]])
    tier.begin_anew()  # an adapter of the next request is read again
    tier.evict(name_of(HASHES[5], 0), 9)
    assert tier.find(HASHES, 0, 20) == 0
    (moves,) = tier.take_moves()
    assert (moves.tag, moves.loaded.block_ids, moves.stored.block_ids) == (b"tag", (7,), ())
    assert tier.find(HASHES, 0, 20) == 0
    tier.evict(name_of(HASHES[5], 0), 9)
    (moves,) = tier.take_moves()
    assert moves.tag != b"tag"
    assert moves.stored.block_ids == (9,)


def test_daemons_that_cannot_tell_have_nothing():
    prefixes = Prefixes()
    tier = made(GROUPS["one"], prefixes)
    tier.evict(name_of(HASHES[0], 0), 1)
    tier.take_moves()
    assert tier.find(HASHES, 0, 20) == 4
    prefixes.error = error_of_rank(ErrorCode.INTERNAL, "no", rank=0, endpoint="ipc:///nowhere")
    assert (tier.read(), tier.find(HASHES, 0, 20)) == (0, 0)
