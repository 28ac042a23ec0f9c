"""Matrix-vector products (GEMV), bound by reading the weights once, fused with the norm before and
the gate after.

A program prefetches its first weights before it waits for the previous kernel, so that memory is
busy until the row arrives. Each fusion saves one launch and one wait.

Letters: y[1, O] = x[1, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.tuning import VectorTile

# Elements of a row that one thread multiplies and adds before lanes exchange sums: 16 bytes.
_VECTOR = tl.constexpr(8)


class RowNorm(NamedTuple):
    """The norm that computes the row from x: rms_norm(residual + x) * weight, or of x alone."""

    weight: torch.Tensor
    """[I]"""
    eps: float
    residual: torch.Tensor | None
    """[1, I], contiguous; rounded to the dtype of x when x is added."""
    total: torch.Tensor
    """[1, I]: receives residual + x; unused without residual."""


def launch_row(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: VectorTile,
    *,
    pdl: bool,
    norm: RowNorm | None = None,
    gated: bool = False,
) -> None:
    """Compute y [1, O] = x [1, I] weight [O, I]^T + bias [O], each row contiguous; one dtype.

    norm: its result replaces x, and is not rounded before the multiplication. gated: the upper half
    of the product is multiplied by silu of the lower half, both rounded first, and y is [1, O / 2];
    a tile of one row then covers two.
    """
    num_outputs, num_inputs = weight.shape
    assert x.shape[0] == 1
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == y.stride(1) == 1
    assert not gated or num_outputs % 2 == 0
    block_o = max(2, tile.block_o) if gated else tile.block_o
    residual = None if norm is None else norm.residual
    _row_kernel[(triton.cdiv(num_outputs, block_o),)](
        y,
        x if norm is None else norm.total,
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,
        weight,
        x if bias is None else bias,
        num_outputs,
        weight.stride(0),
        0.0 if norm is None else norm.eps,
        SIZE=num_inputs,
        NORM=norm is not None,
        ADD=residual is not None,
        GATED=gated,
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
    bias,
    num_outputs,
    weight_stride,
    eps,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    program = tl.program_id(0)
    row = program * BLOCK_O + tl.arange(0, BLOCK_O)
    present = row < num_outputs
    if GATED:  # a gate's row, then the row that it gates
        row = row // 2 + (row % 2) * (num_outputs // 2)
    column = tl.arange(0, BLOCK_I)
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    w = _load_weights(weight_row, present, column, SIZE, EVEN)
    g = tl.full([BLOCK_I], 1.0, tl.float32)
    if NORM:
        g = tl.load(gain + column, mask=column < SIZE, other=0.0).to(tl.float32)
    await_previous(PDL)
    sums = tl.zeros([BLOCK_O, BLOCK_I // _VECTOR], tl.float32)
    squares = tl.zeros([BLOCK_I // _VECTOR], tl.float32)
    for start in range(0, SIZE, BLOCK_I):
        here = start + column
        after = here + BLOCK_I
        next_w = w
        next_g = g
        if start + BLOCK_I < SIZE:
            next_w = _load_weights(weight_row, present, after, SIZE, EVEN)
            if NORM:
                next_g = tl.load(gain + after, mask=after < SIZE, other=0.0).to(tl.float32)
        value = tl.load(x + here, mask=here < SIZE, other=0.0)
        if ADD:
            added = tl.load(residual + here, mask=here < SIZE, other=0.0)
            value = (added.to(tl.float32) + value).to(x.dtype.element_ty)
            tl.store(total + here, value, mask=here < tl.where(program == 0, SIZE, 0))
        value = value.to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, [BLOCK_I // _VECTOR, _VECTOR]), 1)
            value *= g
        product = w.to(tl.float32) * value[None, :]
        sums += tl.sum(tl.reshape(product, [BLOCK_O, BLOCK_I // _VECTOR, _VECTOR]), 2)
        w = next_w
        g = next_g
    result = tl.sum(sums, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / SIZE + eps)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)
    if GATED:
        result = result.to(y.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(result, [BLOCK_O // 2, 2]))
        gated = gate * tl.sigmoid(gate) * up
        column = program * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
        tl.store(y + column, gated.to(y.dtype.element_ty), mask=column < num_outputs // 2)
    else:
        tl.store(y + row, result.to(y.dtype.element_ty), mask=present)


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
