"""Root-mean-square norm of rows, alone or fused with the residual addition before it.

One program normalizes one row, with a tile that depends only on the row's size, so that a row's
result does not depend on other rows.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next

MAX_SIZE = 16384
"""Elements of a row that still fit the registers of one program."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once.

    Args:
        x: [N, H] contiguous, fp32, bf16 or fp16; H is at most MAX_SIZE.
        weight: [H], dtype of x.
        eps: added to the mean of squares.
        pdl: launch as a dependent of the previous kernel (see launch.py).

    Returns:
        [N, H], dtype of x.
    """
    normed = torch.empty_like(x)
    _launch(normed, normed, x, x, weight, eps, adds=False, pdl=pdl)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(s), s) with s = residual + x rounded to their dtype; x and residual are
    unchanged.

    Args:
        x: [N, H] contiguous.
        residual: like x.
        weight: see rms_norm.
        eps: see rms_norm.
        pdl: see rms_norm.

    Returns:
        Two tensors [N, H], dtype of x.
    """
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    assert residual.is_contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _launch(normed, total, x, residual, weight, eps, adds=True, pdl=pdl)
    return normed, total


def sum_and_norm(source: NormedSum, *, pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and the sum of source, [N, H]; without a part, the sum is its residual
    itself."""
    part, residual, weight, eps = source
    if part is None:
        return rms_norm(residual, weight, eps, pdl=pdl), residual
    return add_rms_norm(part, residual, weight, eps, pdl=pdl)


def _launch(
    normed: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    adds: bool,
    pdl: bool,
) -> None:
    num_rows, size = x.shape
    assert x.is_contiguous()
    assert weight.shape == (size,)
    assert size <= MAX_SIZE
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        normed,
        total,
        x,
        residual,
        weight,
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=adds,
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
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    element = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + element, mask=inside, other=0.0)
    if ADD:
        value = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32) + value
        value = value.to(x.dtype.element_ty)
        tl.store(total + element, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    tl.store(normed + element, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)
