"""Parts of the attention over gathered keys (gathered_prefill.py) for products in FP8: of keys and
values of a cache in FP8 as they are, with queries and weights rounded to it.

Hopper's products in FP8 are twice as fast as those in bf16, but read the values position after
position: the gather transposes them. Weights are scaled by 2^8, so that those down to 2^-14 of a
query's largest keep the three bits of FP8. The tensor cores sum products in FP8 in fewer bits than
fp32 has, so those of a tile of keys alone.

Letters: R gathered positions, Hkv KV heads, D head dimension.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata, KeyRange
from worker_daemon.contracts.fp8 import FP8, FP8_MAX
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8 import quantize
from worker_daemon.kernels.scores import softcapped
from worker_daemon.kernels.tiles import padded_head_dim

MIN_FP8_DIM = 32
"""The smallest inner edge of a product in FP8."""
_ROWS = 128
"""Positions of one head that a program of the gather copies."""
_STRIDE_BYTES = 16
"""Strides that the tensor memory accelerator takes are multiples of it."""

_FP8_MAX = tl.constexpr(FP8_MAX)
_WEIGHT_BITS = tl.constexpr(8.0)
"""Weights are up to 2^8, less than FP8_MAX."""


class FP8Context(NamedTuple):
    """Keys and values of a cache in FP8, as products in FP8 take them: not scaled."""

    keys: torch.Tensor
    """FP8 [R, Hkv * D], contiguous."""
    values: torch.Tensor
    """FP8 [Hkv * D, R], contiguous along R, with a stride of a multiple of 16: Hopper's products in
    FP8 read the values of a tile position after position."""
    scales: torch.Tensor
    """The cache's: KVScales.values."""


def gather_fp8(
    kv_cache: torch.Tensor, scales: KVScales, metadata: AttentionMetadata, keys: KeyRange
) -> FP8Context:
    """Return a range of keys and values, zeros for the rows after it. kv_cache: that of a layer, in
    FP8, with these scales; the heads of one token are contiguous."""
    block_size, num_heads, head_dim = kv_cache.shape[2:]
    assert kv_cache.dtype == FP8
    assert kv_cache.stride(4) == 1
    assert kv_cache.stride(3) == head_dim
    num_rows, width = keys.num_rows, num_heads * head_dim
    row_stride = triton.cdiv(num_rows, _STRIDE_BYTES) * _STRIDE_BYTES
    out = torch.empty((2, row_stride * width), dtype=FP8, device=kv_cache.device)
    _gather_kernel[(triton.cdiv(num_rows, _ROWS), num_heads, 2)](
        out.view(torch.uint8),
        kv_cache.view(torch.uint8),
        metadata.block_table,
        metadata.seq_rows,
        keys.seq,
        keys.first,
        keys.end,
        num_rows,
        row_stride,
        *kv_cache.stride()[:3],
        metadata.block_table.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=_ROWS,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=4,
    )
    return FP8Context(
        out[0].view(row_stride, width)[:num_rows],
        out[1].view(width, row_stride)[:, :num_rows],
        scales.values,
    )


@launched
@triton.jit(
    do_not_specialize=("seq", "first", "end", "num_rows", "table_stride"),
    do_not_specialize_on_alignment=("block_table", "seq_rows"),
)
def _gather_kernel(
    out,
    kv_cache,
    block_table,
    seq_rows,
    seq,
    first,
    end,
    num_rows,
    row_stride,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy the positions first .. end - 1 to an FP8Context's memory, and zeros for the rows after
    them. One program per (BLOCK_ROWS rows, KV head, keys or values)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1)
    which = tl.program_id(2)
    dim = tl.arange(0, BLOCK_D)
    pos = first + row
    table = block_table + tl.load(seq_rows + seq).to(tl.int64) * table_stride
    block = tl.load(table + pos // BLOCK_SIZE, mask=pos < end, other=0)
    offset = block.to(tl.int64) * cache_block_stride + which * cache_value_stride
    offset += (pos % BLOCK_SIZE) * cache_token_stride + head * HEAD_DIM
    is_dim = (dim < HEAD_DIM)[None, :]
    x = tl.load(
        kv_cache + offset[:, None] + dim[None, :], mask=(pos < end)[:, None] & is_dim, other=0
    )
    width = tl.num_programs(1) * HEAD_DIM
    inside = (row < num_rows)[:, None] & is_dim
    column = head * HEAD_DIM + dim
    if which == 0:
        tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], x, mask=inside)
    else:
        out += row_stride.to(tl.int64) * width
        tl.store(out + column.to(tl.int64)[None, :] * row_stride + row[:, None], x, mask=inside)


@triton.jit
def fold_fp8(
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
    """Fold a tile of keys in FP8 like attention_tiles.fold. score_scale: of each row. row_max: at
    least the largest score less _WEIGHT_BITS, so that weights use FP8's range."""
    scores = tl.dot(q, tl.trans(k))
    if SOFTCAP is not None:
        scores = softcapped(scores, score_scale[:, None], SOFTCAP)
        score_scale = tl.full(score_scale.shape, 1.0, tl.float32)
    if MASKED:
        visible = key_pos[None, :] <= q_pos[:, None]
        if HAS_WINDOW:
            visible = visible & (key_pos[None, :] > q_pos[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale - _WEIGHT_BITS)
    weights = tl.exp2(scores * score_scale[:, None] - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    # The tensor cores' sums have few bits: those of one tile alone are theirs.
    acc = acc * rescale[:, None] + tl.dot(weights.to(tl.float8e4nv), v)
    return acc, row_sum, new_max


@triton.jit
def quantized_rows(x):
    """Return the rows of x in FP8, and the factor [rows] that they are to be multiplied by."""
    factor = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-20) / _FP8_MAX
    return quantize(x, factor[:, None]), factor
