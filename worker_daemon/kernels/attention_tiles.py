"""Device functions of the attention kernels: tiles of keys of the paged cache, folded into running
softmaxes.

Online softmax after Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2 (Dao,
arXiv 2307.08691).

Letters: D head dimension; a tile is BLOCK_M rows against BLOCK_N keys, BLOCK_D the padded D.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import math

import triton
import triton.language as tl

from worker_daemon.kernels.scores import softcapped

# Arguments that change from step to step must not trigger recompilation.
STEP_SIZES = ("num_seqs", "num_tokens", "window", "table_stride")
STEP_TENSORS = ("block_table", "seq_rows", "query_start_loc", "seq_lens", "seq_order")

# Below every real score, but finite: the difference of two is 0, that of two infinities is NaN.
NO_SCORE = tl.constexpr(-1.0e30)
LOG_OF_2 = tl.constexpr(math.log(2))


@triton.jit
def attend_to_none(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a running softmax before its first key. See attend."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    return acc, row_sum, tl.full([BLOCK_M], NO_SCORE, tl.float32)


@triton.jit
def load_keys(
    cache_view,
    key_pos,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load K and V [BLOCK_N, BLOCK_D] of the keys key_pos; if MASKED, 0 from `end` on. They are of
    DTYPE, which has all values of the cache's. See attend."""
    keys, table, block_stride, value_stride, token_stride = cache_view
    dim = tl.arange(0, BLOCK_D)
    if MASKED:
        block = tl.load(table + key_pos // BLOCK_SIZE, mask=key_pos < end, other=0)
    else:
        block = tl.load(table + key_pos // BLOCK_SIZE)
    key_offset = block.to(tl.int64) * block_stride
    key_offset += (key_pos % BLOCK_SIZE) * token_stride
    key_ptr = keys + key_offset[:, None] + dim[None, :]
    value_ptr = key_ptr + value_stride
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
    return k.to(DTYPE), v.to(DTYPE)


@triton.jit
def fold(
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
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold a tile of keys into the running softmax: acc, row_sum, row_max. See attend."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP is not None:
        scores = softcapped(scores, score_scale, SOFTCAP)
        score_scale = 1.0
    if MASKED:
        visible = key_pos[None, :] <= q_pos[:, None]
        if HAS_WINDOW:
            visible = visible & (key_pos[None, :] > q_pos[:, None] - window)
            # Blocks behind the window may be another sequence's, which may hold NaN.
            v = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], v, 0.0)
        scores = tl.where(visible, scores, float("-inf"))
    # Scaling after the maximum takes one fused multiply-add per score; the scale must be > 0.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
    weights = tl.exp2(scores * score_scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_sum, new_max


@triton.jit
def attend(
    q,
    q_pos,
    acc,
    row_sum,
    row_max,
    cache_view,
    start,
    end,
    window,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold the keys start .. end - 1 into the running softmax of a tile of queries.

    start is a multiple of BLOCK_N. Unless MASKED, end is too, and every row sees all these keys.
    q and acc are [BLOCK_M, BLOCK_D]; q_pos, row_sum and row_max [BLOCK_M], the last in log2 units.
    cache_view locates a sequence's K and V in the cache: a pointer to the KV head's K in block 0, a
    pointer to the sequence's row of the block table, and the cache's strides from block to block,
    from K to V, and from token to token.
    score_scale and SOFTCAP are the factor and the softcap of Scoring.
    Returns acc, row_sum, row_max.
    """
    for first in range(start, end, BLOCK_N):
        key_pos = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
        k, v = load_keys(
            cache_view, key_pos, end, HEAD_DIM, BLOCK_SIZE, MASKED, BLOCK_D, q.dtype
        )  # fmt: skip
        acc, row_sum, row_max = fold(
            q, q_pos, acc, row_sum, row_max, k, v, key_pos, window, score_scale,
            HAS_WINDOW, SOFTCAP, MASKED,
        )  # fmt: skip
    return acc, row_sum, row_max


@triton.jit
def store_log_sum_exp(lse, place, row_max, row_sum, mask, UNIT: tl.constexpr = LOG_OF_2):
    """Store the natural log-sum-exp of running softmaxes to lse + place: -inf of those without keys
    and sinks. UNIT is that of row_max. Does nothing if lse is None. See attend."""
    if lse is not None:
        value = row_max * UNIT + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)) * LOG_OF_2
        tl.store(lse + place, tl.where(row_max > NO_SCORE, value, float("-inf")), mask=mask)
