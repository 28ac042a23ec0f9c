"""Times the kernels of experts on a CUDA device: `python -m benchmarks.experts_kernels [--tune]
[--tokens N,N,...] [--tp N] [--out FILE]`.

Sizes are those of Qwen3-30B-A3B. Each part of a layer (routing, the plan of tiles, both products,
the weighted sum) runs alone in a CUDA graph, then all of them together, over the weights of several
layers, which together exceed the L2 cache; experts are chosen uniformly. A part's time is printed
beside its floor, from bytes and operations. With --tune, tries all candidate tiles and prints the
best of each product: kernels/expert_tiles.py:choose_tiles has them as rules.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.linear_kernels import DTYPE, HBM_BYTES_PER_S, graph_us
from worker_daemon.contracts.experts import ExpertMatrices, RoutedTokens, Routing
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.kernels.compile_ahead import compiling_ahead
from worker_daemon.kernels.expert_routing import TilePlan, plan_tiles, route
from worker_daemon.kernels.expert_tiles import (
    DOWN_ROW,
    GATE_UP_ROW,
    ExpertTiles,
    ProductTile,
    RowTile,
    choose_tiles,
)
from worker_daemon.kernels.experts import (
    add_experts,
    multiply_row,
    multiply_rows,
    multiply_tiles,
)
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.tiles import DeviceLimits

HIDDEN: Final = 2048
INNER: Final = 768
NUM_EXPERTS: Final = 128
ROUTING: Final = Routing(top_k=8, renormalize=True, rounds_weights=True)
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
LAYERS: Final = 3
"""Layers in a graph; each has 1.2 GB of weights."""
PEAK_FLOPS: Final = 989e12
MOST_SHARED_BYTES: Final = 220_000
REPEATS: Final = 9
QUICK, KEPT = 3, 6
"""Replays of each tile; tiles to time again."""


@dataclass(frozen=True)
class Step:
    """The inputs of one step, and the weights of each layer."""

    x: torch.Tensor
    scores: torch.Tensor
    starts: torch.Tensor
    routed: RoutedTokens
    layers: list[ExpertMatrices]

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * ROUTING.top_k

    @property
    def distinct(self) -> int:
        """Experts that at least one token chooses."""
        return len(set(self.routed.experts.flatten().tolist()))


def make_layers(inner: int) -> list[ExpertMatrices]:
    """Return each layer's weights."""
    return [
        ExpertMatrices(
            torch.randn(NUM_EXPERTS, 2 * inner, HIDDEN, device="cuda", dtype=DTYPE) * 0.02,
            torch.randn(NUM_EXPERTS, HIDDEN, inner, device="cuda", dtype=DTYPE) * 0.02,
            0,
        )
        for _ in range(LAYERS)
    ]


def make_step(num_tokens: int, layers: list[ExpertMatrices]) -> Step:
    """Return inputs whose scores choose experts uniformly."""
    scores = torch.randn(num_tokens, NUM_EXPERTS, device="cuda", dtype=DTYPE)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=DTYPE)
    return Step(x, scores, starts, route(scores, ROUTING, starts, pdl=False), layers)


def layer_us(step: Step, launch: Callable[[ExpertMatrices], object], repeats: int) -> float:
    """Return microseconds of a launch for one layer."""

    def run() -> None:
        for matrices in step.layers:
            launch(matrices)

    return graph_us(run, repeats) / len(step.layers)


def floors_us(step: Step, inner: int) -> dict[str, float]:
    """Return the floor of each product: reading the chosen experts' weights, and rows in and out
    once, or the operations."""
    expert = HIDDEN * inner * DTYPE.itemsize
    rows = step.num_pairs * DTYPE.itemsize

    def floor(num_bytes: int, flops: int) -> float:
        return max(num_bytes / HBM_BYTES_PER_S, flops / PEAK_FLOPS) * 1e6

    flops = 2 * step.num_pairs * HIDDEN * inner
    gate_up = floor(2 * step.distinct * expert + rows * inner, 2 * flops)
    down = floor(step.distinct * expert + rows * (inner + HIDDEN), flops)
    return {"gate_up": gate_up, "down": down, "layer": gate_up + down}


