"""Products of many rows with weights in FP8 that have a scale for each block of 128 x 128 values,
for devices and sizes for which torch has none.

The inputs have a scale for each block of 128 values of a row. The sums over a block of columns come
from the tensor cores; each is multiplied by both scales, and added in float32 (DeepSeek-V3, arXiv
2412.19437). The tensor cores' own sums of FP8 products are less exact than float32.

Letters: y[M, O] = x[M, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.contracts.layer_ops import Fp8Matrix
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8_rows import Fp8Rows
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.linear import add_splits
from worker_daemon.kernels.tiles import DeviceLimits

_BLOCK_M: Final = 128
_BLOCK_O: Final = 64
"""Sizes of the fastest tile for all measured shapes (benchmarks/NOTES.md)."""
_LEAST_STEPS: Final = 4
"""Fewest blocks of columns in a split."""
_MAX_SPLITS: Final = 8
_GROUP: Final = 8
"""Tiles of rows that run one after the other with the same weights, which stay in the L2 cache."""
_RESERVED_BYTES: Final = 8 << 10
"""Shared memory besides the tiles of x and W: a stage's scales, and barriers."""
_BLOCK = tl.constexpr(FP8_BLOCK)


class BlockTile(NamedTuple):
    """One program's share of a product: block_m rows of x, block_o rows of W, and the columns of
    one of num_splits splits."""

    block_m: int
    block_o: int
    """A power of two up to 128, so that a tile has one scale for each block of columns."""
    num_splits: int
    num_warps: int
    num_stages: int


def choose_block_tile(num_rows: int, shape: tuple[int, ...], limits: DeviceLimits) -> BlockTile:
    """Return the tile of a product of M rows with a matrix [O, I], by arithmetic on the sizes: a
    program for each SM, if the columns suffice. Programs that have an SM to themselves have more
    stages, to load further ahead. The tile is equal for all M between two powers of two, so that
    the warm-up compiles every kernel."""
    num_outputs, num_inputs = shape
    most_rows = max(_BLOCK_M, triton.next_power_of_2(num_rows))
    num_tiles = most_rows // _BLOCK_M * triton.cdiv(num_outputs, _BLOCK_O)
    num_steps = triton.cdiv(num_inputs, FP8_BLOCK)
    splits = max(1, min(limits.num_sms // num_tiles, num_steps // _LEAST_STEPS, _MAX_SPLITS))
    stages = 5 if num_tiles * splits <= limits.num_sms else 4
    stage_bytes = (_BLOCK_M + _BLOCK_O) * FP8_BLOCK
    most_stages = (limits.shared_memory_bytes - _RESERVED_BYTES) // stage_bytes
    return BlockTile(_BLOCK_M, _BLOCK_O, splits, 4, min(stages, most_stages))


def multiply_blocks(
    y: torch.Tensor,
    x: Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    tile: BlockTile,
    arrivals: torch.Tensor,
    *,
    pdl: bool,
) -> None:
    """Compute y [M, O] = x [M, I] W [O, I]^T + bias [O], each row contiguous; x and W have scales
    of blocks. M includes the padding of x. arrivals: as for linear.py's launch_matrix."""
    num_rows = y.shape[0]
    weight, scale = matrix.weight, matrix.scale
    num_outputs, num_inputs = weight.shape
    assert x.values.shape == (num_rows, num_inputs) and x.num_rows == num_rows
    assert x.scale.shape == (triton.cdiv(num_inputs, FP8_BLOCK), num_rows)
    assert scale.dim() == 2
    assert weight.stride(1) == y.stride(1) == scale.stride(1) == 1
    row_tiles = triton.cdiv(num_rows, tile.block_m)
    output_tiles = triton.cdiv(num_outputs, tile.block_o)
    splits, num_tiles = tile.num_splits, row_tiles * output_tiles
    assert splits == 1 or num_tiles <= arrivals.shape[0]
    parts = num_tiles * splits * tile.block_m * tile.block_o if splits > 1 else 0
    _block_kernel[(num_tiles, splits)](
        y,
        torch.empty(parts, dtype=torch.float32, device=y.device),
        arrivals,
        x.values,
        x.scale,
        weight,
        scale,
        y if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        y.stride(0),
        weight.stride(0),
        scale.stride(0),
        HAS_BIAS=bias is not None,
        EVEN=num_inputs % FP8_BLOCK == 0,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_O=tile.block_o,
        GROUP=_GROUP,
        STAGES=tile.num_stages,
        PDL=pdl,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _block_kernel(
    y,
    parts,
    arrivals,
    x,
    x_scale,
    weight,
    scale,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    y_stride,
    weight_stride,
    scale_stride,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of y over a split of the columns; its last program to finish adds the splits.
    Rows and outputs beyond the last are computed as the last, and not stored. EVEN: all columns of
    a block exist."""
    start_next(PDL)
    row_tile, tile = _place(tl.program_id(0), num_rows, num_outputs, BLOCK_M, BLOCK_O, GROUP)
    split = tl.program_id(1)
    num_steps = tl.cdiv(num_inputs, _BLOCK)
    first = split * num_steps // SPLITS
    last = (split + 1) * num_steps // SPLITS
    m = tl.minimum(row_tile * BLOCK_M + tl.arange(0, BLOCK_M), num_rows - 1)
    output = tl.minimum(tile * BLOCK_O + tl.arange(0, BLOCK_O), num_outputs - 1)
    column = tl.arange(0, _BLOCK)[None, :]
    weight_here = weight + output.to(tl.int64)[:, None] * weight_stride + column
    scale_here = scale + (tile * BLOCK_O // _BLOCK) * scale_stride
    x_here = x + m.to(tl.int64)[:, None] * num_inputs + column
    x_scale_here = x_scale + m
    await_previous(PDL)
    acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * _BLOCK
        if EVEN:
            w = tl.load(weight_here + start)
            value = tl.load(x_here + start)
        else:
            inside = column + start < num_inputs
            w = tl.load(weight_here + start, mask=inside, other=0.0)
            value = tl.load(x_here + start, mask=inside, other=0.0)
        factor = tl.load(x_scale_here + step * num_rows) * tl.load(scale_here + step)
        acc += tl.dot(w, tl.trans(value)) * factor[None, :]
    above = row_tile * BLOCK_M
    row_of_tiles = row_tile * tl.cdiv(num_outputs, BLOCK_O)
    add_splits(
        acc,
        y + above.to(tl.int64) * y_stride,
        parts + row_of_tiles * (SPLITS * BLOCK_O * BLOCK_M),
        arrivals + row_of_tiles,
        bias,
        tile,
        split,
        num_rows - above,
        num_outputs,
        y_stride,
        HAS_BIAS,
        SPLITS,
        BLOCK_M,
        BLOCK_O,
    )


@triton.jit
def _place(
    program,
    num_rows,
    num_outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return a program's tile of rows and its tile of outputs. GROUP tiles of rows share their
    weights one after the other."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    in_group = GROUP * tl.cdiv(num_outputs, BLOCK_O)
    above = program // in_group * GROUP
    height = tl.minimum(row_tiles - above, GROUP)
    return above + program % in_group % height, program % in_group // height
