"""Quantization of rows to FP8: each row by its own largest value, or all by a given scale.

Letters: N rows of K values.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8, FP8_LEAST_SCALE, FP8_MAX
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8 import quantize
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next

_LARGEST = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(FP8_LEAST_SCALE)
_BLOCK: Final = 4096


def quantize_rows(
    x: torch.Tensor, given: torch.Tensor | None, *, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [N, K] as float8_e4m3fn [N, K], saturated, and its scales, float32 [N]. given:
    float32 [G]; the largest is the scale of all rows. A NaN stays NaN."""
    num_rows, num_columns = x.shape
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(num_columns))
    _quantize_kernel[(num_rows,)](
        values,
        scale,
        x,
        x if given is None else given,
        num_columns,
        x.stride(0),
        0 if given is None else given.shape[0],
        IS_GIVEN=given is not None,
        BLOCK_G=1 if given is None else triton.next_power_of_2(given.shape[0]),
        BLOCK=block,
        PDL=pdl,
        num_warps=row_warps(block),
        **launch_options(pdl),
    )
    return values, scale


@launched
@triton.jit
def _quantize_kernel(
    values,
    scale,
    x,
    given,
    num_columns,
    x_stride,
    num_given,
    IS_GIVEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    here = x + row * x_stride + column
    await_previous(PDL)
    if IS_GIVEN:
        g = tl.arange(0, BLOCK_G)
        factor = tl.max(tl.load(given + g, mask=g < num_given, other=0.0), axis=0)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            value = tl.load(here + start, mask=column + start < num_columns, other=0.0)
            largest = tl.maximum(
                largest, tl.abs(value.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL
            )
        factor = tl.max(largest, axis=0) / _LARGEST
    factor = tl.where(factor < _LEAST, _LEAST, factor)
    tl.store(scale + row, factor)
    for start in range(0, num_columns, BLOCK):
        is_inside = column + start < num_columns
        value = tl.load(here + start, mask=is_inside, other=0.0)
        out = values + row * num_columns + column + start
        tl.store(out, quantize(value, factor), mask=is_inside)
