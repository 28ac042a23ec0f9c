"""Paged attention of one query token per sequence, or of a few, in Triton.

Long decodes are split along the keys and merged by log-sum-exp (Flash-Decoding, Dao et al. 2023). q
may be the projection itself: a program then rotates its heads, stores key and value, and starts its
softmax with them.

Letters: N tokens, B sequences, Hq / Hkv query and KV heads, G = Hq / Hkv, D head dimension;
a tile is BLOCK_M rows (a sequence's tokens x G heads) against BLOCK_N keys.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata, AttentionSinks, AttentionStep
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.contracts.layer_ops import HeadNorms
from worker_daemon.kernels.attention_merge import launch_merge_splits
from worker_daemon.kernels.attention_tiles import (
    NO_SCORE,
    STEP_SIZES,
    STEP_TENSORS,
    attend,
    attend_to_none,
    fold,
    load_keys,
    store_log_sum_exp,
)
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8 import head_scales, quantize
from worker_daemon.kernels.fp8_tiles import attend_fp8, load_words
from worker_daemon.kernels.head_rotation import load_angles, load_gains, load_pairs, turn
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.scores import Scoring, join_sinks, softcapped
from worker_daemon.kernels.tiles import (
    DeviceLimits,
    Tile,
    can_hold,
    choose_num_splits,
    decode_tile,
    padded_head_dim,
    run_at_once,
)

MAX_DECODE_ROWS = 64
"""Rows of a tile: more would leave few keys in shared memory."""


def rotate_and_attend(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    step: AttentionStep,
    head_norms: HeadNorms | None,
    *,
    interleaved: bool = False,
    scale: float,
    window: int | None,
    logit_softcap: float | None = None,
    sinks: AttentionSinks | None = None,
    kv_scales: KVScales | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    limits: DeviceLimits | None = None,
    tile: Tile | None = None,
    num_splits: int | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Combine rope_store.rotate_and_store and paged_attention for a batch of decodes: no sequence
    has more than one query token.

    Equal to them up to rounding. A program reads the newest key of its sequence from the
    projection, not the cache, so the blocks of a sequence must not contain tokens that another
    sequence stores in the same batch. Tokens past the last real one are not stored.

    Args:
        qkv: [N, (Hq + 2 Hkv) D] contiguous, bf16, fp16 or fp32; unchanged.
        kv_cache: as in paged_attention, not empty.
        step: a slot below 0 is not stored.
        head_norms, interleaved: as in rope_store.rotate_and_store.
        scale, window, logit_softcap, sinks, kv_scales, out, lse, limits, tile, num_splits, pdl: as
            in paged_attention.

    Returns:
        [N, Hq, D], 0 in the rows past the last real token.
    """
    batch = step.metadata
    num_kv_heads, head_dim = kv_cache.shape[3:]
    scales = None if kv_scales is None else kv_scales.values
    assert kv_cache.dtype == (qkv.dtype if scales is None else FP8)
    assert qkv.is_contiguous() and step.rotary_table.is_contiguous()
    assert 2 * step.rotary_table.shape[2] <= head_dim
    assert kv_cache.stride(4) == batch.block_table.stride(1) == 1
    assert lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)
    scoring = Scoring(scale, window, logit_softcap, sinks)
    q = qkv.view(qkv.shape[0], -1, head_dim)[:, : -2 * num_kv_heads]
    assert q.shape[1] % num_kv_heads == 0
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.shape[0] == 0:
        return out
    limits = DeviceLimits.of(q.device) if limits is None else limits
    plan = plan_decode(q, kv_cache, batch, window, limits, tile, num_splits)
    turning = Turning(step, head_norms, interleaved)
    launch_decode(out, lse, q, kv_cache, scales, batch, turning, scoring, plan, None, pdl)
    return out


def workspace_elements(num_queries: int, num_q_heads: int, head_dim: int, num_splits: int) -> int:
    """Return the number of fp32 elements that a split decode needs: a row and its log-sum-exp for
    each query, head and split. Padding needs none."""
    return num_queries * num_q_heads * num_splits * (head_dim + 1)


