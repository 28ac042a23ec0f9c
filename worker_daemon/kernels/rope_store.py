"""The step between the qkv projection and attention, in one kernel: norms of the query and key
heads, rotary embedding, and the write of keys and values to their slots of the paged cache.

A slot number gives the place of a token's keys. Letters: N tokens, Hq / Hkv query and KV heads, D
head dimension, R its rotated elements.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.contracts.layer_ops import HeadNorms
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8 import quantize
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.norm import offset_gain

_TILE_ELEMENTS = 1024
"""Elements of each half of the heads per program: 16 bytes per thread and load, with elements of
two bytes."""

_NUM_WARPS = 4


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary_table: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    head_norms: HeadNorms | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: KVScales | None = None,
    *,
    interleaved: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Normalize the q and k heads if given norms, rotate them, and store k and v. Each value is
    rounded once, and those that are stored in FP8 once more.

    The queries are overwritten in qkv. The rotation takes the first R elements of a head. It pairs
    element i with element i + R / 2 (the form that checkpoints of the Llama family use) or, if
    interleaved, 2 i with 2 i + 1.

    Args:
        qkv: [N, (Hq + 2 Hkv) D] contiguous, fp32, bf16 or fp16; D is even. Consumed.
        positions: [N] int32 or int64, each a row of rotary_table.
        rotary_table: [P, 2, R / 2] fp32, R <= D: cos, then sin.
        num_kv_heads: Hkv.
        head_dim: D.
        head_norms: the norm of each head over its D elements, of the dtype of qkv; or None.
        kv_cache: [num_blocks, 2, block_size, Hkv, D], dtype of qkv or, with kv_scales, FP8; the
            last dimension contiguous; empty = nothing is stored.
        slot_mapping: [N] int32 or int64: block_id * block_size + offset; negative = not stored.
        kv_scales: the scales of a cache in FP8.
        pdl: launch as a dependent of the previous kernel (see launch.py).

    Returns:
        q [N, Hq, D], a view of qkv.
    """
    num_tokens, width = qkv.shape
    half, rotary_half = head_dim // 2, rotary_table.shape[2]
    num_heads = width // (2 * half)
    num_q_heads = num_heads - 2 * num_kv_heads
    assert qkv.is_contiguous()
    assert rotary_table.is_contiguous()
    assert num_heads * 2 * half == width
    assert rotary_half <= half
    queries = qkv.view(num_tokens, num_heads, 2 * half)[:, :num_q_heads]
    if num_tokens == 0:
        return queries
    is_stored = kv_cache.numel() > 0
    cache_strides = kv_cache.stride() if is_stored else (0, 0, 0, 0, 1)
    assert cache_strides[4] == 1
    scales = kv_scales.values if kv_scales is not None and is_stored else None
    assert kv_cache.dtype == (qkv.dtype if scales is None else FP8)
    norm_weights, eps = (head_norms.weight, head_norms.eps) if head_norms else (qkv, 0.0)
    assert norm_weights.is_contiguous()
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(_TILE_ELEMENTS // block_half, 1), triton.next_power_of_2(num_heads))
    _rotate_and_store_kernel[(num_tokens * triton.cdiv(num_heads, block_heads),)](
        qkv,
        positions,
        rotary_table,
        norm_weights,
        kv_cache,
        scales,
        slot_mapping,
        eps,
        BLOCK_STRIDE=cache_strides[0],
        VALUE_STRIDE=cache_strides[1],
        TOKEN_STRIDE=cache_strides[2],
        HEAD_STRIDE=cache_strides[3],
        BLOCK_SIZE=kv_cache.shape[2] if is_stored else 1,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        ROTARY_HALF=rotary_half,
        INTERLEAVED=interleaved,
        NORMED=head_norms is not None,
        WEIGHT_OFFSET=head_norms.weight_offset if head_norms else 0.0,
        STORED=is_stored,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )
    return queries


@triton.jit
def _store(
    kv_cache,
    slot,
    first,
    second,
    head,
    dim,
    distance,
    in_half,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Write heads to a slot: their elements dim, and those at a distance from them. The first
    NUM_KV_HEADS heads are keys, the next as many values; others are skipped."""
    if slot >= 0:
        row = head // NUM_KV_HEADS * VALUE_STRIDE + head % NUM_KV_HEADS * HEAD_STRIDE
        place = kv_cache + (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE
        place = place + row[:, None] + dim[None, :]
        inside = ((head >= 0) & (head < 2 * NUM_KV_HEADS))[:, None] & in_half[None, :]
        tl.store(place, first, mask=inside)
        tl.store(place + distance, second, mask=inside)


@triton.jit
def _find_pairs(pair, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the first element of each of the HALF pairs of a head, and the distance of the second
    from it. The first ROTARY_HALF pairs are rotated; the others are any."""
    if INTERLEAVED:
        first, distance = 2 * pair, 1
    elif ROTARY_HALF == HALF:
        first, distance = pair, HALF
    else:
        turns = pair < ROTARY_HALF
        first = tl.where(turns, pair, pair + ROTARY_HALF)
        distance = tl.where(turns, ROTARY_HALF, HALF - ROTARY_HALF)[None, :]
    return first, distance


@triton.jit
def _load_gains(gains, in_half, WEIGHT_OFFSET: tl.constexpr):
    """Return the factors of a norm, fp32, from pointers to its weights, [heads, half]."""
    weight = tl.load(gains, mask=in_half[None, :], other=0.0)
    return offset_gain(weight.to(tl.float32), WEIGHT_OFFSET)


@launched
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotate_and_store_kernel(
    qkv,
    positions,
    rotary_table,
    norm_weights,
    kv_cache,
    kv_scales,
    slot_mapping,
    eps,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    NUM_HEADS: tl.constexpr = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    TILES: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    dtype = qkv.dtype.element_ty
    program = tl.program_id(0)
    token = (program // TILES).to(tl.int64)
    head = (program % TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    dim, distance = _find_pairs(pair, HALF, ROTARY_HALF, INTERLEAVED)
    inside = (head < NUM_HEADS)[:, None] & in_half[None, :]
    source = qkv + token * (NUM_HEADS * 2 * HALF) + (head * (2 * HALF))[:, None] + dim[None, :]
    if NORMED:
        is_key = (head >= NUM_Q_HEADS).to(tl.int32)
        gains = norm_weights + (is_key * (2 * HALF))[:, None] + dim[None, :]
        first_gain = _load_gains(gains, in_half, WEIGHT_OFFSET)
        second_gain = _load_gains(gains + distance, in_half, WEIGHT_OFFSET)
    # Loaded for every head: a row shared by all heads would pass through shared memory.
    angle = rotary_table + tl.load(positions + token).to(tl.int64) * (2 * ROTARY_HALF) + pair
    angle = tl.broadcast_to(angle[None, :], [BLOCK_HEADS, BLOCK_HALF])
    turns = (pair < ROTARY_HALF)[None, :]
    # Padding is 0 whatever its factor is.
    cos = tl.load(angle, mask=turns, other=0.0 if ROTARY_HALF == HALF else 1.0)
    sin = tl.load(angle + ROTARY_HALF, mask=turns, other=0.0)
    await_previous(PDL)
    raw_first = tl.load(source, mask=inside, other=0.0)
    raw_second = tl.load(source + distance, mask=inside, other=0.0)
    if STORED:
        slot = tl.load(slot_mapping + token).to(tl.int64)

    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first *= scale * first_gain
        second *= scale * second_gain
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    is_query = (head < NUM_Q_HEADS)[:, None] & in_half[None, :]
    tl.store(source, turned_first, mask=is_query)
    tl.store(source + distance, turned_second, mask=is_query)
    if STORED:
        is_value = (head >= NUM_Q_HEADS + NUM_KV_HEADS)[:, None]
        stored_first = tl.where(is_value, raw_first, turned_first)
        stored_second = tl.where(is_value, raw_second, turned_second)
        kv_head = head - NUM_Q_HEADS
        if kv_scales is not None:
            is_stored = (kv_head >= 0) & (kv_head < 2 * NUM_KV_HEADS)
            divisor = tl.load(kv_scales + kv_head, mask=is_stored, other=1.0)[:, None]
            stored_first = quantize(stored_first, divisor)
            stored_second = quantize(stored_second, divisor)
        _store(
            kv_cache,
            slot,
            stored_first,
            stored_second,
            kv_head,
            dim,
            distance,
            in_half,
            BLOCK_STRIDE,
            VALUE_STRIDE,
            TOKEN_STRIDE,
            HEAD_STRIDE,
            BLOCK_SIZE,
            NUM_KV_HEADS,
        )
