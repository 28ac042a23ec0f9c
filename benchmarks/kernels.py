"""Times the attention kernels on a CUDA device: `python -m benchmarks.kernels [--out FILE.json]`.

Checks every case against a dense fp64 softmax, times it with the launcher's choice of tile and
splits, then sweeps a few others. Times are medians over replays of a CUDA graph with a cold L2.
With --first-use it times only the first launch of each kernel, compilation included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton.testing
from triton.runtime.errors import OutOfResources

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.tiles import (
    DeviceLimits,
    Tile,
    choose_num_splits,
    decode_tile,
    prefill_tile,
)

LLAMA_8B = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
DTYPE = torch.bfloat16
MAX_ERROR = 6e-3

HBM_BYTES_PER_S = 4.5e12
FULL_FLOP_PER_S = 560e12

DECODE_TILES = [
    Tile(16, 32, num_warps=2, num_stages=5),
    Tile(16, 64, num_warps=2, num_stages=3),
    Tile(16, 64, num_warps=4, num_stages=3),
    Tile(16, 64, num_warps=4, num_stages=5),
    Tile(16, 128, num_warps=4, num_stages=3),
    Tile(16, 128, num_warps=8, num_stages=3),
]
PREFILL_TILES = [
    Tile(64, 32, num_warps=4, num_stages=5),
    Tile(64, 64, num_warps=4, num_stages=3),
    Tile(64, 64, num_warps=4, num_stages=5),
    Tile(128, 32, num_warps=4, num_stages=5),
    Tile(128, 64, num_warps=4, num_stages=3),
    Tile(128, 64, num_warps=8, num_stages=5),
    Tile(128, 128, num_warps=8, num_stages=3),
    Tile(256, 32, num_warps=8, num_stages=5),
    Tile(256, 64, num_warps=8, num_stages=3),
    Tile(256, 64, num_warps=8, num_stages=5),
]
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32, 64)

FIRST_USES = {
    "large prefill": [(2500, 2500)] * 2,
    "prefill": [(300, 300)] * 2,
    "short prefill": [(4, 300)] * 2,
    "decode": [(1, 20)] * 2,
    "large decode": [(1, 20)] * 64,
    "split decode": [(1, 3000)] * 2,
}
"""Batches that reach every kernel and every tile of one model; lengths are (query_len, seq_len)."""


@dataclass(frozen=True)
class Timing:
    """One measured launch. error is None if nothing was compared, ms if it did not fit."""

    case: str
    tile: str
    num_splits: int
    ms: float | None
    error: float | None
    gigabytes: float
    teraflops: float

    @property
    def fraction(self) -> float:
        """The floor (the longer of bytes and operations) divided by the time taken."""
        if self.ms is None:
            return 0.0
        floor_s = max(
            self.gigabytes * 1e9 / HBM_BYTES_PER_S, self.teraflops * 1e12 / FULL_FLOP_PER_S
        )
        return floor_s / (self.ms * 1e-3)


@dataclass(frozen=True)
class Case:
    """A batch of Llama-8B's attention heads by name; lengths are (query_len, seq_len)."""

    name: str
    lengths: list[tuple[int, int]]

    @property
    def is_decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.lengths)

    def gigabytes(self) -> float:
        """Bytes with each key and value read once, each query read and output written once."""
        keys = sum(seq_len for _, seq_len in self.lengths) * LLAMA_8B.num_kv_heads
        queries = sum(query_len for query_len, _ in self.lengths) * LLAMA_8B.num_q_heads
        return 2 * (keys + queries) * LLAMA_8B.head_dim * DTYPE.itemsize / 1e9

    def teraflops(self) -> float:
        """Two products of two operations for every visible query-key pair."""
        pairs = sum(n * (2 * length - n + 1) // 2 for n, length in self.lengths)
        return 4 * pairs * LLAMA_8B.num_q_heads * LLAMA_8B.head_dim / 1e12


def cases() -> Iterator[Case]:
    for batch_size in (1, 8, 32, 64, 256):
        for context in (160, 512, 2048, 8192):
            yield Case(f"decode {batch_size}x{context}", [(1, context)] * batch_size)
    yield Case("decode 16x2048", [(1, 2048)] * 16)
    yield Case("decode 48x2048", [(1, 2048)] * 48)
    yield Case("prefill 1x8192", [(8192, 8192)])
    yield Case("prefill 1x2048", [(2048, 2048)])
    yield Case("prefill 8x2048", [(2048, 2048)] * 8)
    yield Case("prefill 16x512", [(512, 512)] * 16)
    yield Case("prefill 16x128", [(128, 128)] * 16)
    yield Case("prefill 1x512/8192", [(512, 8192)])
    yield Case("verify 64x5/2048", [(5, 2048)] * 64)
    yield Case("mixed 64+1x2048", [(1, 2048)] * 64 + [(2048, 2048)])
    yield Case("mixed 256+1x2048", [(1, 2048)] * 256 + [(2048, 2048)])
    yield Case("mixed 1x32768+512", [(1, 32768), (512, 512)])


def attend(
    batch: PagedBatch,
    out: torch.Tensor,
    tile: Tile | None = None,
    num_splits: int | None = None,
    window: int | None = None,
) -> torch.Tensor:
    return paged_attention(
        batch.q,
        batch.kv_cache,
        batch.metadata,
        scale=batch.shape.scale,
        window=window,
        out=out,
        tile=tile,
        num_splits=num_splits,
    )


def graph_ms(launch: Callable[[], object]) -> float:
    """Return the median time of a launch in ms, replayed from a CUDA graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return float(triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median"))


def host_us(launch: Callable[[], object]) -> float:
    """Return the host's cost of one eager launch, in microseconds."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        launch()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / 200 * 1e6


def measure(
    case: Case, batch: PagedBatch, tile: Tile, num_splits: int, expected: torch.Tensor | None = None
) -> Timing:
    """Time one configuration, with an output full of NaN; compare it if expected is given."""
    out = torch.full(batch.q.shape, float("nan"), dtype=DTYPE, device="cuda")
    error = None
    ms = None
    try:
        attend(batch, out, tile, num_splits)
        if expected is not None:
            error = relative_error(out, expected)
        ms = graph_ms(lambda: attend(batch, out, tile, num_splits))
    except OutOfResources:
        torch.cuda.synchronize()
    name = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
    return Timing(case.name, name, num_splits, ms, error, case.gigabytes(), case.teraflops())


def run_case(case: Case, limits: DeviceLimits) -> list[Timing]:
    """Time and check the launcher's choice, then time other tiles, then other splits."""
    batch = make_batch(LLAMA_8B, case.lengths, dtype=DTYPE, device="cuda", seed=1)
    batch.store()
    group_size = LLAMA_8B.num_q_heads // LLAMA_8B.num_kv_heads
    head_dim, num_kv_heads = LLAMA_8B.head_dim, LLAMA_8B.num_kv_heads
    expected = dense_attention(batch, None)
    if not case.is_decode:
        sizes = batch.num_real_tokens, batch.num_seqs, num_kv_heads, group_size, head_dim
        chosen = prefill_tile(*sizes, DTYPE, limits)
        timings = [measure(case, batch, chosen, 1, expected)]
        return timings + [measure(case, batch, tile, 1, expected) for tile in PREFILL_TILES]
    splits = choose_num_splits(batch.num_seqs, num_kv_heads, batch.max_seq_len, None, limits)
    num_programs = batch.num_seqs * num_kv_heads * splits
    most_keys = -(-batch.max_seq_len // splits)
    chosen = decode_tile(num_programs, most_keys, group_size, head_dim, DTYPE, limits)
    timings = [measure(case, batch, chosen, splits, expected)]
    timings += [measure(case, batch, tile, splits, expected) for tile in DECODE_TILES]
    useful = [count for count in SPLITS if count == 1 or 128 * count <= batch.max_seq_len]
    return timings + [measure(case, batch, chosen, count, expected) for count in useful]


def ceilings() -> str:
    """Measure this device's limits: a copy of 4 GiB, a large matrix product, an empty launch."""
    source = torch.randn(2**31, dtype=DTYPE, device="cuda")
    target = torch.empty_like(source)
    copy_ms = graph_ms(lambda: torch.neg(source, out=target))
    matrix = source[: 2**26].view(8192, 8192)
    product = target[: 2**26].view(8192, 8192)
    product_ms = graph_ms(lambda: torch.mm(matrix, matrix, out=product))
    empty_ms = graph_ms(lambda: target[:1].zero_())
    return (
        f"copy {2 * source.nbytes / copy_ms / 1e9:.2f} TB/s, "
        f"product {2 * 8192**3 / product_ms / 1e9:.0f} TFLOP/s, "
        f"replay of one empty kernel {empty_ms * 1e3:.1f} us"
    )


def report_first_uses() -> None:
    """Run every kernel that a model with these heads needs once, and print the time of each first
    run.

    For a cold or warm start, point TRITON_CACHE_DIR at an empty or a filled directory.
    """
    torch.zeros(1, device="cuda").add_(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        spent = {}
        for window in (None, 300):
            suffix = "" if window is None else " window"
            for name, lengths in FIRST_USES.items():
                batch = make_batch(LLAMA_8B, lengths, dtype=dtype, device="cuda", seed=4)
                out = torch.empty(batch.q.shape, dtype=dtype, device="cuda")
                spent[name + suffix] = first_ms(
                    lambda b=batch, o=out, w=window: attend(b, o, window=w)
                )
        parts = ", ".join(f"{name} {ms:.0f}" for name, ms in spent.items())
        print(f"{dtype} first use: {sum(spent.values()) / 1e3:.2f} s (ms: {parts})", flush=True)


def first_ms(launch: Callable[[], object]) -> float:
    """Return the time of one launch in ms, until the device has finished it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


HEADER = (
    f"{'case':<19}{'tile':<16}{'splits':>6}{'us':>10}{'MB':>9}{'TB/s':>7}{'TFLOP/s':>9}"
    f"{'of peak':>9}{'error':>10}"
)


def line(timing: Timing) -> str:
    head = f"{timing.case:<19}{timing.tile:<16}{timing.num_splits:>6}"
    if timing.ms is None:
        return f"{head}{'does not fit':>20}"
    seconds = timing.ms * 1e-3
    error = "-" if timing.error is None else f"{timing.error:.1e}"
    return (
        f"{head}{timing.ms * 1e3:>10.1f}{timing.gigabytes * 1e3:>9.1f}"
        f"{timing.gigabytes / 1e3 / seconds:>7.2f}{timing.teraflops / seconds:>9.1f}"
        f"{timing.fraction:>9.0%}{error:>10}"
    )


def report(chosen: list[Timing], best: list[Timing]) -> None:
    print("\nthe launcher's choice (of peak: of 4.5 TB/s or 560 TFLOP/s, whichever binds)")
    print(HEADER)
    for timing in chosen:
        print(line(timing))
    print("\nthe best of the sweep")
    print(HEADER)
    for timing in best:
        print(line(timing))


def conclude(
    timings: Sequence[Any], line: Callable[[Any], str], most_error: float, out: Path | None
) -> int:
    """Write measurements, dataclasses with an `error` (None: not known), as JSON to out, if given;
    print those whose error is too large to stderr, as lines. Return the exit status."""
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in timings], indent=1))
    wrong = [row for row in timings if row.error is not None and not row.error < most_error]
    for row in wrong:
        print(f"WRONG {line(row)}", file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write every measurement as JSON")
    parser.add_argument("--first-use", action="store_true", help="time only first launches")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    limits = DeviceLimits.of(torch.device("cuda"))
    print(torch.cuda.get_device_name(), f"torch {torch.__version__} triton {triton.__version__}")
    if arguments.first_use:
        report_first_uses()
        return 0
    print(ceilings())
    chosen, best, everything = [], [], []
    for case in cases():
        timings = run_case(case, limits)
        for timing in timings:
            print(line(timing), flush=True)
        chosen.append(timings[0])
        best.append(min(timings, key=lambda timing: timing.ms or float("inf")))
        everything += timings
    report(chosen, best)
    batch = make_batch(LLAMA_8B, [(1, 64)] * 8, dtype=DTYPE, device="cuda", seed=3)
    out = torch.empty(batch.q.shape, dtype=DTYPE, device="cuda")
    batch.store()
    print(f"\nhost cost of an eager launch: {host_us(lambda: attend(batch, out)):.1f} us")
    return conclude(everything, line, MAX_ERROR, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
