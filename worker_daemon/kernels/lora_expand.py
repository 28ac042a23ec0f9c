"""The second half of LoRA adapters' products, y += B s, for decodes whose s = A x another kernel
has written for every slot.

The values of several slots are multiplied at once: a tile of B spans the ranks of all of them, and
s is zero outside each row's slot. So a program loads B, y and s once each, B before the previous
kernel has ended. A row depends on no other row: zeros change no sum.

Letters: y[M, O], s[M, L * G * r], L slots, G matrices merged into one, r ranks of each, B[L, O, r].
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import AdapterWeights
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

MAX_ROWS: Final = 64
_MAX_MERGED: Final = 3
_MAX_RANK_TILE: Final = 64
_GROUP_RANKS: Final = 128
"""Ranks, of several slots, that are multiplied at once."""
_MANY_OUTPUTS: Final = 8192


def add_expanded(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    adapters: AdapterWeights,
    token_slots: torch.Tensor,
    pdl: bool,
) -> None:
    """y [M, O] += B s, for M of at most MAX_ROWS, in bf16 or fp16.

    shrunk: s, float32 [M, L * G * r], contiguous: A x of every row for every slot that any row
    uses; entries of unused slots are undefined. token_slots: int32 [M], see
    RowAdapters.
    """
    a, b, ends = adapters
    num_rows, num_outputs = y.shape
    num_slots, _, rank = b.shape
    assert num_rows <= MAX_ROWS
    assert len(ends) <= _MAX_MERGED
    assert b.dtype == y.dtype != torch.float32
    assert y.stride(1) == b.stride(2) == 1
    assert b.stride(1) == rank
    assert shrunk.shape == (num_rows, a.shape[0] * a.shape[1])
    assert shrunk.is_contiguous()
    block_rank = max(16, min(_MAX_RANK_TILE, triton.next_power_of_2(rank)))
    # At least 16 outputs a warp: Triton 3.6 compiles smaller products of many warps wrongly.
    block_n = 128 if num_outputs > _MANY_OUTPUTS else 64
    starts = (0, *ends[:-1])
    tiles = sum(triton.cdiv(end - start, block_n) for start, end in zip(starts, ends, strict=True))
    end0, end1, end2 = (*ends, *[num_outputs] * (_MAX_MERGED - len(ends)))
    _expand_kernel[(tiles,)](
        y,
        shrunk,
        b,
        token_slots,
        num_rows,
        end0,
        end1,
        end2,
        y.stride(0),
        b.stride(0),
        SLOTS=num_slots,
        RANKS=len(ends) * rank,
        RANK=rank,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=block_n,
        BLOCK_RANK=block_rank,
        GROUP=slots_of_group(num_slots, block_rank),
        PDL=pdl,
        num_warps=block_n // 16,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


def slots_of_group(num_slots: int, block_rank: int) -> int:
    """Return the number of slots that are multiplied at once, a power of two."""
    slots = 1 << (num_slots - 1).bit_length()
    return max(1, min(_GROUP_RANKS // block_rank, slots))


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    y,
    shrunk,
    b,
    token_slots,
    num_rows,
    end0,
    end1,
    end2,
    y_stride,
    slot_stride,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    matrix, first, end = merged_tile(tl.program_id(0), end0, end1, end2, BLOCK_N)
    output = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    slot = tl.load(token_slots + m, mask=m < num_rows, other=0) - 1
    b_row = b + output.to(tl.int64) * RANK
    is_output = output < end
    weight = load_group(b_row, slot, 0, 0, is_output, slot_stride, RANK, BLOCK_RANK, GROUP)
    await_previous(PDL)
    y_here = y + m.to(tl.int64)[None, :] * y_stride + output[:, None]
    changes = (slot != -1)[None, :] & is_output[:, None]
    base = tl.load(y_here, mask=changes, other=0.0)
    own_row = shrunk + m * (SLOTS * RANKS) + slot * RANKS + matrix * RANK
    total = _expand(
        base, weight, own_row, b_row, slot, is_output, slot_stride, SLOTS, RANK, BLOCK_RANK, GROUP
    )
    tl.store(y_here, total, mask=changes)


@triton.jit
def _expand(
    base,
    weight,
    own_row,
    b_row,
    slot,
    is_output,
    slot_stride,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return base [BLOCK_N, BLOCK_M] plus B's product, rounded to base's type. weight: B of the
    first GROUP slots and BLOCK_RANK ranks. own_row: each row's first value of s."""
    acc = tl.zeros(base.shape, tl.float32)
    for start in tl.static_range(0, RANK, BLOCK_RANK):
        rank = start + tl.arange(0, BLOCK_RANK)
        is_own = (slot >= 0)[None, :] & (rank < RANK)[:, None]
        own = tl.load(own_row[None, :] + rank[:, None], mask=is_own, other=0.0)
        if start > 0:
            weight = load_group(
                b_row, slot, 0, start, is_output, slot_stride, RANK, BLOCK_RANK, GROUP
            )
        acc = add_slots(
            acc,
            weight,
            own,
            b_row,
            slot,
            start,
            is_output,
            slot_stride,
            SLOTS,
            RANK,
            BLOCK_RANK,
            GROUP,
        )
    total = tl.where((slot < -1)[None, :], float("nan"), base.to(tl.float32) + acc)
    return tl.where((slot == -1)[None, :], base, total.to(base.dtype))


