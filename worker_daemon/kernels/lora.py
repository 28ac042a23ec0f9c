"""Products of rows with their LoRA adapters: y += B (A x), in one launch per merged matrix.

The first programs of a launch shrink: they compute A x of a tile of rows over a share of the
columns, for one adapter if there are few rows. The others expand: each waits until its rows are
shrunk, and adds B's product to a tile of y. A device starts programs in the order of their ids, so
waiting programs never keep the others from starting. Sums are in float32 and in a fixed order.
Decodes in 16 bits multiply B of several slots at once (lora_expand.py).

Letters: y[M, O], x[M, I], L slots, G matrices merged into one, r ranks of each: A[L, G * r, I],
B[L, O, r].
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import AdapterWeights
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.lora_expand import add_slots, load_group, merged_tile, slots_of_group
from worker_daemon.kernels.prefetch import prefetch

MAX_ROW_TILES: Final = 1024
"""Tiles of rows that one launch can count."""
_MAX_DECODE_ROWS: Final = 64
"""Up to this number, all rows are one tile, and each slot has its own programs."""
_MAX_RANK_TILE: Final = 64
_MAX_SPLITS: Final = 16
"""Partial sums that each expanding program adds, at most."""
_SHRINK_PROGRAMS: Final = 128
"""About the number of SMs of a large device."""
_MANY_OUTPUTS: Final = 8192
_MAX_MERGED: Final = 3


class AdapterProducts:
    """The adapter products of all layers; one object per daemon, on one stream.

    Owns 2 * MAX_ROW_TILES int32 counters on the device, which are zero between launches.
    """

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._pdl = has_dependent_launch(device)
        self._counters = torch.zeros(2 * MAX_ROW_TILES, dtype=torch.int32, device=device)

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> None:
        """Compute y [M, O] += B (A x [M, I]) with each row's slot: see RowAdapters."""
        most = MAX_ROW_TILES * _MAX_DECODE_ROWS
        for first in range(0, x.shape[0], most):
            rows = slice(first, first + most)
            self._launch(y[rows], x[rows], weights, token_slots[rows])

    def _launch(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> None:
        a, b, ends = weights
        num_rows, num_inputs = x.shape
        num_slots, num_ranks = a.shape[0], a.shape[1]
        assert len(ends) <= _MAX_MERGED
        assert a.dtype == b.dtype == x.dtype
        assert x.stride(1) == y.stride(1) == a.stride(2) == b.stride(2) == 1
        is_decode = num_rows <= _MAX_DECODE_ROWS
        is_half = x.dtype != torch.float32
        block_m = max(16, min(_MAX_DECODE_ROWS, triton.next_power_of_2(num_rows)))
        block_r = max(16, min(_MAX_RANK_TILE, triton.next_power_of_2(num_ranks)))
        block_k = 128 if is_half else 32
        block_n = 256 if is_half and y.shape[1] > _MANY_OUTPUTS else 128
        rank = b.shape[2]
        block_rank = max(16, min(_MAX_RANK_TILE, triton.next_power_of_2(rank)))
        group = slots_of_group(num_slots, block_rank) if is_decode and is_half else 1
        num_tiles = triton.cdiv(num_rows, block_m)
        groups = num_slots if is_decode else 1
        rank_tiles = triton.cdiv(num_ranks, block_r)
        splits = _num_splits(groups * rank_tiles, triton.cdiv(num_inputs, block_k), is_decode)
        starts = (0, *ends[:-1])
        expands = sum(
            triton.cdiv(end - start, block_n) for start, end in zip(starts, ends, strict=True)
        )
        shrinks = groups * rank_tiles * splits
        end0, end1, end2 = (*ends, *[y.shape[1]] * (_MAX_MERGED - len(ends)))
        parts = num_tiles * splits * block_m * num_ranks
        row_bytes = num_inputs * x.itemsize
        has_aligned_rows = row_bytes % 16 == 0 and a.data_ptr() % 16 == 0
        has_aligned_tiles = rank * x.itemsize % 16 == 0 and b.data_ptr() % 16 == 0
        _adapter_kernel[(num_tiles * (shrinks + expands),)](
            y,
            torch.empty(parts, dtype=torch.float32, device=x.device),
            self._counters,
            x,
            a,
            b,
            token_slots,
            num_rows,
            num_inputs,
            end0,
            end1,
            end2,
            x.stride(0),
            y.stride(0),
            a.stride(0),
            EXPANDS=expands,
            SLOTS=num_slots,
            SLOTS_EACH=1 if is_decode else num_slots,
            RANKS=num_ranks,
            RANK=rank,
            RANK_TILES=rank_tiles,
            SPLITS=splits,
            MAX_TILES=MAX_ROW_TILES,
            BLOCK_M=block_m,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            BLOCK_N=block_n,
            BLOCK_RANK=block_rank,
            GROUP=group,
            SLOT_LANES=triton.next_power_of_2(num_slots),
            EVEN=num_inputs % block_k == 0,
            A_LANES=str(block_r) if self._pdl and is_decode and has_aligned_rows else "",
            B_LANES=str(triton.next_power_of_2(num_slots))
            if self._pdl and is_decode and has_aligned_tiles and group == 1
            else "",
            PRECISION="tf32" if is_half else "ieee",
            PDL=self._pdl,
            num_warps=8 if block_n > 128 else 4,
            enable_fp_fusion=True,
            **launch_options(self._pdl),
        )


def _num_splits(num_programs: int, num_steps: int, is_decode: bool) -> int:
    """Return the number of shares into which a tile's columns are divided."""
    if not is_decode:
        return 1
    return max(1, min(_MAX_SPLITS, num_steps, _SHRINK_PROGRAMS // num_programs))


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _adapter_kernel(
    y,
    parts,
    counters,
    x,
    a,
    b,
    token_slots,
    num_rows,
    num_inputs,
    end0,
    end1,
    end2,
    x_stride,
    y_stride,
    slot_stride,
    EXPANDS: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_EACH: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
    SLOT_LANES: tl.constexpr,
    EVEN: tl.constexpr,
    A_LANES: tl.constexpr,
    B_LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """counters: for each tile of rows, the number of programs that have shrunk it, then of those
    that have expanded it. parts [tiles, SPLITS, BLOCK_M, RANKS]."""
    start_next(PDL)
    SHRINKS: tl.constexpr = SLOTS // SLOTS_EACH * RANK_TILES * SPLITS
    program = tl.program_id(0)
    num_shrinks = tl.cdiv(num_rows, BLOCK_M) * SHRINKS
    if program < num_shrinks:
        tile = program // SHRINKS
        share = program % SHRINKS
        _shrink(
            parts + tile.to(tl.int64) * (SPLITS * BLOCK_M * RANKS),
            x,
            a,
            token_slots,
            tile,
            share,
            num_rows,
            num_inputs,
            x_stride,
            slot_stride,
            SLOTS_EACH,
            RANKS,
            RANK_TILES,
            SPLITS,
            BLOCK_M,
            BLOCK_R,
            BLOCK_K,
            EVEN,
            A_LANES,
            PDL,
        )
        # All threads have written their parts before the count.
        tl.debug_barrier()
        tl.atomic_add(counters + tile, 1, sem="release")
    else:
        tile = (program - num_shrinks) // EXPANDS
        share = (program - num_shrinks) % EXPANDS
        _expand(
            y,
            parts + tile.to(tl.int64) * (SPLITS * BLOCK_M * RANKS),
            counters + tile,
            b,
            token_slots,
            tile,
            share,
            num_rows,
            end0,
            end1,
            end2,
            y_stride,
            slot_stride,
            SHRINKS,
            SLOTS,
            RANKS,
            RANK,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_RANK,
            GROUP,
            SLOT_LANES,
            B_LANES,
            PRECISION,
            PDL,
        )
        tl.debug_barrier()
        before = tl.atomic_add(counters + MAX_TILES + tile, 1, sem="acq_rel")
        if before == EXPANDS - 1:
            tl.store(counters + tile, 0)
            tl.store(counters + MAX_TILES + tile, 0)


@triton.jit
def _shrink(
    parts,
    x,
    a,
    token_slots,
    tile,
    share,
    num_rows,
    num_inputs,
    x_stride,
    slot_stride,
    SLOTS_EACH: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    A_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write A x over a share of the columns, for the rows in this program's slots."""
    split = share % SPLITS
    rank = share // SPLITS % RANK_TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    first_slot = share // (SPLITS * RANK_TILES) * SLOTS_EACH
    m = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_M + m
    slot = tl.load(token_slots + row, mask=row < num_rows, other=0) - 1
    num_steps = tl.cdiv(num_inputs, BLOCK_K)
    first = split * num_steps // SPLITS * BLOCK_K
    last = (split + 1) * num_steps // SPLITS * BLOCK_K
    column = tl.arange(0, BLOCK_K)
    a_row = a + rank.to(tl.int64) * num_inputs
    if A_LANES != "":
        is_used = tl.max((slot == first_slot).to(tl.int32), axis=0)
        num_bytes = (tl.minimum(last, num_inputs) - first) * is_used * 2
        here = a_row + first_slot.to(tl.int64) * slot_stride + first
        prefetch(here, tl.where(rank < RANKS, num_bytes, 0), A_LANES)
    await_previous(PDL)
    x_row = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    is_row = (row < num_rows)[None, :]
    is_rank = (rank < RANKS)[:, None]
    for index in range(SLOTS_EACH):
        mine = slot == first_slot + index
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            a_here = a_row[:, None] + (first_slot + index).to(tl.int64) * slot_stride
            a_here += column[None, :]
            acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
            for start in range(first, last, BLOCK_K):
                if EVEN:
                    weight = tl.load(a_here + start, mask=is_rank, other=0.0)
                    value = tl.load(x_row + start, mask=is_row, other=0.0)
                else:
                    inside = column + start < num_inputs
                    weight = tl.load(a_here + start, mask=is_rank & inside[None, :], other=0.0)
                    value = tl.load(x_row + start, mask=is_row & inside[:, None], other=0.0)
                acc = tl.dot(weight, value, acc, input_precision="ieee")
            share_of = parts + (split * BLOCK_M + m)[None, :] * RANKS + rank[:, None]
            tl.store(share_of, acc, mask=mine[None, :] & is_rank)


@triton.jit
def _expand(
    y,
    parts,
    counter,
    b,
    token_slots,
    tile,
    share,
    num_rows,
    end0,
    end1,
    end2,
    y_stride,
    slot_stride,
    SHRINKS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
    SLOT_LANES: tl.constexpr,
    B_LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add B's product to a tile of y, once its rows are shrunk."""
    matrix, first, end = merged_tile(share, end0, end1, end2, BLOCK_N)
    output = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_M + m
    slot = tl.load(token_slots + row, mask=row < num_rows, other=0) - 1
    if B_LANES != "":
        lane = tl.arange(0, SLOT_LANES)
        is_used = tl.max((slot[None, :] == lane[:, None]).to(tl.int32), axis=1)
        num_bytes = tl.minimum(end - first, BLOCK_N) * (RANK * 2)
        here = b + lane.to(tl.int64) * slot_stride + first.to(tl.int64) * RANK
        prefetch(here, is_used * num_bytes, B_LANES)
    b_row = b + output.to(tl.int64) * RANK
    if GROUP > 1:
        is_output = output < end
        weight = load_group(b_row, slot, 0, 0, is_output, slot_stride, RANK, BLOCK_RANK, GROUP)
    await_previous(PDL)
    # Loaded before the wait, so that it is complete when the wait ends.
    y_here = y + row.to(tl.int64)[None, :] * y_stride + output[:, None]
    changes = (slot != -1)[None, :] & (output < end)[:, None]
    acc = tl.load(y_here, mask=changes, other=0.0).to(tl.float32)
    arrived = tl.load(counter, volatile=True)
    while arrived < SHRINKS:
        arrived = tl.load(counter, volatile=True)
    tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()
    for start in tl.static_range(0, RANK, BLOCK_RANK):
        rank = start + tl.arange(0, BLOCK_RANK)
        is_rank = rank < RANK
        here = parts + m[None, :] * RANKS + (matrix * RANK + rank)[:, None]
        shrunk = tl.zeros([BLOCK_RANK, BLOCK_M], tl.float32)
        for split in tl.static_range(SPLITS):
            shrunk += tl.load(
                here + split * (BLOCK_M * RANKS),
                mask=(slot >= 0)[None, :] & is_rank[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
        if GROUP > 1:
            if start > 0:
                weight = load_group(
                    b_row, slot, 0, start, is_output, slot_stride, RANK, BLOCK_RANK, GROUP
                )
            acc = add_slots(
                acc,
                weight,
                shrunk,
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
        else:
            for index in range(SLOTS):
                mine = slot == index
                if tl.max(mine.to(tl.int32), axis=0) > 0:
                    b_here = b_row[:, None] + slot_stride.to(tl.int64) * index
                    one = tl.load(
                        b_here + rank[None, :],
                        mask=(output < end)[:, None] & is_rank[None, :],
                        other=0.0,
                    )
                    own = tl.where(mine[None, :], shrunk, 0.0)
                    acc = tl.dot(one.to(tl.float32), own, acc, input_precision=PRECISION)
    acc = tl.where((slot < -1)[None, :], float("nan"), acc)
    tl.store(y_here, acc.to(y.dtype.element_ty), mask=changes)
