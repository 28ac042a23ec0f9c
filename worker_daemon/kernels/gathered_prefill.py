"""Attention of one sequence's query tokens over keys and values in contiguous memory, which are
gathered out of the paged cache first, in Triton.

Without a block table, a tile of keys is one box of memory, which Hopper's tensor memory accelerator
(TMA) copies without registers or address arithmetic. The gather reads and writes the keys and
values once a layer, which takes little time compared with the attention of a thousand tokens.

Letters: L query tokens, R gathered positions, Hq / Hkv query and KV heads, G = Hq / Hkv, D head
dimension; a tile is BLOCK_M query tokens of one head against BLOCK_N keys.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_daemon.contracts.attention import (
    AttentionLayer,
    AttentionMetadata,
    AttentionSinks,
    KeyRange,
)
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.kernels.attention_tiles import attend_to_none, fold, store_log_sum_exp
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8 import head_scales
from worker_daemon.kernels.gathered_fp8 import (
    MIN_FP8_DIM,
    FP8Context,
    fold_fp8,
    gather_fp8,
    quantized_rows,
)
from worker_daemon.kernels.scores import Scoring, join_sinks
from worker_daemon.kernels.tiles import (
    DeviceLimits,
    Tile,
    gathered_tile,
    next_power_of_two,
    padded_head_dim,
)

_GATHERED_ELEMENTS = 4096
"""Elements that a program of the gather copies."""


class TritonGathered:
    """GatheredAttention on one CUDA device. Owns no device memory; step thread only."""

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._limits = DeviceLimits.of(device)

    def gather(
        self,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        keys: KeyRange,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """See GatheredAttention. In the cache, the heads of one token are contiguous."""
        block_size, num_heads, head_dim = kv_cache.shape[2:]
        assert kv_cache.stride(4) == 1
        assert kv_cache.stride(3) == head_dim
        shape = (2, keys.num_rows, num_heads, head_dim)
        out = torch.empty(shape, dtype=dtype, device=kv_cache.device)
        width = next_power_of_two(num_heads * head_dim)
        block_rows = max(1, _GATHERED_ELEMENTS // width)
        _gather_kernel[(triton.cdiv(keys.num_rows, block_rows), 2)](
            out,
            kv_cache,
            None if layer.kv_scales is None else layer.kv_scales.values,
            metadata.block_table,
            metadata.seq_rows,
            keys.seq,
            keys.first,
            keys.end,
            keys.num_rows,
            *kv_cache.stride()[:3],
            metadata.block_table.stride(0),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            BLOCK_ROWS=block_rows,
            BLOCK_WIDTH=width,
            num_warps=4,
        )
        return out

    def attend(
        self,
        q: torch.Tensor,
        context: torch.Tensor | FP8Context,
        layer: AttentionLayer,
        window: int | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See GatheredAttention. The result is contiguous."""
        return gathered_attention(
            q,
            context,
            scale=layer.scale,
            window=window,
            logit_softcap=layer.logit_softcap,
            sinks=layer.sinks,
            lse=lse,
            limits=self._limits,
        )


