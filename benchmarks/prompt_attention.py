"""Times the attention of long prompts on a CUDA device: `python -m benchmarks.prompt_attention
[--sweep]`.

Compares, for chunks of prompts, the paged kernel, our kernel over gathered keys (the gather
included) and cuDNN (the gather included; whole prompts only), each against a dense fp64 softmax.
--sweep also times other tiles of the kernel over gathered keys. TFLOP/s count visible pairs only.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from worker_daemon.contracts.attention import AttentionLayer, KeyRange
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.kernels.compile_ahead import compiling_ahead
from worker_daemon.kernels.gathered_prefill import TritonGathered, gathered_attention
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.kernels.tiles import Tile
from worker_daemon.layers.prompt_attention import PromptAttention, cudnn_attention
from worker_daemon.layers.torch_ops import TorchOps

HEADS = {128: Shape(32, 8, 128), 64: Shape(32, 8, 64), 256: Shape(16, 8, 256)}
CHUNKS = [
    (8192, 0), (8000, 0), (2048, 0), (5000, 0), (7808, 192), (4096, 4096), (8192, 8192),
    (2048, 14336), (1024, 7168),
]  # fmt: skip
"""(query tokens, earlier tokens)"""
WINDOWED = [((8192, 0), 4096), ((4096, 4096), 1024), ((8192, 8192), 4096)]
TILES = [
    Tile(64, 32, num_warps=4, num_stages=3),
    Tile(64, 64, num_warps=4, num_stages=2),
    Tile(64, 64, num_warps=4, num_stages=3),
    Tile(64, 128, num_warps=4, num_stages=2),
    Tile(128, 64, num_warps=4, num_stages=2),
    Tile(128, 64, num_warps=4, num_stages=3),
    Tile(128, 64, num_warps=8, num_stages=2),
    Tile(128, 128, num_warps=8, num_stages=2),
]
DTYPE = torch.bfloat16
MAX_ERROR = 6e-3


@dataclass(frozen=True)
class Case:
    """A chunk of a prompt."""

    shape: Shape
    num_queries: int
    num_earlier: int
    window: int | None = None

    def __str__(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"D {self.shape.head_dim} {self.num_queries} after {self.num_earlier}{window}"

    def teraflops(self) -> float:
        """Two products of two operations for every visible query-key pair."""
        ends = range(self.num_earlier + 1, self.num_earlier + self.num_queries + 1)
        pairs = sum(ends) if self.window is None else sum(min(end, self.window) for end in ends)
        return 4 * pairs * self.shape.num_q_heads * self.shape.head_dim / 1e12


def cases() -> Iterator[Case]:
    for head_dim, shape in HEADS.items():
        chunks = CHUNKS if head_dim == 128 else [(8192, 0), (4096, 4096), (1024, 7168)]
        yield from (Case(shape, *chunk) for chunk in chunks)
    yield from (Case(HEADS[128], *chunk, window) for chunk, window in WINDOWED)


def device_ms(launch: Callable[[], object], repeats: int = 5) -> float:
    """Return the least mean time of a launch over three series, in ms."""
    launch()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            launch()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeats)
    return best


def measure(case: Case, name: str, run: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    """Print time, rate and error of one implementation; return True if it is accurate."""
    error = relative_error(run(), expected)
    ms = device_ms(run)
    rate = case.teraflops() / (ms * 1e-3)
    wrong = "" if error < MAX_ERROR else "  WRONG"
    print(f"{case!s:<32}{name:<22}{ms * 1e3:>9.1f} us{rate:>7.0f} TFLOP/s  {error:.1e}{wrong}")
    return error < MAX_ERROR


def implementations(
    case: Case, batch: PagedBatch, sweep: bool
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    device = torch.device("cuda")
    shape, metadata = batch.shape, batch.metadata
    layer = AttentionLayer(
        TorchOps(), shape.num_kv_heads, shape.head_dim, shape.scale, case.window, norms=None
    )
    paged, gathered = TritonAttention(device), TritonGathered(device)
    backends = {
        "paged": paged,
        "gathered": PromptAttention(paged, gathered),
        "cudnn": PromptAttention(paged, gathered, cudnn_attention),
    }
    if case.window is not None or case.num_earlier or case.num_queries == 5000:
        del backends["cudnn"]  # it has no part in these
    for name, backend in backends.items():
        yield name, lambda it=backend: it.attend(batch.q, batch.kv_cache, layer, metadata)
    if not sweep:
        return
    length = case.num_earlier + case.num_queries
    first = 0 if case.window is None else max(0, case.num_earlier - case.window + 1)
    keys = KeyRange(0, first, length, length - first)
    context = gathered.gather(batch.kv_cache, layer, metadata, keys, batch.q.dtype)
    for tile in TILES:
        name = f"  {tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
        yield (
            name,
            lambda it=tile: gathered_attention(
                batch.q, context, scale=layer.scale, window=case.window, tile=it
            ),
        )


def run_case(case: Case, sweep: bool) -> bool:
    lengths = [(case.num_queries, case.num_earlier + case.num_queries)]
    batch = make_batch(case.shape, lengths, dtype=DTYPE, device="cuda", seed=1)
    batch.store()
    expected = dense_attention(batch, case.window)
    is_right = True
    for name, run in implementations(case, batch, sweep):
        try:
            is_right &= measure(case, name, run, expected)
        except OutOfResources:
            print(f"{case!s:<32}{name:<22} does not fit")
    return is_right


def compile_tiles() -> None:
    """Compile the kernels of the sweep, many at once."""
    with KernelCompiler.start() as compiler, compiling_ahead(compiler):
        for head_dim, shape in HEADS.items():
            for window in (None, 64) if head_dim == 128 else (None,):
                case = Case(shape, 1024, 1024, window)
                batch = make_batch(shape, [(1024, 2048)], dtype=DTYPE, device="cuda", seed=1)
                for _, launch in implementations(case, batch, sweep=True):
                    launch()


@torch.inference_mode()
def main() -> int:
    """Print one line per case and implementation; return 1 if one is inaccurate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    if options.sweep:
        compile_tiles()
    wrong = [case for case in cases() if not run_case(case, options.sweep)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
