"""Times the products of many rows with weights in FP8 and block scales on a CUDA device: `python -m
benchmarks.fp8_block_kernels [--rows M,M...] [--tiles]`.

For each shape of the models and each number of rows M, prints the times of: our kernel, the
conversion of its inputs, torch's product with block scales, dequantizing the weights, torch's bf16
product, and the last two together. Each runs in a CUDA graph over cold weights. With --tiles, also
our kernel with each candidate tile.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
import triton
from torch.nn import functional

from benchmarks.linear_kernels import COLD_BYTES, DTYPE, graph_us, relative_error, tuned_shapes
from worker_daemon.contracts.fp8 import FP8, FP8_BLOCK, FP8_MAX
from worker_daemon.contracts.layer_ops import Fp8Matrix
from worker_daemon.kernels.fp8_blocks import BlockTile, choose_block_tile, multiply_blocks
from worker_daemon.kernels.fp8_rows import BLOCK_SCALED_ROWS, fp8_rows
from worker_daemon.kernels.fp8_weights import dequantize
from worker_daemon.kernels.linear import MAX_TILES
from worker_daemon.kernels.tiles import DeviceLimits

ROWS = "128,256,512,1024,2048,8192"
HEAD_OUTPUTS = 60_000
"""Matrices with as many rows are LM heads, which stay in bf16."""
REPEATS = 7
MAX_SPLIT_PROGRAMS = 512
"""Tiles that split the columns are tried up to as many programs."""
MAX_ERROR = 0.06
"""Bound on the relative error of a product whose inputs are rounded to FP8."""

Shape = tuple[int, int]


class Products:
    """The products of one shape and number of rows, with several matrices of equal values."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        values = (torch.randn(shape, device="cuda") * 50).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        scale = torch.rand(blocks, device="cuda") * 1e-3 + 1e-4
        count = max(2, -(-COLD_BYTES // values.numel()))
        self._matrices = [Fp8Matrix(values.clone(), scale, None, "dynamic") for _ in range(count)]
        self._plain = [each.dequantized(DTYPE) for each in self._matrices]
        self._x = torch.randn(num_rows, shape[1], device="cuda").to(DTYPE)
        self._y = torch.empty(num_rows, shape[0], dtype=DTYPE, device="cuda")
        self._rows = fp8_rows(self._x, BLOCK_SCALED_ROWS, pdl=True)
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")

    def us(self, run: Callable[[int], object]) -> float:
        """Return the microseconds of run(number of a matrix)."""
        count = len(self._matrices)

        def run_all() -> None:
            for index in range(count):
                run(index)

        return graph_us(run_all, REPEATS) / count

    def convert(self, _: int) -> None:
        """Convert the inputs."""
        fp8_rows(self._x, BLOCK_SCALED_ROWS, pdl=True)

    def multiply(self, tile: BlockTile) -> Callable[[int], None]:
        """Return a function that computes our product with matrix `index`, inputs already
        converted."""

        def run(index: int) -> None:
            matrix = self._matrices[index]
            multiply_blocks(self._y, self._rows, matrix, None, tile, self._arrivals, pdl=True)

        return run

    def by_torch(self, index: int) -> torch.Tensor:
        """Return torch's product with matrix `index`, of inputs that are converted already."""
        weight, scale = self._matrices[index][:2]
        x, x_scale = self._rows
        return torch._scaled_mm(
            x, weight.t(), scale_a=x_scale.t(), scale_b=scale.t(), out_dtype=DTYPE
        )

    def dequantize(self, index: int) -> torch.Tensor:
        """Dequantize a matrix."""
        return dequantize(self._matrices[index], DTYPE, pdl=True)

    def in_bf16(self, index: int) -> torch.Tensor:
        """Return torch's product with a matrix in bf16."""
        return functional.linear(self._x, self._plain[index])

    def both(self, index: int) -> torch.Tensor:
        """Return torch's product with a matrix that is dequantized for it."""
        return functional.linear(self._x, self.dequantize(index))

    def error(self, tile: BlockTile) -> float:
        """Return the relative error of our product."""
        self.multiply(tile)(0)
        return relative_error(self._y, self._x.double() @ self._plain[0].double().T)


def candidates(num_rows: int, num_outputs: int) -> Iterator[BlockTile]:
    """Yield the tiles to try."""
    for (block_m, block_o, num_warps), num_stages, num_splits in product(
        ((128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)), (3, 4, 5), (1, 2, 4)
    ):
        num_tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(num_outputs, block_o)
        if num_splits == 1 or num_tiles * num_splits <= MAX_SPLIT_PROGRAMS:
            yield BlockTile(block_m, block_o, num_splits, num_warps, num_stages)


def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    limits = DeviceLimits.of(torch.device("cuda"))
    shapes = [shape for shape in tuned_shapes() if shape[0] < HEAD_OUTPUTS]
    for shape, num_rows in product(shapes, map(int, options.rows.split(","))):
        products, tile = Products(shape, num_rows), choose_block_tile(num_rows, shape, limits)
        error = products.error(tile)
        assert error < MAX_ERROR, (shape, num_rows, error)
        convert, ours = products.us(products.convert), products.us(products.multiply(tile))
        widen, plain = products.us(products.dequantize), products.us(products.in_bf16)
        both = products.us(products.both)
        by_torch = products.us(products.by_torch)
        print(
            f"{shape} M={num_rows}: ours {ours:.1f} + {convert:.1f} us, torch {by_torch:.1f}, "
            f"dequantize {widen:.1f}, bf16 {plain:.1f}, dequantize + bf16 {both:.1f}",
            flush=True,
        )
        for other in candidates(num_rows, shape[0]) if options.tiles else ():
            print(f"  {products.us(products.multiply(other)):.1f} us {other}", flush=True)


if __name__ == "__main__":
    main()