class TritonFP8Gathered:
    """GatheredAttention whose products are in FP8, on one CUDA device of compute capability 9 or
    more, over a cache in FP8: see gathered_fp8.py. Owns no device memory; step thread only."""

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._gathered = TritonGathered(device)

    def gather(
        self,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        keys: KeyRange,
        dtype: torch.dtype,
    ) -> FP8Context:
        """See GatheredAttention. In the cache, the heads of one token are contiguous."""
        assert layer.kv_scales is not None
        return gather_fp8(kv_cache, layer.kv_scales, metadata, keys)

    def attend(
        self,
        q: torch.Tensor,
        context: FP8Context,
        layer: AttentionLayer,
        window: int | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See GatheredAttention. The result is contiguous."""
        return self._gathered.attend(q, context, layer, window, lse)


def gathered_attention(
    q: torch.Tensor,
    context: torch.Tensor | FP8Context,
    *,
    scale: float,
    window: int | None,
    logit_softcap: float | None = None,
    sinks: AttentionSinks | None = None,
    lse: torch.Tensor | None = None,
    limits: DeviceLimits | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute causal softmax(scale * q k^T) v of the last L of R positions, with a softcap or sinks
    if given.

    Query i stands at position p = R - L + i and sees the keys max(0, p - window + 1) .. p. Sums are
    kept in fp32.

    Args:
        q: [L, Hq, D] fp32, bf16 or fp16, the last dimension contiguous. D is a multiple of 8 up to
            256.
        context: keys, then values: [2, R, Hkv, D] of q's dtype, contiguous, R >= L, finite; or
            those of a cache in FP8, for products in FP8.
        scale: factor of the scores, > 0.
        window: keys a query sees, itself included; None = all.
        logit_softcap, sinks: see AttentionLayer.
        lse: [L, Hq] fp32, contiguous; see AttentionBackend.
        limits: the device's; looked up when None.
        tile: overrides the choice of tile.

    Returns:
        [L, Hq, D], contiguous.
    """
    scoring = Scoring(scale, window, logit_softcap, sinks)
    num_queries, num_q_heads, head_dim = q.shape
    if isinstance(context, FP8Context):
        dtype, kv_scales = FP8, context.scales
        num_keys, width = context.keys.shape
    else:
        assert q.dtype == context.dtype
        assert context.is_contiguous()
        dtype, kv_scales = q.dtype, None
        num_keys, width = context.shape[1], context[0, 0].numel()
    assert q.stride(2) == 1
    assert num_queries <= num_keys
    assert lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tile is None:
        limits = DeviceLimits.of(q.device) if limits is None else limits
        num_seen = num_keys if window is None else min(num_keys, window)
        tile = gathered_tile(num_queries, num_seen, head_dim, dtype, limits)
    block_d = max(padded_head_dim(head_dim), MIN_FP8_DIM if dtype == FP8 else 0)
    keys, values = _descriptors(context, tile.block_n, block_d)
    _gathered_kernel[(triton.cdiv(num_queries, tile.block_m), num_q_heads)](
        out,
        lse,
        q,
        keys,
        values,
        scoring.sink_values,
        kv_scales,
        num_queries,
        num_keys,
        scoring.window or 0,
        scoring.factor,
        *out.stride()[:2],
        *q.stride()[:2],
        GROUP=num_q_heads * head_dim // width,
        HEAD_DIM=head_dim,
        HAS_WINDOW=scoring.window is not None,
        SOFTCAP=scoring.softcap,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _descriptors(
    context: torch.Tensor | FP8Context, block_n: int, block_d: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return those of tiles of keys [block_n, block_d] and of values, in FP8 [block_d, block_n]."""
    if isinstance(context, FP8Context):
        of_values = TensorDescriptor.from_tensor(context.values, [block_d, block_n])
        return TensorDescriptor.from_tensor(context.keys, [block_n, block_d]), of_values
    rows = context.view(*context.shape[:2], -1)
    keys, values = (TensorDescriptor.from_tensor(half, [block_n, block_d]) for half in rows)
    return keys, values


@launched
@triton.jit(
    do_not_specialize=("seq", "first", "end", "num_rows", "table_stride"),
    do_not_specialize_on_alignment=("block_table", "seq_rows"),
)
def _gather_kernel(
    out,
    kv_cache,
    kv_scales,
    block_table,
    seq_rows,
    seq,
    first,
    end,
    num_rows,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Copy the positions first .. end - 1 to rows 0 .. of out [2, num_rows, NUM_HEADS, HEAD_DIM],
    and write zeros to the rows after them. One program per (BLOCK_ROWS rows, keys or values)."""
    which = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    is_column = column < NUM_HEADS * HEAD_DIM
    pos = first + row
    table = block_table + tl.load(seq_rows + seq).to(tl.int64) * table_stride
    block = tl.load(table + pos // BLOCK_SIZE, mask=pos < end, other=0)
    offset = block.to(tl.int64) * cache_block_stride + which * cache_value_stride
    offset += (pos % BLOCK_SIZE) * cache_token_stride
    inside = (pos < end)[:, None] & is_column[None, :]
    x = tl.load(kv_cache + offset[:, None] + column[None, :], mask=inside, other=0.0)
    if kv_scales is not None:
        head = which * NUM_HEADS + column // HEAD_DIM
        x = x.to(tl.float32) * tl.load(kv_scales + head, mask=is_column, other=0.0)[None, :]
    out_row = (which * num_rows + row).to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    tl.store(
        out + out_row[:, None] + column[None, :],
        x.to(out.dtype.element_ty),
        mask=(row < num_rows)[:, None] & is_column[None, :],
    )


@triton.jit
def _attend(
    q,
    q_pos,
    acc,
    row_sum,
    row_max,
    keys,
    values,
    column,
    start,
    end,
    window,
    score_scale,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FP8: tl.constexpr,
):
    """Fold the keys start .. end - 1 into the running softmax of a tile of queries. start is a
    multiple of BLOCK_N. Unless MASKED, end is too, and every row sees all these keys. See
    attention_tiles.fold."""
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        k = keys.load([first, column])
        key_pos = first + tl.arange(0, BLOCK_N)
        if IN_FP8:
            v = tl.trans(values.load([column, first]))
            acc, row_sum, row_max = fold_fp8(
                q, q_pos, acc, row_sum, row_max, k, v, key_pos, window, score_scale,
                HAS_WINDOW, SOFTCAP, MASKED,
            )  # fmt: skip
        else:
            v = values.load([first, column])
            acc, row_sum, row_max = fold(
                q, q_pos, acc, row_sum, row_max, k, v, key_pos, window, score_scale,
                HAS_WINDOW, SOFTCAP, MASKED,
            )  # fmt: skip
    return acc, row_sum, row_max


@launched
@triton.jit(
    do_not_specialize=("num_queries", "num_keys", "window"),
    do_not_specialize_on_alignment=("lse",),
)
def _gathered_kernel(
    out,
    lse,
    q,
    keys,
    values,
    sinks,
    kv_scales,
    num_queries,
    num_keys,
    window,
    score_scale,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The last queries have the most keys: they start first, short ones fill the gaps.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    column = head // GROUP * HEAD_DIM
    query = first_query + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    inside = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    token = query.to(tl.int64)
    q_ptr = q + (token * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    # Columns past HEAD_DIM are zero, so that those of the keys, the next head's, do not matter.
    queries = tl.load(q_ptr, mask=inside, other=0.0)
    IN_FP8: tl.constexpr = kv_scales is not None
    key_scale, value_scale = head_scales(kv_scales, head // GROUP, tl.num_programs(1) // GROUP)
    if IN_FP8:
        queries, row_factor = quantized_rows(queries)
        score_scale = row_factor * key_scale * score_scale
    acc, row_sum, row_max = attend_to_none(BLOCK_M, BLOCK_D)
    first_pos = num_keys - num_queries + first_query
    q_pos = first_pos + tl.arange(0, BLOCK_M)
    # Every row of the tile sees the keys from the start of the last row's window up to the first
    # row's position: these need no mask.
    seen_to = (first_pos + 1) // BLOCK_N * BLOCK_N
    seen_from = 0
    if HAS_WINDOW:
        start = tl.maximum(first_pos - window + 1, 0) // BLOCK_N * BLOCK_N
        last_from = tl.maximum(first_pos + BLOCK_M - window, 0)
        seen_from = tl.minimum(tl.cdiv(last_from, BLOCK_N) * BLOCK_N, seen_to)
        acc, row_sum, row_max = _attend(
            queries, q_pos, acc, row_sum, row_max, keys, values, column,
            start, seen_from, window, score_scale, HAS_WINDOW, SOFTCAP, True, BLOCK_N, 1, IN_FP8,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        queries, q_pos, acc, row_sum, row_max, keys, values, column,
        seen_from, seen_to, window, score_scale, HAS_WINDOW, SOFTCAP, False, BLOCK_N, STAGES,
        IN_FP8,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        queries, q_pos, acc, row_sum, row_max, keys, values, column,
        seen_to, tl.minimum(first_pos + BLOCK_M, num_keys), window, score_scale,
        HAS_WINDOW, SOFTCAP, True, BLOCK_N, 1, IN_FP8,
    )  # fmt: skip
    if sinks is not None:
        acc, row_sum, row_max = join_sinks(acc, row_sum, row_max, sinks + head, True)
    out_ptr = out + (token * out_token_stride + head * out_head_stride)[:, None] + dim[None, :]
    # Rows past the last query may see no key in their window.
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if IN_FP8:
        result = result * value_scale
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=inside)
    place = token * tl.num_programs(1) + head
    store_log_sum_exp(lse, place, row_max, row_sum, query < num_queries)
