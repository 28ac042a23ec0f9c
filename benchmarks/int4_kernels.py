"""Times the products with weights in 4 bits on a CUDA device: `python -m benchmarks.int4_kernels`.

Like linear_kernels: every product runs in a CUDA graph over weights that together exceed the L2
cache, with a relay between two products. Tries tiles for each shape of Llama 8B and prints the
fastest, the time of the chosen tile, and its share of the floor. Groups have 128 columns and zero
points.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.linear_kernels import (
    COLD_BYTES,
    DTYPE,
    HBM_BYTES_PER_S,
    LLAMA_8B,
    MAX_ERROR,
    graph_us,
    layer_shapes,
    relative_error,
    relay,
)
from worker_daemon.contracts.int4 import Int4Matrix, pack
from worker_daemon.kernels.int4_linear import choose_tile, dequantize, launch_int4_matrix
from worker_daemon.kernels.int4_row import choose_row_tile, launch_int4_row
from worker_daemon.kernels.linear import MAX_TILES
from worker_daemon.kernels.tuning import MatrixTile, Tile, VectorTile

GROUP = 128
ROWS = (1, 16, 64)
TILES = {
    16: [(32, 2), (64, 2), (64, 4), (128, 4), (128, 8)],
    64: [(64, 4), (128, 4), (128, 8)],
}
"""Outputs of a tile, and warps, by rows."""
STAGES = {16: (3, 5), 64: (3,)}
SPLITS = {16: (1, 2, 4), 64: (1, 2, 4)}
PREFETCH = 1024
ROW_OUTPUTS, ROW_COLUMNS = (4, 8, 16, 32), (2048, 4096, 16384)
"""Outputs and columns of a tile for one row."""
VALUES_PER_THREAD = (16, 32, 64)
"""Values of one output that a thread has."""
MAX_VALUES_PER_THREAD = 512
"""Values of all outputs that a thread has, at most."""


def draw(num_outputs: int, num_inputs: int) -> Int4Matrix:
    """Return a random matrix [O, I] on the device."""
    values = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8, device="cuda")
    groups = (num_inputs // GROUP, num_outputs)
    scale = (torch.rand(groups, device="cuda") + 0.5) / num_inputs**0.5
    zero = torch.randint(0, 16, groups, device="cuda").float()
    return Int4Matrix(pack(values), torch.stack((scale, zero), 2).to(DTYPE), True)


def num_bytes(matrix: Int4Matrix) -> int:
    return matrix.values.nbytes + matrix.groups.nbytes


def candidates(num_rows: int, shape: tuple[int, int]) -> list[Tile]:
    """Return the tiles to try; those for several rows with up to ten programs for each SM."""
    if num_rows == 1:
        return row_candidates(shape[1])
    found: list[Tile] = []
    for (block_o, warps), stages, splits in product(
        TILES[num_rows], STAGES[num_rows], SPLITS[num_rows]
    ):
        programs = shape[0] // block_o * splits
        steps = shape[1] // GROUP // splits
        if 100 <= programs <= 2000 and steps >= 4:
            found.append(MatrixTile(block_o, GROUP, splits, warps, stages, PREFETCH))
    return found


def row_candidates(num_inputs: int) -> list[Tile]:
    """Return the tiles to try for one row: its columns at once, or in several steps."""
    found: list[Tile] = []
    for block_i, outputs, values in product(ROW_COLUMNS, ROW_OUTPUTS, VALUES_PER_THREAD):
        warps = block_i // values // 32
        if block_i >= 2 * num_inputs or outputs * values > MAX_VALUES_PER_THREAD:
            continue
        if 2 <= warps <= 16:
            found.append(VectorTile(outputs, block_i, warps))
    return found


def launch(
    y: torch.Tensor, x: torch.Tensor, matrix: Int4Matrix, tile: Tile, arrivals: torch.Tensor
) -> None:
    """Launch the kernel that the tile is for: one row, or several."""
    if isinstance(tile, VectorTile):
        launch_int4_row(y, x, matrix, None, tile, pdl=True)
    else:
        launch_int4_matrix(y, x, matrix, None, tile, True, arrivals)


def compile_tiles(work: Sequence[tuple[int, Tile]]) -> list[tuple[int, Tile]]:
    """Compile each tile, in a separate process; return those that fail or are wrong."""
    arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
    failed = []
    for num_rows, tile in work:
        columns = GROUP * tile.num_splits * 4 if isinstance(tile, MatrixTile) else tile.block_i
        matrix = draw(max(128, tile.block_o), columns)
        x = torch.randn(num_rows, matrix.shape[1], dtype=DTYPE, device="cuda")
        y = torch.empty(num_rows, matrix.shape[0], dtype=DTYPE, device="cuda")
        try:
            launch(y, x, matrix, tile, arrivals)
            expected = x.double() @ matrix.dequantized(torch.float64).T
            error = relative_error(y, expected)
        except Exception as problem:
            print(f"{num_rows} rows, {tile}: {problem!r:.200}", flush=True)
            failed.append((num_rows, tile))
            continue
        if not error < MAX_ERROR:
            print(f"{num_rows} rows, {tile}: error {error}", flush=True)
            failed.append((num_rows, tile))
    return failed


def product_us(matrices: Sequence[Int4Matrix], num_rows: int, tile: Tile) -> float:
    """Time one product and its relay, in microseconds."""
    num_outputs, num_inputs = matrices[0].shape
    arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
    x = torch.randn(num_rows, num_inputs, dtype=DTYPE, device="cuda")
    y = torch.empty(num_rows, num_outputs, dtype=DTYPE, device="cuda")

    def run_all() -> None:
        for matrix in matrices:
            launch(y, x, matrix, tile, arrivals)
            relay(x, y, True)

    return graph_us(run_all, 7) / len(matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    shapes = layer_shapes(LLAMA_8B, 1)
    chosen: dict[tuple[int, tuple[int, int]], Tile] = {
        (rows, shape): choose_row_tile(shape, num_sms)
        if rows == 1
        else choose_tile(rows, _meta(shape), num_sms)
        for rows in options.rows
        for shape in shapes
    }
    tried = {key: list(dict.fromkeys([tile, *candidates(*key)])) for key, tile in chosen.items()}
    work = sorted({(rows, tile) for (rows, _), tiles in tried.items() for tile in tiles}, key=repr)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        parts = [work[start :: options.processes] for start in range(options.processes)]
        failed = {item for part in pool.map(compile_tiles, parts) for item in part}
    print(f"{len(work)} kernels, {len(failed)} failed", flush=True)
    results = []
    totals: dict[tuple[int, str], float] = {}
    for shape in shapes:
        one = draw(*shape)
        count = max(2, -(-COLD_BYTES // num_bytes(one)))
        matrices = [Int4Matrix(one.values.clone(), one.groups.clone(), True) for _ in range(count)]
        floor = num_bytes(one) / HBM_BYTES_PER_S * 1e6
        for rows in options.rows:
            key = (rows, shape)
            times = {
                tile: product_us(matrices, rows, tile)
                for tile in tried[key]
                if (rows, tile) not in failed
            }
            best = sorted(times, key=times.__getitem__)[:4]
            ours = times.get(chosen[key], float("nan"))
            print(f"{shape} M={rows}: floor {floor:.1f}, chosen {ours:.2f} {chosen[key]}")
            for tile in best:
                print(f"    {times[tile]:.2f} {tile}", flush=True)
            for name, value in (("chosen", ours), ("best", times[best[0]]), ("floor", floor)):
                totals[rows, name] = totals.get((rows, name), 0.0) + value
            results += [
                {"shape": shape, "rows": rows, "us": value, **asdict(tile)}
                for tile, value in times.items()
            ]
        whole = graph_us(partial(_dequantize_all, matrices[:4]), 7) / 4
        print(f"{shape}: dequantize {whole:.1f} us", flush=True)
    for (rows, name), value in totals.items():
        print(f"M={rows} {name}: {value:.1f} us a layer with relays, {32e-3 * value:.3f} ms")
    if options.out is not None:
        options.out.write_text(json.dumps(results))


def _dequantize_all(matrices: Sequence[Int4Matrix]) -> None:
    for matrix in matrices:
        dequantize(matrix, DTYPE, True)


def _meta(shape: tuple[int, int]) -> Int4Matrix:
    values = torch.empty(shape[0], shape[1] // 8, dtype=torch.int32, device="meta")
    groups = torch.empty(shape[1] // GROUP, shape[0], 2, dtype=DTYPE, device="meta")
    return Int4Matrix(values, groups, True)


if __name__ == "__main__":
    main()
