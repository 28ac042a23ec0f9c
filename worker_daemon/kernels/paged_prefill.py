"""Paged attention of batches in which sequences have several query tokens, in Triton.

Letters: N tokens, B sequences, Hq / Hkv query and KV heads, G = Hq / Hkv, D head dimension;
a tile is BLOCK_M rows (BLOCK_Q tokens x G heads) against BLOCK_N keys.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.kernels.attention_merge import launch_merge_items
from worker_daemon.kernels.attention_tiles import (
    STEP_SIZES,
    STEP_TENSORS,
    attend,
    attend_to_none,
    store_log_sum_exp,
)
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.decode_schedule import Cutting, load_item, schedule_decodes
from worker_daemon.kernels.fp8 import head_scales
from worker_daemon.kernels.fp8_tiles import narrow
from worker_daemon.kernels.key_parts import (
    clear_padding,
    keys_of_split,
    store_result,
)
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.query_blocks import (
    BlockDivision,
    divide_queries,
    find_sequence,
    num_query_blocks,
)
from worker_daemon.kernels.scores import Scoring, join_sinks
from worker_daemon.kernels.tiles import (
    MAX_CUT_TOKENS,
    MIN_PIECE_KEYS,
    DeviceLimits,
    Tile,
    block_slots,
    block_tile,
    padded_head_dim,
    prefill_tile,
)

_ALL_KEYS: Final = 2**30

_UNEVEN: Final = 3
"""The longest block's time over a slot's share from which blocks are cut: the kernel for few tokens
is slower by a tenth."""


class BlockPlan(NamedTuple):
    """The division of a step's prompts into programs, each with a block of query tokens of one
    sequence and one KV head."""

    tile: Tile
    queries: int
    """Query tokens of a block."""
    fewest_queries: int
    """Sequences with fewer are left to another kernel."""
    cutting: Cutting | None = None
    """Bounds within which the device divides the keys of blocks; None: each has one program."""


def plan_blocks(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionMetadata,
    window: int | None,
    limits: DeviceLimits,
    tile: Tile | None,
    fewest_queries: int,
    min_piece: int,
    *,
    is_cut: bool,
) -> BlockPlan:
    """Choose the tile, unless it is given, and let the device cut the keys of blocks if is_cut, or
    if the step's tokens are few or, as far as the host knows, much longer for few of them."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    group_size = num_q_heads // num_kv_heads
    most_keys = batch.max_seq_len if window is None else min(batch.max_seq_len, window)
    cut_tile = tile or block_tile(group_size, head_dim, q.dtype, limits)
    queries, slots = cut_tile.block_m // group_size, block_slots(cut_tile, num_kv_heads, limits)
    assert queries >= 1, "a tile holds at least one token's group of heads"
    if not is_cut and most_keys > MIN_PIECE_KEYS:
        is_cut = num_tokens <= MAX_CUT_TOKENS or _are_uneven(
            batch, most_keys, queries, slots, fewest_queries
        )
    if is_cut:
        most = _ALL_KEYS if window is None else window + queries - 1
        cutting = Cutting(num_kv_heads, slots, slots, min_piece, min_piece, queries, most)
        return BlockPlan(cut_tile, queries, fewest_queries, cutting)
    tile = tile or prefill_tile(
        num_tokens, batch.num_seqs, num_kv_heads, group_size, head_dim, q.dtype, limits,
        has_window=window is not None,
    )  # fmt: skip
    return BlockPlan(tile, tile.block_m // group_size, fewest_queries)


def _are_uneven(
    batch: AttentionMetadata, most_keys: int, queries: int, slots: int, fewest_queries: int
) -> bool:
    """Return True if a block with the most keys takes much longer than a slot's share of all
    blocks."""
    key = _Evenness(most_keys, queries, slots, fewest_queries)
    known = batch.divisions.get(key)
    if known is None:
        counts = np.where(batch.query_lens_np < fewest_queries, 0, batch.query_lens_np)
        keys = np.minimum(batch.seq_lens_np, most_keys)[counts > 0].astype(np.int64)
        total = int(keys @ -(-counts[counts > 0] // queries))
        known = batch.divisions[key] = slots * int(keys.max(initial=0)) > _UNEVEN * total
    return bool(known)


class _Evenness(NamedTuple):
    """Inputs of _are_uneven beside the lengths."""

    most_keys: int
    queries: int
    slots: int
    fewest_queries: int


def launch_prefill(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    scales: torch.Tensor | None,
    batch: AttentionMetadata,
    scoring: Scoring,
    plan: BlockPlan,
    pdl: bool,
) -> None:
    """Launch one program per (block of query tokens, KV head), or per (item of a schedule, KV
    head). lse: see paged_attention; scales: those of a cache in FP8."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    tile, queries, fewest_queries, cutting = plan
    group_size, block_d = num_q_heads // num_kv_heads, padded_head_dim(head_dim)
    if cutting is None:
        schedule, partial_out, partial_lse = None, out, out
        num_programs = num_query_blocks(num_tokens, batch.num_seqs, queries)
    else:
        batch = divide_queries(batch, num_tokens, BlockDivision(queries, fewest_queries))
        schedule = schedule_decodes(batch, cutting, pdl=False)
        num_programs, partial_rows = (
            schedule.num_items,
            schedule.num_partial * queries * num_q_heads,
        )
        partial_out = torch.empty(
            partial_rows * (head_dim + 1), dtype=torch.float32, device=q.device
        )
        partial_lse = partial_out[partial_rows * head_dim :]
    _prefill_kernel[(num_programs, num_kv_heads)](
        out,
        lse,
        partial_out,
        partial_lse,
        q,
        kv_cache,
        scales,
        batch.block_table,
        batch.seq_rows,
        batch.query_start_loc,
        batch.seq_lens,
        scoring.sink_values,
        None if schedule is None else schedule.entries,
        0 if schedule is None else schedule.num_items,
        batch.num_seqs,
        num_tokens,
        fewest_queries,
        scoring.window or 0,
        scoring.factor,
        *out.stride()[:2],
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        batch.block_table.stride(0),
        BLOCK_Q=queries,
        GROUP=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=scoring.window is not None,
        SOFTCAP=scoring.softcap,
        NUM_Q_HEADS=num_q_heads,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )
    if schedule is not None:
        launch_merge_items(out, lse, partial_out, partial_lse, schedule, queries, num_kv_heads, pdl)


@triton.jit
def _find_block(
    schedule,
    num_items,
    seq_rows,
    query_start_loc,
    seq_lens,
    num_seqs,
    num_tokens,
    fewest_queries,
    BLOCK_Q: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Return the program's block: its first token, the number of its queries, its block table row,
    and the keys of its last query; then its part of how many, the first partial result, and whether
    it is padding. Without work there is no query."""
    if schedule is None:
        # The last blocks of a sequence have the most keys: they start first, short ones fill the
        # gaps.
        q_block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = find_sequence(query_start_loc, q_block, num_seqs, BLOCK_Q)
        seq_start = tl.load(query_start_loc + seq)
        seq_stop = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
        is_padding = seq == num_seqs
        query_len = tl.where(is_padding, num_tokens, seq_stop) - seq_start
        first_query = (q_block - seq_start // BLOCK_Q - seq) * BLOCK_Q
        num_queries = tl.minimum(query_len - first_query, BLOCK_Q)
        if (query_len < fewest_queries) & (seq < num_seqs):
            num_queries = 0
        token = seq_start + first_query
        table_row = tl.load(seq_rows + seq, mask=seq < num_seqs, other=0)
        num_keys = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
        num_keys -= query_len - first_query - num_queries
        part, num_parts, first_partial = 0, 1, 0
    else:
        token, next_token, table_row, num_keys, part, num_parts, first_partial, _ = load_item(
            schedule, tl.program_id(0), num_items, NUM_KV_HEADS
        )
        num_queries, is_padding = next_token - token, False
    return (
        token, num_queries, table_row.to(tl.int64), num_keys, part, num_parts, first_partial,
        is_padding,
    )  # fmt: skip


@launched
@triton.jit(
    do_not_specialize=(*STEP_SIZES, "num_items", "fewest_queries"),
    do_not_specialize_on_alignment=("lse", "partial_lse", *STEP_TENSORS),
)
def _prefill_kernel(
    out,
    lse,
    partial_out,
    partial_lse,
    q,
    kv_cache,
    kv_scales,
    block_table,
    seq_rows,
    query_start_loc,
    seq_lens,
    sinks,
    schedule,
    num_items,
    num_seqs,
    num_tokens,
    fewest_queries,
    window,
    score_scale,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    cache_head_stride,
    table_stride,
    BLOCK_Q: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """schedule: Schedule.entries, which cut the keys of blocks into parts, or None: a program has
    all."""
    start_next(PDL)
    await_previous(PDL)
    kv_head = tl.program_id(1)
    token, num_queries, table_row, num_keys, part, num_parts, first_partial, is_padding = (
        _find_block(
            schedule, num_items, seq_rows, query_start_loc, seq_lens, num_seqs,
            num_tokens, fewest_queries, BLOCK_Q, NUM_Q_HEADS // GROUP,
        )
    )  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (query < num_queries) & (row < BLOCK_Q * GROUP)
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    if schedule is not None:
        clear_padding(
            out, lse, tl.program_id(0), num_queries == 0, query_start_loc + num_seqs, num_tokens,
            0, head, inside, is_row, out_token_stride, out_head_stride,
            NUM_Q_HEADS, GROUP, BLOCK_Q, HEAD_DIM,
        )  # fmt: skip
    if num_queries <= 0:
        return
    tokens = (token + query).to(tl.int64)
    results = out + tokens * out_token_stride + head * out_head_stride
    place = tokens * NUM_Q_HEADS + head
    acc, row_sum, row_max = attend_to_none(BLOCK_M, BLOCK_D)
    if is_padding:
        tl.store(results[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)
        store_log_sum_exp(lse, place, row_max, row_sum, is_row)
        return

    q_ptr = q + (tokens * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    queries = tl.load(q_ptr, mask=inside, other=0.0)
    if sinks is not None:
        acc, row_sum, row_max = join_sinks(
            acc, row_sum, row_max, sinks + head, row < tl.where(part == 0, BLOCK_M, 0)
        )
    first_pos = num_keys - num_queries
    keys = kv_cache + kv_head * cache_head_stride
    key_scale, value_scale = head_scales(kv_scales, kv_head, NUM_Q_HEADS // GROUP)
    score_scale *= key_scale
    if kv_scales is not None and queries.dtype != tl.float32:
        queries, score_scale = narrow(queries, score_scale)
    table = block_table + table_row * table_stride
    cache_view = keys, table, cache_block_stride, cache_value_stride, cache_token_stride
    start, end = keys_of_split(
        num_keys, window + (BLOCK_Q - 1), part, num_parts, HAS_WINDOW, BLOCK_N
    )
    masked_from = start
    if not HAS_WINDOW:
        # Every row of the tile sees the keys up to the first row's own. With lse, there may be
        # fewer keys than queries.
        masked_from = tl.maximum(first_pos + 1, 0) // BLOCK_N * BLOCK_N
        masked_from = tl.minimum(tl.maximum(masked_from, start), end)
        acc, row_sum, row_max = attend(
            queries, first_pos + query, acc, row_sum, row_max, cache_view,
            start, masked_from, window, score_scale,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, row_sum, row_max = attend(
        queries, first_pos + query, acc, row_sum, row_max, cache_view,
        masked_from, end, window, score_scale,
        HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    store_result(
        results[:, None], lse, partial_out, partial_lse, acc, row_sum, row_max, value_scale, place,
        (first_partial * BLOCK_Q + query) * NUM_Q_HEADS + head, part, num_parts,
        inside, is_row, HEAD_DIM, None if schedule is not None else False, BLOCK_Q * NUM_Q_HEADS,
    )  # fmt: skip