def measure(step: Step, inner: int, pdl: bool) -> dict[str, float]:
    """Return microseconds of each part, and of a layer. counted: routing that adds to the experts'
    loads, as that of a layer does."""
    loads = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device="cuda")
    plain = partial(route, step.scores, ROUTING, step.starts, pdl=pdl)
    counted = partial(plain, loads=loads)
    times = {
        "route": layer_us(step, lambda _: plain(), REPEATS),
        "counted": layer_us(step, lambda _: counted(), REPEATS),
    }
    if step.num_tokens == 1:
        whole: Callable[[ExpertMatrices], object] = partial(_multiply_row, step, pdl=pdl)
    else:
        limits = DeviceLimits.of(step.x.device)
        tiles = choose_tiles(step.num_pairs, step.layers[0], DTYPE, limits)
        plan = partial(plan_tiles, step.routed.experts, 0, NUM_EXPERTS, tiles.block_m, pdl=pdl)
        times["plan"] = layer_us(step, lambda _: plan(), REPEATS)
        times |= {
            name: product_us(step, tiles, name == "gate_up", inner, pdl, REPEATS)
            for name in ("gate_up", "down")
        }
        y = torch.randn(step.num_pairs, HIDDEN, device="cuda", dtype=DTYPE)
        times["sum"] = layer_us(
            step, lambda m: add_experts(y, step.x, step.routed, m, pdl=pdl), REPEATS
        )
        whole = partial(_multiply_rows, step, tiles=tiles, pdl=pdl)
    times["layer"] = layer_us(step, lambda m: (counted(), whole(m)), REPEATS)
    return times


def _multiply_row(step: Step, matrices: ExpertMatrices, *, pdl: bool) -> torch.Tensor:
    return multiply_row(step.x, step.routed, matrices, pdl=pdl)


def _multiply_rows(
    step: Step, matrices: ExpertMatrices, *, tiles: ExpertTiles, pdl: bool
) -> torch.Tensor:
    return multiply_rows(step.x, step.routed, matrices, tiles, pdl=pdl)


def product_us(
    step: Step, tiles: ExpertTiles, is_gated: bool, inner: int, pdl: bool, repeats: int
) -> float:
    """Return microseconds of one of the products."""
    plan = plan_tiles(step.routed.experts, 0, NUM_EXPERTS, tiles.block_m, pdl=False)
    launch = _product(step, tiles, is_gated, inner, plan, pdl)
    return layer_us(step, launch, repeats)


def _product(
    step: Step, tiles: ExpertTiles, is_gated: bool, inner: int, plan: TilePlan, pdl: bool
) -> Callable[[ExpertMatrices], None]:
    h = torch.randn(plan.num_tiles * plan.block_m, inner, device="cuda", dtype=DTYPE)
    if is_gated:
        return lambda m: multiply_tiles(h, step.x, m, plan, tiles, pdl=pdl, gated=True)
    y = torch.empty(step.num_pairs, HIDDEN, device="cuda", dtype=DTYPE)
    return lambda m: multiply_tiles(y, h, m, plan, tiles, pdl=pdl, gated=False)


def candidates(num_pairs: int, is_gated: bool) -> Iterator[ExpertTiles]:
    """Yield the tiles to try for one product; the other product's are the same, and not run."""
    mean = num_pairs / NUM_EXPERTS
    for left in (True, False):
        if (left and mean > 64) or (not left and mean < 8):
            continue
        outputs = (32, 64, 128) if left else (64, 128, 256)
        rows = (16, 32, 64) if left else (32, 64, 128)
        for block_m, block_o, block_i, num_warps, num_stages in product(
            rows, outputs, (64, 128), (4, 8), (3, 4, 5)
        ):
            width = (2 if is_gated else 1) * block_o
            shared = num_stages * (block_m + width) * block_i * DTYPE.itemsize
            accumulators = block_m * width // (32 * num_warps)
            if shared > MOST_SHARED_BYTES or shared < 20_000 or not 4 <= accumulators <= 128:
                continue
            if block_m < min(64, mean / 2) or block_m > max(32, 4 * mean):
                continue
            tile = ProductTile(block_o, block_i, num_warps, num_stages)
            yield ExpertTiles(block_m, tile, tile, weights_left=left)


