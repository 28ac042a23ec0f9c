"""Matrix products with weights in 4 bits (contracts/int4.py); inputs are not quantized.

One row is multiplied in float32 (int4_row.py). Up to 64 rows are bound by reading the weights: a
kernel like linear.py's converts them in registers and multiplies with MMA instructions. Each
group's sum is multiplied by its scale in float32. More rows dequantize the weights first.

Letters: y[M, O] = x[M, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker_daemon.contracts.int4 import INT4_BLOCK, INT4_HALF, Int4Matrix
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.int4_row import choose_row_tile, launch_int4_row, low_half
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.linear import MAX_TILES, add_splits, has_aligned_rows
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.kernels.tuning import MatrixTile, Tile, VectorTile, row_bucket

_LEAST: Final = (8, 0)
"""Compute capability from which a device has MMA instructions for bfloat16."""
_LEAST_ROWS: Final = 8
"""The narrowest tile of an MMA instruction."""
_MAX_SPLITS: Final = 8
_TALLEST: Final = 128
_SHORTEST: Final = 32
_ROWS_PER_WARP: Final = 16
"""Outputs of a tile, and of a warp: with fewer, Triton 3.6 has compiled wrong products
(benchmarks/NOTES.md)."""
_FULL_ROWS: Final = 16
_FULL, _FULL_ENOUGH = 0.95, 0.8
"""No more splits are tried once programs keep this share of the SMs busy, as a mean over the waves:
_FULL up to _FULL_ROWS rows, _FULL_ENOUGH above, where the split-K reduction costs more. All
programs are assumed to take equally long."""
_WIDEST: Final = 128
"""The most columns of a step; fewer if groups are shorter."""
_LEAST_STEPS: Final = 4
"""Fewest steps in a split. With fewer, the split-K reduction costs more than the split gains."""
_DEQUANTIZED_ROWS: Final = 32

_BLOCK = tl.constexpr(INT4_BLOCK)
_HALF = tl.constexpr(INT4_HALF)
_CONVERT: Final = """{
    .reg .b32 %low, %high, %one, %two, %three, %four, %unit, %minus;
    and.b32 %low, $6, 0x0F0F0F0F;
    shr.u32 %high, $6, 4;
    and.b32 %high, %high, 0x0F0F0F0F;
    mov.b32 %unit, UNIT;
    mov.b32 %minus, MINUS;
    prmt.b32 %one, %low, MAGIC, 0x4140;
    prmt.b32 %two, %low, MAGIC, 0x4342;
    prmt.b32 %three, %high, MAGIC, 0x4140;
    prmt.b32 %four, %high, MAGIC, 0x4342;
    fma.rn.TYPE $0, %one, %unit, %minus;
    fma.rn.TYPE $1, %two, %unit, %minus;
    fma.rn.TYPE $2, %three, %unit, %minus;
    fma.rn.TYPE $3, %four, %unit, %minus;
    mov.b32 $4, UNIT;
    mov.b32 $5, UNIT;
}"""
"""Converts four bytes to eight values minus 8. Each value is placed in the lowest mantissa bits of
128 (bf16) or 1024 (fp16), where the last bit counts 1. Then 128 + 8 or 1024 + 8 is subtracted. All
steps are exact."""
_CONVERT_BF16 = tl.constexpr(
    _CONVERT.replace("TYPE", "bf16x2")
    .replace("MAGIC", "0x43434343")  # 128
    .replace("UNIT", "0x3F803F80")
    .replace("MINUS", "0xC308C308")
)
_CONVERT_FP16 = tl.constexpr(
    _CONVERT.replace("TYPE", "f16x2")
    .replace("MAGIC", "0x64646464")  # 1024
    .replace("UNIT", "0x3C003C00")
    .replace("MINUS", "0xE408E408")
)


class Int4Linear:
    """The products of all layers with matrices in 4 bits; one object per daemon, on one stream.

    Owns MAX_TILES int32 counters on the device, which are zero between launches.
    """

    def __init__(self, device: torch.device, tile: Tile | None = None) -> None:
        """device is that of all tensors; tile replaces the choice by shape."""
        is_cuda = device.type == "cuda"
        self._pdl = has_dependent_launch(device)
        self._multiplies = not is_cuda or torch.cuda.get_device_capability(device) >= _LEAST
        self._num_sms = DeviceLimits.of(device).num_sms
        self._tile = tile
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def linear(
        self, x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y [M, O], contiguous, of x [M, I] and bias [O], both of one dtype. Up to 64 rows, a row
        of y depends only on its row of x and on the bucket of M."""
        x = matrix.ordered(x)
        num_rows = x.shape[0]
        has_half = x.dtype in (torch.bfloat16, torch.float16)
        if not (self._multiplies and has_half and num_rows and row_bucket(num_rows) is not None):
            return functional.linear(x, dequantize(matrix, x.dtype, self._pdl), bias)
        y = x.new_empty(num_rows, matrix.shape[0])
        tile = self._choose(num_rows, matrix)
        if isinstance(tile, VectorTile):
            launch_int4_row(y, x, matrix, bias, tile, pdl=self._pdl)
        else:
            launch_int4_matrix(y, x, matrix, bias, tile, self._pdl, self._arrivals)
        return y

    def _choose(self, num_rows: int, matrix: Int4Matrix) -> Tile:
        if isinstance(self._tile, MatrixTile):
            return self._tile
        if num_rows == 1:
            return self._tile or choose_row_tile(matrix.shape, self._num_sms)
        return choose_tile(num_rows, matrix, self._num_sms)


