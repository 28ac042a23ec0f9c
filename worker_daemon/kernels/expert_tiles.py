"""Chooses the tiles of experts' products by arithmetic on sizes.

The rules are from `python -m benchmarks.experts_kernels --tune` on an H200, with the sizes of
Qwen3-30B-A3B (benchmarks/NOTES.md).
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton

from worker_daemon.contracts.experts import MAX_TILE_ROWS, ExpertMatrices
from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.kernels.tiles import RESERVED_SHARED_BYTES, DeviceLimits

_SOME_ROWS: Final = 24
"""With fewer rows per expert on average, weights are the left operand of the products."""
_MANY_ROWS: Final = 96
"""From as many rows per expert on average, tiles have MAX_TILE_ROWS rows."""
_WASTE_DIVISOR: Final = 8
"""Outputs that tiles compute beyond the last one are at most this part of all (1 / 8)."""
_LEAST_OUTPUTS: Final = 64
"""block_o is not reduced below it."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One program's share of a grouped product: the rows of a tile times block_o outputs (of gate
    and of up each, if they are fused), block_i inputs at a time. Sizes are powers of two >= 16."""

    block_o: int
    block_i: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products of a step."""

    block_m: int
    """Rows of a tile, a power of two >= 16."""
    gate_up: ProductTile
    down: ProductTile
    weights_left: bool
    """True if weights are the left operand of the MMA instruction, which has at least 64 rows, and
    a tile's rows the right one, which may have 16. If False, products in 16 bits use TMA."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """One program's share of a matrix-vector product: block_o outputs, block_i inputs at a time,
    both powers of two. Down has all experts of an output in one program."""

    block_o: int
    block_i: int
    num_warps: int


GATE_UP_ROW: Final = RowTile(block_o=1, block_i=1024, num_warps=4)
DOWN_ROW: Final = RowTile(block_o=1, block_i=256, num_warps=1)
"""Tiles of the products of one row."""

_FEW_ROWS: Final = ProductTile(64, 128, 4, 3)
_FLOAT32: Final = ProductTile(32, 32, 4, 2)
"""Float32 is multiplied on CUDA cores, in unrolled loops: larger tiles spill registers."""


def choose_tiles(
    num_pairs: int, matrices: ExpertMatrices, dtype: torch.dtype, limits: DeviceLimits
) -> ExpertTiles:
    """Return the tiles of a step with num_pairs rows (tokens times experts of a token, over all
    ranks) in dtype.

    Few rows are bound by reading weights: a tile has about twice as many rows as the mean expert,
    so that most experts have one tile, and their weights are read once. Many rows are bound by
    operations: tiles are as large as registers permit.
    """
    held, hidden, inner = matrices.down.shape
    mean = -(-num_pairs // (matrices.num_experts or held))
    if dtype == torch.float32:
        return ExpertTiles(16, _FLOAT32, _FLOAT32, weights_left=False)
    if mean < _SOME_ROWS:
        block_m = min(32, max(16, triton.next_power_of_2(2 * mean - 1)))
        gate_up = _FEW_ROWS if block_m == 16 else replace(_FEW_ROWS, block_i=64)
        return ExpertTiles(block_m, gate_up, _FEW_ROWS, weights_left=True)
    if mean < _MANY_ROWS:
        block_m, gate_up, down = 64, ProductTile(64, 64, 4, 3), ProductTile(256, 64, 4, 5)
    else:
        block_m = MAX_TILE_ROWS
        gate_up, down = ProductTile(128, 64, 8, 4), ProductTile(256, 64, 8, 4)
    if matrices.down_scale is not None:  # converted weights take registers and shared memory
        gate_up, down = replace(gate_up, block_o=64), replace(down, block_o=FP8_BLOCK)
    tiles = ExpertTiles(block_m, _fit(gate_up, inner), _fit(down, hidden), weights_left=False)
    return _limit_stages(tiles, matrices, dtype, limits)


def stage_bytes(tiles: ExpertTiles, matrices: ExpertMatrices, dtype: torch.dtype) -> list[int]:
    """Return the shared memory of a stage of gate and up, and of one of down."""
    weight_bytes = matrices.down.itemsize
    return [
        (tiles.block_m * dtype.itemsize + parts * tile.block_o * weight_bytes) * tile.block_i
        for tile, parts in ((tiles.gate_up, 2), (tiles.down, 1))
    ]


def _limit_stages(
    tiles: ExpertTiles, matrices: ExpertMatrices, dtype: torch.dtype, limits: DeviceLimits
) -> ExpertTiles:
    """Return the tiles with fewer stages, if the device's shared memory holds no more."""
    room = limits.shared_memory_bytes - RESERVED_SHARED_BYTES
    most = [max(1, room // each) for each in stage_bytes(tiles, matrices, dtype)]
    gate_up, down = (
        replace(tile, num_stages=min(tile.num_stages, stages))
        for tile, stages in zip((tiles.gate_up, tiles.down), most, strict=True)
    )
    return replace(tiles, gate_up=gate_up, down=down)


def _fit(tile: ProductTile, num_outputs: int) -> ProductTile:
    """Return the tile with fewer outputs, if num_outputs would leave too many of them unused."""
    block_o = tile.block_o
    while block_o > _LEAST_OUTPUTS and -num_outputs % block_o > num_outputs // _WASTE_DIVISOR:
        block_o //= 2
    return replace(tile, block_o=block_o)
