"""Times decodes between two projections: `python -m benchmarks.decode_kernels [--out FILE]`.

Compares two kernels, one that rotates and stores the heads and one for attention, with the fused
kernel; on a CUDA device, in a graph of 24 layers with separate caches, with dependent launch. A
time is the median over replays, divided by the layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton.testing

from benchmarks.kernels import conclude
from benchmarks.layer_reference import EPS, make_rows
from benchmarks.paged_reference import PagedBatch, Shape, make_batch, relative_error
from worker_daemon.contracts.attention import AttentionStep
from worker_daemon.contracts.layer_ops import Norm
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.paged_decode import rotate_and_attend
from worker_daemon.kernels.rope_store import rotate_and_store

DTYPE = torch.bfloat16
NUM_LAYERS = 24
MAX_ERROR = 6e-3
MODELS = (
    ("llama-8b", Shape(32, 8, 128), False),
    ("qwen3-0.6b", Shape(16, 8, 128), True),
)
CASES = ((1, 160), (1, 2048), (8, 160), (64, 160), (256, 160))
"""(sequences, keys of each)"""


@dataclass(frozen=True)
class Layer:
    """One layer's step of decodes."""

    batch: PagedBatch
    qkv: torch.Tensor  # [N, (Hq + 2 Hkv) D]
    step: AttentionStep
    head_norms: Norm | None


@dataclass(frozen=True)
class Timing:
    """Microseconds of one layer with two kernels and fused, and the relative error between them."""

    model: str
    num_seqs: int
    num_keys: int
    apart_us: float
    fused_us: float
    error: float


def make_layer(shape: Shape, num_seqs: int, num_keys: int, is_normed: bool, seed: int) -> Layer:
    """Return a random layer step at the last position of each sequence."""
    lengths = [(1, num_keys)] * num_seqs
    batch = make_batch(shape, lengths, dtype=DTYPE, device="cuda", seed=seed)
    random = torch.Generator("cuda").manual_seed(seed)
    angles = torch.rand(num_keys, shape.head_dim // 2, generator=random, device="cuda") * 6.3
    norms = Norm(make_rows(2, shape.head_dim, DTYPE, random), EPS) if is_normed else None
    step = AttentionStep(
        torch.full((num_seqs,), num_keys - 1, dtype=torch.int32, device="cuda"),
        torch.stack((angles.cos(), angles.sin()), dim=1),
        batch.metadata,
    )
    return Layer(batch, torch.cat((batch.q, batch.k, batch.v), dim=1).flatten(1), step, norms)


def run_apart(layer: Layer, pdl: bool) -> torch.Tensor:
    """Run the two kernels; rotates the queries in place."""
    batch, step = layer.batch, layer.step
    q = rotate_and_store(
        layer.qkv,
        step.positions,
        step.rotary_table,
        batch.shape.num_kv_heads,
        batch.shape.head_dim,
        layer.head_norms,
        batch.kv_cache,
        batch.slot_mapping,
        pdl=pdl,
    )
    return paged_attention(
        q,
        batch.kv_cache,
        batch.metadata,
        scale=batch.shape.scale,
        window=None,
        pdl=pdl,
    )


def run_fused(layer: Layer, pdl: bool) -> torch.Tensor:
    batch = layer.batch
    return rotate_and_attend(
        layer.qkv,
        batch.kv_cache,
        layer.step,
        layer.head_norms,
        scale=batch.shape.scale,
        window=None,
        pdl=pdl,
    )


def layer_us(
    run: Callable[[Layer, bool], torch.Tensor], layers: Sequence[Layer], pdl: bool
) -> float:
    """Return the median time of one layer in microseconds."""
    run(layers[0], pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            run(layer, pdl)
    ms = float(triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median"))
    return ms * 1e3 / len(layers)


def measure(
    model: str, shape: Shape, is_normed: bool, num_seqs: int, num_keys: int, pdl: bool
) -> Timing:
    layers = [make_layer(shape, num_seqs, num_keys, is_normed, seed) for seed in range(NUM_LAYERS)]
    fused = run_fused(layers[0], pdl)
    error = relative_error(fused, run_apart(layers[0], pdl))
    apart_us, fused_us = (layer_us(run, layers, pdl) for run in (run_apart, run_fused))
    return Timing(model, num_seqs, num_keys, apart_us, fused_us, error)


HEADER = f"{'model':<12}{'seqs':>6}{'keys':>6}{'apart us':>10}{'fused us':>10}{'error':>10}"


def line(timing: Timing) -> str:
    return (
        f"{timing.model:<12}{timing.num_seqs:>6}{timing.num_keys:>6}{timing.apart_us:>10.2f}"
        f"{timing.fused_us:>10.2f}{timing.error:>10.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write every measurement as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    pdl = has_dependent_launch(torch.device("cuda"))
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, dependent launch: {pdl}")
    print(HEADER)
    timings = []
    for model, shape, is_normed in MODELS:
        for num_seqs, num_keys in CASES:
            timings.append(measure(model, shape, is_normed, num_seqs, num_keys, pdl))
            print(line(timings[-1]), flush=True)
    return conclude(timings, line, MAX_ERROR, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
