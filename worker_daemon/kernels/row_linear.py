"""The product of one row with a weight matrix, bound by reading the weights once, with what stands
before and behind it in a layer: the norm of the row, the gate of its result.

Must not know layers. A program asks for the first of its weights before it waits for the kernel
before it, so that the device's memory is busy while the row comes; each fused part is one launch,
and one wait, less.

Letters: y[1, O] = x[1, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import AMPERE, await_previous, launch_options, start_next
from worker_daemon.kernels.tuning import VectorTile

# Elements of a row that one thread multiplies and adds before lanes exchange anything: 16 bytes.
_VECTOR = tl.constexpr(8)

_WARP_COLUMNS = 32 * 8
"""From so many columns on all lanes of a warp have the same row."""


class RowNorm(NamedTuple):
    """What makes the row of x: rms_norm(residual + x) * weight, or of x alone."""

    weight: torch.Tensor
    """[I]"""
    eps: float
    residual: torch.Tensor | None
    """[1, I], contiguous; rounded to the dtype of x when x is added."""
    total: torch.Tensor
    """[1, I]: where residual + x is written; unused without residual."""


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
    """y [1, O] = x [1, I] weight [O, I]^T + bias [O], each row contiguous; one dtype.

    With norm, its result takes the place of x; bf16 rounds it before it is divided by the root of
    the mean square, which is done to the product. gated: the upper half of the product is
    multiplied by silu of the lower half, both rounded before, and y is [1, O / 2]; a tile of one
    row then takes two.
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
        MMA=_takes_matrix_instructions(weight, tile),
        BLOCK_O=block_o,
        BLOCK_I=tile.block_i,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


