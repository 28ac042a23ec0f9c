"""The choice of tiles and splits, over the sizes models have and the limits devices have."""

import itertools

import pytest
import torch

from worker_daemon.contracts.experts import ExpertMatrices
from worker_daemon.kernels.expert_tiles import choose_tiles, stage_bytes
from worker_daemon.kernels.tiles import (
    MAX_KEYS_UNPIPELINED,
    MAX_SPLITS,
    MIN_KEYS_PER_SPLIT,
    DeviceLimits,
    Tile,
    can_hold,
    choose_num_splits,
    decode_tile,
    gathered_tile,
    length_bounds,
    padded_head_dim,
    pays_to_cut,
    prefill_tile,
    shared_bytes,
    split_tile,
)

BF16 = torch.bfloat16
H200 = DeviceLimits(num_sms=132, shared_memory_bytes=227 * 1024)
CONSUMER = DeviceLimits(num_sms=40, shared_memory_bytes=99 * 1024)


@pytest.mark.parametrize("limits", [H200, CONSUMER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_fit_and_hold_a_group(limits: DeviceLimits, dtype: torch.dtype) -> None:
    for group_size, head_dim in itertools.product(range(1, 17), range(8, 257, 8)):
        tiles = [
            decode_tile(num_programs, longest, group_size, head_dim, dtype, limits)
            for num_programs, longest in ((8, 100), (4096, 100), (4096, 9000))
        ]
        tiles += [
            decode_tile(num, 1024, group_size, head_dim, dtype, limits, has_fp8_cache=True)
            for num in (8, 512, 4096)
        ]
        tiles += [
            prefill_tile(num_tokens, 8, 4, group_size, head_dim, dtype, limits)
            for num_tokens in (9, 128, 32768)
        ]
        tiles += [
            prefill_tile(32768, 8, 4, group_size, head_dim, dtype, limits, has_window=True),
            split_tile(group_size, head_dim, dtype, limits),
        ]
        for tile in tiles:
            assert tile.block_m >= group_size
            assert min(tile.block_m, tile.block_n) >= 16
            assert tile.block_m & (tile.block_m - 1) == tile.block_n & (tile.block_n - 1) == 0
            assert tile.num_stages >= 1
            assert shared_bytes(tile, head_dim, dtype) <= limits.shared_memory_bytes


@pytest.mark.parametrize("limits", [H200, CONSUMER])
@pytest.mark.parametrize("num_keys", [1024, 20_000])
def test_tiles_over_gathered_keys_fit(limits: DeviceLimits, num_keys: int) -> None:
    for head_dim in range(8, 257, 8):
        tile = gathered_tile(9000, num_keys, head_dim, torch.bfloat16, limits)
        assert min(tile.block_m, tile.block_n) >= 16
        rows = tile.block_m + 2 * tile.num_stages * tile.block_n
        needed = rows * padded_head_dim(head_dim) * torch.bfloat16.itemsize
        assert needed < limits.shared_memory_bytes


def test_tiles_over_gathered_keys_are_larger_for_many_queries_and_keys() -> None:
    def rows(num_queries: int, num_keys: int) -> int:
        return gathered_tile(num_queries, num_keys, 128, torch.bfloat16, H200).block_m

    assert rows(8192, 16384) == 128
    assert rows(8192, 8192) == rows(2048, 16384) == 64


def test_prefill_tiles_grow_with_the_tokens_of_a_sequence_and_with_the_batch() -> None:
    def rows(num_tokens: int, num_seqs: int) -> int:
        return prefill_tile(num_tokens, num_seqs, 8, 4, 128, torch.bfloat16, H200).block_m

    assert rows(320, 64) == rows(2112, 65) == 64  # verification; decodes beside one prefill
    assert rows(512, 1) == rows(2048, 1) == 128
    assert rows(8192, 1) == rows(8192, 16) == 256


def test_wide_heads_and_windows_have_tiles_that_leave_registers() -> None:
    """Warps hold the sums of a tile's rows and, under a window's mask, a tile of values."""

    def per_thread(tile: Tile, head_dim: int) -> tuple[float, float]:
        threads = 32 * tile.num_warps
        return tile.block_m * head_dim / threads, tile.block_n * head_dim / threads

    for num_programs, num_keys in itertools.product((4, 200, 500, 4000), (100, 500, 9000)):
        sums, values = per_thread(decode_tile(num_programs, num_keys, 2, 256, BF16, H200), 256)
        assert sums <= 32
        assert values <= 128
    for head_dim, (num_tokens, num_seqs) in itertools.product((128, 256), ((512, 256), (8192, 9))):
        tile = prefill_tile(num_tokens, num_seqs, 8, 2, head_dim, BF16, H200, has_window=True)
        assert per_thread(tile, head_dim)[0] <= 128
        assert per_thread(tile, head_dim)[1] <= 64


def test_decode_tiles_are_long_while_the_device_has_room() -> None:
    def keys(num_programs: int, longest: int) -> int:
        return decode_tile(num_programs, longest, 4, 128, torch.bfloat16, H200).block_n

    assert keys(8, 128) == keys(2 * H200.num_sms, 9999) == 128
    assert keys(8, 127) == keys(2048, 257) == 64
    assert keys(1024, 256) == keys(4096, 1) == 32


def test_many_decodes_take_the_tile_whose_last_wave_is_fuller() -> None:
    def keys(num_seqs: int) -> int:
        return decode_tile(num_seqs * 8, 1000, 4, 128, torch.bfloat16, H200).block_n

    one_wave_of_three, one_wave_of_four, two_waves_of_three = 49, 66, 99
    assert keys(34) == keys(one_wave_of_three) == 128
    assert keys(one_wave_of_three + 1) == keys(one_wave_of_four) == 64
    assert keys(one_wave_of_four + 1) == keys(two_waves_of_three) == 128
    assert keys(two_waves_of_three + 1) == keys(2 * one_wave_of_four) == 64


def test_few_keys_are_not_pipelined() -> None:
    def stages(num_programs: int, longest: int) -> int:
        return decode_tile(num_programs, longest, 4, 128, torch.bfloat16, H200).num_stages

    assert stages(8, MAX_KEYS_UNPIPELINED) == 1
    assert stages(8, MAX_KEYS_UNPIPELINED + 1) == stages(512, 99) == 3


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_a_thread_holds_a_quarter_of_its_registers_at_most_of_keys(head_dim: int) -> None:
    tile = decode_tile(8, 9999, 4, head_dim, torch.bfloat16, H200)
    assert can_hold(tile, head_dim) == (tile.block_n * padded_head_dim(head_dim) <= 128 * 128)


def test_one_split_once_the_device_is_full() -> None:
    assert choose_num_splits(64, 8, 131072, None, H200) == 1
    assert choose_num_splits(1, 8, MIN_KEYS_PER_SPLIT, None, H200) == 1
    assert choose_num_splits(0, 8, 0, None, H200) == 1


def test_splits_fill_the_device_but_keep_their_length() -> None:
    assert choose_num_splits(1, 8, 8192, None, H200) == 33
    assert choose_num_splits(1, 8, 1024, None, H200) == 16
    assert choose_num_splits(1, 1, 10**6, None, H200) == MAX_SPLITS
    for num_seqs, max_seq_len in itertools.product((1, 3, 16), (1, 300, 5000)):
        splits = choose_num_splits(num_seqs, 2, max_seq_len, None, H200)
        assert splits == 1 or splits * MIN_KEYS_PER_SPLIT <= max_seq_len


def test_a_window_bounds_the_keys_to_split() -> None:
    assert choose_num_splits(1, 8, 8192, 512, H200) == choose_num_splits(1, 8, 512, None, H200)


def test_long_decodes_over_fp8_are_split_although_the_device_is_full() -> None:
    def splits(num_seqs: int, longest: int) -> int:
        return choose_num_splits(num_seqs, 8, longest, None, H200, has_fp8_cache=True)

    assert splits(32, 8100) == 4
    assert splits(64, 8100) == 2
    assert splits(32, 4096) == splits(256, 8100) == 1
    assert splits(1, 8192) == choose_num_splits(1, 8, 8192, None, H200)


def test_many_splits_take_programs_of_one_warp() -> None:
    def tile(num_programs: int) -> tuple[int, int, int]:
        chosen = decode_tile(num_programs, 2025, 4, 128, torch.bfloat16, H200, is_split=True)
        return chosen.block_n, chosen.num_warps, chosen.num_stages

    assert tile(1024) == (32, 1, 5)
    assert tile(2 * H200.num_sms) == (128, 4, 3)


@pytest.mark.parametrize("has_fp8_cache", [False, True])
@pytest.mark.parametrize("longest", [1, 100, 256, 257, 4096, 131072])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 16, 64, 127, 128, 256])
def test_a_bound_is_launched_as_every_length_that_it_stands_for(
    num_seqs: int, longest: int, has_fp8_cache: bool
) -> None:
    bounds = length_bounds(num_seqs, 8, longest, H200, has_fp8_cache=has_fp8_cache)
    assert bounds == sorted({*bounds})
    assert bounds[-1] == longest

    def launch(length: int) -> tuple[int, bool, Tile]:
        splits = choose_num_splits(num_seqs, 8, length, None, H200, has_fp8_cache=has_fp8_cache)
        sizes = num_seqs * 8 * splits, -(-length // splits), 4, 128
        tile = decode_tile(*sizes, torch.bfloat16, H200, is_split=splits > 1)
        return splits, pays_to_cut(num_seqs, length, splits), tile

    launches = [launch(bound) for bound in bounds]
    assert len({*launches}) == len(launches)
    assert [splits for splits, *_ in launches] == sorted(splits for splits, *_ in launches)


@pytest.mark.parametrize("limits", [H200, CONSUMER])
@pytest.mark.parametrize("mean", [24, 100, 4000])
def test_tiles_of_many_rows_of_experts_fit(limits: DeviceLimits, mean: int) -> None:
    gate_up, down = torch.empty(8, 1536, 2048, dtype=BF16), torch.empty(8, 2048, 768, dtype=BF16)
    matrices = ExpertMatrices(gate_up, down, first=0)
    tiles = choose_tiles(8 * mean, matrices, BF16, limits)
    stages = stage_bytes(tiles, matrices, BF16)
    for tile, each in zip((tiles.gate_up, tiles.down), stages, strict=True):
        assert tile.num_stages * each < limits.shared_memory_bytes
    assert limits is CONSUMER or tiles.down.num_stages >= 4
