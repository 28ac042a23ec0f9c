"""Times the layer operations on a CUDA device: `python -m benchmarks.layer_kernels [--out FILE]`.

A graph launches one operation several times, rotating over input sets. A time is the median over
replays, divided by the launches: the operation's share of a captured step. At decode sizes the
inputs lie in the L2 cache, as those of a step do; at 8,192 rows they do not fit. The floor is each
byte read and written once at 4.5 TB/s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton.testing

from benchmarks.kernels import conclude
from benchmarks.layer_reference import (
    EPS,
    Heads,
    activated,
    make_projected,
    make_rows,
    normed,
    rotated,
)
from benchmarks.paged_reference import relative_error
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.layer_ops import LayerOps, Norm, NormedSum
from worker_daemon.layers.torch_ops import TorchOps

DTYPE = torch.bfloat16
HBM_BYTES_PER_S = 4.5e12
MAX_ERROR = 3e-3
NUM_ROWS = (1, 8, 64, 256, 8192)
NUM_SETS = 4

Launch = Callable[[LayerOps], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder layer."""

    name: str
    hidden_size: int
    inner_size: int
    heads: Heads


MODELS = (
    Model("llama-8b", 4096, 14336, Heads(32, 8, 128)),
    Model("qwen3-0.6b", 1024, 3072, Heads(16, 8, 128, is_normed=True)),
)


@dataclass(frozen=True)
class Case:
    """One operation at one size: the same launch on several input sets, and its exact result."""

    name: str
    num_rows: int
    num_bytes: int
    launches: Sequence[Launch]
    expected: torch.Tensor
    """fp64 result of the first launch."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch in a graph: ours, torch's operations, the floor."""

    case: str
    num_rows: int
    us: float
    torch_us: float
    floor_us: float
    error: float


def norm_case(model: Model, num_rows: int, random: torch.Generator) -> Case:
    rows = [make_rows(num_rows, model.hidden_size, DTYPE, random) for _ in range(NUM_SETS)]
    norm = Norm(make_rows(1, model.hidden_size, DTYPE, random)[0], EPS)
    return Case(
        f"{model.name} rms_norm",
        num_rows,
        2 * rows[0].nbytes + norm.weight.nbytes,
        [lambda ops, x=x: ops.rms_norm(x, norm) for x in rows],
        normed(rows[0], norm),
    )


def add_norm_case(model: Model, num_rows: int, random: torch.Generator) -> Case:
    rows = [make_rows(num_rows, model.hidden_size, DTYPE, random) for _ in range(2 * NUM_SETS)]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    norm = Norm(make_rows(1, model.hidden_size, DTYPE, random)[0], EPS)
    return Case(
        f"{model.name} sum_and_norm",
        num_rows,
        4 * rows[0].nbytes + norm.weight.nbytes,
        [lambda ops, x=x, r=r: ops.sum_and_norm(NormedSum(x, r, norm))[0] for x, r in pairs],
        normed(rows[0] + rows[1], norm),
    )


def activation_case(model: Model, num_rows: int, random: torch.Generator) -> Case:
    rows = [make_rows(num_rows, 2 * model.inner_size, DTYPE, random) for _ in range(NUM_SETS)]
    return Case(
        f"{model.name} act_and_mul",
        num_rows,
        rows[0].nbytes * 3 // 2,
        [lambda ops, x=x: ops.act_and_mul(x, "silu") for x in rows],
        activated(rows[0]),
    )


def projection_case(model: Model, num_rows: int, random: torch.Generator) -> Case:
    steps = [make_projected(model.heads, num_rows, DTYPE, random) for _ in range(NUM_SETS)]
    table_bytes = 4 * num_rows * model.heads.head_dim
    return Case(
        f"{model.name} rotate_and_store",
        num_rows,
        2 * steps[0].qkv.nbytes + table_bytes + 16 * num_rows,
        [
            lambda ops, s=s: ops.rotate_and_store(
                s.qkv,
                s.positions,
                s.rotary_table,
                s.heads.num_kv_heads,
                s.heads.head_dim,
                s.head_norms,
                s.kv_cache,
                s.slot_mapping,
            )
            for s in steps
        ],
        rotated(steps[0])[0],
    )


def cases() -> Iterator[Case]:
    random = torch.Generator("cuda").manual_seed(1)
    for model in MODELS:
        for make in (norm_case, add_norm_case, activation_case, projection_case):
            for num_rows in NUM_ROWS:
                yield make(model, num_rows, random)


def launch_us(launches: Sequence[Launch], ops: LayerOps, num_rounds: int) -> float:
    """Return the median time of one launch in microseconds, in a graph of num_rounds over all
    sets."""
    for launch in launches:
        launch(ops)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for launch in launches:
                launch(ops)
    ms = float(triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median"))
    return ms * 1e3 / (num_rounds * len(launches))


def measure(case: Case, ops: LayerOps) -> Timing:
    error = relative_error(case.launches[0](ops), case.expected)
    num_rounds = 1 if case.num_rows > 256 else 16
    return Timing(
        case.name,
        case.num_rows,
        launch_us(case.launches, ops, num_rounds),
        launch_us(case.launches, TorchOps(), num_rounds),
        case.num_bytes / HBM_BYTES_PER_S * 1e6,
        error,
    )


HEADER = (
    f"{'case':<30}{'rows':>6}{'us':>9}{'torch us':>10}{'floor us':>10}{'of peak':>9}{'error':>10}"
)


def line(timing: Timing) -> str:
    return (
        f"{timing.case:<30}{timing.num_rows:>6}{timing.us:>9.2f}{timing.torch_us:>10.2f}"
        f"{timing.floor_us:>10.2f}{timing.floor_us / timing.us:>9.0%}{timing.error:>10.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write every measurement as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    ops = choose_backend(torch.device("cuda")).make_ops()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, operations: {ops.name}")
    print(HEADER)
    timings = []
    for case in cases():
        timings.append(measure(case, ops))
        print(line(timings[-1]), flush=True)
    return conclude(timings, line, MAX_ERROR, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
