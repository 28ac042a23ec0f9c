"""Paged attention of batches in which sequences have several query tokens, in Triton.

Letters: N tokens, B sequences, Hq / Hkv query and KV heads, G = Hq / Hkv, D head dimension;
a tile is BLOCK_M rows (BLOCK_Q tokens x G heads) against BLOCK_N keys.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.kernels.attention_tiles import (
    STEP_SIZES,
    STEP_TENSORS,
    attend,
    attend_to_none,
    store_log_sum_exp,
)
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8 import head_scales
from worker_daemon.kernels.fp8_tiles import narrow
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.scores import Scoring, join_sinks
from worker_daemon.kernels.tiles import Tile, padded_head_dim


def launch_prefill(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    scales: torch.Tensor | None,
    batch: AttentionMetadata,
    scoring: Scoring,
    tile: Tile,
    pdl: bool,
    *,
    fewest_queries: int = 1,
) -> None:
    """Launch one program per (block of query tokens, KV head). lse: see paged_attention; scales:
    those of a cache in FP8. Sequences with less than fewest_queries are left to another kernel.

    Sequence s owns the blocks from query_start_loc[s] // BLOCK_Q + s on, which are at least as many
    as it needs. There are N // BLOCK_Q + B + 1 blocks in total (the last for padding rows), so the
    host knows the grid.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    group_size = num_q_heads // kv_cache.shape[3]
    block_q = tile.block_m // group_size
    assert block_q >= 1, "a tile holds at least one token's group of heads"
    grid = (num_tokens // block_q + batch.num_seqs + 1, kv_cache.shape[3])
    _prefill_kernel[grid](
        out,
        lse,
        q,
        kv_cache,
        scales,
        batch.block_table,
        batch.seq_rows,
        batch.query_start_loc,
        batch.seq_lens,
        scoring.sink_values,
        batch.num_seqs,
        num_tokens,
        fewest_queries,
        scoring.window or 0,
        scoring.factor,
        *out.stride()[:2],
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        batch.block_table.stride(0),
        BLOCK_Q=block_q,
        GROUP=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=scoring.window is not None,
        SOFTCAP=scoring.softcap,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )


@triton.jit
def _find_sequence(query_start_loc, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the largest s in 0 .. num_seqs whose first block is <= q_block; num_seqs means
    padding."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        starts_here = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= q_block
        low = tl.where(starts_here, middle, low)
        high = tl.where(starts_here, high, middle - 1)
    return low


@launched
@triton.jit(
    do_not_specialize=(*STEP_SIZES, "fewest_queries"),
    do_not_specialize_on_alignment=("lse", *STEP_TENSORS),
)
def _prefill_kernel(
    out,
    lse,
    q,
    kv_cache,
    kv_scales,
    block_table,
    seq_rows,
    query_start_loc,
    seq_lens,
    sinks,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    await_previous(PDL)
    # The last blocks of a sequence have the most keys: they start first, short ones fill the gaps.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_loc, q_block, num_seqs, BLOCK_Q)
    seq_start = tl.load(query_start_loc + seq)
    seq_stop = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
    query_len = tl.where(seq == num_seqs, num_tokens, seq_stop) - seq_start
    first_query = (q_block - seq_start // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= query_len or (query_len < fewest_queries and seq < num_seqs):
        return

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = first_query + row // GROUP
    token = (seq_start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    is_row = (query < query_len) & (row < BLOCK_Q * GROUP)
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    out_ptr = out + (token * out_token_stride + head * out_head_stride)[:, None] + dim[None, :]
    place = token * (tl.num_programs(1) * GROUP) + head
    acc, row_sum, row_max = attend_to_none(BLOCK_M, BLOCK_D)
    if seq == num_seqs:
        tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=inside)
        store_log_sum_exp(lse, place, row_max, row_sum, is_row)
        return

    q_ptr = q + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    queries = tl.load(q_ptr, mask=inside, other=0.0)
    if sinks is not None:
        acc, row_sum, row_max = join_sinks(acc, row_sum, row_max, sinks + head, row >= 0)
    seq_len = tl.load(seq_lens + seq)
    first_pos = seq_len - query_len + first_query
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)
    keys = kv_cache + kv_head * cache_head_stride
    key_scale, value_scale = head_scales(kv_scales, kv_head, tl.num_programs(1))
    score_scale *= key_scale
    if kv_scales is not None and queries.dtype != tl.float32:
        queries, score_scale = narrow(queries, score_scale)
    table = block_table + tl.load(seq_rows + seq).to(tl.int64) * table_stride
    cache_view = keys, table, cache_block_stride, cache_value_stride, cache_token_stride
    if HAS_WINDOW:
        masked_from = tl.maximum(first_pos - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Every row of the tile sees the keys up to the first row's own.
        # With lse, there may be fewer keys than queries.
        masked_from = first_pos + 1 if lse is None else tl.maximum(first_pos + 1, 0)
        masked_from = masked_from // BLOCK_N * BLOCK_N
        acc, row_sum, row_max = attend(
            queries, first_pos + row // GROUP, acc, row_sum, row_max, cache_view,
            0, masked_from, window, score_scale,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, row_sum, row_max = attend(
        queries, first_pos + row // GROUP, acc, row_sum, row_max, cache_view,
        masked_from, end, window, score_scale,
        HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None] * value_scale
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=inside)
    store_log_sum_exp(lse, place, row_max, row_sum, is_row)
