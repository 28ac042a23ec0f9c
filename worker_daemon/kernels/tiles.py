"""Chooses tile and splits of a paged-attention launch by arithmetic on shapes and limits.

A choice never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from worker_daemon.contracts.fp8 import FP8

MIN_DOT_ROWS = 16
"""The smallest edge of a tile that an MMA instruction takes."""

MIN_KEYS_PER_SPLIT = 64
"""Shorter splits cost more in the reduction than they gain in parallelism."""

MAX_KEYS_UNPIPELINED = 512
"""Keys per program up to which software pipelining costs more than it saves."""

MAX_SPLITS = 64

SHORT_CONTEXT = 256
"""Keys up to which many decodes use shorter tiles; longer ones would be half empty."""

MANY_PROGRAMS = 1024
"""Sequences x KV heads from which shorter tiles are worth separate graphs."""

LONG_CONTEXT, SPLIT_PROGRAMS_PER_SM = 4096, 8
"""Decodes over a KV cache in FP8 with more keys than LONG_CONTEXT, which occupy all SMs, are split
until each SM has SPLIT_PROGRAMS_PER_SM: converting keys needs more warps than reading them."""

MIN_PIECE_KEYS = 1024
"""Keys of the pieces into which sequences of different lengths are cut, at least: a program reads
as many in some 15 us, ten times what its start takes."""

MIN_BLOCK_PIECE_KEYS = 512
"""The same, of blocks of query tokens (query_blocks.py), which compute more for each key."""

MAX_CUT_TOKENS = 512
"""Tokens of a step up to which the keys of its blocks are always cut. More have programs enough,
unless few of them see most of the keys."""

PIECES_PER_SM = 4
"""Pieces that such a schedule may add, for each SM."""

SMALL_TILES_RESIDENT, LARGE_TILES_RESIDENT = 4, 3
"""Resident decode programs per SM, with tiles of 64 and of 128 keys."""

FP8_STAGES, FP8_ONE_WAVE_STAGES = 5, 7
"""Stages of decodes over a KV cache in FP8, whose tiles are half as large; and of those whose
programs all run at once: with more shared memory, they are spread over the SMs evenly."""

HELD_ELEMENTS_PER_THREAD = 128
"""Elements of a tile's keys per thread, and as many of its values; more would leave too few
registers."""

FEW_ROWS_PER_SEQ = 512
"""Tiles stay small up to this many rows (query tokens x heads of a group) per sequence on
average."""

LARGE_TILE_ROWS = 256
"""With a head dimension up to 128, the output of this many rows still fits eight warps'
registers."""

WIDE = 128
"""Tiles with a larger padded head dimension have fewer keys or more warps; so have prefill tiles of
this dimension with a window and many rows. Others would spill dozens of registers in each loop."""

MANY_QUERIES, MANY_KEYS = 4096, 12288
"""Sizes from which tiles over gathered keys have 128 query tokens instead of 64: they read keys
half as often, which then matters more than spilled registers."""

RESERVED_GATHERED_BYTES = 1024
"""Reserved for barriers of the kernel over gathered keys, whose reductions stay inside warps."""

RESERVED_SHARED_BYTES = 8 * 1024
"""Reserved for the compiler's reductions and layout conversions."""


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of a launch: SMs, and shared memory of one program in bytes."""

    num_sms: int
    shared_memory_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        """Return the limits of a CUDA device; nominal ones for a CPU, where Triton's interpreter
        runs."""
        if device.type != "cuda":
            return cls(num_sms=8, shared_memory_bytes=96 * 1024)
        properties = torch.cuda.get_device_properties(device)
        return cls(
            num_sms=properties.multi_processor_count,
            # torch has it, but its type stub does not.
            shared_memory_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )


@dataclass(frozen=True)
class Tile:
    """One program's share: block_m rows (query tokens x heads of a group) against block_n keys.

    Both are powers of two >= 16; num_warps is the warps of a program. num_stages is the depth of
    the software pipeline: K and V wait for the block ids, so 2 n + 1 stages load n tiles ahead.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two >= value (value >= 1)."""
    return 1 << (value - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """Return the head dimension of a tile: a power of two, at least one MMA instruction wide."""
    return max(MIN_DOT_ROWS, next_power_of_two(head_dim))


def prefill_tile(
    num_tokens: int,
    num_seqs: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
    *,
    has_window: bool = False,
) -> Tile:
    """Return the tile for num_seqs sequences with num_tokens query tokens in total.

    Large tiles read keys less often. But they would be mostly empty if sequences have few tokens on
    average, and leave SMs idle if the batch is small. group_size is query heads per KV head.
    has_window: all tiles are masked, which takes registers.
    """
    if dtype == torch.float32 or num_tokens * group_size <= FEW_ROWS_PER_SEQ * num_seqs:
        return block_tile(group_size, head_dim, dtype, limits)
    rows = max(MIN_DOT_ROWS, next_power_of_two(group_size))
    width = padded_head_dim(head_dim)
    large_tiles = num_tokens * group_size * num_kv_heads // LARGE_TILE_ROWS
    if has_window and width >= WIDE:
        wanted = Tile(max(rows, 128), 64 * WIDE // width, num_warps=8, num_stages=3)
    elif large_tiles < 4 * limits.num_sms or width > WIDE:
        wanted = Tile(max(rows, 128), 128, num_warps=8, num_stages=3)
    else:
        wanted = Tile(max(rows, LARGE_TILE_ROWS), 64, num_warps=8, num_stages=3)
    return fit_tile(wanted, rows, head_dim, dtype, limits)


def block_tile(group_size: int, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Tile:
    """Return the small tile: that of sequences with few query tokens, and of all blocks whose keys
    are cut, whatever their number and context, so that one kernel serves these."""
    rows = max(MIN_DOT_ROWS, next_power_of_two(group_size))
    if dtype == torch.float32:
        wanted = _exact_tile(rows)
    elif padded_head_dim(head_dim) > WIDE:
        wanted = Tile(max(rows, 64), 32, num_warps=8, num_stages=5)
    else:
        wanted = Tile(max(rows, 64), 64, num_warps=4, num_stages=5)
    return fit_tile(wanted, rows, head_dim, dtype, limits)


def block_slots(tile: Tile, num_kv_heads: int, limits: DeviceLimits) -> int:
    """Return the programs, for each KV head, among which blocks of query tokens are divided: eight
    warps on each SM."""
    return max(1, limits.num_sms * 8 // (num_kv_heads * tile.num_warps))


def gathered_tile(
    num_queries: int, num_keys: int, head_dim: int, dtype: torch.dtype, limits: DeviceLimits
) -> Tile:
    """Return the tile for num_queries query tokens of a sequence over gathered keys, of which a
    query sees up to num_keys. num_stages tiles of keys and of values are in flight.

    Small programs share an SM, so that one computes products while another computes a softmax.
    """
    width = padded_head_dim(head_dim)
    if dtype == FP8 and width <= 128:
        tile = Tile(64, 128, num_warps=4, num_stages=3)
    elif dtype == FP8:
        tile = Tile(64, 64, num_warps=8, num_stages=3)
    elif width <= 64:
        tile = Tile(64, 128, num_warps=4, num_stages=2)
    elif width <= 128 and num_queries >= MANY_QUERIES and num_keys >= MANY_KEYS:
        tile = Tile(128, 64, num_warps=4, num_stages=2)
    else:
        tile = Tile(64, 64, num_warps=4, num_stages=3)
    budget = limits.shared_memory_bytes - RESERVED_GATHERED_BYTES
    while _gathered_bytes(tile, head_dim, dtype) > budget and tile.block_n > MIN_DOT_ROWS:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=2)
        else:
            tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def _gathered_bytes(tile: Tile, head_dim: int, dtype: torch.dtype) -> int:
    """Return the shared memory of a program: the queries, and K and V of the tiles in flight."""
    rows = tile.block_m + 2 * tile.num_stages * tile.block_n
    return rows * padded_head_dim(head_dim) * dtype.itemsize


def decode_tile(
    num_programs: int,
    keys_per_program: int,
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
    *,
    is_split: bool = False,
    has_fp8_cache: bool = False,
) -> Tile:
    """Return the tile for one query token per sequence, with just enough rows for a group.

    num_programs is sequences x KV heads x splits, keys_per_program an upper bound. Few programs are
    fastest with long tiles. Very many programs with few keys get short tiles, and so do splits that
    do not all run at once (LONG_CONTEXT). Otherwise, the tile with the least estimated time over
    all waves is chosen. Sequences of unequal length, started longest first, run equally well with
    both, or better with long tiles. dtype is that of queries.
    """
    rows = max(MIN_DOT_ROWS, next_power_of_two(group_size))
    sizes = _decode_tile_sizes(num_programs, keys_per_program, limits, is_split, has_fp8_cache)
    if dtype == torch.float32:
        wanted = _exact_tile(rows)
    elif padded_head_dim(head_dim) > WIDE:
        wanted = _wide_decode_tile(rows, num_stages=min(3, sizes[2]))
    else:
        wanted = Tile(rows, *sizes)
    return fit_tile(wanted, rows, head_dim, dtype, limits)


def split_tile(group_size: int, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Tile:
    """Return the tile for decodes that are always split, whatever their number and context, so that
    one kernel serves all of them."""
    rows = max(MIN_DOT_ROWS, next_power_of_two(group_size))
    if dtype == torch.float32:
        wanted = _exact_tile(rows)
    elif padded_head_dim(head_dim) > WIDE:
        wanted = _wide_decode_tile(rows, num_stages=3)
    else:
        wanted = Tile(rows, 128, 4, 3)
    return fit_tile(wanted, rows, head_dim, dtype, limits)


def _wide_decode_tile(rows: int, num_stages: int) -> Tile:
    """Return the decode tile for heads wider than WIDE. The number of programs and their keys
    matter only through num_stages."""
    return Tile(rows, 64 if num_stages == 1 else 32, num_warps=4, num_stages=num_stages)


def _decode_tile_sizes(
    num_programs: int,
    keys_per_program: int,
    limits: DeviceLimits,
    is_split: bool,
    has_fp8_cache: bool,
) -> tuple[int, int, int]:
    """Return block_n, num_warps and num_stages."""
    if run_at_once(num_programs, limits):
        block_n = 128 if keys_per_program >= 128 else 64
        return block_n, 4, 1 if keys_per_program <= MAX_KEYS_UNPIPELINED else 3
    if is_split:
        return 32, 1, 5
    if num_programs >= MANY_PROGRAMS and keys_per_program <= SHORT_CONTEXT:
        return 32, 2, 3
    small = _waves_cost(num_programs, SMALL_TILES_RESIDENT, limits)
    large = _waves_cost(num_programs, LARGE_TILES_RESIDENT, limits)
    num_stages = 3
    if has_fp8_cache:
        is_one_wave = num_programs <= SMALL_TILES_RESIDENT * limits.num_sms
        num_stages = FP8_ONE_WAVE_STAGES if is_one_wave else FP8_STAGES
    return (64, 2, num_stages) if small < large else (128, 4, num_stages)


def _waves_cost(num_programs: int, residents: int, limits: DeviceLimits) -> int:
    """Return the time of equal programs, in units of one program alone on its SM. Programs on one
    SM share its bandwidth, and the last wave takes as long as a full one."""
    return residents * -(-num_programs // (residents * limits.num_sms))


def run_at_once(num_programs: int, limits: DeviceLimits) -> bool:
    """Return True if all decode programs fit on the device at once. They then load their first
    keys and values before the projection is ready, and rotate its heads themselves. With more
    programs the registers for this cost more than the saved launch."""
    return num_programs <= 2 * limits.num_sms


def can_hold(tile: Tile, head_dim: int) -> bool:
    """Return True if a program's registers can hold a tile of keys and one of values in
    addition."""
    elements = tile.block_n * padded_head_dim(head_dim)
    return elements <= HELD_ELEMENTS_PER_THREAD * 32 * tile.num_warps


def _exact_tile(rows: int) -> Tile:
    """Return a tile for exact fp32 products. They run unrolled on CUDA cores, where larger tiles
    spill registers."""
    return Tile(rows, 32, num_warps=8, num_stages=3)


def fit_tile(
    tile: Tile, min_rows: int, head_dim: int, dtype: torch.dtype, limits: DeviceLimits
) -> Tile:
    """Shrink a tile until it fits shared memory: first its keys, then its stages."""
    budget = limits.shared_memory_bytes - RESERVED_SHARED_BYTES
    while shared_bytes(tile, head_dim, dtype) > budget:
        if tile.num_stages > 3:
            tile = replace(tile, num_stages=tile.num_stages - 2)
        elif tile.block_n > 2 * MIN_DOT_ROWS:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.num_stages > 1:
            tile = replace(tile, num_stages=max(1, tile.num_stages - 2))
        elif tile.block_n > MIN_DOT_ROWS:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.block_m > min_rows:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            break
    return tile


def shared_bytes(tile: Tile, head_dim: int, dtype: torch.dtype) -> int:
    """Return an upper estimate: K and V of the tiles in flight, the queries, and the
    probabilities."""
    width = padded_head_dim(head_dim)
    keys_and_values = 2 * (tile.num_stages // 2 + 1) * tile.block_n * width
    return (keys_and_values + tile.block_m * (width + tile.block_n)) * dtype.itemsize


def length_bounds(
    num_seqs: int,
    num_kv_heads: int,
    longest: int,
    limits: DeviceLimits,
    *,
    has_fp8_cache: bool = False,
) -> list[int]:
    """Return ascending bounds of a decode's context length, ending with `longest`: a launch made
    for a bound is fast for every length up to it.

    Between two bounds the number of splits and the tile are equal, or differ too little to matter.
    """
    shorter = (SHORT_CONTEXT, 1024, LONG_CONTEXT)
    bounds = [*(bound for bound in shorter if bound < longest), longest]

    def launch(bound: int) -> tuple[int, ...]:
        splits = choose_num_splits(
            num_seqs, num_kv_heads, bound, None, limits, has_fp8_cache=has_fp8_cache
        )
        num_programs, keys = num_seqs * num_kv_heads * splits, -(-bound // splits)
        is_cut = pays_to_cut(num_seqs, bound, splits)
        return (
            splits,
            is_cut,
            *_decode_tile_sizes(num_programs, keys, limits, splits > 1, has_fp8_cache),
        )

    differing = [bound for bound, larger in pairwise(bounds) if launch(bound) != launch(larger)]
    return [*differing, longest]


def choose_num_splits(
    num_seqs: int,
    num_kv_heads: int,
    max_seq_len: int,
    window: int | None,
    limits: DeviceLimits,
    *,
    has_fp8_cache: bool = False,
) -> int:
    """Return the number of parts into which a pure-decode batch divides each sequence's keys.

    It is one if sequences x KV heads give every SM two programs (see also LONG_CONTEXT); otherwise
    enough for that, with at least MIN_KEYS_PER_SPLIT keys per part. Deterministic: a function of
    its arguments alone.
    """
    keys = max_seq_len if window is None else min(max_seq_len, window)
    slots = decode_slots(num_seqs, num_kv_heads, keys, limits, has_fp8_cache=has_fp8_cache)
    return max(1, min(slots // max(1, num_seqs), keys // MIN_KEYS_PER_SPLIT, MAX_SPLITS))


def decode_slots(
    num_seqs: int,
    num_kv_heads: int,
    keys: int,
    limits: DeviceLimits,
    *,
    has_fp8_cache: bool = False,
) -> int:
    """Return the programs, for each KV head, among which a batch of decodes with up to `keys` keys
    is divided: two on each SM together (see also LONG_CONTEXT)."""
    is_long = has_fp8_cache and keys > LONG_CONTEXT and num_seqs * num_kv_heads >= limits.num_sms
    return max(1, (SPLIT_PROGRAMS_PER_SM if is_long else 2) * limits.num_sms // num_kv_heads)


def pays_to_cut(
    num_seqs: int, most_keys: int, num_splits: int, min_piece: int = MIN_PIECE_KEYS
) -> bool:
    """Return True if a schedule may give shorter pieces than num_splits of each sequence, of
    min_piece keys or more."""
    return num_seqs > 1 and most_keys > num_splits * min_piece


def most_extra_pieces(num_kv_heads: int, queries: int, limits: DeviceLimits) -> int:
    """Return the pieces, for each KV head, that a schedule of decodes of up to `queries` query
    tokens may add to one for each sequence. Partial results take memory in proportion to both."""
    return PIECES_PER_SM * limits.num_sms // (num_kv_heads * queries)
