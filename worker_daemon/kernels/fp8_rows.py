"""Rows in FP8, the inputs of products with weights in FP8: converted alone, or fused with the norm
or the gate that computes them.

A row has one or two terms. A single term is rounded to the three mantissa bits of FP8. Of two
terms, the first is cut off after three bits, and the second holds the rest: together they keep the
seven bits of bf16, at the speed of FP8. A value below 2^-12 of its row's largest loses bits; the
error is below 2^-20 of the largest. fp16 is rounded to about the precision of bf16.

A scale belongs to a whole row, or to a block of 128 of its values, as DeepSeek-V3 quantizes
activations (arXiv 2412.19437).

Letters: N rows of K values.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8, FP8_BLOCK, FP8_LEAST_SCALE, FP8_MAX
from worker_daemon.contracts.layer_ops import Activation, GateUp, Norm, NormedSum
from worker_daemon.kernels.activation import activate
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next
from worker_daemon.kernels.norm import offset_gain, with_part_normed

MAX_SIZE: Final = 16384
"""Largest K of a fused conversion: the row lies in the registers of one program."""
TERM_RATIO: Final = 8
"""The second term is multiplied by it, so that it is as large as the first."""

_BLOCK: Final = 4096
_ROW_MULTIPLE: Final = 4
"""See Fp8Rows.scale."""
_LARGEST = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(FP8_LEAST_SCALE)
_RATIO = tl.constexpr(TERM_RATIO)
_SCALE_BLOCK = tl.constexpr(FP8_BLOCK)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_SUBNORMAL_ROUNDER = tl.constexpr(1.5 * 2.0**14)
"""FP8 values below _LEAST_NORMAL are multiples of 2^-9. Adding this number to a float32 value and
subtracting it again rounds the value to such a multiple."""

_Way: TypeAlias = Literal["plain", "norm", "add and norm"] | Activation
"""The operation that a conversion is fused with; an activation is that of a gate."""


class RowForm(NamedTuple):
    """The form in which rows are wanted."""

    num_terms: int
    """1 or 2"""
    given: torch.Tensor | None
    """float32 [G]: the largest is the scale of all rows; only with one term. None: each row has
    its own scale."""
    has_blocks: bool = False
    """True: each block of 128 values of a row has its own scale. Requires num_terms = 1 and
    given = None."""


SPLIT_ROWS: Final = RowForm(2, None)
BLOCK_SCALED_ROWS: Final = RowForm(1, None, has_blocks=True)


class Fp8Rows(NamedTuple):
    """Rows in FP8: scale * (the first term + the second / TERM_RATIO)."""

    values: torch.Tensor
    """float8_e4m3fn [N, K], or [2 N, K]: all first terms, then all second ones."""
    scale: torch.Tensor
    """float32 [N]; powers of two if there are two terms. For blocks [ceil(K / 128), N], where N is
    rounded up to a multiple of 4, as cuBLAS requires; the added rows have undefined values."""

    @property
    def num_rows(self) -> int:
        """The number of rows, N; with two terms, half as many as `values` has."""
        return self.scale.shape[-1]


def fp8_rows(x: torch.Tensor, form: RowForm, *, pdl: bool) -> Fp8Rows:
    """Return x [N, K] in FP8, saturated. A NaN stays NaN, or makes its row NaN."""
    num_rows, num_columns = x.shape
    if num_columns <= MAX_SIZE and x.is_contiguous():
        return _fused_rows(x, x, x, None, num_columns, "plain", form, pdl)
    rows = _new_rows(num_rows, num_columns, form, x.device)
    given = form.given
    block = _block_size(min(_BLOCK, num_columns), form)
    _rows_kernel[(num_rows,)](
        *rows,
        x,
        x if given is None else given,
        rows.num_rows,
        num_columns,
        x.stride(0),
        0 if given is None else given.shape[0],
        TERMS=form.num_terms,
        IS_GIVEN=given is not None,
        BLOCKS=block // FP8_BLOCK if form.has_blocks else 0,
        BLOCK_G=1 if given is None else triton.next_power_of_2(given.shape[0]),
        BLOCK=block,
        PDL=pdl,
        num_warps=row_warps(block),
        **launch_options(pdl),
    )
    return rows


def fp8_norm_rows(source: NormedSum, form: RowForm, *, pdl: bool) -> tuple[Fp8Rows, torch.Tensor]:
    """Return the norm of source, rounded to its dtype, in FP8; and its sum, [N, K], K <=
    MAX_SIZE."""
    part, residual, norm, _ = with_part_normed(source, pdl=pdl)
    total = residual if part is None else torch.empty_like(residual)
    x = residual if part is None else part
    way: _Way = "norm" if part is None else "add and norm"
    return _fused_rows(x, residual, total, norm, residual.shape[1], way, form, pdl), total


def fp8_gate_rows(gate_up: GateUp, form: RowForm, *, pdl: bool) -> Fp8Rows:
    """Return what gate_up [N, 2 K] says, rounded to its dtype, in FP8; K <= MAX_SIZE."""
    x, activation = gate_up
    return _fused_rows(x, x, x, None, x.shape[1] // 2, activation, form, pdl)


def _fused_rows(
    x: torch.Tensor,
    residual: torch.Tensor,
    total: torch.Tensor,
    norm: Norm | None,
    num_columns: int,
    way: _Way,
    form: RowForm,
    pdl: bool,
) -> Fp8Rows:
    assert num_columns <= MAX_SIZE
    assert x.is_contiguous()
    assert residual.is_contiguous()
    num_rows = x.shape[0]
    rows = _new_rows(num_rows, num_columns, form, x.device)
    given = form.given
    block = _block_size(num_columns, form)
    _fused_kernel[(num_rows,)](
        *rows,
        total,
        x,
        residual,
        x if norm is None else norm.weight,
        x if given is None else given,
        rows.num_rows,
        0 if given is None else given.shape[0],
        0.0 if norm is None else norm.eps,
        SIZE=num_columns,
        WAY=way,
        NORMED=norm is not None,
        WEIGHT_OFFSET=0.0 if norm is None else norm.weight_offset,
        TERMS=form.num_terms,
        IS_GIVEN=given is not None,
        BLOCKS=block // FP8_BLOCK if form.has_blocks else 0,
        BLOCK_G=1 if given is None else triton.next_power_of_2(given.shape[0]),
        BLOCK=block,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=True,
        **launch_options(pdl),
    )
    return rows


def _new_rows(num_rows: int, num_columns: int, form: RowForm, device: torch.device) -> Fp8Rows:
    assert form.num_terms == 1 or (form.given is None and not form.has_blocks)
    if form.has_blocks:
        num_rows = triton.cdiv(num_rows, _ROW_MULTIPLE) * _ROW_MULTIPLE
    shape = (form.num_terms * num_rows, num_columns)
    values = torch.empty(shape, dtype=FP8, device=device)
    scales = (triton.cdiv(num_columns, FP8_BLOCK), num_rows) if form.has_blocks else (num_rows,)
    return Fp8Rows(values, torch.empty(scales, dtype=torch.float32, device=device))


def _block_size(num_columns: int, form: RowForm) -> int:
    """Return the columns that a program has at a time."""
    block: int = triton.next_power_of_2(num_columns)
    return max(block, FP8_BLOCK) if form.has_blocks else block


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    values,
    scale,
    x,
    given,
    num_rows,
    num_columns,
    x_stride,
    num_given,
    TERMS: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
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
        factor = _given_scale(given, num_given, BLOCK_G)
    elif BLOCKS == 0:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            value = tl.load(here + start, mask=column + start < num_columns, other=0.0)
            largest = tl.maximum(
                largest, tl.abs(value.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL
            )
        factor = _row_scale(largest, TERMS)
    if BLOCKS == 0:
        tl.store(scale + row, factor)
    for start in range(0, num_columns, BLOCK):
        inside = column + start < num_columns
        value = tl.load(here + start, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS > 0:
            here_scale = scale + (start // _SCALE_BLOCK) * num_rows.to(tl.int64) + row
            factor = _store_block_scales(here_scale, value, num_rows, num_columns - start, BLOCKS)
        out = values + row * num_columns + column + start
        _store_terms(out, value, factor, num_rows.to(tl.int64) * num_columns, inside, TERMS)


@launched
@triton.jit(do_not_specialize=["num_rows", "eps"])
def _fused_kernel(
    values,
    scale,
    total,
    x,
    residual,
    gain,
    given,
    num_rows,
    num_given,
    eps,
    SIZE: tl.constexpr,
    WAY: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    TERMS: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    element = row * SIZE + column
    if WAY == "plain":
        await_previous(PDL)
        value = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    elif NORMED:
        weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        weight = offset_gain(weight, WEIGHT_OFFSET)
        await_previous(PDL)
        value = tl.load(x + element, mask=inside, other=0.0)
        if WAY == "add and norm":
            value = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32) + value
            value = value.to(x.dtype.element_ty)
            tl.store(total + element, value, mask=inside)
        value = value.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value) / SIZE + eps) * weight
    else:
        await_previous(PDL)
        source = x + row * (2 * SIZE) + column
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
        value = activate(gate, WAY) * up
    value = value.to(x.dtype.element_ty).to(tl.float32)
    if BLOCKS > 0:
        factor = _store_block_scales(scale + row, value, num_rows, SIZE, BLOCKS)
    else:
        if IS_GIVEN:
            factor = _given_scale(given, num_given, BLOCK_G)
        else:
            factor = _row_scale(tl.abs(value), TERMS)
        tl.store(scale + row, factor)
    _store_terms(values + element, value, factor, num_rows.to(tl.int64) * SIZE, inside, TERMS)


@triton.jit
def _given_scale(given, num_given, BLOCK_G: tl.constexpr):
    g = tl.arange(0, BLOCK_G)
    return _limited(tl.max(tl.load(given + g, mask=g < num_given, other=0.0), axis=0))


@triton.jit
def _row_scale(sizes, TERMS: tl.constexpr):
    """Return a row's scale from the absolute values of its elements; NaN if one is NaN."""
    largest = tl.reduce(sizes, 0, _larger)
    factor = _limited(largest / _LARGEST)
    if TERMS == 2:  # the next power of two
        bits = (factor.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        power = bits.to(tl.float32, bitcast=True)
        factor = tl.where(factor < float("inf"), power, factor)
    return factor


@triton.jit
def _store_block_scales(scale, value, num_rows, num_columns, BLOCKS: tl.constexpr):
    """Store the scales of the blocks of a row's values, float32 [BLOCKS * 128], num_rows elements
    apart; return each value's scale. A block with a NaN has the scale NaN."""
    blocks = tl.reshape(tl.abs(value), [BLOCKS, _SCALE_BLOCK])
    factor = _limited(tl.reduce(blocks, 1, _larger) / _LARGEST)
    block = tl.arange(0, BLOCKS)
    inside = block * _SCALE_BLOCK < num_columns
    tl.store(scale + block.to(tl.int64) * num_rows, factor, mask=inside)
    return tl.reshape(tl.broadcast_to(factor[:, None], [BLOCKS, _SCALE_BLOCK]), value.shape)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _limited(factor):
    return tl.where(factor < _LEAST, _LEAST, factor)


@triton.jit
def _cut(value):
    """Return float32 values cut off to values of FP8 (rounded, if subnormal in FP8). The remainder
    fits in FP8 exactly too, unless it is too small.

    Conversions to FP8 and back would do, but ptxas 13.0 compiles them wrongly.
    """
    bits = value.to(tl.int32, bitcast=True) & -0x100000  # sign, exponent, three bits of mantissa
    small = (value + _SUBNORMAL_ROUNDER) - _SUBNORMAL_ROUNDER
    return tl.where(tl.abs(value) < _LEAST_NORMAL, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def _store_terms(out, value, factor, second, inside, TERMS: tl.constexpr):
    """Store value / factor, float32 [BLOCK]; a second term lies `second` elements after the
    first."""
    scaled = value * tl.div_rn(1.0, factor)
    if TERMS == 2:
        first = _cut(scaled)
        rest = (scaled - first) * _RATIO
        tl.store(out, first.to(tl.float8e4nv), mask=inside)
        tl.store(out + second, rest.to(tl.float8e4nv), mask=inside)
    else:
        limited = tl.clamp(scaled, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out, limited.to(tl.float8e4nv), mask=inside)
