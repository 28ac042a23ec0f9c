"""Blocks and context lengths, against counting."""

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
