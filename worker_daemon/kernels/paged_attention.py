"""Attention of a mixed batch of prefill and decode queries over a paged KV cache, in Triton.

Must not know layers or requests. Grids follow from host-side sizes: a launch never waits for the
device. Online softmax after Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2
(Dao, arXiv 2307.08691); long decodes are cut along the keys and merged by log-sum-exp
(Flash-Decoding, Dao et al. 2023).

Letters: N tokens, B sequences, Hq / Hkv query and KV heads, G = Hq / Hkv, D head dimension;
a tile is BLOCK_M rows (BLOCK_Q tokens x G heads) against BLOCK_N keys.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.tiles import (
    DeviceLimits,
    Tile,
    choose_num_splits,
    decode_tile,
    padded_head_dim,
    prefill_tile,
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
    num_kv_heads = kv_cache.shape[3]
    group_size = q.shape[1] // num_kv_heads
    batch = (block_table, seq_rows, query_start_loc, seq_lens)
    if max_query_len != 1:
        tile = tile or prefill_tile(
            q.shape[0], num_seqs, num_kv_heads, group_size, q.shape[2], q.dtype, limits
        )
        _launch_prefill(out, q, kv_cache, *batch, num_seqs, scale, window, tile, pdl)
        return out
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs, num_kv_heads, max_seq_len, window, limits)
    if tile is None:
        num_programs = num_seqs * num_kv_heads * num_splits
        tile = decode_tile(num_programs, max_seq_len, group_size, q.shape[2], q.dtype, limits)
    if num_splits > 1 and workspace is None:
        elements = workspace_elements(q.shape[0], q.shape[1], q.shape[2], num_splits)
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
    _launch_decode(
        out,
        q,
        kv_cache,
        *batch,
        seq_order,
        num_seqs,
        scale,
        window,
        tile,
        num_splits,
        workspace,
        pdl,
        prefetches=pdl and num_seqs * num_kv_heads * num_splits <= 2 * limits.num_sms,
    )
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


def _launch_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_order: torch.Tensor,
    num_seqs: int,
    scale: float,
    window: int | None,
    tile: Tile,
    num_splits: int,
    workspace: torch.Tensor | None,
    pdl: bool,
    *,
    prefetches: bool,
) -> None:
    """One program per (KV head, sequence, split); a second kernel merges several splits.

    prefetches: programs that all run at once ask for their first keys and values ahead."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    assert tile.block_m >= num_q_heads // num_kv_heads, "a tile holds one token's group of heads"
    # Unsplit, the kernel never touches the workspace: any pointer will do.
    partial_out = out if workspace is None else workspace
    partial_rows = num_tokens * num_q_heads * num_splits
    partial_lse = partial_out if num_splits == 1 else partial_out[partial_rows * head_dim :]
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
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=window is not None,
        SPLIT=num_splits > 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        LANES=str(tile.block_n) if prefetches else "",
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
    lane = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    for first in range(start, end, BLOCK_N):
        key_pos = tl.multiple_of(first, BLOCK_N) + lane
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
        row_max = new_max
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
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], _NO_SCORE, tl.float32)
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


@launched
@triton.jit(
    do_not_specialize=(*_STEP_SIZES, "num_splits"),
    do_not_specialize_on_alignment=(*_STEP_TENSORS, "partial_lse"),
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
    PDL: tl.constexpr,
):
    """LANES: BLOCK_N where a program asks for its first keys and values before it waits."""
    start_next(PDL)
    # Heads go first: those of one sequence run together and share the pages of its blocks.
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    is_seq = seq < num_seqs
    seq = tl.load(seq_order + seq, mask=is_seq, other=seq)
    split = tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]

    token = tl.load(query_start_loc + tl.minimum(seq, num_seqs))
    next_token = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
    seq_len = tl.load(seq_lens + seq, mask=is_seq, other=0)
    table_row = tl.load(seq_rows + seq, mask=is_seq, other=0).to(tl.int64)
    table = block_table + table_row * table_stride
    keys = kv_cache + kv_head * cache_head_stride
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(seq_len - window, 0) // BLOCK_N
    tiles = tl.cdiv(seq_len, BLOCK_N) - first_tile
    tiles_per_split = tl.cdiv(tiles, num_splits)
    start = (first_tile + split * tiles_per_split) * BLOCK_N
    end = tl.minimum(start + tiles_per_split * BLOCK_N, seq_len)
    if LANES != "":
        _prefetch_keys(
            keys, table, start, end, cache_block_stride, cache_value_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, LANES,
        )  # fmt: skip
    await_previous(PDL)
    if next_token == token:
        # The n-th program without a query, n = programs - queries before it, clears padding n.
        padding = (tl.load(query_start_loc + num_seqs) + seq - token).to(tl.int64)
        if (padding < num_tokens) & (split == 0):
            padding_ptr = out + padding * out_token_stride + (head * out_head_stride)[:, None]
            _clear(padding_ptr + dim[None, :], inside)
        return

    token = token.to(tl.int64)
    q_ptr = q + token * q_token_stride + (head * q_head_stride)[:, None] + dim[None, :]
    queries = tl.load(q_ptr, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], _NO_SCORE, tl.float32)
    q_pos = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    # One masked loop: a second one for the last tile would fill the pipeline a second time.
    acc, row_sum, row_max = _attend(
        queries, q_pos, acc, row_sum, row_max, keys, table,
        start, end, window, score_scale,
        cache_block_stride, cache_value_stride, cache_token_stride,
        HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc / divisor[:, None]
    if SPLIT:
        partial = (token * NUM_Q_HEADS + head) * num_splits + split
        partial_ptr = partial_out + (partial * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(partial_ptr, result, mask=inside)
        # Without keys row_max is still _NO_SCORE: such a split weighs nothing.
        tl.store(partial_lse + partial, row_max + tl.log2(divisor), mask=row < GROUP)
    else:
        out_ptr = out + token * out_token_stride + (head * out_head_stride)[:, None] + dim[None, :]
        tl.store(out_ptr, result.to(out.dtype.element_ty), mask=inside)


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