def choose_tile(num_rows: int, matrix: Int4Matrix, num_sms: int) -> MatrixTile:
    """Return the tile of a product of several rows M, by arithmetic on the sizes: tall tiles, split
    until the programs fill the device evenly, and steps within one group."""
    num_outputs, num_inputs = matrix.shape
    block_i = widest_step(matrix.group_size)
    most = max(1, min(_MAX_SPLITS, num_inputs // block_i // _LEAST_STEPS))
    wanted = _FULL if num_rows <= _FULL_ROWS else _FULL_ENOUGH
    block_o = _TALLEST
    while True:
        num_tiles = triton.cdiv(num_outputs, block_o)
        limit = most if num_tiles <= MAX_TILES else 1
        splits = _choose_splits(num_tiles, limit, num_sms, wanted)
        if block_o == _SHORTEST or num_tiles * splits * 4 >= num_sms * 3:
            break
        block_o //= 2
    num_warps = block_o // _ROWS_PER_WARP
    return MatrixTile(block_o, block_i, splits, num_warps, num_stages=3, prefetch=1024)


def _choose_splits(num_tiles: int, most: int, num_sms: int, wanted: float) -> int:
    """Return the fewest splits that fill the wanted share of the device; if none do, those that
    fill the most."""
    shares = {}
    for splits in range(1, most + 1):
        programs = num_tiles * splits
        shares[splits] = programs / (triton.cdiv(programs, num_sms) * num_sms)
    enough = (splits for splits, share in shares.items() if share >= wanted)
    return next(enough, max(shares, key=shares.__getitem__))


def widest_step(group_size: int) -> int:
    """Return the most columns of a step that is within one group: a power of two."""
    return min(_WIDEST, group_size & -group_size)


def launch_int4_matrix(
    y: torch.Tensor,
    x: torch.Tensor,
    matrix: Int4Matrix,
    bias: torch.Tensor | None,
    tile: MatrixTile,
    pdl: bool,
    arrivals: torch.Tensor,
) -> None:
    """Compute y [M, O] = x [M, I] W [O, I]^T + bias [O], each row contiguous. arrivals: as for
    launch_matrix. A tile's block_i divides the size of a group, and is at least 32."""
    num_rows, num_inputs = x.shape
    num_outputs, num_columns = matrix.shape
    values = matrix.values.view(torch.uint8)
    assert num_inputs == num_columns
    assert x.stride(1) == y.stride(1) == values.stride(1) == 1
    assert matrix.groups.is_contiguous()
    assert tile.block_i >= INT4_BLOCK
    assert matrix.group_size % tile.block_i == 0
    num_tiles = triton.cdiv(num_outputs, tile.block_o)
    splits = tile.num_splits
    assert splits == 1 or num_tiles <= arrivals.shape[0]
    block_m = max(_LEAST_ROWS, triton.next_power_of_2(num_rows))
    parts = num_tiles * splits * block_m * tile.block_o if splits > 1 else 0
    _int4_kernel[(num_tiles, splits)](
        y,
        torch.empty(parts, dtype=torch.float32, device=x.device),
        arrivals,
        x,
        values,
        matrix.groups.view(torch.int32),
        x if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        y.stride(0),
        values.stride(0),
        HAS_BIAS=bias is not None,
        HAS_ZEROS=matrix.has_zeros,
        GROUP=matrix.group_size,
        EVEN=num_outputs % tile.block_o == 0,
        IN_REGISTERS=x.device.type == "cuda",
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i,
        STAGES=tile.num_stages,
        PREFETCH=tile.prefetch if pdl and has_aligned_rows(values) else 0,
        LANES=str(tile.block_o),
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _int4_kernel(
    y,
    parts,
    arrivals,
    x,
    values,
    groups,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    y_stride,
    values_stride,
    HAS_BIAS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Like linear.py's kernel; PREFETCH counts columns."""
    start_next(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = row < num_outputs
    values_row = values + row.to(tl.int64) * values_stride
    num_steps = num_inputs // BLOCK_I
    first = (split * num_steps // SPLITS) * BLOCK_I
    last = ((split + 1) * num_steps // SPLITS) * BLOCK_I
    if PREFETCH > 0:
        num_bytes = tl.minimum(PREFETCH, last - first) // 2
        prefetch(values_row + first // 2, tl.where(is_output, num_bytes, 0), LANES)
    await_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    byte = tl.arange(0, BLOCK_I // 2)
    column = byte // _HALF * _BLOCK + byte % _HALF
    values_here = values_row[:, None] + byte[None, :]
    x_here = x + m[:, None] * x_stride + column[None, :]
    is_row = (m < num_rows)[:, None]
    acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_I, num_stages=STAGES):
        here = groups + (start // GROUP) * num_outputs + row
        if EVEN:
            packed = tl.load(values_here + start // 2, eviction_policy="evict_first")
            word = tl.load(here)
        else:
            packed = tl.load(
                values_here + start // 2,
                mask=is_output[:, None],
                other=0,
                eviction_policy="evict_first",
            )
            word = tl.load(here, mask=is_output, other=0)
        low_x = tl.trans(tl.load(x_here + start, mask=is_row, other=0.0))
        high_x = tl.trans(tl.load(x_here + start + _HALF, mask=is_row, other=0.0))
        low, high, ones = _convert(packed, x.dtype.element_ty, IN_REGISTERS)
        product = tl.dot(low, low_x)
        product = tl.dot(high, high_x, product)
        if HAS_ZEROS:
            # The sums of inputs, as a product, are in the layout of the products.
            total = tl.dot(ones, low_x)
            total = tl.dot(ones, high_x, total)
            product -= total * (low_half(word >> 16, x.dtype.element_ty) - 8.0)[:, None]
        acc += product * low_half(word, x.dtype.element_ty)[:, None]
    add_splits(
        acc,
        y,
        parts,
        arrivals,
        bias,
        tile,
        split,
        num_rows,
        num_outputs,
        y_stride,
        HAS_BIAS,
        SPLITS,
        BLOCK_M,
        BLOCK_O,
    )


@triton.jit
def _convert(packed, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Return the low and the high values of bytes, minus 8, and ones, in DTYPE. On a GPU,
    one asm statement returns all three, so that they share a register layout and their products
    reuse one copy of the inputs."""
    if not IN_REGISTERS:
        low = (packed & 15).to(DTYPE) - 8.0
        high = (packed >> 4).to(DTYPE) - 8.0
        ones = tl.full(packed.shape, 1.0, DTYPE)
    elif tl.bfloat16 == DTYPE:
        low, high, ones = tl.inline_asm_elementwise(
            _CONVERT_BF16,
            "=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high, ones = tl.inline_asm_elementwise(
            _CONVERT_FP16,
            "=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low.to(DTYPE), high.to(DTYPE), ones


def dequantize(matrix: Int4Matrix, dtype: torch.dtype, pdl: bool) -> torch.Tensor:
    """Return W [O, I], computed in float32 and rounded once to dtype."""
    num_outputs, num_inputs = matrix.shape
    values = matrix.values.view(torch.uint8)
    assert matrix.groups.is_contiguous()
    weight = torch.empty(num_outputs, num_inputs, dtype=dtype, device=values.device)
    block_i = widest_step(matrix.group_size)
    _dequantize_kernel[(triton.cdiv(num_outputs, _DEQUANTIZED_ROWS), num_inputs // block_i)](
        weight,
        values,
        matrix.groups,
        num_outputs,
        num_inputs,
        values.stride(0),
        HAS_ZEROS=matrix.has_zeros,
        GROUP=matrix.group_size,
        BLOCK_O=_DEQUANTIZED_ROWS,
        BLOCK_I=block_i,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return weight


@launched
@triton.jit
def _dequantize_kernel(
    weight,
    values,
    groups,
    num_outputs,
    num_inputs,
    values_stride,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program dequantizes BLOCK_O rows of BLOCK_I columns, which are in one group."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    present = row < num_outputs
    inside = present[:, None] & (column < num_inputs)[None, :]
    byte = column // _BLOCK * _HALF + column % _HALF
    packed = tl.load(values + row[:, None] * values_stride + byte[None, :], mask=inside, other=0)
    here = groups + (tl.program_id(1) * BLOCK_I // GROUP * num_outputs + row) * 2
    scale = tl.load(here, mask=present, other=0.0).to(tl.float32)
    await_previous(PDL)
    value = ((packed >> ((column // _HALF) % 2 * 4)[None, :].to(tl.uint8)) & 15).to(tl.float32)
    if HAS_ZEROS:
        value -= tl.load(here + 1, mask=present, other=0.0).to(tl.float32)[:, None]
    else:
        value -= 8.0
    value *= scale[:, None]
    here = weight + row[:, None] * num_inputs + column[None, :]
    tl.store(here, value.to(weight.dtype.element_ty), mask=inside)