class DecodePlan(NamedTuple):
    """The division of a batch of decodes into programs."""

    num_splits: int
    tile: Tile
    queries: int
    """Query tokens for which a program has rows: those of the longest sequence, or more."""
    are_few: bool
    """All programs run at the same time: those that rotate prefetch their first keys and values,
    and may hold them in registers (HOLDS)."""


def plan_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionMetadata,
    window: int | None,
    limits: DeviceLimits,
    tile: Tile | None,
    num_splits: int | None,
) -> DecodePlan:
    """Choose the arguments that are None, only by the batch's sizes."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    group_size = num_q_heads // num_kv_heads
    most_rows = MAX_DECODE_ROWS if tile is None else min(tile.block_m, MAX_DECODE_ROWS)
    queries = padded_queries(batch.max_query_len, most_rows // group_size)
    if num_splits is None:
        num_splits = choose_num_splits(
            batch.num_seqs,
            num_kv_heads,
            batch.max_seq_len,
            window,
            limits,
            has_fp8_cache=kv_cache.dtype == FP8,
        )
    num_programs = batch.num_seqs * num_kv_heads * num_splits
    if tile is None:
        most_keys = batch.max_seq_len if window is None else min(batch.max_seq_len, window)
        most_keys = triton.cdiv(most_keys, num_splits)
        sizes = num_programs, most_keys, group_size * queries, head_dim
        tile = decode_tile(*sizes, q.dtype, limits, is_split=num_splits > 1)
    assert tile.block_m >= group_size * queries, "a tile holds a sequence's queries"
    return DecodePlan(num_splits, tile, queries, run_at_once(num_programs, limits))


def padded_queries(num_queries: int, most: int) -> int:
    """Return a number of queries, at least num_queries, for which a kernel is compiled: a power of
    two, or the most for which a tile has rows."""
    power: int = triton.next_power_of_2(num_queries)
    return max(num_queries, min(power, most))


class Turning(NamedTuple):
    """The norm, rotation and storage of a projection's heads."""

    step: AttentionStep
    head_norms: HeadNorms | None
    interleaved: bool


