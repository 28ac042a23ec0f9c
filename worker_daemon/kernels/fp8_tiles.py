"""Device functions of attention over a KV cache in FP8 (see attention_tiles.py).

Keys and values are converted to fp16, which has all values of FP8: one instruction converts two
values, while bf16 needs three. Decode kernels load two adjacent elements of a head as one 16-bit
word. MMA instructions then read keys and values from shared memory as they read 16-bit formats;
single bytes would need a load each. A head is two tiles: its even elements, and its odd ones.

Letters: D head dimension; a tile is BLOCK_M rows against BLOCK_N keys, BLOCK_D the padded D.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from worker_daemon.kernels.scores import softcapped

_QUERY_FACTOR = tl.constexpr(2.0**-8)
"""Brings queries of up to 2^24 into the range of fp16."""
_SCORE_FACTOR = tl.constexpr(2.0**8)


@triton.jit
def narrow(q, score_scale):
    """Return queries in fp16, and the factor of their scores."""
    return (q.to(tl.float32) * _QUERY_FACTOR).to(tl.float16), score_scale * _SCORE_FACTOR


@triton.jit
def load_words(
    cache_view,
    key_pos,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load K and V [BLOCK_N, BLOCK_D / 2] of the keys key_pos, as words of two values; 0 from `end`
    on. All strides are even. See attention_tiles.attend."""
    keys, table, block_stride, value_stride, token_stride = cache_view
    words = keys.to(tl.pointer_type(tl.uint16))
    word = tl.arange(0, BLOCK_D // 2)
    is_key = key_pos < end
    block = tl.load(table + key_pos // BLOCK_SIZE, mask=is_key, other=0)
    offset = block.to(tl.int64) * (block_stride // 2)
    offset += (key_pos % BLOCK_SIZE) * (token_stride // 2)
    here = words + offset[:, None] + word[None, :]
    inside = is_key[:, None] & (word < HEAD_DIM // 2)[None, :]
    k = tl.load(here, mask=inside, other=0)
    return k, tl.load(here + value_stride // 2, mask=inside, other=0)


@triton.jit
def fold_words(
    q_even,
    q_odd,
    q_pos,
    acc_even,
    acc_odd,
    row_sum,
    row_max,
    k,
    v,
    key_pos,
    window,
    score_scale,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Do what attention_tiles.fold does if MASKED, for tiles of load_words. Queries come from
    narrow(). Queries and accumulators are split into even and odd elements."""
    scores = tl.dot(q_even, tl.trans(_even(k)))
    scores = tl.dot(q_odd, tl.trans(_odd(k)), scores)
    if SOFTCAP is not None:
        scores = softcapped(scores, score_scale, SOFTCAP)
        score_scale = 1.0
    visible = key_pos[None, :] <= q_pos[:, None]
    if HAS_WINDOW:
        visible = visible & (key_pos[None, :] > q_pos[:, None] - window)
        # Blocks behind the window may be another sequence's, which may hold NaN.
        v = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], v, 0)
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
    weights = tl.exp2(scores * score_scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    weights = weights.to(tl.float16)
    acc_even = tl.dot(weights, _even(v), acc_even * rescale[:, None])
    acc_odd = tl.dot(weights, _odd(v), acc_odd * rescale[:, None])
    return acc_even, acc_odd, row_sum, new_max


@triton.jit
def attend_fp8(
    q,
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
    """Do what attention_tiles.attend does if MASKED, over a cache in FP8. If HOLDS, the tiles
    held_k and held_v, which load_words has loaded before, are attended to first."""
    q, score_scale = narrow(q, score_scale)
    q_even, q_odd = _halves(q)
    acc_even, acc_odd = _halves(acc)
    if HOLDS:
        acc_even, acc_odd, row_sum, row_max = fold_words(
            q_even, q_odd, q_pos, acc_even, acc_odd, row_sum, row_max, held_k, held_v, held_pos,
            window, score_scale, HAS_WINDOW, SOFTCAP,
        )  # fmt: skip
    for first in range(start, end, BLOCK_N):
        key_pos = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
        k, v = load_words(
            cache_view, key_pos, end, HEAD_DIM, BLOCK_SIZE, BLOCK_D
        )  # fmt: skip
        acc_even, acc_odd, row_sum, row_max = fold_words(
            q_even, q_odd, q_pos, acc_even, acc_odd, row_sum, row_max, k, v, key_pos,
            window, score_scale, HAS_WINDOW, SOFTCAP,
        )  # fmt: skip
    return tl.reshape(tl.join(acc_even, acc_odd), acc.shape), row_sum, row_max


@triton.jit
def _halves(x):
    """Return the even and the odd columns of x [BLOCK_M, BLOCK_D]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _even(words):
    """Return the first value of each word, in fp16."""
    return words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _odd(words):
    """Return the second value of each word, in fp16."""
    return (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
