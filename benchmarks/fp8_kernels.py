"""Times the products with weights in FP8 on a CUDA device: `python -m benchmarks.fp8_kernels
[--tune] [--out FILE]`.

Each runs like those of linear_kernels.py: in a CUDA graph, over cold weights, with a relay between
two. A time includes the relay, but not the conversion of the inputs. With --tune, tries all
candidate tiles and writes the best to the file that ships for this device.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

import worker_daemon.kernels
from benchmarks.linear_kernels import (
    COLD_BYTES,
    DTYPE,
    HBM_BYTES_PER_S,
    MAX_ERROR,
    graph_us,
    relative_error,
    relay,
    tuned_shapes,
)
from worker_daemon.contracts.fp8 import FP8, FP8_MAX
from worker_daemon.contracts.layer_ops import Fp8Matrix
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.kernels.compile_ahead import compiling_ahead
from worker_daemon.kernels.fp8_linear import choose_row_tile, choose_tile, launch_fp8_matrix
from worker_daemon.kernels.fp8_rows import SPLIT_ROWS, Fp8Rows, fp8_rows
from worker_daemon.kernels.linear import MAX_TILES
from worker_daemon.kernels.row_linear import launch_row
from worker_daemon.kernels.tuning import (
    ROW_BUCKETS,
    MatrixTile,
    Tile,
    Tuning,
    VectorTile,
    file_name,
    format_tuning,
    load_tuning,
)

TUNED_BUCKETS = ROW_BUCKETS[1:]
"""One row has a rule instead: what is fastest alone is not in a layer."""
HEAD_OUTPUTS = 60_000
"""Matrices with as many rows are LM heads, which stay in bf16."""
LEAST_PROGRAMS = 100
MOST_SHARED_BYTES = 220_000
QUICK, KEPT, AGAIN = 3, 6, 9
"""Replays of each tile; tiles to time again; replays of those."""

Shape = tuple[int, int]


class Products:
    """The products of one shape and number of rows, each with its own weights, of equal values."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        num_outputs, num_inputs = shape
        values = (torch.randn(shape, device="cuda") * 50).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        count = max(2, -(-COLD_BYTES // values.numel()))
        scale = torch.rand(num_outputs, device="cuda") * 1e-3 + 1e-4
        self._matrices = [Fp8Matrix(values.clone(), scale, None, "none") for _ in range(count)]
        self._x = torch.randn(num_rows, num_inputs, device="cuda").to(DTYPE)
        self._rows = fp8_rows(self._x, SPLIT_ROWS, pdl=True)
        self._y = torch.empty(num_rows, num_outputs, dtype=DTYPE, device="cuda")
        self._sink = torch.empty_like(self._x)
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
        exact = values.double() * scale.double().unsqueeze(1)
        self._expected = self._x.double() @ exact.T

    def multiply(self, tile: Tile, matrix: Fp8Matrix | None = None) -> None:
        launch(self._y, self._x, self._rows, matrix or self._matrices[0], tile, self._arrivals)

    def is_right(self, tile: Tile) -> bool:
        self._y.fill_(torch.nan)
        self.multiply(tile)
        return relative_error(self._y, self._expected) < MAX_ERROR

    def us(self, tile: Tile, repeats: int) -> float:
        """Return microseconds of a product and its relay."""

        def run() -> None:
            for matrix in self._matrices:
                self.multiply(tile, matrix)
                relay(self._sink, self._y, pdl=True)

        return graph_us(run, repeats) / len(self._matrices)


def launch(
    y: torch.Tensor,
    x: torch.Tensor,
    rows: Fp8Rows,
    matrix: Fp8Matrix,
    tile: Tile,
    arrivals: torch.Tensor,
) -> None:
    """Multiply one row x, or rows with two terms, by a matrix."""
    if isinstance(tile, VectorTile):
        launch_row(y, x, matrix.weight, None, tile, pdl=True, scale=matrix.scale)
    else:
        launch_fp8_matrix(y, rows, matrix, None, tile, True, arrivals)


def candidates(shape: Shape, bucket: int) -> Iterator[MatrixTile]:
    """Yield the tiles to try for several rows."""
    num_outputs, num_inputs = shape
    for (block_o, num_warps), block_i, num_stages, num_splits in product(
        ((32, 2), (64, 4), (128, 4), (128, 8)), (128, 256), (3, 4, 5), (1, 2, 4, 8)
    ):
        shared_bytes = num_stages * block_i * (block_o + 2 * max(16, bucket))
        num_programs = -(-num_outputs // block_o) * num_splits
        has_work = num_splits == 1 or num_inputs // block_i >= 4 * num_splits
        is_full = num_programs >= LEAST_PROGRAMS or num_outputs < 32 * LEAST_PROGRAMS
        if shared_bytes <= MOST_SHARED_BYTES and has_work and is_full and num_programs <= 1500:
            yield MatrixTile(block_o, block_i, num_splits, num_warps, num_stages, 512)


def compile_all(shapes: list[Shape]) -> None:
    """Compile all candidates in parallel."""
    with KernelCompiler.start() as compiler, compiling_ahead(compiler):
        for shape, bucket in product(shapes, TUNED_BUCKETS):
            y = torch.empty(bucket, shape[0], dtype=DTYPE, device="cuda")
            x = torch.empty(bucket, shape[1], dtype=DTYPE, device="cuda")
            weight = torch.empty(shape, dtype=FP8, device="cuda")
            scale = torch.empty(shape[0], device="cuda")
            rows = Fp8Rows(torch.empty(2 * bucket, shape[1], dtype=FP8, device="cuda"), scale)
            arrivals = torch.empty(MAX_TILES, dtype=torch.int32, device="cuda")
            for tile in candidates(shape, bucket):
                launch(y, x, rows, Fp8Matrix(weight, scale, None, "none"), tile, arrivals)


def tune(shapes: list[Shape]) -> Tuning:
    """Return the fastest tile of each shape and bucket."""
    compile_all(shapes)
    tiles: dict[tuple[int, int, int], Tile | None] = {}
    for shape, bucket in product(shapes, TUNED_BUCKETS):
        products = Products(shape, bucket)
        right = [tile for tile in candidates(shape, bucket) if products.is_right(tile)]
        kept = sorted(right, key=lambda tile: products.us(tile, QUICK))[:KEPT]
        times = {tile: products.us(tile, AGAIN) for tile in kept}
        best = min(kept, key=times.__getitem__)
        tiles[(*shape, bucket)] = best
        print(f"{shape} M<={bucket}: {times[best]:.2f} us {best}", flush=True)
    return Tuning(tiles)


def report(shapes: list[Shape], tuning: Tuning) -> list[dict[str, object]]:
    """Time each product with the tile that a daemon takes."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    records: list[dict[str, object]] = []
    for shape, bucket in product(shapes, ROW_BUCKETS):
        chosen = choose_tile(bucket, shape, num_sms)
        rule = choose_row_tile(shape, num_sms) if bucket == 1 else chosen
        tile = tuning.tiles.get((*shape, bucket)) or rule
        products = Products(shape, bucket)
        us, rule_us = products.us(tile, AGAIN), products.us(rule, AGAIN)
        floor = shape[0] * shape[1] / HBM_BYTES_PER_S * 1e6
        records.append({"shape": shape, "M": bucket, "us": us, "rule_us": rule_us, "floor": floor})
        print(f"{shape} M={bucket}: floor {floor:.2f} ours {us:.2f} rule {rule_us:.2f}", flush=True)
    return records


def main() -> None:
    """Tune if asked, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, help="figures as JSON")
    options = parser.parse_args()
    shapes = [shape for shape in tuned_shapes() if shape[0] < HEAD_OUTPUTS]
    device = f"{torch.cuda.get_device_name()} fp8"
    tuning = load_tuning(device)
    if options.tune:
        tuning = tune(shapes)
        shipped = Path(next(iter(worker_daemon.kernels.__path__))) / "tuned" / file_name(device)
        shipped.write_text(format_tuning(tuning))
    records = report(shapes, tuning)
    if options.out is not None:
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