def launch_decode(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    scales: torch.Tensor | None,
    batch: AttentionMetadata,
    turning: Turning | None,
    scoring: Scoring,
    plan: DecodePlan,
    workspace: torch.Tensor | None,
    pdl: bool,
) -> None:
    """Launch one program per (KV head, sequence, split); a second kernel merges splits. Each has
    all queries of its sequence. lse: see paged_attention; scales: those of a cache in FP8.

    turning: q is the start of a projection that must still be rotated and stored; None = already
    rotated and stored."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    num_splits, tile, queries, are_few = plan
    num_queries = batch.num_seqs * batch.max_query_len
    if num_splits > 1 and workspace is None:
        elements = workspace_elements(num_queries, num_q_heads, head_dim, num_splits)
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
    # Without splits the kernel never uses the workspace: any pointer will do.
    partial_out = out if workspace is None else workspace
    partial_rows = num_queries * num_q_heads * num_splits
    partial_lse = partial_out if num_splits == 1 else partial_out[partial_rows * head_dim :]
    # If already rotated, the kernel uses no projection: again any pointer will do.
    step, head_norms, interleaved = turning or (None, None, False)
    positions, rotary_table = (step.positions, step.rotary_table) if step else (q, q)
    norm_weights, eps = (head_norms.weight, head_norms.eps) if head_norms else (q, 0.0)
    assert queries == 1 or step is None, "one that rotates has one query"
    rows = max(triton.cdiv(num_tokens, queries), batch.num_seqs)
    _decode_kernel[(num_kv_heads, rows, num_splits)](
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
        batch.seq_order,
        positions,
        rotary_table,
        norm_weights,
        eps,
        batch.slot_mapping if step else q,
        scoring.sink_values,
        batch.num_seqs,
        num_tokens,
        num_splits,
        scoring.window or 0,
        scoring.factor,
        *out.stride()[:2],
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        batch.block_table.stride(0),
        NUM_Q_HEADS=num_q_heads,
        GROUP=num_q_heads // num_kv_heads,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=scoring.window is not None,
        SOFTCAP=scoring.softcap,
        SPLIT=num_splits > 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        LANES=str(tile.block_n) if pdl and are_few and step is not None else "",
        ROTATES=step is not None,
        ROTARY_DIM=2 * rotary_table.shape[2] if step else 0,
        INTERLEAVED=interleaved,
        HOLDS=step is not None and are_few and can_hold(tile, head_dim),
        NORMED=head_norms is not None,
        WEIGHT_OFFSET=head_norms.weight_offset if head_norms else 0.0,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )
    if num_splits > 1:
        launch_merge_splits(out, lse, partial_out, partial_lse, batch, queries, num_splits, pdl)


@triton.jit
def _clear(pointers, inside, lse, place, is_row):
    """Store a row of padding: 0, and -inf to lse + place."""
    tl.store(pointers, tl.zeros(pointers.shape, pointers.dtype.element_ty), mask=inside)
    row_sum = tl.zeros(place.shape, tl.float32)
    store_log_sum_exp(lse, place, row_sum + NO_SCORE, row_sum, is_row)


@triton.jit
def _clear_padding(
    out,
    lse,
    seq,
    token,
    padding_start,
    num_tokens,
    split,
    head,
    inside,
    is_row,
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Clear this program's share of the padding. head, inside, is_row: of the tile's rows; with
    several queries all programs call it. padding_start points to the first token of the padding."""
    dim = tl.arange(0, inside.shape[1])
    if QUERIES == 1:
        # The n-th program without a query, n = programs - queries before it, clears padding n.
        padding = (tl.load(padding_start) + seq - token).to(tl.int64)
        place = out + padding * out_token_stride + (head * out_head_stride)[:, None]
        if (padding < num_tokens) & (split == 0):
            _clear(place + dim[None, :], inside, lse, padding * NUM_Q_HEADS + head, is_row)
    else:
        # Padding takes the rows of the tile that has its place.
        row = tl.arange(0, inside.shape[0])
        padding = seq.to(tl.int64) * QUERIES + row // GROUP
        last = tl.where(split == 0, num_tokens, 0)
        is_padding = (padding >= tl.load(padding_start)) & (padding < last)
        is_padding = is_padding & (row < QUERIES * GROUP)
        place = out + padding * out_token_stride + head * out_head_stride
        _clear(
            place[:, None] + dim[None, :], is_padding[:, None] & (dim < HEAD_DIM)[None, :],
            lse, padding * NUM_Q_HEADS + head, is_padding,
        )  # fmt: skip