def row_candidates(num_inputs: int, rows_of_output: int) -> Iterator[RowTile]:
    """Yield the tiles to try for one row. rows_of_output: rows of weights that one output reads."""
    sizes = (256, 512, 1024, 2048)
    for block_o, block_i, num_warps in product((1, 2, 4), sizes, (1, 2, 4, 8)):
        weights = block_o * rows_of_output * block_i // (32 * num_warps)
        if block_i < 2 * num_inputs and 16 <= weights <= 128:
            yield RowTile(block_o, block_i, num_warps)


def tune_rows(step: Step, inner: int, pdl: bool) -> dict[str, object]:
    """Return the fastest tile of each product of several rows."""
    best: dict[str, object] = {}
    for name, is_gated in (("gate_up", True), ("down", False)):
        found = list(candidates(step.num_pairs, is_gated))
        plans = {
            block_m: plan_tiles(step.routed.experts, 0, NUM_EXPERTS, block_m, pdl=False)
            for block_m in {tiles.block_m for tiles in found}
        }
        with KernelCompiler.start() as compiler, compiling_ahead(compiler):
            for tiles in found:
                _product(step, tiles, is_gated, inner, plans[tiles.block_m], pdl)(step.layers[0])
        times: dict[ExpertTiles, float] = {}
        for tiles in found:
            try:
                times[tiles] = product_us(step, tiles, is_gated, inner, pdl, QUICK)
            except OutOfResources:
                continue
        kept = sorted(times, key=times.__getitem__)[:KEPT]
        again = {tiles: product_us(step, tiles, is_gated, inner, pdl, REPEATS) for tiles in kept}
        for tiles, us in sorted(again.items(), key=lambda item: item[1]):
            form = "weights left" if tiles.weights_left else "rows left"
            print(f"  {name} {us:8.2f} us  M {tiles.block_m} {tiles.gate_up} {form}", flush=True)
        winner = min(again, key=again.__getitem__)
        best[name] = asdict(winner) | {"us": again[winner]}
    return best


def tune_row(step: Step, inner: int, pdl: bool) -> dict[str, object]:
    """Return the fastest tiles of the products of one row."""
    best: dict[str, object] = {}
    chosen = {"gate_up_tile": GATE_UP_ROW, "down_tile": DOWN_ROW}
    sizes = {"gate_up_tile": (HIDDEN, 2), "down_tile": (inner, ROUTING.top_k)}
    for name, (num_inputs, rows_of_output) in sizes.items():
        times: dict[RowTile, float] = {}
        for tile in row_candidates(num_inputs, rows_of_output):
            given = chosen | {name: tile}

            def launch(m: ExpertMatrices, given: dict[str, RowTile] = given) -> torch.Tensor:
                return multiply_row(step.x, step.routed, m, **given, pdl=pdl)

            times[tile] = layer_us(step, launch, REPEATS)
        for tile in sorted(times, key=times.__getitem__)[:KEPT]:
            print(f"  both with {name} {times[tile]:8.2f} us  {tile}", flush=True)
        chosen[name] = min(times, key=times.__getitem__)
        best[name] = asdict(chosen[name]) | {"us": times[chosen[name]]}
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try all candidate tiles")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens of a step")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split the inner size")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    options = parser.parse_args()
    inner = INNER // options.tp
    pdl = has_dependent_launch(torch.device("cuda"))
    layers = make_layers(inner)
    figures = []
    for num_tokens in map(int, options.tokens.split(",")):
        step = make_step(num_tokens, layers)
        few = replace(step, layers=layers[:1]) if num_tokens > 2048 else step
        floors = floors_us(step, inner)
        times = measure(few, inner, pdl)
        print(f"{num_tokens} tokens, {step.distinct} experts", flush=True)
        for name, us in times.items():
            floor = f", floor {floors[name]:.2f}" if name in floors else ""
            print(f"  {name} {us:.2f} us{floor}", flush=True)
        figure = {"tokens": num_tokens, "distinct": step.distinct, "us": times, "floors": floors}
        if options.tune:
            tune = tune_row if num_tokens == 1 else tune_rows
            figure["best"] = tune(few, inner, pdl)
        figures.append(figure)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
