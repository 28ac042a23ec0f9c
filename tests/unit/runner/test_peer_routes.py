"""Routes of blocks between groups of any shapes: what each rank gets is what a naive model of the
ranks' pages says, and groups that cannot exchange blocks are refused."""

import random

import numpy as np
import pytest
from msgspec import structs

from rpc_schema.errors import ConfigError
from rpc_schema.kv_transfer import KVDraftPages, KVShard, KVShardGroup
from tests.support.exhaustive import seeds
from worker_daemon.runner.connectors.peer_routes import find_routes


def shards_of(num_layers, num_heads, pp, tp, rng):
    """The shards of a group with random numbers of layers in its stages."""
    cuts = sorted(rng.sample(range(1, num_layers), pp - 1))
    borders = [0, *cuts, num_layers]
    return [
        KVShard(
            pp_rank=stage,
            tp_rank=rank,
            layer_names=tuple(f"layers.{i}" for i in range(borders[stage], borders[stage + 1])),
            first_head=rank * num_heads // tp,
            num_heads=max(1, num_heads // tp),
            rows=8,
            words=4,
            dtype="float32",
            weights=bytes(32),
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def pages_of(shard):
    """[layers, heads]: the name of each part."""
    heads = range(shard.first_head, shard.first_head + shard.num_heads)
    return np.array([[f"{name} {head}" for head in heads] for name in shard.layer_names], object)


@pytest.mark.parametrize("seed", seeds(20, of=400))
def test_each_part_comes_once_from_a_rank_that_has_it(seed):
    rng = random.Random(seed)
    num_layers, num_heads = rng.randint(4, 9), 2 ** rng.randint(0, 3)
    shapes = [(rng.randint(1, 4), 2 ** rng.randint(0, 4)) for _ in range(2)]
    sources, destinations = (shards_of(num_layers, num_heads, *shape, rng) for shape in shapes)
    routes = find_routes(sources, destinations)
    received = [np.full(pages_of(each).shape, None, object) for each in destinations]
    for route in routes:
        sent, got = route.sent, route.received
        assert sent.num_heads == got.num_heads
        have = pages_of(sources[route.source])
        own = received[route.destination]
        for name, source, place in zip(route.layers, sent.pages, got.pages, strict=True):
            assert destinations[route.destination].layer_names[place.page] == name
            for head in range(sent.num_heads):
                assert own[place.page, got.first_head + head] is None, (seed, route)
                part = have[source.page, sent.first_head + head]
                own[place.page, got.first_head + head] = part
    for shard, found in zip(destinations, received, strict=True):
        assert (found == pages_of(shard)).all(), (seed, shapes, num_layers, num_heads)


def test_ranks_that_share_heads_take_turns():
    """Four ranks with one head each of one: four destinations get it from all of them."""
    rng = random.Random(0)
    sources, destinations = (shards_of(4, 1, 1, 4, rng) for _ in range(2))
    assert [route.source for route in find_routes(sources, destinations)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [("rows", 16), ("words", 8), ("dtype", "bfloat16"), ("weights", b"w" * 32)],
)
def test_groups_of_other_blocks_are_refused(field, value):
    rng = random.Random(0)
    sources, destinations = (shards_of(4, 2, 1, 1, rng) for _ in range(2))
    others = [structs.replace(each, **{field: value}) for each in destinations]
    with pytest.raises(ConfigError, match=f"shards.{field}"):
        find_routes(sources, others)


def test_other_windows_are_refused():
    rng = random.Random(0)
    sources, destinations = (shards_of(4, 2, 1, 1, rng) for _ in range(2))
    windowed = (KVShardGroup(num_layers=4, sliding_window=8),)
    others = [structs.replace(each, groups=windowed) for each in destinations]
    with pytest.raises(ConfigError, match=r"windows of layers\.0.*shards\.groups = 8"):
        find_routes(sources, others)


DRAFTS = KVDraftPages(
    layer_names=("draft",),
    first_head=0,
    num_heads=2,
    rows=8,
    words=4,
    dtype="float32",
    weights=bytes(32),
)


@pytest.mark.parametrize("field", ["rows", "words", "dtype", "weights"])
def test_other_draft_models_are_refused(field):
    rng = random.Random(0)
    values = {"rows": 16, "words": 8, "dtype": "bfloat16", "weights": b"w" * 32}
    ours, theirs = (
        [structs.replace(each, drafts=drafts) for each in shards_of(4, 2, 1, 1, rng)]
        for drafts in (DRAFTS, structs.replace(DRAFTS, **{field: values[field]}))
    )
    with pytest.raises(ConfigError, match=rf"shards.drafts\.{field}"):
        find_routes(ours, theirs)


def test_a_group_with_a_draft_model_needs_one_that_has_it_too():
    rng = random.Random(0)
    plain = shards_of(4, 2, 1, 1, rng)
    drafting = [structs.replace(each, drafts=DRAFTS) for each in plain]
    assert len(find_routes(drafting, plain)) == 1
    with pytest.raises(ConfigError, match="parts of a draft model that no rank"):
        find_routes(plain, drafting)


def test_layers_that_nobody_has_are_refused():
    rng = random.Random(0)
    sources, destinations = shards_of(4, 2, 1, 1, rng), shards_of(5, 2, 1, 1, rng)
    with pytest.raises(ConfigError, match="no rank of the other group has"):
        find_routes(sources, destinations)