@triton.jit
def _keys_of_split(
    num_keys, window, split, num_splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the split's range (start, end) of the keys that a query at the last key sees, or one
    of QUERIES before it if the window is longer by them, in whole tiles. end <= start if earlier
    splits have all of them."""
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(num_keys - window, 0) // BLOCK_N
    tiles = tl.cdiv(num_keys, BLOCK_N) - first_tile
    tiles_per_split = tl.cdiv(tiles, num_splits)
    start = (first_tile + split * tiles_per_split) * BLOCK_N
    return start, tl.minimum(start + tiles_per_split * BLOCK_N, num_keys)


@triton.jit
def _prefetch_keys(
    cache_view,
    start,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
):
    """Prefetch the first BLOCK_N of the keys start .. end - 1, and their values; the newest may
    still be written. See attend."""
    keys, table, block_stride, value_stride, token_stride = cache_view
    key_pos = start + tl.arange(0, BLOCK_N)
    inside = key_pos < end
    block = tl.load(table + key_pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    key = keys + block * block_stride + (key_pos % BLOCK_SIZE) * token_stride
    num_bytes = tl.where(inside, HEAD_DIM * (keys.dtype.element_ty.primitive_bitwidth // 8), 0)
    prefetch(key, num_bytes, LANES)
    prefetch(key + value_stride, num_bytes, LANES)


@triton.jit
def _load_turning(
    positions,
    token,
    num_tokens,
    rotary_table,
    norm_weights,
    NORMED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the factors that rotate a token's heads, known before the projection: cos, sin, then
    the norm's factors of queries and their partners, and of the key and its partners."""
    position = tl.load(positions + token, mask=token < num_tokens, other=0)
    cos, sin = load_angles(
        rotary_table, position, BLOCK_M, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D
    )
    q_gain, q_partner = load_gains(
        norm_weights,
        BLOCK_M,
        HEAD_DIM,
        ROTARY_DIM,
        INTERLEAVED,
        BLOCK_D,
        NORMED,
        WEIGHT_OFFSET,
    )
    k_gain, k_partner = load_gains(
        norm_weights + HEAD_DIM,
        BLOCK_M,
        HEAD_DIM,
        ROTARY_DIM,
        INTERLEAVED,
        BLOCK_D,
        NORMED,
        WEIGHT_OFFSET,
    )
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
    cache_view,
    key_scale,
    value_scale,
    slot,
    is_storing,
    NUM_KV_HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return a token's heads for attention, rounded: the queries [BLOCK_M, BLOCK_D], the key in
    every row of [BLOCK_M, BLOCK_D], the value [BLOCK_D], both as the cache has them. If is_storing
    and slot >= 0, they go to the cache too.

    heads points at the token's projection, of which q_head [BLOCK_M] are the queries, k_head is the
    key, and the value lies NUM_KV_HEADS behind it. inside masks the queries. cache_view: see
    attend; turning: see _load_turning."""
    keys, _, block_stride, value_stride, token_stride = cache_view
    dtype = heads.dtype.element_ty
    cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain = turning
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    every_row = tl.broadcast_to(in_head[None, :], [BLOCK_M, BLOCK_D])
    key_ptr = heads + k_head * head_stride
    q_own, q_partner = load_pairs(
        heads + q_head * head_stride, inside, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D
    )
    k_own, k_partner = load_pairs(
        key_ptr + row * 0, every_row, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D
    )
    value = tl.load(key_ptr + NUM_KV_HEADS * head_stride + dim, mask=in_head, other=0.0)

    queries = turn(q_own, q_partner, q_gain, q_partner_gain, eps, cos, sin, NORMED, HEAD_DIM)
    key = turn(k_own, k_partner, k_gain, k_partner_gain, eps, cos, sin, NORMED, HEAD_DIM)
    key = key.to(dtype)
    if keys.dtype.element_ty == tl.float8e4nv:
        stored_key, stored_value = quantize(key, key_scale), quantize(value, value_scale)
    else:
        stored_key, stored_value = key, value
    place = keys + (slot // BLOCK_SIZE) * block_stride
    place += (slot % BLOCK_SIZE) * token_stride
    if is_storing & (slot >= 0):
        once = every_row & (row == 0)[:, None]
        tl.store(place + (row * 0)[:, None] + dim[None, :], stored_key, mask=once)
        tl.store(place + value_stride + dim, stored_value, mask=in_head)
    return queries.to(dtype), stored_key.to(dtype), stored_value.to(dtype)


@triton.jit
def _attend_to_one(queries, key, value, is_seen, score_scale, SOFTCAP: tl.constexpr):
    """Start a running softmax with one key, or without any if not is_seen. See attend."""
    score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1)
    score = score * score_scale if SOFTCAP is None else softcapped(score, score_scale, SOFTCAP)
    row_max = tl.where(is_seen, score, NO_SCORE)
    row_sum = tl.zeros(score.shape, tl.float32) + tl.where(is_seen, 1.0, 0.0)
    return row_sum[:, None] * value.to(tl.float32)[None, :], row_sum, row_max


@triton.jit
def _load_held(
    cache_view,
    key_pos,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load the first tile of keys and values, as _attend_cached takes it. See load_keys."""
    if cache_view[0].dtype.element_ty == tl.float8e4nv and tl.float32 != DTYPE:
        k, v = load_words(cache_view, key_pos, end, HEAD_DIM, BLOCK_SIZE, BLOCK_D)
    else:
        k, v = load_keys(cache_view, key_pos, end, HEAD_DIM, BLOCK_SIZE, True, BLOCK_D, DTYPE)
    return k, v


@triton.jit
def _attend_cached(
    queries,
    q_pos,
    acc,
    row_sum,
    row_max,
    held_k,
    held_v,
    held_pos,
    cache_view,
    start,
    end,
    window,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HOLDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold the held tile, if HOLDS, and the keys start .. end - 1, in one masked loop: a second one
    for the last tile would fill the pipeline a second time. See attend."""
    if cache_view[0].dtype.element_ty == tl.float8e4nv and queries.dtype != tl.float32:
        acc, row_sum, row_max = attend_fp8(
            queries, q_pos, acc, row_sum, row_max, held_k, held_v, held_pos, cache_view,
            start, end, window, score_scale,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, HOLDS, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        if HOLDS:
            acc, row_sum, row_max = fold(
                queries, q_pos, acc, row_sum, row_max, held_k, held_v, held_pos, window,
                score_scale, HAS_WINDOW, SOFTCAP, True,
            )  # fmt: skip
        acc, row_sum, row_max = attend(
            queries, q_pos, acc, row_sum, row_max, cache_view, start, end, window, score_scale,
            HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    return acc, row_sum, row_max


@triton.jit
def _store_result(
    out,
    lse,
    partial_out,
    partial_lse,
    acc,
    row_sum,
    row_max,
    value_scale,
    place,
    split,
    num_splits,
    inside,
    is_row,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write the rows [BLOCK_M, BLOCK_D] of a running softmax: to out, which points at each row, and
    to lse + place; or those of a split, with their log-sum-exps, to the partial results."""
    dim = tl.arange(0, acc.shape[1])
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc / divisor[:, None] * value_scale
    if SPLIT:
        partial = place * num_splits + split
        tl.store(partial_out + (partial * HEAD_DIM)[:, None] + dim[None, :], result, mask=inside)
        # Without keys it is still NO_SCORE: such a split has weight zero.
        tl.store(partial_lse + partial, row_max + tl.log2(divisor), mask=is_row)
    else:
        tl.store(out + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
        store_log_sum_exp(lse, place, row_max, row_sum, is_row)


@triton.jit
def _place_rows(
    kv_head, num_queries, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the heads and the queries of a tile's rows [BLOCK_M], and which of them there are."""
    row = tl.arange(0, BLOCK_M)
    if QUERIES == 1:
        return kv_head * GROUP + row, row * 0, row < GROUP
    num_rows = tl.minimum(num_queries, QUERIES) * GROUP
    return kv_head * GROUP + row % GROUP, row // GROUP, row < num_rows


@triton.jit
def _find_decode(place, num_seqs, query_start_loc, seq_rows, seq_lens, seq_order):
    """Return the place-th sequence in the order of decodes: its index, its query token, the next
    sequence's query token, its block table row and its number of keys. Padding from num_seqs on has
    no query and no key."""
    is_seq = place < num_seqs
    seq = tl.load(seq_order + place, mask=is_seq, other=place)
    token = tl.load(query_start_loc + tl.minimum(seq, num_seqs))
    next_token = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
    table_row = tl.load(seq_rows + seq, mask=is_seq, other=0).to(tl.int64)
    return seq, token, next_token, table_row, tl.load(seq_lens + seq, mask=is_seq, other=0)


@launched
@triton.jit(
    do_not_specialize=(*STEP_SIZES, "num_splits"),
    do_not_specialize_on_alignment=(
        *STEP_TENSORS,
        "lse",
        "partial_lse",
        "positions",
        "slot_mapping",
    ),
)
def _decode_kernel(
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
    seq_order,
    positions,
    rotary_table,
    norm_weights,
    eps,
    slot_mapping,
    sinks,
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
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
    ROTATES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HOLDS: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """LANES: BLOCK_N if a program prefetches its first keys and values before it waits. With HOLDS,
    it loads these and prefetches the next. Both need ROTATES.

    ROTATES: q is the projection, with key and value heads after it, and the newest key is not in
    the cache yet. Only then are positions .. slot_mapping read.

    QUERIES: no sequence has more query tokens; 1 if it ROTATES. Query i of a sequence has the rows
    i * GROUP .. of a tile.
    """
    start_next(PDL)
    # Heads vary fastest: those of one sequence run together and share its blocks' pages.
    kv_head, split = tl.program_id(0), tl.program_id(2)
    seq, token, next_token, table_row, num_keys = _find_decode(
        tl.program_id(1), num_seqs, query_start_loc, seq_rows, seq_lens, seq_order
    )
    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head, query, is_row = _place_rows(kv_head, next_token - token, GROUP, QUERIES, BLOCK_M)
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    table = block_table + table_row * table_stride
    keys = kv_cache + kv_head * cache_head_stride
    cache_view = keys, table, cache_block_stride, cache_value_stride, cache_token_stride
    key_scale, value_scale = head_scales(kv_scales, kv_head, NUM_Q_HEADS // GROUP)
    score_scale *= key_scale
    if ROTATES:
        # For the cached keys, treat the query as if at the position of the last one.
        num_keys, window = num_keys - 1, window - 1
    start, end = _keys_of_split(
        num_keys, window + (QUERIES - 1), split, num_splits, HAS_WINDOW, BLOCK_N
    )
    unheld, held_k, held_v, held_pos = start, None, None, None
    if HOLDS:
        # No kernel of this step writes these keys: they do not include the newest one.
        held_pos = start + tl.arange(0, BLOCK_N)
        held_k, held_v = _load_held(
            cache_view, held_pos, end, HEAD_DIM, BLOCK_SIZE, BLOCK_D, q.dtype.element_ty
        )
        unheld += BLOCK_N
    if LANES != "":
        _prefetch_keys(cache_view, unheld, end, HEAD_DIM, BLOCK_SIZE, BLOCK_N, LANES)
    if ROTATES:
        turning = _load_turning(
            positions, token, num_tokens, rotary_table, norm_weights,
            NORMED, WEIGHT_OFFSET, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    await_previous(PDL)
    if QUERIES > 1:
        _clear_padding(
            out, lse, seq, token, query_start_loc + num_seqs, num_tokens, split, head, inside,
            is_row, out_token_stride, out_head_stride, NUM_Q_HEADS, GROUP, QUERIES, HEAD_DIM,
        )  # fmt: skip
    if next_token == token:
        if QUERIES == 1:
            _clear_padding(
                out, lse, seq, token, query_start_loc + num_seqs, num_tokens, split, head, inside,
                is_row, out_token_stride, out_head_stride, NUM_Q_HEADS, GROUP, QUERIES, HEAD_DIM,
            )  # fmt: skip
        return

    q_pos = num_keys - 1 + query
    if QUERIES > 1:
        q_pos += 1 - (next_token - token)
    token = token.to(tl.int64)
    heads, results = q + token * q_token_stride, out + token * out_token_stride
    if QUERIES > 1:
        token += query
        heads = q + token[:, None] * q_token_stride
        results = out + token[:, None] * out_token_stride
    if ROTATES:
        # The last split has the fewest keys of the cache, so it also takes the newest one.
        has_newest = split == num_splits - 1
        queries, key, value = _turn_and_store(
            heads, head, inside, NUM_Q_HEADS + kv_head, q_head_stride, turning, eps,
            cache_view, key_scale, value_scale,
            tl.load(slot_mapping + token).to(tl.int64), has_newest,
            NUM_Q_HEADS // GROUP, NORMED, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
            BLOCK_SIZE, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        acc, row_sum, row_max = _attend_to_one(
            queries, key, value, has_newest, score_scale, SOFTCAP
        )
    else:
        queries = tl.load(heads + (head * q_head_stride)[:, None] + dim[None, :], inside, 0.0)
        acc, row_sum, row_max = attend_to_none(BLOCK_M, BLOCK_D)
    if sinks is not None:
        acc, row_sum, row_max = join_sinks(
            acc, row_sum, row_max, sinks + head, is_row & (row < tl.where(split == 0, BLOCK_M, 0))
        )
    acc, row_sum, row_max = _attend_cached(
        queries, q_pos, acc, row_sum, row_max, held_k, held_v, held_pos, cache_view,
        unheld, end, window, score_scale,
        HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, SOFTCAP, HOLDS, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_result(
        results + (head * out_head_stride)[:, None], lse, partial_out, partial_lse,
        acc, row_sum, row_max, value_scale, token * NUM_Q_HEADS + head,
        split, num_splits, inside, is_row, HEAD_DIM, SPLIT,
    )  # fmt: skip