def _takes_matrix_instructions(weight: torch.Tensor, tile: VectorTile) -> bool:
    """Whether each thread has whole vectors of a row, and each warp one row's. Not fp16: there a
    row that is still to be divided by its norm may not fit."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device) >= AMPERE
        and weight.data_ptr() % 16 == weight.stride(0) % 16 == weight.shape[1] % 16 == 0
        and tile.block_i >= _WARP_COLUMNS
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
    MMA: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    program = tl.program_id(0)
    row = program * BLOCK_O + tl.arange(0, BLOCK_O)
    present = row < num_outputs
    if GATED:  # a gate's row, then that of what it gates
        row = row // 2 + (row % 2) * (num_outputs // 2)
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    if MMA:
        weight_row = _words(weight_row)
    # Of the weights: words of two columns, or columns.
    STEP: tl.constexpr = BLOCK_I // 2 if MMA else BLOCK_I
    END: tl.constexpr = SIZE // 2 if MMA else SIZE
    place = tl.arange(0, STEP)
    column = tl.arange(0, BLOCK_I)
    w = _load_weights(weight_row, present, place, END, EVEN)
    g = _load_gain(gain, column, SIZE, NORM)
    await_previous(PDL)
    sums = tl.zeros([BLOCK_O, STEP if MMA else STEP // _VECTOR], tl.float32)
    more_sums = sums
    squares = tl.zeros([BLOCK_I // _VECTOR], tl.float32)
    for step in tl.static_range((SIZE + BLOCK_I - 1) // BLOCK_I):
        here = step * BLOCK_I + column
        next_w, next_g = w, g
        if (step + 1) * BLOCK_I < SIZE:
            next_w = _load_weights(weight_row, present, (step + 1) * STEP + place, END, EVEN)
            next_g = _load_gain(gain, here + BLOCK_I, SIZE, NORM)
        value = _load_value(x, residual, total, here, program == 0, SIZE, ADD)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, [BLOCK_I // _VECTOR, _VECTOR]), 1)
            value *= g
        if MMA:
            words = _pack(value) if NORM else _load_words(x, step * STEP + place, END)
            sums, more_sums = _multiply(w, words, sums, more_sums)
        else:
            product = w.to(tl.float32) * value[None, :]
            sums += tl.sum(tl.reshape(product, [BLOCK_O, BLOCK_I // _VECTOR, _VECTOR]), 2)
        w, g = next_w, next_g
    if MMA:
        sums = _sums_of_quads(sums, more_sums)
    result = tl.sum(sums, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / SIZE + eps)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)
    _store_result(y, result, program, row, num_outputs, GATED)


@triton.jit
def _load_gain(gain, column, SIZE: tl.constexpr, NORM: tl.constexpr):
    """[BLOCK_I] fp32, 1 where there is no norm."""
    if NORM:
        g = tl.load(gain + column, mask=column < SIZE, other=0.0).to(tl.float32)
    else:
        g = tl.full(column.shape, 1.0, tl.float32)
    return g


@triton.jit
def _load_value(x, residual, total, here, stores, SIZE: tl.constexpr, ADD: tl.constexpr):
    """[BLOCK_I] fp32 of the row: x, or its rounded sum with the residual, which is stored if
    `stores`."""
    value = tl.load(x + here, mask=here < SIZE, other=0.0)
    if ADD:
        added = tl.load(residual + here, mask=here < SIZE, other=0.0)
        value = (added.to(tl.float32) + value).to(x.dtype.element_ty)
        tl.store(total + here, value, mask=here < tl.where(stores, SIZE, 0))
    return value.to(tl.float32)


@triton.jit
def _store_result(y, result, program, row, num_outputs, GATED: tl.constexpr):
    """Round and write a program's outputs [BLOCK_O], those of a gated product half as many."""
    dtype = y.dtype.element_ty
    if GATED:
        HALF: tl.constexpr = result.shape[0] // 2
        rounded = result.to(dtype).to(tl.float32)
        gate, up = tl.split(tl.reshape(rounded, [HALF, 2]))
        column = program * HALF + tl.arange(0, HALF)
        gated = gate * tl.sigmoid(gate) * up
        tl.store(y + column, gated.to(dtype), mask=column < num_outputs // 2)
    else:
        tl.store(y + row, result.to(dtype), mask=row < num_outputs)


@triton.jit
def _words(pointers):
    return pointers.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _load_weights(weight_row, present, place, END: tl.constexpr, EVEN: tl.constexpr):
    """The weights at the places of each row, read once by the whole device."""
    if EVEN:
        w = tl.load(weight_row + place[None, :], eviction_policy="evict_first")
    else:
        inside = present[:, None] & (place < END)[None, :]
        w = tl.load(
            weight_row + place[None, :], mask=inside, other=0, eviction_policy="evict_first"
        )
    return w


@triton.jit
def _load_words(x, place, END: tl.constexpr):
    """x two columns to an int32: [BLOCK_I / 2]."""
    return tl.load(_words(x) + place, mask=place < END, other=0)


@triton.jit
def _pack(value):
    """value [BLOCK_I] fp32 rounded to bf16, two to an int32: [BLOCK_I / 2]."""
    even, odd = tl.split(tl.reshape(value, [value.shape[0] // 2, 2]))
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _multiply(w, x, sums, more_sums):
    """Add the products of bf16 weights [BLOCK_O, BLOCK_I / 2] and values [BLOCK_I / 2], two to an
    int32, to sums and more_sums, fp32 [BLOCK_O, BLOCK_I / 2], which _sums_of_quads understands.

    A thread has vectors of eight weights and the values that belong to them. A matrix instruction
    D[16, 8] += A[16, 16] B[16, 8] takes column q of B and rows q and q + 8 of A from the lanes
    4 q .. 4 q + 3: here weights, and values of the one and of the other half of a vector. So
    D[q, q], or D[q + 8, q] for the other half, is a sum of products of what belongs together; the
    rest of D is for nobody. These two instructions take the place of thirty that convert, multiply
    and add, whose power would have an H200 lower its clock. Source: PTX ISA, "Matrix Fragments for
    mma.m16n8k16".
    """
    return tl.inline_asm_elementwise(
        """{
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {$0, $1, $2, $3}, {$12, $14, $13, $15}, {$8, $9}, {$16, $17, $18, $19};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {$4, $5, $6, $7}, {$12, $14, $13, $15}, {$10, $11}, {$20, $21, $22, $23};
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
        [w, tl.broadcast_to(x[None, :], w.shape), sums, more_sums],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _sums_of_quads(sums, more_sums):
    """What _multiply has added up, fp32 [BLOCK_O, BLOCK_I / 2] and mostly 0: their sum is what
    counts.

    Lane 4 q + t has D[q, 2 t], D[q, 2 t + 1], D[q + 8, 2 t] and D[q + 8, 2 t + 1] of either half.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred %has, %odd;
        .reg .u32 %lane, %half, %rest;
        .reg .f32 %one, %other;
        mov.u32 %lane, %laneid;
        shr.u32 %half, %lane, 3;
        and.b32 %rest, %lane, 3;
        setp.eq.u32 %has, %half, %rest;
        and.b32 %rest, %lane, 4;
        setp.ne.u32 %odd, %rest, 0;
        selp.f32 %one, $5, $4, %odd;
        selp.f32 %other, $11, $10, %odd;
        add.f32 %one, %one, %other;
        selp.f32 $0, %one, 0f00000000, %has;
        mov.f32 $1, 0f00000000;
        mov.f32 $2, 0f00000000;
        mov.f32 $3, 0f00000000;
        }""",
        "=f,=f,=f,=f,f,f,f,f,f,f,f,f",
        [sums, more_sums],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
