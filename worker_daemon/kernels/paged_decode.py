"""Paged attention of one query token per sequence, or of a few, in Triton.

Long decodes are split along the keys and merged by log-sum-exp (Flash-Decoding, Dao et al. 2023):
each sequence into as many parts, or, if lengths may differ much, by decode_schedule.py. So a
result's rounding depends on the batch's lengths and bounds, but on nothing else. q may be the
projection itself: a program then rotates its heads, stores key and value, and starts with them.

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
from worker_daemon.kernels.attention_merge import launch_merge_items, launch_merge_splits
from worker_daemon.kernels.attention_tiles import (
    NO_SCORE,
    STEP_SIZES,
    STEP_TENSORS,
    attend,
    attend_to_none,
    fold,
    load_keys,
)
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.decode_schedule import (
    Cutting,
    load_item,
    schedule_decodes,
)
from worker_daemon.kernels.fp8 import head_scales, quantize
from worker_daemon.kernels.fp8_tiles import attend_fp8, load_words
from worker_daemon.kernels.head_rotation import load_angles, load_gains, load_pairs, turn
from worker_daemon.kernels.key_parts import (
    clear_padding,
    keys_of_split,
    merge_if_last,
    store_result,
)
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.scores import Scoring, join_sinks, softcapped
from worker_daemon.kernels.tiles import (
    MIN_DOT_ROWS,
    MIN_PIECE_KEYS,
    DeviceLimits,
    Tile,
    can_hold,
    choose_num_splits,
    decode_slots,
    decode_tile,
    next_power_of_two,
    padded_head_dim,
    pays_to_cut,
    run_at_once,
    split_tile,
)

MAX_DECODE_QUERIES = 16

MAX_DECODE_ROWS = 64
"""Rows of a tile: more would leave few keys in shared memory."""

_MERGED_ELEMENTS_PER_THREAD = 64
"""Elements of partial results that a thread loads at a time."""

_MERGED_BY_WARPS = {2: 128, 4: 32}
"""The same, by the warps of a program, where more programs than run at once read keys that are not
in FP8. Their registers then let as many run on an SM as choose_num_splits and decode_tile assume: 4
of 2 warps, of which 5 would be spread unevenly, and 3 of 4 warps."""


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
    min_piece: int = MIN_PIECE_KEYS,
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
        scale, window, logit_softcap, sinks, kv_scales, out, lse, limits, tile, num_splits,
            min_piece, pdl: as in paged_attention.

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
    plan = plan_decode(q, kv_cache, batch, window, limits, tile, num_splits, min_piece)
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
    cutting: Cutting | None = None
    """Bounds within which the device divides the sequences; num_splits then only chose the tile.
    None: each is divided into num_splits."""
    has_prompts: bool = False
    """Sequences with more queries, and padding, are left to another kernel."""


def plan_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionMetadata,
    window: int | None,
    limits: DeviceLimits,
    tile: Tile | None,
    num_splits: int | None,
    min_piece: int,
    *,
    is_cut: bool = False,
) -> DecodePlan:
    """Choose the arguments that are None, only by the batch's sizes. Unless num_splits is given,
    the device cuts the sequences if pieces of min_piece keys may be shorter than even ones; always
    if is_cut, so that one kernel serves any number of sequences."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    group_size = num_q_heads // num_kv_heads
    most_rows = MAX_DECODE_ROWS if tile is None else min(tile.block_m, MAX_DECODE_ROWS)
    queries = padded_queries(batch.max_query_len, most_rows // group_size)
    most_keys = batch.max_seq_len if window is None else min(batch.max_seq_len, window)
    sizes, has_fp8_cache = (batch.num_seqs, num_kv_heads), kv_cache.dtype == FP8 and not is_cut
    may_cut = num_splits is None
    if num_splits is None:
        num_splits = choose_num_splits(
            *sizes, batch.max_seq_len, window, limits, has_fp8_cache=has_fp8_cache
        )
    num_programs = batch.num_seqs * num_kv_heads * num_splits
    if tile is None:
        keys_per_program = triton.cdiv(most_keys, num_splits)
        tile = decode_tile(
            num_programs, keys_per_program, group_size * queries, head_dim, q.dtype, limits,
            is_split=num_splits > 1, has_fp8_cache=has_fp8_cache,
        )  # fmt: skip
    assert tile.block_m >= group_size * queries, "a tile holds a sequence's queries"
    cutting = None
    if may_cut and (is_cut or pays_to_cut(batch.num_seqs, most_keys, num_splits, min_piece)):
        slots = decode_slots(*sizes, most_keys, limits, has_fp8_cache=has_fp8_cache)
        cutting = Cutting.of(
            batch.num_seqs, most_keys, num_kv_heads, slots, queries, window, tile, min_piece, limits
        )
    return DecodePlan(num_splits, tile, queries, run_at_once(num_programs, limits), cutting)


def plan_beside_prompts(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionMetadata,
    window: int | None,
    limits: DeviceLimits,
    min_piece: int,
) -> DecodePlan | None:
    """Return the plan for the sequences of a mixed batch with as many queries as the smallest tile
    has rows for, if any may have more than min_piece keys. One kernel serves any number of them."""
    most_keys = batch.max_seq_len if window is None else min(batch.max_seq_len, window)
    if not pays_to_cut(batch.num_seqs, most_keys, 1, min_piece):
        return None
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    group_size = num_q_heads // num_kv_heads
    queries = max(1, min(MAX_DECODE_QUERIES, MIN_DOT_ROWS // group_size))
    slots = decode_slots(batch.num_seqs, num_kv_heads, most_keys, limits)
    tile = split_tile(group_size * queries, head_dim, q.dtype, limits)
    cutting = Cutting.of(
        batch.num_seqs, most_keys, num_kv_heads, slots, queries, window, tile, min_piece, limits
    )
    return DecodePlan(1, tile, queries, False, cutting, has_prompts=True)


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


def _pieces_at_a_time(plan: DecodePlan, elements: int, cache_dtype: torch.dtype) -> int:
    """Return the partial results, each of so many elements, that a program loads at a time to merge
    them."""
    num_warps, per_thread = plan.tile.num_warps, _MERGED_ELEMENTS_PER_THREAD
    if not plan.are_few and cache_dtype != FP8:
        per_thread = _MERGED_BY_WARPS.get(num_warps, per_thread)
    return max(1, 32 * num_warps * per_thread // elements)


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
    """Launch one program per (KV head, sequence, split), or (KV head, item). Each has all queries
    of its sequence. lse: see paged_attention; scales: those of a cache in FP8.

    turning: q is the start of a projection that must still be rotated and stored; None = already
    rotated and stored."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    num_splits, tile, queries, are_few, cutting, has_prompts = plan
    rows = max(triton.cdiv(num_tokens, queries), batch.num_seqs)
    if cutting is not None:
        schedule = schedule_decodes(batch, cutting, pdl)
        partial_rows = schedule.num_partial * queries * num_q_heads
        # Each item, and, unless the prompts' kernel clears it, each row of padding has a program.
        rows = schedule.num_items if has_prompts else rows + cutting.extra
        num_splits = 1
    else:
        schedule = None
        partial_rows = batch.num_seqs * batch.max_query_len * num_q_heads * num_splits
    has_parts = schedule is not None or num_splits > 1
    if has_parts and workspace is None:
        elements = partial_rows * (head_dim + 1)
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
    # Without parts the kernel never uses the workspace: any pointer will do.
    partial_out = out if workspace is None else workspace
    partial_lse = partial_out[partial_rows * head_dim :] if has_parts else partial_out
    group_size, block_d = num_q_heads // num_kv_heads, padded_head_dim(head_dim)
    merged_rows = next_power_of_two(group_size)
    # If already rotated, the kernel uses no projection: again any pointer will do.
    step, head_norms, interleaved = turning or (None, None, False)
    positions, rotary_table = (step.positions, step.rotary_table) if step else (q, q)
    norm_weights, eps = (head_norms.weight, head_norms.eps) if head_norms else (q, 0.0)
    assert queries == 1 or step is None, "one that rotates has one query"
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
        None if schedule is None else schedule.entries,
        0 if schedule is None else schedule.num_items,
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
        GROUP=group_size,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        HAS_WINDOW=scoring.window is not None,
        SOFTCAP=scoring.softcap,
        SPLIT=None if schedule is not None else num_splits > 1,
        CLEARS=not has_prompts,
        MERGED_ROWS=merged_rows,
        MERGED=_pieces_at_a_time(plan, merged_rows * block_d, kv_cache.dtype),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
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
    elif schedule is not None and queries > 1:
        launch_merge_items(out, lse, partial_out, partial_lse, schedule, queries, num_kv_heads, pdl)


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
def _find_decode(
    schedule,
    num_items,
    place,
    split,
    num_splits,
    num_seqs,
    query_start_loc,
    seq_rows,
    seq_lens,
    seq_order,
    QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Return the sequence of the place-th program: its query token, the next sequence's, its block
    table row and its number of keys; then its split of how many, its first partial result, and the
    program's place in clear_padding. Without work there is no query, and perhaps no key."""
    if schedule is None:
        seq = tl.load(seq_order + place, mask=place < num_seqs, other=place)
        token = tl.load(query_start_loc + tl.minimum(seq, num_seqs))
        next_token = tl.load(query_start_loc + tl.minimum(seq + 1, num_seqs))
        table_row = tl.load(seq_rows + seq, mask=seq < num_seqs, other=0)
        num_keys = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
        # Programs before it without a query, n = programs - queries.
        first_partial, clearing = 0, seq - token
    else:
        (token, next_token, table_row, num_keys, split, num_splits, first_partial, clearing) = (
            load_item(schedule, place, num_items, NUM_KV_HEADS)
        )
    if QUERIES > 1:
        clearing = place
    table_row = table_row.to(tl.int64)
    return token, next_token, table_row, num_keys, split, num_splits, first_partial, clearing


@launched
@triton.jit(
    do_not_specialize=(*STEP_SIZES, "num_items", "num_splits"),
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
    schedule,
    num_items,
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
    CLEARS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED: tl.constexpr,
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

    schedule: Schedule.entries, which divide the sequences, and then SPLIT is None; or None: each
    has num_splits programs, of which SPLIT says if they are several. CLEARS: the rows of padding
    are set to 0.

    The last program of a sequence with one query that the schedule has cut merges its pieces (the
    fix-up of Stream-K). MERGED_ROWS, MERGED: see merge_if_last.
    """
    start_next(PDL)
    # Heads vary fastest: those of one sequence run together and share its blocks' pages.
    kv_head = tl.program_id(0)
    token, next_token, table_row, num_keys, split, num_splits, first_partial, clearing = (
        _find_decode(
            schedule, num_items, tl.program_id(1), tl.program_id(2), num_splits, num_seqs,
            query_start_loc, seq_rows, seq_lens, seq_order, QUERIES, NUM_Q_HEADS // GROUP,
        )
    )  # fmt: skip
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
    start, end = keys_of_split(
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
    if CLEARS:
        clear_padding(
            out, lse, clearing, next_token == token, query_start_loc + num_seqs, num_tokens,
            tl.program_id(2), head, inside, is_row, out_token_stride, out_head_stride,
            NUM_Q_HEADS, GROUP, QUERIES, HEAD_DIM,
        )  # fmt: skip
    if next_token == token:
        return

    num_queries, q_pos = next_token - token, num_keys - 1 + query
    if QUERIES > 1:
        q_pos += 1 - num_queries
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
    store_result(
        results + (head * out_head_stride)[:, None], lse, partial_out, partial_lse,
        acc, row_sum, row_max, value_scale, token * NUM_Q_HEADS + head,
        (first_partial * QUERIES + query) * NUM_Q_HEADS + head, split, num_splits,
        inside, is_row, HEAD_DIM, SPLIT, QUERIES * NUM_Q_HEADS,
    )  # fmt: skip
    if schedule is not None and QUERIES == 1:
        merge_if_last(
            schedule, tl.program_id(1) - split, num_splits, first_partial, out, lse,
            partial_out, partial_lse, next_token - 1, kv_head, out_token_stride, out_head_stride,
            NUM_Q_HEADS, GROUP, HEAD_DIM, MERGED_ROWS, MERGED, BLOCK_D,
        )  # fmt: skip
