"""Products of many rows grouped by expert, with operands copied through tensor descriptors (TMA,
Hopper's tensor memory accelerator).

A program computes a block of outputs of one tile of rows. Descriptors copy the weights; those of
gate and up are one tile, so that one MMA instruction computes up to 256 outputs. Descriptors also
copy the rows of the second product, which are contiguous; the rows of the first are gathered by
loads.

Letters: N tokens, H hidden size, L experts of this rank, O outputs of a matrix.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_daemon.kernels.activation import activate_pair
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.expert_routing import TilePlan
from worker_daemon.kernels.expert_tiles import ProductTile
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

_ROW_BYTES = 16
"""TMA requires that rows begin at multiples of it."""


def can_use_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the product of x [..., H] and weight [L, O, H] can use TMA: both have the same
    16-bit dtype, and aligned rows."""
    is_aligned = all(
        values.data_ptr() % _ROW_BYTES == values.shape[-1] * values.itemsize % _ROW_BYTES == 0
        for values in (x, weight)
    )
    return is_aligned and x.itemsize == 2 and x.dtype == weight.dtype


def multiply_by_tma(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: TilePlan,
    tile: ProductTile,
    activation: Mapping[str, float | None],
    *,
    pdl: bool,
    gated: bool,
) -> None:
    """Compute what experts.py's multiply_tiles does, with weight [L, O, H] and bias [L, O]. If
    gated, O has the outputs of gate, then those of up. activation: ALPHA and LIMIT of
    activate_pair."""
    num_outputs, num_inputs = y.shape[1], x.shape[1]
    num_blocks = triton.cdiv(num_outputs, tile.block_o)
    matrices = weight.view(-1, num_outputs, num_inputs)
    rows = half = x
    if not gated:
        rows = TensorDescriptor.from_tensor(x, [plan.block_m, tile.block_i])
        half = TensorDescriptor.from_tensor(x, [plan.block_m // 2, tile.block_i])
    _tma_kernel[(plan.num_tiles * num_blocks,)](
        y,
        rows,
        half,
        TensorDescriptor.from_tensor(matrices, [2 if gated else 1, tile.block_o, tile.block_i]),
        bias,
        plan.entries,
        plan.num_tiles,
        num_outputs,
        num_inputs,
        num_blocks,
        TOP_K=plan.top_k,
        PARTS=2 if gated else 1,
        EVEN=num_inputs % tile.block_i == 0,
        BLOCK_M=plan.block_m,
        BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i,
        STAGES=tile.num_stages,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **activation,
        **launch_options(pdl),
    )


@launched
@triton.jit(do_not_specialize=["num_tiles", "num_blocks"])
def _tma_kernel(
    y,
    x,
    x_half,
    weight,
    bias,
    entries,
    num_tiles,
    num_outputs,
    num_inputs,
    num_blocks,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """PARTS is 2 for gate and up: x and x_half are the pointer to the tokens. It is 1 for down:
    they are descriptors of BLOCK_M rows in the order of the plan, and of half as many. A tile of
    128 rows whose second half is empty multiplies the first half alone. The grid is that of
    experts.py's _product_kernel."""
    start_next(PDL)
    tile = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    await_previous(PDL)
    expert = tl.load(entries + tile)
    rows_here = entries + 2 * num_tiles + tile * BLOCK_M
    if expert >= 0:
        num_rows = tl.load(entries + num_tiles + tile)
        if BLOCK_M >= 128 and num_rows <= BLOCK_M // 2:
            _multiply_rows(
                y,
                x_half,
                weight,
                bias,
                rows_here,
                tile * BLOCK_M,
                num_rows,
                expert,
                block,
                num_outputs,
                num_inputs,
                TOP_K,
                PARTS,
                EVEN,
                ALPHA,
                LIMIT,
                BLOCK_M // 2,
                BLOCK_O,
                BLOCK_I,
                STAGES,
            )
        else:
            _multiply_rows(
                y,
                x,
                weight,
                bias,
                rows_here,
                tile * BLOCK_M,
                num_rows,
                expert,
                block,
                num_outputs,
                num_inputs,
                TOP_K,
                PARTS,
                EVEN,
                ALPHA,
                LIMIT,
                BLOCK_M,
                BLOCK_O,
                BLOCK_I,
                STAGES,
            )


@triton.jit
def _multiply_rows(
    y,
    x,
    weight,
    bias,
    pairs,
    first_place,
    num_rows,
    expert,
    block,
    num_outputs,
    num_inputs,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply BLOCK_M rows of an expert, of which num_rows exist. pairs: pointer to their numbers,
    n * K + k; first_place: the first one's place in the order of the plan."""
    m = tl.arange(0, BLOCK_M)
    is_row = m < num_rows
    place = first_place + m
    pair = tl.load(pairs + m, mask=is_row, other=0)
    column = tl.arange(0, BLOCK_I)[None, :]
    if PARTS == 2:
        x_here = x + (pair // TOP_K).to(tl.int64)[:, None] * num_inputs + column
    acc = tl.zeros([BLOCK_M, PARTS * BLOCK_O], tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_I, num_stages=STAGES):
        if PARTS == 2:
            is_value = is_row[:, None]
            if not EVEN:
                is_value &= column + start < num_inputs
            value = tl.load(x_here + start, mask=is_value, other=0.0)
        else:
            value = x.load([first_place, start])
        w = weight.load([PARTS * expert, block * BLOCK_O, start])
        acc = tl.dot(value, tl.trans(tl.reshape(w, [PARTS * BLOCK_O, BLOCK_I])), acc)
    output = block * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = output < num_outputs
    first_bias = bias
    if bias is not None:
        first_bias = bias + PARTS * expert * num_outputs
    if PARTS == 2:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_O]), 0, 2, 1))
        if bias is not None:
            gate += _load_bias(first_bias, output, is_output)
            up += _load_bias(first_bias + num_outputs, output, is_output)
        gate = gate.to(y.dtype.element_ty).to(tl.float32)
        up = up.to(y.dtype.element_ty).to(tl.float32)
        result = activate_pair(gate, up, ALPHA, LIMIT)
        # A tile's padding is stored too, since the descriptor of the next product reads it.
        y_row = place
        stored = is_output[None, :]
    else:
        result = acc
        if bias is not None:
            result += _load_bias(first_bias, output, is_output)
        y_row = pair
        stored = is_row[:, None] & is_output[None, :]
    y_here = y + y_row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(y_here, result.to(y.dtype.element_ty), mask=stored)


@triton.jit
def _load_bias(bias, output, is_output):
    return tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
