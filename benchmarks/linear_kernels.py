"""Times the skinny GEMMs on a CUDA device: `python -m benchmarks.linear_kernels`.

Every GEMM runs in a CUDA graph over weights that together exceed the L2 cache, with a small kernel
(a relay) between two GEMMs that passes on the output, as in layers. With --tune, tries all
candidate tiles and writes the best to the file that ships for this device. With --shapes OxI,...
too, it tries the given shapes only, and replaces the file's entries for them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.runtime.errors import OutOfResources

import worker_daemon.kernels
from benchmarks.layer_reference import Heads, ProjectedStep, make_projected
from worker_daemon.contracts.attention import AttentionMetadata, AttentionStep
from worker_daemon.contracts.layer_ops import Norm
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.kernels.argmax import greedy_tokens
from worker_daemon.kernels.compile_ahead import compiling_ahead
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.linear import MAX_TILES, ThinLinear, launch_matrix
from worker_daemon.kernels.paged_decode import rotate_and_attend
from worker_daemon.kernels.row_linear import RowNorm, launch_row
from worker_daemon.kernels.tiles import SHORT_CONTEXT
from worker_daemon.kernels.tuning import (
    ROW_BUCKETS,
    MatrixTile,
    Tile,
    Tuning,
    VectorTile,
    default_vector_tile,
    file_name,
    format_tuning,
    load_tuning,
)

DTYPE = torch.bfloat16
HBM_BYTES_PER_S = 4.51e12
COLD_BYTES = 300_000_000
"""Minimum bytes of weights that a timed graph reads: several times the L2 cache."""
LAYERS_BYTES = 1_200_000_000
"""Bytes of weights of the layers that are timed in sequence."""
MAX_ERROR = 6e-3
KEPT_CANDIDATES = 8
"""Number of tiles of each shape to try in a layer."""
TIMED_ROWS = (1, 2, 8, 16, 32, 64)


@dataclass(frozen=True)
class Model:
    """The dense shapes of a decoder; sizes as its configuration file names them."""

    name: str
    hidden_size: int
    q_size: int
    kv_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    norms_heads: bool

    def shapes(self, tp_size: int) -> dict[str, tuple[int, int]]:
        """Return (O, I) of each product on one of tp_size ranks."""
        return {
            "qkv": ((self.q_size + 2 * self.kv_size) // tp_size, self.hidden_size),
            "o": (self.hidden_size, self.q_size // tp_size),
            "gate_up": (2 * self.intermediate_size // tp_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size // tp_size),
            "head": (self.vocab_size // tp_size, self.hidden_size),
        }


LLAMA_8B = Model("Llama 8B", 4096, 4096, 1024, 14336, 128256, 32, norms_heads=False)
QWEN3_600M = Model("Qwen3 0.6B", 1024, 2048, 1024, 3072, 151936, 28, norms_heads=True)
TUNED = ((LLAMA_8B, 1), (LLAMA_8B, 2), (QWEN3_600M, 1))
"""Models and tensor-parallel sizes whose shapes --tune tries."""

HEAD_DIM = 128
CONTEXT = 160
"""Keys that a layer of one row attends to."""
GATED = 2
"""Index of the gated product in a layer."""
THREAD_WEIGHTS = (16, 64)
"""Minimum and maximum of a tile's weights per thread, for one row."""

MATRIX_TILES = [
    MatrixTile(block_o, block_i, 1, num_warps, num_stages, 0)
    for block_o, block_i, num_warps, num_stages in [
        (16, 256, 1, 5), (16, 512, 1, 3), (16, 512, 1, 4), (32, 256, 2, 4), (64, 128, 4, 4),
        (64, 128, 4, 5), (64, 256, 4, 3), (64, 256, 4, 4), (128, 64, 4, 4), (128, 64, 4, 6),
        (128, 64, 8, 5), (128, 128, 4, 4), (128, 128, 8, 4), (256, 64, 8, 4), (256, 64, 8, 5),
    ]
]  # fmt: skip
"""Candidates for several rows, before splits and prefetch are varied."""

SPLITS = (1, 2, 3, 4, 5, 8)
PREFETCHES = (0, 512)


@triton.jit
def _relay_kernel(  # type: ignore[no-untyped-def]
    target, source, count, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start_next(PDL)
    await_previous(PDL)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + here, tl.load(source + here, mask=here < count), mask=here < count)


