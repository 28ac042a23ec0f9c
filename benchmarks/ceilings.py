"""Measures the limits that a device reaches in simple tasks: `python -m benchmarks.ceilings [--out
FILE.json]`.

Medians of CUDA-event times over random data larger than the cache: reads (a reduction that keeps
its input in device memory), copies (bytes read plus bytes written), bfloat16 GEMMs of the Llama-8B
shapes, causal attention of 8,192 tokens by torch's own backends, copies from and to page-locked
host memory; with two devices, NCCL's one-way sends and all-reduces. Uses none of our kernels.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.floors import Ceilings

READ_BYTES = 8 << 30
COPY_BYTES = 4 << 30
HOST_BYTES = 1 << 30
REPEATS = 20
HEAT_S = 0.7
"""GEMMs are timed after the device has worked this long, at the clock that its power limit
allows."""
LAYER_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(outputs, inputs) of the four GEMMs of a Llama-8B layer."""
ROWS = (2048, 4096, 8192)
ATTENTION_TOKENS = 8192
SEND_BYTES = (8 << 10, 1 << 20, 16 << 20, 256 << 20)
REDUCE_BYTES = (8 << 10, 512 << 10)
READ_BLOCK = 8192


@dataclass(frozen=True)
class Figure:
    """One ceiling."""

    name: str
    value: float
    unit: str


def measure() -> Iterator[Figure]:
    """Yield the figures of device 0, and of devices 0 and 1 together."""
    torch.cuda.set_device(0)
    yield Figure("read", max(read_rates()) / 1e12, "TB/s")
    yield Figure("copy, read + written", copy_rate() / 1e12, "TB/s")
    for rows in ROWS:
        yield Figure(f"bf16 products, {rows} rows", layer_flop_rate(rows) / 1e12, "TFLOP/s")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        rate = attention_flop_rate(backend)
        if rate is not None:
            name = backend.name.lower().removesuffix("_attention")
            yield Figure(f"causal attention, {name}", rate / 1e12, "TFLOP/s")
    yield Figure("pinned host to device", host_rate(to_device=True) / 1e9, "GB/s")
    yield Figure("device to pinned host", host_rate(to_device=False) / 1e9, "GB/s")
    if torch.cuda.device_count() > 1:
        yield from link_figures()


def ceilings_of(figures: list[Figure]) -> Ceilings:
    """Return the ceilings for floors: the best of each kind."""
    best: dict[str, float] = {}
    for figure in figures:
        kind = figure.name.split(",")[0]
        best[kind] = max(best.get(kind, 0.0), figure.value)
    reduces = [f.value for f in figures if f.name.startswith("all-reduce of 8 KiB")]
    return Ceilings(
        read_bytes=best["read"] * 1e12,
        matmul_flop=best["bf16 products"] * 1e12,
        attention_flop=best["causal attention"] * 1e12,
        all_reduce_s=min(reduces, default=0.0) * 1e-6,
    )


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a piece of device work, after two calls that warm it up."""
    for _ in range(2):
        work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def heat(work: Callable[[], object]) -> None:
    """Run device work for HEAT_S."""
    end = time.monotonic() + HEAT_S
    while time.monotonic() < end:
        work()
        torch.cuda.synchronize()


@triton.jit
def _sum_blocks(source, target, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum every num_programs-th block of int32 values in each program."""
    total = tl.zeros((BLOCK,), tl.int32)
    lane = tl.arange(0, BLOCK)
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), num_stages=4):
        total += tl.load(source + block.to(tl.int64) * BLOCK + lane)
    tl.store(target + tl.program_id(0), tl.sum(total))


def read_rates() -> Iterator[float]:
    """Yield bytes per second of torch's reduction, and of a plain one at several grid sizes."""
    source = torch.randint(
        -(2**31), 2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device="cuda"
    )
    target = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    as_floats = source.view(torch.float32)
    yield READ_BYTES / median_s(lambda: torch.sum(as_floats))
    num_blocks = source.numel() // READ_BLOCK
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for programs in (2 * processors, 4 * processors, 16 * processors):
        yield READ_BYTES / median_s(
            lambda grid=programs: _sum_blocks[(grid,)](
                source, target, num_blocks, BLOCK=READ_BLOCK, num_warps=8
            )
        )


