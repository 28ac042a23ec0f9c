"""Device functions of the kernels that divide a sequence's keys among programs: the keys of a part,
its partial result, the merge by the last program to end, and the rows of padding.

Letters as in paged_decode.py.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from worker_daemon.kernels.attention_merge import merge_pieces
from worker_daemon.kernels.attention_tiles import NO_SCORE, store_log_sum_exp
from worker_daemon.kernels.decode_schedule import is_last_piece


@triton.jit
def _clear(pointers, inside, lse, place, is_row):
    """Store a row of padding: 0, and -inf to lse + place."""
    tl.store(pointers, tl.zeros(pointers.shape, pointers.dtype.element_ty), mask=inside)
    row_sum = tl.zeros(place.shape, tl.float32)
    store_log_sum_exp(lse, place, row_sum + NO_SCORE, row_sum, is_row)


@triton.jit
def clear_padding(
    out,
    lse,
    place,
    is_idle,
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
    """Clear this program's share of the padding. place: among the idle programs, those without a
    query; with several queries among all. head, inside, is_row: of the tile's rows. padding_start
    points to the first token of the padding."""
    dim = tl.arange(0, inside.shape[1])
    if QUERIES == 1:
        if is_idle:
            padding = (tl.load(padding_start) + place).to(tl.int64)
            rows = out + padding * out_token_stride + (head * out_head_stride)[:, None]
            if (padding < num_tokens) & (split == 0):
                _clear(rows + dim[None, :], inside, lse, padding * NUM_Q_HEADS + head, is_row)
    else:
        # Padding takes the rows of the tile that has its place.
        row = tl.arange(0, inside.shape[0])
        padding = place.to(tl.int64) * QUERIES + row // GROUP
        last = tl.where(split == 0, num_tokens, 0)
        is_padding = (padding >= tl.load(padding_start)) & (padding < last)
        is_padding = is_padding & (row < QUERIES * GROUP)
        rows = out + padding * out_token_stride + head * out_head_stride
        _clear(
            rows[:, None] + dim[None, :], is_padding[:, None] & (dim < HEAD_DIM)[None, :],
            lse, padding * NUM_Q_HEADS + head, is_padding,
        )  # fmt: skip


@triton.jit
def keys_of_split(
    num_keys, window, split, num_splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the split's range (start, end) of the keys that a query at the last key sees, or one
    of QUERIES before it if the window is longer by them, in whole tiles. The last splits have
    one tile less than the first, if they differ. A split without a tile has start >= num_keys, as
    paged_decode's held tiles need it."""
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(num_keys - window, 0) // BLOCK_N
    tiles = tl.cdiv(num_keys, BLOCK_N) - first_tile
    most = tl.cdiv(tiles, num_splits)
    num_most = tiles - (most - 1) * num_splits
    start = (first_tile + split * most - tl.maximum(split - num_most, 0)) * BLOCK_N
    length = tl.where(split < num_most, most, most - 1) * BLOCK_N
    return start, tl.minimum(start + length, num_keys)


@triton.jit
def store_result(
    out,
    lse,
    partial_out,
    partial_lse,
    acc,
    row_sum,
    row_max,
    value_scale,
    place,
    piece_row,
    split,
    num_splits,
    inside,
    is_row,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECE_ROWS: tl.constexpr,
):
    """Write the rows [BLOCK_M, BLOCK_D] of a running softmax: to out, which points at each row, and
    to lse + place; or those of a split, with their log-sum-exps, to the partial results. piece_row:
    their rows there if they are a schedule's first piece of a sequence, PIECE_ROWS before those of
    the second. SPLIT: each sequence has several parts, or none has; None: as its schedule
    says."""
    if SPLIT is None:
        is_part, partial_row = num_splits > 1, piece_row + split * PIECE_ROWS
    else:
        is_part, partial_row = SPLIT, place * num_splits + split
    dim = tl.arange(0, acc.shape[1])
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc / divisor[:, None] * value_scale
    if is_part:
        tl.store(
            partial_out + (partial_row * HEAD_DIM)[:, None] + dim[None, :], result, mask=inside
        )
        # Without keys it is still NO_SCORE: such a split has weight zero.
        tl.store(partial_lse + partial_row, row_max + tl.log2(divisor), mask=is_row)
    else:
        tl.store(out + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
        store_log_sum_exp(lse, place, row_max, row_sum, is_row)


@triton.jit
def merge_if_last(
    schedule,
    first_item,
    pieces,
    first_partial,
    out,
    lse,
    partial_out,
    partial_lse,
    token,
    kv_head,
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge a KV head's pieces of a sequence with one query, from first_item on, if this program is
    the last of them to store its own: MERGED at a time. MERGED_ROWS: GROUP, padded to a power of
    two."""
    if pieces > 1:
        is_last = is_last_piece(schedule, first_item, kv_head, pieces, NUM_Q_HEADS // GROUP)
        if is_last:
            row = tl.arange(0, MERGED_ROWS)
            head = kv_head * GROUP + row
            wide = token.to(tl.int64)
            merge_pieces(
                out + wide * out_token_stride + head * out_head_stride, lse,
                wide * NUM_Q_HEADS + head, partial_out, partial_lse,
                first_partial * NUM_Q_HEADS + head, pieces, row < GROUP,
                NUM_Q_HEADS, HEAD_DIM, MERGED_ROWS, MERGED, BLOCK_D,
            )  # fmt: skip
