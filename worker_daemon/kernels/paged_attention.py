"""Attention of a mixed batch of prefill and decode queries over a paged KV cache, in Triton.

Must not know layers or requests. Grids follow from host-side sizes: a launch never waits for the
device. Online softmax after Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2
(Dao, arXiv 2307.08691); long decodes are cut along the keys and merged by log-sum-exp
(Flash-Decoding, Dao et al. 2023). Decodes may come as they leave the projection: their program
turns the heads, stores key and value, and begins its softmax with them.

Letters: N tokens, B sequences, Hq / Hkv query and KV heads, G = Hq / Hkv, D head dimension;
a tile is BLOCK_M rows (BLOCK_Q tokens x G heads) against BLOCK_N keys.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.head_rotation import load_angles, load_gains, load_pairs, turn
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.tiles import (
    DeviceLimits,
    Tile,
    can_hold,
    choose_num_splits,
    decode_tile,
    padded_head_dim,
    prefill_tile,
    run_at_once,
)

# Below every real score yet finite: two of them differ by 0, where two infinities differ by NaN.
_NO_SCORE = tl.constexpr(-1.0e30)

# Splits that the reduction merges at a time.
_REDUCE_CHUNK = 64

# Arguments that change from step to step must not each bring a compilation of their own.
_STEP_SIZES = ("num_seqs", "num_tokens", "window", "table_stride")
_STEP_TENSORS = ("block_table", "seq_rows", "query_start_loc", "seq_lens", "seq_order")


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_order: torch.Tensor,
    *,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
    limits: DeviceLimits | None = None,
    tile: Tile | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Causal softmax(scale * q k^T) v of every query token over its sequence's cached keys.

    Query token i of a sequence stands at p = seq_len - query_len + i and sees the keys
    max(0, p - window + 1) .. p, which must already be in the cache. Sums are kept in fp32; fp32
    inputs are multiplied exactly (no TF32). A batch of which max_query_len is 1 takes the decode
    path, which may cut each sequence's keys into splits.

    Args:
        q: [N, Hq, D] fp32, bf16 or fp16, the last dimension contiguous. D is a multiple of 8 up to
            256, G any integer up to the rows of a tile.
        kv_cache: [num_blocks, 2, block_size, Hkv, D], dtype of q; [:, 0] is K and [:, 1] is V.
        block_table: [rows, max_blocks] int32, each row contiguous.
        seq_rows: [>= B] int32, the row of the block table that each sequence has.
        query_start_loc: [B + 1] int32, non-decreasing from 0 to the number of real tokens, <= N.
        seq_lens: [>= B] int32, the keys of each sequence, its query tokens included.
        seq_order: [>= B] int32, a permutation: the order in which decodes start. Longest first
            leaves the shortest tail.
        num_seqs: B. Sequences without query tokens are allowed.
        max_query_len: an upper bound of the query lengths.
        max_seq_len: an upper bound of seq_lens; serves to choose the number of splits.
        scale: factor of the scores, > 0.
        window: keys a query sees, itself included; None = all.
        out: [N, Hq, D], dtype of q; allocated when None. Rows past the last real token become 0.
        limits: the device's; looked up when None.
        tile: overrides the choice of tile.
        num_splits: overrides the choice of splits, >= 1; without effect outside the decode path.
        workspace: fp32, flat, at least `workspace_elements(...)`; allocated when None and needed.
        pdl: launch as launch.has_dependent_launch allows on this device.

    Returns:
        out.
    """
    assert q.dtype == kv_cache.dtype
    assert q.stride(2) == kv_cache.stride(4) == block_table.stride(1) == 1
    assert q.shape[1] % kv_cache.shape[3] == 0
    assert scale > 0
    assert window is None or window > 0
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.shape[0] == 0:
        return out
    limits = DeviceLimits.of(q.device) if limits is None else limits
    batch = (block_table, seq_rows, query_start_loc, seq_lens)
    if max_query_len != 1:
        num_kv_heads = kv_cache.shape[3]
        group_size = q.shape[1] // num_kv_heads
        tile = tile or prefill_tile(
            q.shape[0], num_seqs, num_kv_heads, group_size, q.shape[2], q.dtype, limits
        )
        _launch_prefill(out, q, kv_cache, *batch, num_seqs, scale, window, tile, pdl)
        return out
    _decode(
        out, q, kv_cache, *batch, seq_order, None,
        num_seqs, max_seq_len, scale, window, limits, tile, num_splits, workspace, pdl,
    )  # fmt: skip
    return out


