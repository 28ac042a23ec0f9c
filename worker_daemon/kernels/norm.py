"""Root-mean-square norm of rows, alone or fused with the residual addition before or after it.

One program normalizes one row, with a tile that depends only on the row's size, so that a row's
result does not depend on other rows.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Literal, TypeAlias

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import Norm, NormedSum
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next

MAX_SIZE = 16384
"""Elements of a row that still fit the registers of one program."""


_Way: TypeAlias = Literal["norm", "add then norm", "norm then add"]


def rms_norm(x: torch.Tensor, norm: Norm, *, pdl: bool = False) -> torch.Tensor:
    """Return the norm of each row, rounded once.

    Args:
        x: [N, H] contiguous, fp32, bf16 or fp16; H is at most MAX_SIZE.
        norm: its weight has the dtype of x.
        pdl: launch as a dependent of the previous kernel (see launch.py).

    Returns:
        [N, H], dtype of x.
    """
    normed = torch.empty_like(x)
    _launch(normed, normed, x, x, norm, "norm", pdl)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(s), s) with s = residual + x rounded to their dtype; x and residual are
    unchanged.

    Args:
        x: [N, H] contiguous.
        residual: like x.
        norm: see rms_norm.
        pdl: see rms_norm.

    Returns:
        Two tensors [N, H], dtype of x.
    """
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _launch(normed, total, x, residual, norm, "add then norm", pdl)
    return normed, total


def rms_norm_add(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, *, pdl: bool = False
) -> torch.Tensor:
    """Return residual + rms_norm(x), the norm rounded before the addition. Arguments are those of
    add_rms_norm, and unchanged."""
    total = torch.empty_like(x)
    _launch(total, total, x, residual, norm, "norm then add", pdl)
    return total


def sum_and_norm(source: NormedSum, *, pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and the sum of source, [N, H]; without a part, the sum is its residual
    itself."""
    part, residual, norm = source
    if part is None:
        return rms_norm(residual, norm, pdl=pdl), residual
    return add_rms_norm(part, residual, norm, pdl=pdl)


def _launch(
    normed: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    way: _Way,
    pdl: bool,
) -> None:
    num_rows, size = x.shape
    assert x.is_contiguous() and residual.is_contiguous()
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    assert norm.weight.shape == (size,)
    assert size <= MAX_SIZE
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        normed,
        total,
        x,
        residual,
        norm.weight,
        norm.eps,
        SIZE=size,
        BLOCK=block,
        WAY=way,
        WEIGHT_OFFSET=norm.weight_offset,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit
def _rms_norm_kernel(
    normed,
    total,
    x,
    residual,
    weight,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAY: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    gain = offset_gain(gain, WEIGHT_OFFSET)
    await_previous(PDL)
    element = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + element, mask=inside, other=0.0)
    if WAY == "add then norm":
        value = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32) + value
        value = value.to(x.dtype.element_ty)
        tl.store(total + element, value, mask=inside)
    if WAY == "norm then add":
        before = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    place = normed + element
    result = (value * scale * gain).to(normed.dtype.element_ty)
    if WAY == "norm then add":
        result = (before + result).to(normed.dtype.element_ty)
    tl.store(place, result, mask=inside)


@triton.jit
def offset_gain(gain, WEIGHT_OFFSET: tl.constexpr):
    """Return the factors of a norm, from its weights in float32."""
    if WEIGHT_OFFSET != 0.0:
        gain += WEIGHT_OFFSET
    return gain