@triton.jit
def merged_tile(tile, end0, end1, end2, BLOCK_N: tl.constexpr):
    """Return the merged matrix in which a tile of outputs lies, its first output, and the
    matrix's end. Each matrix begins a tile."""
    tiles0 = tl.cdiv(end0, BLOCK_N)
    tiles1 = tiles0 + tl.cdiv(end1 - end0, BLOCK_N)
    matrix = (tile >= tiles0).to(tl.int32) + (tile >= tiles1).to(tl.int32)
    begin = tl.where(matrix == 0, 0, tl.where(matrix == 1, end0, end1))
    end = tl.where(matrix == 0, end0, tl.where(matrix == 1, end1, end2))
    before = tl.where(matrix == 0, 0, tl.where(matrix == 1, tiles0, tiles1))
    return matrix, begin + (tile - before) * BLOCK_N, end


@triton.jit
def load_group(
    b_row,
    slot,
    first_slot,
    first_rank,
    is_output,
    slot_stride,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load B of GROUP slots, for ranks from first_rank on: [BLOCK_N, GROUP * BLOCK_RANK]. Slots
    that no row uses are zero, whatever their memory holds."""
    lane = first_slot + tl.arange(0, GROUP)
    is_used = tl.max((slot[None, :] == lane[:, None]).to(tl.int32), axis=1)
    each = tl.broadcast_to(is_used[:, None], (GROUP, BLOCK_RANK))
    is_used = tl.reshape(each, (GROUP * BLOCK_RANK,))
    # Without this, the compiler would load B value by value.
    is_used = tl.max_constancy(is_used, [BLOCK_RANK])
    k = tl.arange(0, GROUP * BLOCK_RANK)
    rank = first_rank + k % BLOCK_RANK
    offset = (first_slot + k // BLOCK_RANK).to(tl.int64) * slot_stride + rank
    mask = is_output[:, None] & ((is_used > 0) & (rank < RANK))[None, :]
    return tl.load(b_row[:, None] + offset[None, :], mask=mask, other=0.0)


@triton.jit
def add_slots(
    acc,
    weight,
    own,
    b_row,
    slot,
    first_rank,
    is_output,
    slot_stride,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add B's product with own [BLOCK_RANK, BLOCK_M], float32, in the slots of the rows. weight: B
    of the first GROUP slots; it is loaded here for the others."""
    acc = _multiply_group(weight, own, slot, 0, acc, GROUP)
    for other in range(GROUP, SLOTS, GROUP):
        is_mine = (slot >= other) & (slot < other + GROUP)
        if tl.max(is_mine.to(tl.int32), axis=0) > 0:
            more = load_group(
                b_row, slot, other, first_rank, is_output, slot_stride, RANK, BLOCK_RANK, GROUP
            )
            acc = _multiply_group(more, own, slot, other, acc, GROUP)
    return acc


@triton.jit
def _multiply_group(weight, own, slot, first_slot, acc, GROUP: tl.constexpr):
    """Add B's product with own [BLOCK_RANK, BLOCK_M], float32, each row's values in its slot.

    bf16 weights are multiplied by own's leading bits and by what they leave, 16 bits in all; others
    as tf32.
    """
    lane = first_slot + tl.arange(0, GROUP)
    is_mine = slot[None, None, :] == lane[:, None, None]
    spread = tl.where(is_mine, own[None, :, :], 0.0)
    spread = tl.reshape(spread, (GROUP * own.shape[0], own.shape[1]))
    if weight.dtype == tl.bfloat16:
        high = spread.to(tl.bfloat16)
        acc = tl.dot(weight, high, acc)
        return tl.dot(weight, (spread - high.to(tl.float32)).to(tl.bfloat16), acc)
    return tl.dot(weight.to(tl.float32), spread, acc, input_precision="tf32")
