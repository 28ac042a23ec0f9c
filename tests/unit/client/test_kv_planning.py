"""Blocks and context lengths, against counting."""

import msgspec
import numpy as np
import pytest

from rpc_schema import kv_cache
from rpc_schema.config import read_layer_partition
from worker_client.errors import KVPlanError
from worker_client.group.kv_planning import (
    bytes_for_pages,
    choose_num_blocks,
    fit_max_model_len,
)


def layer(name, bytes_per_token):
    return kv_cache.KVPages(
        layer_name=name,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        bytes_per_token=bytes_per_token,
    )


def random_cases():
    rng = np.random.default_rng()
    for _ in range(200):
        block_size = 2 ** int(rng.integers(0, 8))
        size = int(rng.integers(1, 50))
        specs = [
            [layer(f"{rank}.{i}", size) for i in range(rng.integers(1, 5))]
            for rank in range(rng.integers(1, 5))
        ]
        available = rng.integers(0, 200_000, len(specs)).tolist()
        yield block_size, size, specs, available


def test_the_smallest_rank_decides_and_its_blocks_fit_where_one_more_does_not():
    """Stages differ in their layers."""
    for block_size, size, specs, available in random_cases():
        groups = kv_cache.plan_groups(specs, block_size, 100, 10)
        count = kv_cache.smallest_fitting_blocks(groups, available)
        each = [block_size * size * len(layers) for layers in specs]
        room = [has - count * size for has, size in zip(available, each, strict=True)]
        assert min(room) >= 0
        assert any(left < size for left, size in zip(room, each, strict=True))
        if count >= 2:
            plan = kv_cache.build_kv_cache_config(groups, 0, count)
            assert plan.size_bytes == count * each[0] <= available[0]
            assert plan.groups[0].layer_names == tuple(spec.layer_name for spec in specs[0])
            assert (len(plan.groups), plan.groups[0].block_size) == (1, block_size)


def test_requests_of_the_longest_length_have_all_their_blocks():
    rng = np.random.default_rng()
    for _ in range(200):
        num_blocks, length = int(rng.integers(0, 300)), int(rng.integers(1, 500))
        size = 2 ** int(rng.integers(0, 7))
        groups = [kv_cache.BlockGroup(size)]
        free, count = num_blocks - 1, 0
        while free >= kv_cache.blocks_for(length, size):
            free -= kv_cache.blocks_for(length, size)
            count += 1
        assert kv_cache.longest_requests(num_blocks, groups, length, 7) == count
        usable = kv_cache.usable_tokens(num_blocks, groups, length, 7)
        assert usable == max(0, num_blocks - 1) * size