def relay(target: torch.Tensor, source: torch.Tensor, pdl: bool) -> None:
    """Copy elements from source to target: a kernel between two GEMMs, which it depends on and
    delays."""
    count = min(target.numel(), source.numel())
    grid = (triton.cdiv(count, 1024),)
    _relay_kernel[grid](
        target, source, count, BLOCK=1024, PDL=pdl, num_warps=4, **launch_options(pdl)
    )


class Device:
    """Runs products with given tiles, on weights drawn once."""

    def __init__(self, weight_elements: int) -> None:
        self.name = torch.cuda.get_device_name()
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.pdl = has_dependent_launch(torch.device("cuda"))
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
        self._pool = torch.empty(weight_elements, dtype=DTYPE, device="cuda")
        for chunk in self._pool.split(1 << 28):
            chunk.normal_(0, 0.015)

    def weights(self, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Return matrices [O, I] of these shapes, contiguous in memory."""
        sizes = [num_outputs * num_inputs for num_outputs, num_inputs in shapes]
        parts = self._pool[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def cold_weights(self, shape: tuple[int, int]) -> list[torch.Tensor]:
        """Return enough matrices of one shape to flush the L2 cache between two uses of one."""
        one = shape[0] * shape[1] * DTYPE.itemsize
        return self.weights([shape] * max(2, -(-COLD_BYTES // one)))

    def multiply(
        self, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tile: Tile | None, pdl: bool
    ) -> None:
        if tile is None:
            torch.mm(x, weight.T, out=y)
        elif isinstance(tile, VectorTile):
            launch_row(y, x, weight, None, tile, pdl=pdl)
        else:
            launch_matrix(y, x, weight, None, tile, pdl, self._arrivals)


def graph_us(launch: Callable[[], None], repeats: int) -> float:
    """Return the median time of a launch, replayed from a CUDA graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in times) * 1e3


def product_us(
    device: Device, shape: tuple[int, int], num_rows: int, tile: Tile | None, repeats: int
) -> float:
    """Time one product and its relay, in microseconds."""
    weights = device.cold_weights(shape)
    x = torch.randn(num_rows, shape[1], dtype=DTYPE, device="cuda")
    y = torch.empty(num_rows, shape[0], dtype=DTYPE, device="cuda")

    def launch() -> None:
        for weight in weights:
            device.multiply(y, x, weight, tile, device.pdl)
            relay(x, y, device.pdl)

    return graph_us(launch, repeats) / len(weights)


