"""Dequantizes weights in FP8, in one pass, for products that need them in the model's dtype.

Letters: W[O, I].
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.contracts.layer_ops import Fp8Matrix
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

_ROWS: Final = 8
"""Rows of W for each program; divides 128, so that a program's rows share one row of scales."""
_BLOCKS: Final = 8
"""Blocks of 128 columns for each program."""
_BLOCK = tl.constexpr(FP8_BLOCK)


def dequantize(matrix: Fp8Matrix, dtype: torch.dtype, *, pdl: bool) -> torch.Tensor:
    """Return values times scales [O, I], multiplied in float32 and rounded once to dtype."""
    weight, scale = matrix.weight, matrix.scale
    num_outputs, num_inputs = weight.shape
    assert weight.stride(1) == scale.stride(-1) == 1
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(num_outputs, _ROWS), triton.cdiv(num_inputs, _BLOCKS * FP8_BLOCK))
    _dequantize_kernel[grid](
        values,
        weight,
        scale,
        num_outputs,
        num_inputs,
        weight.stride(0),
        scale.stride(0),
        HAS_BLOCKS=scale.dim() == 2,
        ROWS=_ROWS,
        BLOCKS=_BLOCKS,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
    return values


@launched
@triton.jit
def _dequantize_kernel(
    values,
    weight,
    scale,
    num_outputs,
    num_inputs,
    weight_stride,
    scale_stride,
    HAS_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize [ROWS, BLOCKS * 128] values per program. With block scales, all of them lie in one
    row of blocks."""
    start_next(PDL)
    first = tl.program_id(0) * ROWS
    row = (first + tl.arange(0, ROWS))[:, None, None]
    block = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[None, :, None]
    column = block * _BLOCK + tl.arange(0, _BLOCK)[None, None, :]
    inside = (row < num_outputs) & (column < num_inputs)
    value = tl.load(weight + row.to(tl.int64) * weight_stride + column, mask=inside, other=0.0)
    if HAS_BLOCKS:
        here = scale + (first // _BLOCK) * scale_stride + block
        factor = tl.load(here, mask=block * _BLOCK < num_inputs, other=0.0)
    else:
        factor = tl.load(scale + row, mask=row < num_outputs, other=0.0)
    await_previous(PDL)
    product = (value.to(tl.float32) * factor).to(values.dtype.element_ty)
    tl.store(values + row.to(tl.int64) * num_inputs + column, product, mask=inside)