def test_a_rank_that_lacks_bytes_has_no_blocks():
    assert kv_cache.fitting_blocks(-5, 10) == 0
    assert [kv_cache.blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_length_is_kept_lowered_or_refused():
    """Not even one request of the longest length fits."""
    groups = [kv_cache.BlockGroup(4)]
    assert fit_max_model_len(11, groups, 40, 8, may_lower=False) == 40
    assert fit_max_model_len(11, groups, 41, 8, may_lower=True) == 40
    for num_blocks, may_lower in ((11, False), (1, True), (0, True)):
        with pytest.raises(KVPlanError, match="needs 12 KV blocks") as caught:
            fit_max_model_len(num_blocks, groups, 41, 8, may_lower=may_lower)
        assert caught.value.field == "max_model_len"
    assert choose_num_blocks(9, None) == 9
    assert choose_num_blocks(9, 8) == 8
    with pytest.raises(KVPlanError, match="at most 9"):
        choose_num_blocks(9, 10)


def test_a_layer_partition_is_a_list_of_counts():
    assert read_layer_partition("17, 15") == (17, 15)
    for text in ("", "3,", "3,x", "0,3", "-1,4", "\u00b2", "1" * 5000, "1.5"):
        with pytest.raises(ValueError, match="not a list of counts"):
            read_layer_partition(text)


def state(name, num_bytes, every=None):
    return kv_cache.RowState(
        layer_name=name,
        shape=(num_bytes,),
        dtype="uint8",
        bytes_per_row=num_bytes,
        checkpoint_blocks=every,
    )


def test_checkpoints_take_a_tenth_of_the_memory_and_all_blocks_fit_where_one_more_does_not():
    """By counting the bytes of each plan."""
    rng, max_num_seqs, planned = np.random.default_rng(), 3, 0
    for block_size, _, specs, _ in random_cases():
        for rank, layers in enumerate(specs):
            layers += [
                state(f"s{rank}.{i}", int(rng.integers(1, 5000))) for i in range(rng.integers(0, 3))
            ]
        groups = kv_cache.plan_groups(specs, block_size, 10**6, 10)
        every = kv_cache.choose_checkpoint_blocks(specs, groups, 10**6)
        states = [kv_cache.rank_states(layers, max_num_seqs) for layers in specs]
        available = [int(rng.integers(10**5, 10**7)) for _ in specs]
        for_pages = bytes_for_pages(available, states, max_num_seqs)
        count = kv_cache.smallest_fitting_blocks(groups, for_pages, states, every)
        if not any(own.row_bytes for own in states):
            assert every == 0
            continue

        def sizes(rank, num_blocks, groups=groups, states=states, every=every):
            plan = kv_cache.build_kv_cache_config(groups, rank, num_blocks, states[rank], every)
            return plan.size_bytes, plan.state_bytes

        room = [
            (has - sum(sizes(rank, count)), has - sum(sizes(rank, count + 1)))
            for rank, has in enumerate(available)
        ]
        assert all(left >= 0 for left, _ in room) and any(left < 0 for _, left in room)
        for rank, own in enumerate(states):
            pages, kept = sizes(rank, 1000 * every)
            checkpoints = kept - own.size_bytes
            assert checkpoints <= (pages + checkpoints) / 10 + 256 * len(own.row_bytes)
            planned += checkpoints > 0
        least = max(
            512 / block_size,
            *(
                9 * sum(own.row_bytes) / kv_cache.bytes_per_block(groups, rank)
                for rank, own in enumerate(states)
            ),
        )
        assert every - 1 < least <= every
    assert planned


def test_layers_say_how_often_they_have_checkpoints():
    def every(*layers, length=1000):
        groups = kv_cache.plan_groups([layers], 4, length, 32)
        return groups[0].blocks.block_size, kv_cache.choose_checkpoint_blocks(
            [layers], groups, length
        )

    pages = kv_cache.KVPages(
        layer_name="kv", num_kv_heads=1, head_size=1, dtype="uint8", bytes_per_token=4
    )
    assert every(pages, state("a", 300)) == (4, 169), "16 bytes of pages in a block"
    assert every(pages, state("a", 64)) == (4, 128), "512 tokens at least"
    assert every(pages, state("a", 64, 5), state("b", 64)) == (4, 5)
    assert every(pages, state("a", 64, 5), state("b", 64, 7)) == (4, 7)
    assert every(pages, state("a", 64, 5), state("b", 64, 0)) == (4, 0)
    assert every(pages, state("a", 64), length=512) == (4, 0), "no request reaches a border"
    assert every(pages) == (4, 0)
    assert every(state("a", 64)) == (1000, 0), "nothing of which a tenth could be taken"
    assert every(state("a", 64, 8)) == (4, 8)
    window = kv_cache.KVPages(
        layer_name="w",
        num_kv_heads=1,
        head_size=1,
        dtype="uint8",
        bytes_per_token=1,
        sliding_window=64,
    )
    assert every(pages, window, state("a", 64, 5)) == (4, 8), "blocks of 4 and of 16 tokens"
    alone = msgspec.structs.replace(window, sliding_window=1)
    assert every(alone, state("a", 64, 5)) == (4, 0), "no block is left at a border"


def test_states_take_their_memory_before_pages_do():
    states = [
        kv_cache.RowState(layer_name=str(i), shape=(3, 5), dtype="float32", bytes_per_row=60)
        for i in range(2)
    ]
    ranks = [kv_cache.rank_states(states, 8), kv_cache.rank_states([layer("kv", 4)], 8)]
    assert [own.size_bytes for own in ranks] == [2 * 768, 0]  # 540 bytes, rounded up to 256
    assert bytes_for_pages([4000, 3000], ranks, 8) == [4000 - 1536, 3000]
    with pytest.raises(KVPlanError, match="on rank 0, and 1500 are left") as refused:
        bytes_for_pages([1500, 3000], ranks, 8)
    assert (refused.value.field, refused.value.value) == ("scheduler.max_num_seqs", 8)
    assert bytes_for_pages([-5], ranks[1:], 8) == [-5], "without states, pages lack memory"