class Projection(NamedTuple):
    """What turns a decode's projection into queries, keys and values."""

    positions: torch.Tensor
    """[N] int32 or int64, each a row of rotary_table."""
    rotary_table: torch.Tensor
    """[P, 2, D / 2] fp32: cos, then sin."""
    head_norms: tuple[torch.Tensor, float] | None
    """[2, D] weights of the query and of the key norm, dtype of the projection; epsilon."""
    slot_mapping: torch.Tensor
    """[N] int32 or int64: block_id * block_size + offset; negative = not stored."""


def rotate_and_attend(
    qkv: torch.Tensor,
    projection: Projection,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_order: torch.Tensor,
    *,
    num_seqs: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
    limits: DeviceLimits | None = None,
    tile: Tile | None = None,
    num_splits: int | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """What rope_store.rotate_and_store and paged_attention do one after the other, for a batch of
    decodes: no sequence has more than one query token.

    Equal to them up to rounding. A program attends to the newest key of its sequence without the
    cache, so no sequence may have in its blocks what another one stores in this same batch. Tokens
    past the last real one are not stored.

    Args:
        qkv: [N, (Hq + 2 Hkv) D] contiguous, bf16, fp16 or fp32; stays as it is.
        projection: see there.
        kv_cache: as in paged_attention, not empty.
        block_table, seq_rows, query_start_loc, seq_lens, seq_order, num_seqs, max_seq_len, scale,
            window, out, limits, tile, num_splits, pdl: as in paged_attention.

    Returns:
        [N, Hq, D], 0 in the rows past the last real token.
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    assert qkv.dtype == kv_cache.dtype
    assert qkv.is_contiguous() and projection.rotary_table.is_contiguous()
    assert 2 * projection.rotary_table.shape[2] == head_dim
    assert kv_cache.stride(4) == block_table.stride(1) == 1
    assert scale > 0
    assert window is None or window > 0
    q = qkv.view(qkv.shape[0], -1, head_dim)[:, : -2 * num_kv_heads]
    assert q.shape[1] % num_kv_heads == 0
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.shape[0] == 0:
        return out
    limits = DeviceLimits.of(q.device) if limits is None else limits
    _decode(
        out, q, kv_cache, block_table, seq_rows, query_start_loc, seq_lens, seq_order, projection,
        num_seqs, max_seq_len, scale, window, limits, tile, num_splits, None, pdl,
    )  # fmt: skip
    return out


def workspace_elements(num_tokens: int, num_q_heads: int, head_dim: int, num_splits: int) -> int:
    """fp32 elements a split decode needs: for each head and split a row and its log-sum-exp."""
    return num_tokens * num_q_heads * num_splits * (head_dim + 1)


def _launch_prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_seqs: int,
    scale: float,
    window: int | None,
    tile: Tile,
    pdl: bool,
) -> None:
    """One program per (block of query tokens, KV head).

    Sequence s owns the blocks from query_start_loc[s] // BLOCK_Q + s on: never fewer than it needs,
    and N // BLOCK_Q + B + 1 in all, so that the host knows the grid; the + 1 is for padding rows.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    group_size = num_q_heads // kv_cache.shape[3]
    block_q = tile.block_m // group_size
    assert block_q >= 1, "a tile holds at least one token's group of heads"
    grid = (num_tokens // block_q + num_seqs + 1, kv_cache.shape[3])
    _prefill_kernel[grid](
        out,
        q,
        kv_cache,
        block_table,
        seq_rows,
        query_start_loc,
        seq_lens,
        num_seqs,
        num_tokens,
        0 if window is None else window,
        scale * math.log2(math.e),
        *out.stride()[:2],
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        block_table.stride(0),
        BLOCK_Q=block_q,
        GROUP=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=window is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )


def _decode(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_order: torch.Tensor,
    projection: Projection | None,
    num_seqs: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    limits: DeviceLimits,
    tile: Tile | None,
    num_splits: int | None,
    workspace: torch.Tensor | None,
    pdl: bool,
) -> None:
    """One program per (KV head, sequence, split); a second kernel merges several splits.

    projection: q is the beginning of one that is still to be turned, and stored; None = it is
    turned, and stored already. Programs that all run at once ask for their first keys and values
    ahead, and hold them where they may."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    group_size = num_q_heads // num_kv_heads
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs, num_kv_heads, max_seq_len, window, limits)
    num_programs = num_seqs * num_kv_heads * num_splits
    if tile is None:
        most_keys = max_seq_len if window is None else min(max_seq_len, window)
        most_keys = triton.cdiv(most_keys, num_splits)
        tile = decode_tile(num_programs, most_keys, group_size, head_dim, q.dtype, limits)
    assert tile.block_m >= group_size, "a tile holds one token's group of heads"
    if num_splits > 1 and workspace is None:
        elements = workspace_elements(num_tokens, num_q_heads, head_dim, num_splits)
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
    are_few = run_at_once(num_programs, limits)
    # Unsplit, the kernel never touches the workspace: any pointer will do.
    partial_out = out if workspace is None else workspace
    partial_rows = num_tokens * num_q_heads * num_splits
    partial_lse = partial_out if num_splits == 1 else partial_out[partial_rows * head_dim :]
    # Turned already, the kernel touches nothing of a projection: again any pointer will do.
    positions, rotary_table, head_norms, slot_mapping = projection or (q, q, None, q)
    norm_weights, eps = head_norms or (q, 0.0)
    rows = max(num_tokens, num_seqs)
    _decode_kernel[(num_kv_heads, rows, num_splits)](
        out,
        partial_out,
        partial_lse,
        q,
        kv_cache,
        block_table,
        seq_rows,
        query_start_loc,
        seq_lens,
        seq_order,
        positions,
        rotary_table,
        norm_weights,
        eps,
        slot_mapping,
        num_seqs,
        num_tokens,
        num_splits,
        0 if window is None else window,
        scale * math.log2(math.e),
        *out.stride()[:2],
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        block_table.stride(0),
        NUM_Q_HEADS=num_q_heads,
        GROUP=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=window is not None,
        SPLIT=num_splits > 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        LANES=str(tile.block_n) if pdl and are_few else "",
        ROTATES=projection is not None,
        HOLDS=projection is not None and are_few and can_hold(tile, head_dim),
        NORMED=head_norms is not None,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )
    if num_splits > 1:
        _merge_splits_kernel[(num_seqs, num_q_heads)](
            out,
            partial_out,
            partial_lse,
            query_start_loc,
            num_splits,
            *out.stride()[:2],
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            CHUNK=_REDUCE_CHUNK,
            BLOCK_D=padded_head_dim(head_dim),
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=True,
            **launch_options(pdl),
        )


@triton.jit
def _find_sequence(query_start_loc, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """The largest s in 0 .. num_seqs whose first block is <= q_block; num_seqs means padding."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        starts_here = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= q_block
        low = tl.where(starts_here, middle, low)
        high = tl.where(starts_here, high, middle - 1)
    return low


@triton.jit
def _attend_to_none(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """A running softmax before its first key. See _attend."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    return acc, row_sum, tl.full([BLOCK_M], _NO_SCORE, tl.float32)


@triton.jit
def _load_keys(
    keys,
    table,
    key_pos,
    end,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """K and V [BLOCK_N, BLOCK_D] of the keys key_pos; if MASKED, 0 from `end` on. See _attend."""
    dim = tl.arange(0, BLOCK_D)
    if MASKED:
        block = tl.load(table + key_pos // BLOCK_SIZE, mask=key_pos < end, other=0)
    else:
        block = tl.load(table + key_pos // BLOCK_SIZE)
    key_offset = block.to(tl.int64) * cache_block_stride
    key_offset += (key_pos % BLOCK_SIZE) * cache_token_stride
    key_ptr = keys + key_offset[:, None] + dim[None, :]
    value_ptr = key_ptr + cache_value_stride
    # Slots past the end may hold NaN, and 0 * NaN is NaN: they are never read.
    if MASKED:
        inside = (key_pos < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(key_ptr, mask=inside, other=0.0)
        v = tl.load(value_ptr, mask=inside, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        k = tl.load(key_ptr, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(value_ptr, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(key_ptr)
        v = tl.load(value_ptr)
    return k, v


@triton.jit
def _fold(
    q,
    q_pos,
    acc,
    row_sum,
    row_max,
    k,
    v,
    key_pos,
    window,
    score_scale,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold a tile of keys into the running softmax: acc, row_sum, row_max. See _attend."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        visible = key_pos[None, :] <= q_pos[:, None]
        if HAS_WINDOW:
            visible = visible & (key_pos[None, :] > q_pos[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    # Scaling after the maximum makes one fused multiply-add a score; it needs a scale > 0.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
    weights = tl.exp2(scores * score_scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_sum, new_max


@triton.jit
def _attend(
    q,
    q_pos,
    acc,
    row_sum,
    row_max,
    keys,
    table,
    start,
    end,
    window,
    score_scale,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold the keys start .. end - 1 into the running softmax of a tile of queries.

    start is a multiple of BLOCK_N. Unless MASKED, end is too, and every row sees all these keys.
    q and acc are [BLOCK_M, BLOCK_D]; q_pos, row_sum and row_max [BLOCK_M], the last in log2 units.
    keys points at the KV head's K in block 0, table at the sequence's row of the block table.
    Returns acc, row_sum, row_max.
    """
    for first in range(start, end, BLOCK_N):
        key_pos = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
        k, v = _load_keys(
            keys, table, key_pos, end, cache_block_stride, cache_value_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, MASKED, BLOCK_D,
        )  # fmt: skip
        acc, row_sum, row_max = _fold(
            q, q_pos, acc, row_sum, row_max, k, v, key_pos, window, score_scale, HAS_WINDOW, MASKED
        )
    return acc, row_sum, row_max


@launched
@triton.jit(
    do_not_specialize=_STEP_SIZES,
    do_not_specialize_on_alignment=_STEP_TENSORS,
)
def _prefill_kernel(
    out,
    q,
    kv_cache,
    block_table,
    seq_rows,
    query_start_loc,
    seq_lens,
    num_seqs,
    num_tokens,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    await_previous(PDL)
    # The last blocks of a sequence have the most keys: they start first, and short ones fill up.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_loc, q_block, num_seqs, BLOCK_Q)
    seq_start = tl.load(query_start_loc + seq)
    seq_stop = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
    query_len = tl.where(seq == num_seqs, num_tokens, seq_stop) - seq_start
    first_query = (q_block - seq_start // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= query_len:
        return

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = first_query + row // GROUP
    token = (seq_start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    inside = ((query < query_len) & (row < BLOCK_Q * GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    out_ptr = out + (token * out_token_stride + head * out_head_stride)[:, None] + dim[None, :]
    if seq == num_seqs:
        tl.store(out_ptr, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=inside)
        return

    q_ptr = q + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    queries = tl.load(q_ptr, mask=inside, other=0.0)
    acc, row_sum, row_max = _attend_to_none(BLOCK_M, BLOCK_D)
    seq_len = tl.load(seq_lens + seq)
    first_pos = seq_len - query_len + first_query
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)
    keys = kv_cache + kv_head * cache_head_stride
    table = block_table + tl.load(seq_rows + seq).to(tl.int64) * table_stride
    if HAS_WINDOW:
        masked_from = tl.maximum(first_pos - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Every row of the tile sees the keys up to its first row's own.
        masked_from = (first_pos + 1) // BLOCK_N * BLOCK_N
        acc, row_sum, row_max = _attend(
            queries, first_pos + row // GROUP, acc, row_sum, row_max, keys, table,
            0, masked_from, window, score_scale,
            cache_block_stride, cache_value_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        queries, first_pos + row // GROUP, acc, row_sum, row_max, keys, table,
        masked_from, end, window, score_scale,
        cache_block_stride, cache_value_stride, cache_token_stride,
        HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _clear(pointers, inside):
    tl.store(pointers, tl.zeros(pointers.shape, pointers.dtype.element_ty), mask=inside)


@triton.jit
def _keys_of_split(
    num_keys, window, split, num_splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The keys start .. end - 1 of a split: of those that a query at the last key sees, in whole
    tiles. end <= start where the splits before have them all."""
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(num_keys - window, 0) // BLOCK_N
    tiles = tl.cdiv(num_keys, BLOCK_N) - first_tile
    tiles_per_split = tl.cdiv(tiles, num_splits)
    start = (first_tile + split * tiles_per_split) * BLOCK_N
    return start, tl.minimum(start + tiles_per_split * BLOCK_N, num_keys)


@triton.jit
def _prefetch_keys(
    keys,
    table,
    start,
    end,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
):
    """Ask for the first BLOCK_N of the keys start .. end - 1, and for their values; the newest may
    still be written. See _attend."""
    key_pos = start + tl.arange(0, BLOCK_N)
    inside = key_pos < end
    block = tl.load(table + key_pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    key = keys + block * cache_block_stride + (key_pos % BLOCK_SIZE) * cache_token_stride
    num_bytes = tl.where(inside, HEAD_DIM * (keys.dtype.element_ty.primitive_bitwidth // 8), 0)
    prefetch(key, num_bytes, LANES)
    prefetch(key + cache_value_stride, num_bytes, LANES)


@triton.jit
def _load_turning(
    positions,
    token,
    num_tokens,
    rotary_table,
    norm_weights,
    NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What turns a token's heads, all of it known before the projection: cos, sin, then the gains
    of queries and of their partners, those of the key and of its partners."""
    position = tl.load(positions + token, mask=token < num_tokens, other=0)
    cos, sin = load_angles(rotary_table, position, BLOCK_M, HEAD_DIM, BLOCK_D)
    q_gain, q_partner = load_gains(norm_weights, BLOCK_M, HEAD_DIM, BLOCK_D, NORMED)
    k_gain, k_partner = load_gains(norm_weights + HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D, NORMED)
    return cos, sin, q_gain, q_partner, k_gain, k_partner


@triton.jit
def _turn_and_store(
    heads,
    q_head,
    inside,
    k_head,
    head_stride,
    turning,
    eps,
    keys,
    slot,
    is_storing,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    NUM_KV_HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A token's heads as attention takes them, rounded: the queries [BLOCK_M, BLOCK_D], the key in
    every row of [BLOCK_M, BLOCK_D], the value [BLOCK_D]. If is_storing and slot >= 0, key and value
    go to the cache too.

    heads points at the token's projection, of which q_head [BLOCK_M] are the queries, k_head is the
    key, and the value lies NUM_KV_HEADS behind it. inside masks the queries; keys points at the KV
    head's K in block 0. turning: see _load_turning."""
    dtype = heads.dtype.element_ty
    cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain = turning
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    every_row = tl.broadcast_to(in_head[None, :], [BLOCK_M, BLOCK_D])
    key_ptr = heads + k_head * head_stride
    q_own, q_partner = load_pairs(heads + q_head * head_stride, inside, HEAD_DIM, BLOCK_D)
    k_own, k_partner = load_pairs(key_ptr + row * 0, every_row, HEAD_DIM, BLOCK_D)
    value = tl.load(key_ptr + NUM_KV_HEADS * head_stride + dim, mask=in_head, other=0.0)

    queries = turn(q_own, q_partner, q_gain, q_partner_gain, eps, cos, sin, NORMED, HEAD_DIM)
    key = turn(k_own, k_partner, k_gain, k_partner_gain, eps, cos, sin, NORMED, HEAD_DIM)
    key = key.to(dtype)
    place = keys + (slot // BLOCK_SIZE) * cache_block_stride
    place += (slot % BLOCK_SIZE) * cache_token_stride
    if is_storing & (slot >= 0):
        once = every_row & (row == 0)[:, None]
        tl.store(place + (row * 0)[:, None] + dim[None, :], key, mask=once)
        tl.store(place + cache_value_stride + dim, value, mask=in_head)
    return queries.to(dtype), key, value


@triton.jit
def _attend_to_one(queries, key, value, is_seen, score_scale):
    """Begin a running softmax with one key, or without any if not is_seen. See _attend."""
    score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * score_scale
    row_max = tl.where(is_seen, score, _NO_SCORE)
    row_sum = tl.zeros(score.shape, tl.float32) + tl.where(is_seen, 1.0, 0.0)
    return row_sum[:, None] * value.to(tl.float32)[None, :], row_sum, row_max


@triton.jit
def _store_partial(
    partial_out, partial_lse, partial, result, lse, inside, is_row, HEAD_DIM: tl.constexpr
):
    """Write a split's rows [BLOCK_M, BLOCK_D] and their log-sum-exps to the places partial."""
    dim = tl.arange(0, result.shape[1])
    tl.store(partial_out + (partial * HEAD_DIM)[:, None] + dim[None, :], result, mask=inside)
    # Without keys it is still _NO_SCORE: such a split weighs nothing.
    tl.store(partial_lse + partial, lse, mask=is_row)


@triton.jit
def _find_decode(place, num_seqs, query_start_loc, seq_rows, seq_lens, seq_order):
    """The place-th sequence in the order of decodes: its index, its query token and the next one's,
    its row of the block table and its keys. Padding from num_seqs on has no query and no key."""
    is_seq = place < num_seqs
    seq = tl.load(seq_order + place, mask=is_seq, other=place)
    token = tl.load(query_start_loc + tl.minimum(seq, num_seqs))
    next_token = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
    table_row = tl.load(seq_rows + seq, mask=is_seq, other=0).to(tl.int64)
    return seq, token, next_token, table_row, tl.load(seq_lens + seq, mask=is_seq, other=0)


@launched
@triton.jit(
    do_not_specialize=(*_STEP_SIZES, "num_splits"),
    do_not_specialize_on_alignment=(*_STEP_TENSORS, "partial_lse", "positions", "slot_mapping"),
)
def _decode_kernel(
    out,
    partial_out,
    partial_lse,
    q,
    kv_cache,
    block_table,
    seq_rows,
    query_start_loc,
    seq_lens,
    seq_order,
    positions,
    rotary_table,
    norm_weights,
    eps,
    slot_mapping,
    num_seqs,
    num_tokens,
    num_splits,
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
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
    ROTATES: tl.constexpr,
    HOLDS: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """LANES: BLOCK_N where a program asks for its first keys and values before it waits; if HOLDS,
    which ROTATES allows, it loads these, and asks for the next.

    ROTATES: q is the projection, of which the key heads and the value heads follow, and the newest
    key is not in the cache yet. Only then are positions .. slot_mapping read.
    """
    start_next(PDL)
    # Heads go first: those of one sequence run together and share the pages of its blocks.
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    seq, token, next_token, table_row, num_keys = _find_decode(
        tl.program_id(1), num_seqs, query_start_loc, seq_rows, seq_lens, seq_order
    )
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    table = block_table + table_row * table_stride
    keys = kv_cache + kv_head * cache_head_stride
    if ROTATES:
        # To the cached keys, the query is as one that stands at the last of them.
        num_keys -= 1
        window -= 1
    start, end = _keys_of_split(num_keys, window, split, num_splits, HAS_WINDOW, BLOCK_N)
    unheld = start
    if HOLDS:
        # No kernel of this step writes them: the newest one is not among them.
        held_pos = start + tl.arange(0, BLOCK_N)
        held_k, held_v = _load_keys(
            keys, table, held_pos, end, cache_block_stride, cache_value_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, True, BLOCK_D,
        )  # fmt: skip
        unheld += BLOCK_N
    if LANES != "":
        _prefetch_keys(
            keys, table, unheld, end, cache_block_stride, cache_value_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, LANES,
        )  # fmt: skip
    if ROTATES:
        turning = _load_turning(
            positions, token, num_tokens, rotary_table, norm_weights,
            NORMED, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    await_previous(PDL)
    if next_token == token:
        # The n-th program without a query, n = programs - queries before it, clears padding n.
        padding = (tl.load(query_start_loc + num_seqs) + seq - token).to(tl.int64)
        padding_ptr = out + padding * out_token_stride + (head * out_head_stride)[:, None]
        if (padding < num_tokens) & (split == 0):
            _clear(padding_ptr + dim[None, :], inside)
        return

    token = token.to(tl.int64)
    heads = q + token * q_token_stride
    if ROTATES:
        # The last split has the fewest keys of the cache, so it takes the newest one beside them.
        has_newest = split == num_splits - 1
        queries, key, value = _turn_and_store(
            heads, head, inside, NUM_Q_HEADS + kv_head, q_head_stride, turning, eps,
            keys, tl.load(slot_mapping + token).to(tl.int64), has_newest,
            cache_block_stride, cache_value_stride, cache_token_stride,
            NUM_Q_HEADS // GROUP, NORMED, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        acc, row_sum, row_max = _attend_to_one(queries, key, value, has_newest, score_scale)
    else:
        queries = tl.load(heads + (head * q_head_stride)[:, None] + dim[None, :], inside, 0.0)
        acc, row_sum, row_max = _attend_to_none(BLOCK_M, BLOCK_D)
    q_pos = tl.zeros([BLOCK_M], tl.int32) + (num_keys - 1)
    if HOLDS:
        acc, row_sum, row_max = _fold(
            queries, q_pos, acc, row_sum, row_max, held_k, held_v, held_pos, window, score_scale,
            HAS_WINDOW, True,
        )  # fmt: skip
    # One masked loop: a second one for the last tile would fill the pipeline a second time.
    acc, row_sum, row_max = _attend(
        queries, q_pos, acc, row_sum, row_max, keys, table,
        unheld, end, window, score_scale,
        cache_block_stride, cache_value_stride, cache_token_stride,
        HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc / divisor[:, None]
    if SPLIT:
        _store_partial(
            partial_out, partial_lse, (token * NUM_Q_HEADS + head) * num_splits + split,
            result, row_max + tl.log2(divisor), inside, row < GROUP, HEAD_DIM,
        )  # fmt: skip
    else:
        out_ptr = out + token * out_token_stride + (head * out_head_stride)[:, None]
        tl.store(out_ptr + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["partial_lse", "query_start_loc"],
)
def _merge_splits_kernel(
    out,
    partial_out,
    partial_lse,
    query_start_loc,
    num_splits,
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token, head] = the mean of its partial rows, weighted by exp2 of their log-sum-exps."""
    start_next(PDL)
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + seq)
    next_token = tl.load(query_start_loc + seq + 1)
    await_previous(PDL)
    if next_token == token:
        return
    token = token.to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    first = (token * NUM_Q_HEADS + head) * num_splits
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    top = _NO_SCORE
    for chunk in range(0, num_splits, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        present = split < num_splits
        lse = tl.load(partial_lse + first + split, mask=present, other=float("-inf"))
        partial_ptr = partial_out + ((first + split) * HEAD_DIM)[:, None] + dim[None, :]
        inside = present[:, None] & (dim < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr, mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(partial * weights[:, None], 0)
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)
    out_ptr = out + token * out_token_stride + head * out_head_stride + dim
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