def layer_us(
    device: Device,
    shapes: Sequence[tuple[int, int]],
    num_rows: int,
    tiles: Sequence[Tile | None],
    pdl: bool,
    relays: bool,
) -> float:
    """Time a layer's products, each (O, I) with its tile, in microseconds: the mean of many
    layers."""
    layer_bytes = sum(o * i for o, i in shapes) * DTYPE.itemsize
    num_layers = -(-LAYERS_BYTES // layer_bytes)
    weights = device.weights(list(shapes) * num_layers)
    inputs = [torch.randn(num_rows, i, dtype=DTYPE, device="cuda") for _, i in shapes]
    outputs = [torch.empty(num_rows, o, dtype=DTYPE, device="cuda") for o, _ in shapes]

    def launch() -> None:
        for position, weight in enumerate(weights):
            here, there = position % len(shapes), (position + 1) % len(shapes)
            device.multiply(outputs[here], inputs[here], weight, tiles[here], pdl)
            if relays:
                relay(inputs[there], outputs[here], pdl)

    return graph_us(launch, 7) / num_layers


def floor_us(shape: tuple[int, int]) -> float:
    return shape[0] * shape[1] * DTYPE.itemsize / HBM_BYTES_PER_S * 1e6


def candidates(shape: tuple[int, int], bucket: int, num_sms: int) -> Iterator[Tile]:
    """Yield the tiles to try; tiles for several rows must divide the shape."""
    num_outputs, num_inputs = shape
    if bucket == 1:
        yield from row_candidates(num_inputs, 0)
        return
    for tile in MATRIX_TILES:
        steps, rest = divmod(num_inputs, tile.block_i)
        if rest or num_outputs % tile.block_o or tile.block_o * 2 < bucket:
            continue
        most = min(steps, 6 * num_sms * tile.block_o // num_outputs)
        for num_splits in SPLITS:
            if num_splits == 1 or num_splits <= most:
                for prefetch in PREFETCHES:
                    yield replace(tile, num_splits=num_splits, prefetch=prefetch)


def row_candidates(num_inputs: int, position: int) -> Iterator[VectorTile]:
    """Yield the tiles to try for one row, at a position in a layer."""
    widest = max(1024, triton.next_power_of_2(num_inputs))
    fewest, most = THREAD_WEIGHTS
    sizes = (1024, 2048, 4096, 8192, 16384)
    for block_o, block_i, num_warps in product((1, 2, 4, 8, 16), sizes, (4, 8, 16)):
        weights = block_o * block_i // (32 * num_warps)
        if position == GATED and block_o == 1:
            continue
        if block_i <= widest and fewest <= weights <= most:
            yield VectorTile(block_o, block_i, num_warps)


def compile_tiles(work: list[tuple[Tile, int]]) -> list[tuple[Tile, int]]:
    """Compile each tile for its bucket, in a separate process; return those that fail."""
    arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
    return [(tile, bucket) for tile, bucket in work if not _works(arrivals, tile, bucket)]


def _works(arrivals: torch.Tensor, tile: Tile, num_rows: int) -> bool:
    num_outputs = max(16, 2 * tile.block_o)
    if isinstance(tile, VectorTile):
        shapes = [(num_outputs, 2 * tile.block_i), (num_outputs, tile.block_i + 16)]
    else:
        shapes = [(num_outputs, tile.block_i * tile.num_splits * 2)]
    try:
        return all(_trial_error(arrivals, tile, num_rows, shape) < MAX_ERROR for shape in shapes)
    except OutOfResources:
        return False


def _trial_error(
    arrivals: torch.Tensor, tile: Tile, num_rows: int, shape: tuple[int, int]
) -> float:
    num_outputs, num_inputs = shape
    x = torch.randn(num_rows, num_inputs, dtype=DTYPE, device="cuda")
    weight = torch.randn(num_outputs, num_inputs, dtype=DTYPE, device="cuda")
    y = torch.full((num_rows, num_outputs), torch.nan, dtype=DTYPE, device="cuda")
    if isinstance(tile, VectorTile):
        launch_row(y, x, weight, None, tile, pdl=True)
    else:
        launch_matrix(y, x, weight, None, tile, True, arrivals)
    return relative_error(y, functional.linear(x.double(), weight.double()))


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


def compile_all(wanted: set[tuple[Tile, int]], num_processes: int) -> set[tuple[Tile, int]]:
    """Fill Triton's cache from many processes; return the tiles that do not fit or give wrong
    results."""
    work = sorted(wanted, key=repr)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        shares = [work[start::num_processes] for start in range(num_processes)]
        failed = {item for share in pool.map(compile_tiles, shares) for item in share}
    print(f"{len(work)} kernels compiled, {len(failed)} do not fit or are wrong", flush=True)
    return failed


def layer_shapes(model: Model, tp_size: int) -> list[tuple[int, int]]:
    return [shape for name, shape in model.shapes(tp_size).items() if name != "head"]


def parse_shape(text: str) -> tuple[int, int]:
    """Return (O, I) of OxI."""
    num_outputs, num_inputs = map(int, text.split("x"))
    return num_outputs, num_inputs


def tuned_shapes() -> list[tuple[int, int]]:
    shapes = [shape for model, tp_size in TUNED for shape in model.shapes(tp_size).values()]
    return list(dict.fromkeys(shapes))


Ranking = dict[tuple[tuple[int, int], int], dict[Tile | None, float]]
"""Microseconds of each tile by shape and bucket, fastest first."""


def rank(device: Device, num_processes: int, shapes: Sequence[tuple[int, int]]) -> Ranking:
    """Time every candidate alone, the best ones twice."""
    work = {
        (shape, bucket): list(candidates(shape, bucket, device.num_sms))
        for shape in shapes
        for bucket in ROW_BUCKETS
    }
    wanted = {(tile, bucket) for (_, bucket), tiles in work.items() for tile in tiles}
    failed = compile_all(wanted, num_processes)
    ranking: Ranking = {}
    for (shape, bucket), tiles in work.items():
        usable = [None, *(tile for tile in tiles if (tile, bucket) not in failed)]
        first = {tile: product_us(device, shape, bucket, tile, 3) for tile in usable}
        kept = sorted(usable, key=lambda tile: first[tile])[:KEPT_CANDIDATES]
        again = {tile: product_us(device, shape, bucket, tile, 9) for tile in kept}
        ordered = dict(sorted(again.items(), key=lambda item: item[1]))
        ranking[shape, bucket] = ordered | {t: us for t, us in first.items() if t not in ordered}
        best, best_us = next(iter(ordered.items()))
        print(
            f"{shape[0]}x{shape[1]} M<={bucket}: floor {floor_us(shape):.2f} torch "
            f"{first[None]:.2f} best {best_us:.2f} {best}",
            flush=True,
        )
    return ranking


def refine(
    device: Device, shapes: Sequence[tuple[int, int]], bucket: int, ranking: Ranking
) -> list[Tile | None]:
    """The tiles with which a layer is fastest: one product after the other is varied, twice.

    A tile's position in a layer matters: its programs start while the previous kernel's still run,
    and the free SMs determine how evenly the load is spread.
    """
    kept = [list(ranking[shape, bucket])[:KEPT_CANDIDATES] for shape in shapes]
    best = [tiles[0] for tiles in kept]
    best_us = layer_us(device, shapes, bucket, best, device.pdl, relays=True)
    start_us = best_us
    for position in list(range(len(shapes))) * 2:
        for tile in kept[position]:
            trial = [*best[:position], tile, *best[position + 1 :]]
            us = layer_us(device, shapes, bucket, trial, device.pdl, relays=True)
            if us < best_us:
                best, best_us = trial, us
    print(f"layer {shapes} M<={bucket}: {start_us:.2f} to {best_us:.2f} us", flush=True)
    return best


def row_layers(
    device: Device, model: Model, tp_size: int, tiles: Sequence[VectorTile], num_layers: int
) -> Callable[[], None]:
    """Return a launch of one row's layers, including attention over CONTEXT keys; relays replace
    all-reduces."""
    shapes = layer_shapes(model, tp_size)
    weights = device.weights(shapes * num_layers)
    heads = Heads(
        model.q_size // HEAD_DIM // tp_size,
        model.kv_size // HEAD_DIM // tp_size,
        HEAD_DIM,
        is_normed=model.norms_heads,
    )
    random = torch.Generator("cuda")
    steps = [make_projected(heads, CONTEXT, DTYPE, random) for _ in range(num_layers)]
    table = torch.randperm(CONTEXT // heads.block_size, device="cuda").int().unsqueeze(0)
    slot = (table[0, -1:].long() + 1) * heads.block_size - 1
    part, residual, hidden = (
        torch.randn(1, model.hidden_size, dtype=DTYPE, device="cuda") for _ in range(3)
    )
    gain = torch.ones(model.hidden_size, dtype=DTYPE, device="cuda")
    qkv, gated = (
        torch.randn(1, size, dtype=DTYPE, device="cuda") for size in (shapes[0][0], shapes[3][1])
    )
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    bounds = torch.arange(2, dtype=torch.int32, device="cuda")
    sequence = AttentionMetadata(
        query_start_loc=bounds,
        seq_lens=zero + CONTEXT,
        seq_order=zero,
        block_table=table,
        seq_rows=zero,
        slot_mapping=slot,
        num_seqs=1,
        max_query_len=1,
        max_seq_len=SHORT_CONTEXT,
        query_lens_np=np.ones(1, np.int32),
        seq_lens_np=np.full(1, CONTEXT, np.int32),
    )

    def normed(residual: torch.Tensor) -> tuple[torch.Tensor, RowNorm | None]:
        """Return the row of the next product, and its norm, which an all-reduce of several ranks
        has done already."""
        if tp_size > 1:
            relay(hidden, part, device.pdl)
            return hidden, None
        return part, RowNorm(Norm(gain, 1e-5), residual, torch.empty_like(residual))

    def attend(step: ProjectedStep) -> torch.Tensor:
        return rotate_and_attend(
            qkv,
            step.kv_cache,
            AttentionStep(step.positions[:1], step.rotary_table, sequence),
            step.head_norms,
            scale=HEAD_DIM**-0.5,
            window=None,
            pdl=device.pdl,
        ).view(1, -1)

    def launch() -> None:
        total = residual
        for layer, step in enumerate(steps):
            w_qkv, w_o, w_gate_up, w_down = weights[4 * layer : 4 * layer + 4]
            x, norm = normed(total)
            launch_row(qkv, x, w_qkv, None, tiles[0], pdl=device.pdl, norm=norm)
            launch_row(part, attend(step), w_o, None, tiles[1], pdl=device.pdl)
            x, norm = normed(total if norm is None else norm.total)
            launch_row(gated, x, w_gate_up, None, tiles[2], pdl=device.pdl, norm=norm, gate="silu")
            launch_row(part, gated, w_down, None, tiles[3], pdl=device.pdl)
            total = total if norm is None else norm.total

    return launch


def row_layer_us(device: Device, model: Model, tp_size: int, tiles: Sequence[VectorTile]) -> float:
    """Time one of these layers, in microseconds: the mean of many."""
    layer_bytes = sum(o * i for o, i in layer_shapes(model, tp_size)) * DTYPE.itemsize
    num_layers = min(model.num_layers, 3 * LAYERS_BYTES // layer_bytes)
    return graph_us(row_layers(device, model, tp_size, tiles, num_layers), 7) / num_layers


def refine_rows(device: Device, model: Model, tp_size: int) -> list[VectorTile]:
    """The tiles with which a layer of one row is fastest: one product after the other is varied,
    twice."""
    shapes = layer_shapes(model, tp_size)
    kept = [
        list(row_candidates(num_inputs, position))
        for position, (_, num_inputs) in enumerate(shapes)
    ]
    best = [default_vector_tile(num_inputs) for _, num_inputs in shapes]
    with KernelCompiler.start() as compiler, compiling_ahead(compiler):
        for position, tiles in enumerate(kept):
            for tile in tiles:
                trial = [*best[:position], tile, *best[position + 1 :]]
                row_layers(device, model, tp_size, trial, 1)()
    best_us = start_us = row_layer_us(device, model, tp_size, best)
    for position in list(range(len(shapes))) * 2:
        for tile in kept[position]:
            trial = [*best[:position], tile, *best[position + 1 :]]
            us = row_layer_us(device, model, tp_size, trial)
            if us < best_us:
                best, best_us = trial, us
    print(f"layer {shapes} M=1: {start_us:.2f} to {best_us:.2f} us", flush=True)
    return best


def best_tiles(ranking: Ranking) -> dict[tuple[int, int, int], Tile | None]:
    """Return the fastest tile of each shape and bucket, by (O, I, bucket)."""
    return {(*shape, bucket): next(iter(ranked)) for (shape, bucket), ranked in ranking.items()}


def tune(device: Device, ranking: Ranking) -> Tuning:
    """Return the best tile of each shape alone; for layers, the best combination."""
    tiles = best_tiles(ranking)
    for model, tp_size in TUNED:
        shapes = layer_shapes(model, tp_size)
        for bucket in ROW_BUCKETS[1:]:
            chosen = refine(device, shapes, bucket, ranking)
            tiles |= {(*shape, bucket): tile for shape, tile in zip(shapes, chosen, strict=True)}
        rows = refine_rows(device, model, tp_size)
        tiles |= {(*shape, 1): tile for shape, tile in zip(shapes, rows, strict=True)}
    return Tuning(tiles)


def ranking_records(ranking: Ranking) -> list[dict[str, object]]:
    return [
        {"shape": shape, "bucket": bucket, "tile": tile and asdict(tile), "us": us}
        for (shape, bucket), ranked in ranking.items()
        for tile, us in ranked.items()
    ]


def report_products(device: Device, tuning: Tuning) -> list[dict[str, object]]:
    """Time each product with its relay, with these tiles and with torch."""
    records: list[dict[str, object]] = []
    for model in (LLAMA_8B, QWEN3_600M):
        for name, shape in model.shapes(1).items():
            for num_rows in TIMED_ROWS:
                ours = product_us(device, shape, num_rows, tuning.tile(num_rows, *shape), 7)
                theirs = product_us(device, shape, num_rows, None, 7)
                what = f"{model.name} {name} M={num_rows}"
                records.append({"what": what, "us": ours, "torch_us": theirs})
                print(f"{what}: floor {floor_us(shape):.2f} ours {ours:.2f} torch {theirs:.2f}")
    return records


def report_layers(device: Device, tuning: Tuning) -> list[dict[str, object]]:
    """Time whole layers with these tiles, with and without dependent launch, and with torch."""
    records: list[dict[str, object]] = []
    cases = [
        (m, r, relays) for m in (LLAMA_8B, QWEN3_600M) for r in TIMED_ROWS for relays in (0, 1)
    ]
    for model, num_rows, relays in cases:
        shapes = layer_shapes(model, 1)
        ours = [tuning.tile(num_rows, *shape) for shape in shapes]
        runs: dict[str, tuple[Sequence[Tile | None], bool]] = {
            "ours": (ours, device.pdl),
            "without dependent launch": (ours, False),
            "torch": ([None] * len(shapes), device.pdl),
        }
        times = {
            name: layer_us(device, shapes, num_rows, tiles, pdl, bool(relays))
            for name, (tiles, pdl) in runs.items()
        }
        floor = sum(floor_us(shape) for shape in shapes)
        what = f"{model.name} layer M={num_rows}" + (" with relays" if relays else "")
        records.append({"what": what, "floor_us": floor, **times})
        listed = ", ".join(f"{name} {us:.2f}" for name, us in times.items())
        print(f"{what}: floor {floor:.2f}, {listed} us", flush=True)
    return records


def report_greedy(device: Device) -> list[dict[str, object]]:
    """Time the argmax over logits that together exceed the L2 cache."""
    records: list[dict[str, object]] = []
    for num_rows, vocab_size in ((1, 128256), (1, 151936), (64, 128256), (256, 128256)):
        copies = max(2, COLD_BYTES // (num_rows * vocab_size * DTYPE.itemsize))
        logits = torch.randn(min(copies, 128), num_rows, vocab_size, device="cuda").to(DTYPE)

        def ours(logits: torch.Tensor = logits, vocab_size: int = vocab_size) -> None:
            for one in logits:
                greedy_tokens(one, vocab_size, pdl=device.pdl)

        def theirs(logits: torch.Tensor = logits) -> None:
            for one in logits:
                one.argmax(dim=-1)

        times = {"us": graph_us(ours, 7), "torch_us": graph_us(theirs, 7)}
        times = {name: us / len(logits) for name, us in times.items()}
        what = f"greedy R={num_rows} V={vocab_size}"
        records.append({"what": what, **times})
        floor = num_rows * vocab_size * DTYPE.itemsize / HBM_BYTES_PER_S * 1e6
        print(f"{what}: floor {floor:.2f} ours {times['us']:.2f} torch {times['torch_us']:.2f}")
    return records


def check(device: Device, tuning: Tuning) -> None:
    """Check every tuned tile against fp32, on fresh inputs at its real size."""
    linear = ThinLinear(torch.device("cuda"), tuning)
    for num_outputs, num_inputs, bucket in tuning.tiles:
        (weight,) = device.weights([(num_outputs, num_inputs)])
        x = torch.randn(bucket, num_inputs, dtype=DTYPE, device="cuda")
        expected = functional.linear(x.float(), weight.float())
        error = relative_error(linear.linear(x, weight), expected)
        assert error < MAX_ERROR, f"{num_outputs}x{num_inputs} M={bucket}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try all tiles and write the best")
    parser.add_argument("--shapes", default="", help="OxI,... for --tune [those of all models]")
    parser.add_argument("--tuned", type=Path, help="where --tune writes [the package]")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--processes", type=int, default=14, help="that compile [14]")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = Device(2_200_000_000)
    records: list[dict[str, object]] = []
    tuning = load_tuning(device.name)
    if options.tune:
        given = [parse_shape(shape) for shape in filter(None, options.shapes.split(","))]
        ranking = rank(device, options.processes, given or tuned_shapes())
        records += ranking_records(ranking)
        own = Tuning({**tuning.tiles, **best_tiles(ranking)})
        tuning = own if given else tune(device, ranking)
        shipped = Path(worker_daemon.kernels.__file__).parent / "tuned" / file_name(device.name)
        target = options.tuned or shipped
        target.parent.mkdir(exist_ok=True)
        target.write_text(format_tuning(tuning))
        print(f"written: {target}")
    check(device, tuning)
    for report in (report_products, report_layers):
        records += report(device, tuning)
    records += report_greedy(device)
    if options.out is not None:
        options.out.write_text(json.dumps({"device": device.name, "records": records}))


if __name__ == "__main__":
    main()