def copy_rate() -> float:
    """Return bytes read plus bytes written per second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source))


def layer_flop_rate(rows: int) -> float:
    """Return operations per second of the four GEMMs of a layer in sequence, rotating over the
    weights of four layers."""
    layers = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in LAYER_SHAPES]
        for _ in range(4)
    ]
    inputs = {
        width: torch.randn((rows, width), dtype=torch.bfloat16, device="cuda")
        for _, width in LAYER_SHAPES
    }

    def run() -> None:
        for weights in layers:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    heat(run)
    flop = 4 * sum(2 * rows * outputs * width for outputs, width in LAYER_SHAPES)
    return flop / median_s(run)


def attention_flop_rate(backend: SDPBackend) -> float | None:
    """Return operations per second, counting only visible pairs, with Llama-8B's heads (keys and
    values repeated to 32 heads); None if torch lacks this backend here."""
    shape = (1, 32, ATTENTION_TOKENS, 128)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    try:
        with sdpa_kernel(backend):
            heat(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
            seconds = median_s(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    except RuntimeError:
        return None
    pairs = ATTENTION_TOKENS * (ATTENTION_TOKENS + 1) // 2
    return 4 * pairs * 32 * 128 / seconds


def host_rate(to_device: bool) -> float:
    """Return bytes per second between a device and page-locked memory."""
    host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    device = torch.ones(HOST_BYTES, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_device else (host, device)
    return HOST_BYTES / median_s(lambda: target.copy_(source, non_blocking=True), 5)


def link_figures() -> list[Figure]:
    """Run two processes of this module, one per device; rank 0 prints its figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.ceilings", "--port", str(port), "--rank"]
    with tempfile.TemporaryFile("w+") as output:
        ranks = [
            subprocess.Popen([*command, "1"], stdout=subprocess.DEVNULL),
            subprocess.Popen([*command, "0"], stdout=output),
        ]
        codes = [rank.wait(120) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}")
        output.seek(0)
        return [Figure(**figure) for figure in json.load(output)]


def link_rank(rank: int, port: int) -> list[Figure]:
    """Run one of the two processes; both make the same sequence of transfers."""
    torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    figures = []
    for size in SEND_BYTES:
        data = torch.ones(size, dtype=torch.uint8, device="cuda")
        seconds = wall_median_s(lambda data=data: ping_pong(data, rank)) / 2
        figures.append(Figure(f"send of {size >> 10} KiB, one way", seconds * 1e6, "us"))
    for size in REDUCE_BYTES:
        values = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
        seconds = median_s(lambda values=values: dist.all_reduce(values), 200)
        figures.append(Figure(f"all-reduce of {size >> 10} KiB, eager", seconds * 1e6, "us"))
        seconds = graph_reduce_s(values)
        figures.append(Figure(f"all-reduce of {size >> 10} KiB, in a graph", seconds * 1e6, "us"))
    dist.destroy_process_group()
    return figures


def ping_pong(data: torch.Tensor, rank: int) -> None:
    """Send to the other rank and wait for its answer, on the host."""
    for sender in (0, 1):
        if rank == sender:
            dist.send(data, 1 - rank)
        else:
            dist.recv(data, 1 - rank)
    torch.cuda.synchronize()


def graph_reduce_s(values: torch.Tensor, count: int = 50) -> float:
    """Return the seconds per all-reduce in a graph of count."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            dist.all_reduce(values)
    return median_s(graph.replay) / count


def wall_median_s(work: Callable[[], None]) -> float:
    """Return the median time, by the host's clock, of work that waits for its completion."""
    times = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def main() -> None:
    """Measure, print, and with --out write a list of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        json.dump([asdict(figure) for figure in link_rank(options.rank, options.port)], sys.stdout)
        sys.stdout.flush()
        os._exit(0)  # NCCL's own teardown may wait for the peer
    figures = []
    for figure in measure():
        figures.append(figure)
        print(f"{figure.name:<40} {figure.value:>10.2f} {figure.unit}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
