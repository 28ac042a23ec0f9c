"""Matrix-vector products (GEMV) with weights in 4 bits (contracts/int4.py), in float32.

The kernel is like row_linear.py's, but fuses nothing: weights go from memory to registers, whole
rows at a time, and enough programs share an SM to hide the latency. The kernel for several rows
(int4_linear.py) is slower for one: it waits for shared memory and for MMA instructions, of which
one row uses an eighth.

Letters: y[1, O] = x[1, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.int4 import INT4_BLOCK, INT4_HALF, Int4Matrix
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.tuning import VectorTile

_BLOCK = tl.constexpr(INT4_BLOCK)
_HALF = tl.constexpr(INT4_HALF)
_OFFSET = tl.constexpr(128.0)
_CONVERT_PTX: Final = """{
    .reg .b32 %low, %high, %offset;
    and.b32 %low, $8, 0x0F0F0F0F;
    shr.u32 %high, $8, 4;
    and.b32 %high, %high, 0x0F0F0F0F;
    mov.b32 %offset, 0x43000000;
    prmt.b32 $0, %low, %offset, 0x7044;
    prmt.b32 $1, %low, %offset, 0x7144;
    prmt.b32 $2, %low, %offset, 0x7244;
    prmt.b32 $3, %low, %offset, 0x7344;
    prmt.b32 $4, %high, %offset, 0x7044;
    prmt.b32 $5, %high, %offset, 0x7144;
    prmt.b32 $6, %high, %offset, 0x7244;
    prmt.b32 $7, %high, %offset, 0x7344;
}"""
"""Converts four bytes to eight values plus 128, in float32: each value is placed in those bits of
the mantissa of 128 that count 1 to 8."""
_CONVERT = tl.constexpr(_CONVERT_PTX)


def choose_row_tile(shape: tuple[int, int], num_sms: int) -> VectorTile:
    """Return the tile of a product of one row with a matrix [O, I]: a block of 32 columns for each
    thread, and at most four steps, which are unrolled. If there is one step and each SM still has
    two programs, a tile has 16 outputs instead of 8. Measured for up to 14,336 columns
    (benchmarks/NOTES.md)."""
    num_outputs, num_inputs = shape
    columns = triton.next_power_of_2(num_inputs)
    block_i = min(columns, max(4096, columns // 4), 16384)
    is_one_step = num_inputs <= block_i
    block_o = 16 if is_one_step and num_outputs >= 16 * 2 * num_sms else 8
    return VectorTile(block_o, block_i, max(1, block_i // INT4_BLOCK // 32))


def launch_int4_row(
    y: torch.Tensor,
    x: torch.Tensor,
    matrix: Int4Matrix,
    bias: torch.Tensor | None,
    tile: VectorTile,
    *,
    pdl: bool,
) -> None:
    """Compute y [1, O] = x [1, I] W [O, I]^T + bias [O], each row contiguous, in bf16 or fp16. A
    tile's block_i is at least 32."""
    num_outputs, num_inputs = matrix.shape
    values = matrix.values.view(torch.uint8)
    assert x.shape == (1, num_inputs)
    assert x.stride(1) == y.stride(1) == values.stride(1) == 1
    assert matrix.groups.is_contiguous()
    assert tile.block_i >= INT4_BLOCK
    _int4_row_kernel[(triton.cdiv(num_outputs, tile.block_o),)](
        y,
        x,
        values,
        matrix.groups.view(torch.int32),
        x if bias is None else bias,
        num_outputs,
        values.stride(0),
        SIZE=num_inputs,
        GROUP=matrix.group_size,
        HAS_ZEROS=matrix.has_zeros,
        HAS_BIAS=bias is not None,
        EVEN=num_outputs % tile.block_o == 0 and num_inputs % tile.block_i == 0,
        IN_REGISTERS=x.device.type == "cuda",
        BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i,
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit
def _int4_row_kernel(
    y,
    x,
    values,
    groups,
    bias,
    num_outputs,
    values_stride,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_O outputs. Values stay 128 too large until their products are
    summed over a block of 32 columns; then 128 times the sum of inputs is subtracted. In float32
    the difference costs five bits of 24."""
    start_next(PDL)
    BLOCKS: tl.constexpr = BLOCK_I // _BLOCK
    row = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    present = row < num_outputs
    byte = tl.arange(0, BLOCK_I // 2)
    column = byte // _HALF * _BLOCK + byte % _HALF
    values_row = values + row.to(tl.int64)[:, None] * values_stride
    packed = _load_packed(values_row, present, byte, SIZE, EVEN)
    word = _load_words(groups, row, present, 0, num_outputs, SIZE, GROUP, BLOCKS, EVEN)
    await_previous(PDL)
    sums = tl.zeros([BLOCK_O, BLOCKS], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_I):
        if start > 0:
            packed = _load_packed(values_row, present, byte + start // 2, SIZE, EVEN)
            word = _load_words(groups, row, present, start, num_outputs, SIZE, GROUP, BLOCKS, EVEN)
        here = start + column
        low_x = tl.load(x + here, mask=here < SIZE, other=0.0).to(tl.float32)
        high_x = tl.load(x + here + _HALF, mask=here < SIZE, other=0.0).to(tl.float32)
        low, high = _convert(packed, IN_REGISTERS)
        part = tl.sum(tl.reshape(low * low_x[None, :], [BLOCK_O, BLOCKS, _HALF]), 2)
        part += tl.sum(tl.reshape(high * high_x[None, :], [BLOCK_O, BLOCKS, _HALF]), 2)
        total = tl.sum(tl.reshape(low_x + high_x, [BLOCKS, _HALF]), 1)
        zero = low_half(word >> 16, x.dtype.element_ty) if HAS_ZEROS else 8.0
        part -= total[None, :] * (zero + _OFFSET)
        sums += part * low_half(word, x.dtype.element_ty)
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)
    tl.store(y + row, result.to(y.dtype.element_ty), mask=present)


@triton.jit
def _load_packed(values_row, present, byte, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Return bytes [BLOCK_O, BLOCK_I / 2] of the weights, which no other program reads."""
    if EVEN:
        packed = tl.load(values_row + byte[None, :], eviction_policy="evict_first")
    else:
        inside = present[:, None] & (byte < SIZE // 2)[None, :]
        packed = tl.load(
            values_row + byte[None, :], mask=inside, other=0, eviction_policy="evict_first"
        )
    return packed


@triton.jit
def _load_words(
    groups,
    row,
    present,
    start,
    num_outputs,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return scale and zero point of each block of columns from start on: int32 [BLOCK_O, BLOCKS],
    the scale in the low 16 bits."""
    column = start + tl.arange(0, BLOCKS) * _BLOCK
    here = groups + (column // GROUP)[None, :] * num_outputs + row[:, None]
    if EVEN:
        word = tl.load(here)
    else:
        word = tl.load(here, mask=present[:, None] & (column < SIZE)[None, :], other=0)
    return word


@triton.jit
def low_half(word, DTYPE: tl.constexpr):
    """Return the low 16 bits of int32 words, which hold a value in DTYPE, as float32."""
    return word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _convert(packed, IN_REGISTERS: tl.constexpr):
    """Return the values in the low and in the high four bits of bytes, plus 128, in float32."""
    if IN_REGISTERS:
        low, high = tl.inline_asm_elementwise(
            _CONVERT,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low = (packed & 15).to(tl.float32) + _OFFSET
        high = (packed >> 4).to(tl.float32) + _OFFSET
    return low, high
