"""Computes a matrix product and, in the same launch, the LoRA shrink A x: the A matrices of all
slots are treated as additional rows of W.

A skinny product is bound by reading the weights and leaves some SMs idle. The tiles of A run on
those SMs, so they cost only the time to read A. lora_expand.py adds the product with B.

Letters: y[M, O] = x[M, I] W[O, I]^T + bias; L slots, G matrices merged into one, r ranks of each:
A[L, G * r, I].
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.linear import MAX_TILES, add_columns, has_aligned_rows, store_tile
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.tuning import MatrixTile


class FusedShrink:
    """The launch that multiplies and shrinks; one object per daemon, on one stream.

    Owns MAX_TILES int32 counters on the device, which are zero between launches.
    """

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._pdl = has_dependent_launch(device)
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        token_slots: torch.Tensor,
        tile: MatrixTile,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x W^T + bias, and A x of every row for every slot that any row uses: float32
        [M, L * G * r]; entries of unused slots are undefined. tile: the tile of the product without
        adapters, so that rows without an adapter get results bit-identical to the base model's."""
        num_rows, num_inputs = x.shape
        num_outputs = weight.shape[0]
        num_slots, num_ranks = a.shape[:2]
        y = x.new_empty(num_rows, num_outputs)
        shrunk = x.new_empty(num_rows, num_slots * num_ranks, dtype=torch.float32)
        assert a.dtype == x.dtype == weight.dtype
        assert x.stride(1) == weight.stride(1) == y.stride(1) == a.stride(2) == 1
        assert a.stride(1) == num_inputs
        splits, block_o = tile.num_splits, tile.block_o
        num_tiles = triton.cdiv(num_slots * num_ranks, block_o) + triton.cdiv(num_outputs, block_o)
        assert splits == 1 or num_tiles <= MAX_TILES
        block_m = max(16, triton.next_power_of_2(num_rows))
        parts = num_tiles * splits * block_m * block_o if splits > 1 else 0
        is_aligned = has_aligned_rows(weight) and a.data_ptr() % 16 == 0
        _product_kernel[(num_tiles, splits)](
            y,
            shrunk,
            torch.empty(parts, dtype=torch.float32, device=x.device),
            self._arrivals,
            x,
            weight,
            x if bias is None else bias,
            a,
            token_slots,
            num_rows,
            num_outputs,
            num_inputs,
            x.stride(0),
            y.stride(0),
            weight.stride(0),
            a.stride(0),
            HAS_BIAS=bias is not None,
            EVEN=num_outputs % block_o == 0 and num_inputs % tile.block_i == 0,
            SPLITS=splits,
            A_ROWS=num_slots * num_ranks,
            SLOT_ROWS=num_ranks,
            BLOCK_M=block_m,
            BLOCK_O=block_o,
            BLOCK_I=tile.block_i,
            STAGES=tile.num_stages,
            PREFETCH=tile.prefetch if self._pdl and is_aligned else 0,
            LANES=str(block_o),
            PDL=self._pdl,
            num_warps=tile.num_warps,
            enable_fp_fusion=True,
            **launch_options(self._pdl),
        )
        return y, shrunk


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    y,
    shrunk,
    parts,
    arrivals,
    x,
    weight,
    bias,
    a,
    token_slots,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    y_stride,
    weight_stride,
    slot_stride,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    A_ROWS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Like linear.py's kernel, with A's tiles before those of W. A tile of slots that no row uses
    stays unread. shrunk [M, A_ROWS]."""
    start_next(PDL)
    A_TILES: tl.constexpr = (A_ROWS + BLOCK_O - 1) // BLOCK_O
    tile = tl.program_id(0)
    split = tl.program_id(1)
    is_adapter = tile < A_TILES
    m = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    # The last tile of A repeats the last row: what it computes there is not stored.
    a_row = tl.minimum(row, A_ROWS - 1)
    a_here = a + (a_row // SLOT_ROWS).to(tl.int64) * slot_stride
    a_here += (a_row % SLOT_ROWS).to(tl.int64) * num_inputs
    output = row - A_TILES * BLOCK_O
    matrix_row = tl.where(is_adapter, a_here, weight + output.to(tl.int64) * weight_stride)
    is_output = output < num_outputs
    num_steps = tl.cdiv(num_inputs, BLOCK_I)
    first = (split * num_steps // SPLITS) * BLOCK_I
    last = ((split + 1) * num_steps // SPLITS) * BLOCK_I
    if is_adapter:
        slot = tl.load(token_slots + m, mask=m < num_rows, other=0) - 1
        first_slot = tile * BLOCK_O // SLOT_ROWS
        last_slot = (tile * BLOCK_O + BLOCK_O - 1) // SLOT_ROWS
        is_used = (slot >= first_slot) & (slot <= last_slot)
        last = tl.where(tl.max(is_used.to(tl.int32), axis=0) > 0, last, first)
    if PREFETCH > 0:
        num_bytes = tl.minimum(PREFETCH, tl.minimum(last, num_inputs) - first) * 2
        prefetch(matrix_row + first, tl.where(is_output, num_bytes, 0), LANES)
    await_previous(PDL)
    acc = add_columns(
        matrix_row,
        x,
        is_output,
        num_rows,
        num_inputs,
        x_stride,
        first,
        last,
        EVEN,
        BLOCK_M,
        BLOCK_O,
        BLOCK_I,
        STAGES,
    )
    if SPLITS > 1:
        element = tl.arange(0, BLOCK_O)[:, None] * BLOCK_M + m[None, :]
        here = parts + tile * (SPLITS * BLOCK_O * BLOCK_M) + element
        tl.store(here + split * (BLOCK_O * BLOCK_M), acc)
        # All threads write their parts before the count, and read other programs' parts after it.
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        tl.debug_barrier()
        if before == SPLITS - 1:
            total = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(here + part * (BLOCK_O * BLOCK_M), cache_modifier=".cg")
            _store(
                total,
                y,
                shrunk,
                bias,
                tile,
                num_rows,
                num_outputs,
                y_stride,
                HAS_BIAS,
                A_ROWS,
                A_TILES,
            )
            tl.store(arrivals + tile, 0)
    else:
        _store(
            acc, y, shrunk, bias, tile, num_rows, num_outputs, y_stride, HAS_BIAS, A_ROWS, A_TILES
        )


@triton.jit
def _store(
    acc,
    y,
    shrunk,
    bias,
    tile,
    num_rows,
    num_outputs,
    y_stride,
    HAS_BIAS: tl.constexpr,
    A_ROWS: tl.constexpr,
    A_TILES: tl.constexpr,
):
    """Write acc [BLOCK_O, BLOCK_M] to its place in shrunk or, with the bias, in y."""
    if tile < A_TILES:
        row = tile * acc.shape[0] + tl.arange(0, acc.shape[0])
        m = tl.arange(0, acc.shape[1])
        stored = (m < num_rows)[None, :] & (row < A_ROWS)[:, None]
        tl.store(shrunk + m[None, :] * A_ROWS + row[:, None], acc, mask=stored)
    else:
        store_tile(acc, y, bias, tile - A_TILES, num_rows, num_outputs, y_stride, HAS_BIAS)
