"""Matrix-vector products (GEMV), bound by reading the weights once, fused with the norm before and
the gate after.

A program prefetches its first weights before it waits for the previous kernel, so that memory is
busy until the row arrives. Each fusion saves one launch and one wait.

Weights in FP8 are converted in registers, and their scales multiply the sums: inputs are not
quantized.

Letters: y[1, O] = x[1, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.contracts.layer_ops import Activation, Norm, NormedSum
from worker_daemon.kernels.activation import activate
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.norm import offset_gain, with_part_normed
from worker_daemon.kernels.tuning import VectorTile

_VECTOR_BITS = tl.constexpr(128)
"""Bits of a row's weights that one thread multiplies and adds before lanes exchange sums."""


class RowNorm(NamedTuple):
    """The norm that computes the row from x: that of residual + x, or of x alone."""

    norm: Norm
    residual: torch.Tensor | None
    """[1, I], contiguous; rounded to the dtype of x when x is added."""
    total: torch.Tensor
    """[1, I]: receives residual + x; unused without residual."""


def row_norm(source: NormedSum, *, pdl: bool) -> tuple[torch.Tensor, RowNorm]:
    """Return the row for launch_row, and the norm to apply to it."""
    part, residual, norm, _ = with_part_normed(source, pdl=pdl)
    if part is None:
        return residual, RowNorm(norm, None, residual)
    return part, RowNorm(norm, residual, torch.empty_like(residual))


def launch_row(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: VectorTile,
    *,
    pdl: bool,
    norm: RowNorm | None = None,
    gate: Activation | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Compute y [1, O] = x [1, I] weight [O, I]^T + bias [O], each row contiguous; one dtype,
    unless weight is float8_e4m3fn with a scale, float32 (Fp8Matrix).

    norm: its result replaces x, and is not rounded before the multiplication. gate: the upper half
    of the product is multiplied by this activation of the lower half, both rounded first, and y is
    [1, O / 2]; a tile of one row then covers two.
    """
    num_outputs, num_inputs = weight.shape
    assert x.shape[0] == 1
    assert scale is not None or x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == y.stride(1) == 1
    assert gate is None or num_outputs % 2 == 0
    block_o = tile.block_o if gate is None else max(2, tile.block_o)
    residual = None if norm is None else norm.residual
    _row_kernel[(triton.cdiv(num_outputs, block_o),)](
        y,
        x if norm is None else norm.total,
        x,
        x if residual is None else residual,
        x if norm is None else norm.norm.weight,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        num_outputs,
        weight.stride(0),
        0 if scale is None else scale.stride(0),
        0.0 if norm is None else norm.norm.eps,
        SIZE=num_inputs,
        NORM=norm is not None,
        WEIGHT_OFFSET=0.0 if norm is None else norm.norm.weight_offset,
        ADD=residual is not None,
        GATE=gate,
        HAS_SCALE=scale is not None,
        SCALE_BLOCK=FP8_BLOCK if scale is not None and scale.dim() == 2 else 0,
        HAS_BIAS=bias is not None,
        EVEN=num_outputs % block_o == 0 and num_inputs % tile.block_i == 0,
        BLOCK_O=block_o,
        BLOCK_I=tile.block_i,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit(do_not_specialize=["eps"])
def _row_kernel(
    y,
    total,
    x,
    residual,
    gain,
    weight,
    scale,
    bias,
    num_outputs,
    weight_stride,
    scale_stride,
    eps,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATE: an Activation or None. SCALE_BLOCK: 0 for a scale of each row."""
    start_next(PDL)
    VECTOR: tl.constexpr = _VECTOR_BITS // weight.dtype.element_ty.primitive_bitwidth
    VECTORS: tl.constexpr = BLOCK_I // VECTOR
    program = tl.program_id(0)
    row = program * BLOCK_O + tl.arange(0, BLOCK_O)
    present = row < num_outputs
    if GATE is not None:  # a gate's row, then the row that it gates
        row = row // 2 + (row % 2) * (num_outputs // 2)
    column = tl.arange(0, BLOCK_I)
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    w = _load_weights(weight_row, present, column, SIZE, EVEN)
    g = _load_gain(gain, column, SIZE, BLOCK_I, NORM, WEIGHT_OFFSET)
    if HAS_SCALE and SCALE_BLOCK == 0:
        factor = tl.load(scale + row, mask=present, other=0.0)
    await_previous(PDL)
    sums = tl.zeros([BLOCK_O, VECTORS], tl.float32)
    squares = tl.zeros([VECTORS], tl.float32)
    for start in range(0, SIZE, BLOCK_I):
        here = start + column
        after = here + BLOCK_I
        next_w = w
        next_g = g
        if start + BLOCK_I < SIZE:
            next_w = _load_weights(weight_row, present, after, SIZE, EVEN)
            next_g = _load_gain(gain, after, SIZE, BLOCK_I, NORM, WEIGHT_OFFSET)
        value = _load_row(total, x, residual, here, program, SIZE, ADD).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, [VECTORS, VECTOR]), 1)
            value *= g
        product = w.to(tl.float32) * value[None, :]
        part = tl.sum(tl.reshape(product, [BLOCK_O, VECTORS, VECTOR]), 2)
        if SCALE_BLOCK > 0:
            first = start + tl.arange(0, VECTORS) * VECTOR
            part *= _load_scales(scale, scale_stride, row, present, first, SIZE, SCALE_BLOCK)
        sums += part
        w = next_w
        g = next_g
    result = tl.sum(sums, 1)
    if HAS_SCALE and SCALE_BLOCK == 0:
        result *= factor
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / SIZE + eps)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)
    if GATE is not None:
        _store_gated(y, result, program, num_outputs, BLOCK_O, GATE)
    else:
        tl.store(y + row, result.to(y.dtype.element_ty), mask=present)


