"""Root-mean-square norms of rows, alone or fused with the residual addition before or after them.

One program normalizes one row, with a tile that depends only on the row's size, so that a row's
result does not depend on other rows.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import Norm, NormedSum
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next

MAX_SIZE = 16384
"""Elements of a row that still fit the registers of one program."""


def rms_norm(x: torch.Tensor, norm: Norm, *, pdl: bool = False) -> torch.Tensor:
    """Return the norm of each row, rounded once.

    Args:
        x: [N, H] contiguous, fp32, bf16 or fp16; H is at most MAX_SIZE.
        norm: its weight has the dtype of x.
        pdl: launch as a dependent of the previous kernel (see launch.py).

    Returns:
        [N, H], dtype of x.
    """
    return _norm_rows(x, None, norm, None, pdl)[0]


def rms_norm_add(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, *, pdl: bool = False
) -> torch.Tensor:
    """Return residual + rms_norm(x), the norm rounded before the addition. residual is like x,
    other arguments are those of rms_norm."""
    return _norm_rows(x, residual, None, norm, pdl)[1]


def sum_and_norm(source: NormedSum, *, pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and the sum of source, [N, H]; without a part, the sum is its residual
    itself."""
    part, residual, norm, part_norm = source
    if part is None:
        return _norm_rows(residual, None, norm, None, pdl)
    return _norm_rows(part, residual, norm, part_norm, pdl)


def with_part_normed(source: NormedSum, *, pdl: bool) -> NormedSum:
    """Return source without a norm of its part: if it has one, its sum is computed here."""
    part, residual, norm, part_norm = source
    if part is None or part_norm is None:
        return source
    return NormedSum(None, rms_norm_add(part, residual, part_norm, pdl=pdl), norm)


def _norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm | None,
    x_norm: Norm | None,
    pdl: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(s), s), s = residual + x_norm(x). What is None is left out; then s may be x
    itself, or norm(s) s itself."""
    num_rows, size = x.shape
    assert x.is_contiguous()
    assert size <= MAX_SIZE
    if residual is not None:
        assert x.shape == residual.shape
        assert x.dtype == residual.dtype
        assert residual.is_contiguous()
    total = x if residual is None else torch.empty_like(x)
    normed = total if norm is None else torch.empty_like(x)
    if num_rows == 0:
        return normed, total
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        normed,
        total,
        x,
        x if residual is None else residual,
        *_arguments(norm, size),
        *_arguments(x_norm, size),
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        WEIGHT_OFFSET=0.0 if norm is None else norm.weight_offset,
        X_WEIGHT_OFFSET=0.0 if x_norm is None else x_norm.weight_offset,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=True,
        **launch_options(pdl),
    )
    return normed, total


def _arguments(norm: Norm | None, size: int) -> tuple[torch.Tensor | None, float | None]:
    if norm is None:
        return None, None
    assert norm.weight.shape == (size,)
    return norm.weight, norm.eps


@launched
@triton.jit
def _rms_norm_kernel(
    normed,
    total,
    x,
    residual,
    weight,
    eps,
    x_weight,
    x_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    X_WEIGHT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """weight and eps are those of the norm after the addition, x_weight and x_eps those of the norm
    before it; None: no such norm."""
    start_next(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if weight is not None:
        gain = _load_gain(weight, column, inside, WEIGHT_OFFSET)
    if x_weight is not None:
        x_gain = _load_gain(x_weight, column, inside, X_WEIGHT_OFFSET)
    await_previous(PDL)
    element = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + element, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32)
    if x_weight is not None:
        value = value.to(tl.float32)
        x_scale = tl.rsqrt(tl.sum(value * value) / SIZE + x_eps)
        value = (value * x_scale * x_gain).to(x.dtype.element_ty)
    if ADD:
        value = before + value
        value = value.to(x.dtype.element_ty)
        tl.store(total + element, value, mask=inside)
    if weight is not None:
        value = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
        tl.store(normed + element, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _load_gain(weight, column, inside, WEIGHT_OFFSET: tl.constexpr):
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return offset_gain(gain, WEIGHT_OFFSET)


@triton.jit
def offset_gain(gain, WEIGHT_OFFSET: tl.constexpr):
    """Return the factors of a norm, from its weights in float32."""
    if WEIGHT_OFFSET != 0.0:
        gain += WEIGHT_OFFSET
    return gain