@triton.jit
def _load_gain(
    gain,
    column,
    SIZE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
):
    """Return the norm's factors; 1 without a norm."""
    g = tl.full([BLOCK_I], 1.0, tl.float32)
    if NORM:
        g = tl.load(gain + column, mask=column < SIZE, other=0.0).to(tl.float32)
        g = offset_gain(g, WEIGHT_OFFSET)
    return g


@triton.jit
def _load_row(total, x, residual, here, program, SIZE: tl.constexpr, ADD: tl.constexpr):
    """Return the values at `here`; if ADD, with the residual, and the first program stores them."""
    value = tl.load(x + here, mask=here < SIZE, other=0.0)
    if ADD:
        added = tl.load(residual + here, mask=here < SIZE, other=0.0)
        value = (added.to(tl.float32) + value).to(x.dtype.element_ty)
        tl.store(total + here, value, mask=here < tl.where(program == 0, SIZE, 0))
    return value


@triton.jit
def _store_gated(y, result, program, num_outputs, BLOCK_O: tl.constexpr, GATE: tl.constexpr):
    """Store GATE(gate) * up of the result [BLOCK_O], in which each gate precedes its up."""
    result = result.to(y.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(tl.reshape(result, [BLOCK_O // 2, 2]))
    gated = activate(gate, GATE) * up
    column = program * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
    tl.store(y + column, gated.to(y.dtype.element_ty), mask=column < num_outputs // 2)


@triton.jit
def _load_scales(
    scale, scale_stride, row, present, column, SIZE: tl.constexpr, SCALE_BLOCK: tl.constexpr
):
    """Return the scales of the blocks that hold these rows and columns."""
    block = (row // SCALE_BLOCK)[:, None] * scale_stride + (column // SCALE_BLOCK)[None, :]
    inside = present[:, None] & (column < SIZE)[None, :]
    return tl.load(scale + block, mask=inside, other=0.0)


@triton.jit
def _load_weights(weight_row, present, column, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Return [BLOCK_O, BLOCK_I] of the weights, read once by the whole device."""
    if EVEN:
        w = tl.load(weight_row + column[None, :], eviction_policy="evict_first")
    else:
        inside = present[:, None] & (column < SIZE)[None, :]
        w = tl.load(
            weight_row + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        )
    return w
