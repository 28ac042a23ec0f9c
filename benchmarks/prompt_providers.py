"""Compares what can compute the attention of prompts on a CUDA device, in about two minutes:
`python -m benchmarks.prompt_providers [--budget-s 150] [--out FILE.json]`.

Ours, in bf16 and with products in FP8, torch's cuDNN (whole prompts; each length has a plan of its
own) and the libraries of layers/prompt_providers.py that are installed, over gathered keys: TFLOP/s
of visible pairs, the error against ours in bf16 (of 2,048 tokens against a dense fp64 softmax; in
FP8 that of its cache is in it), the host's time per call, the first call's time (compilation, or a
plan), and the memory beyond inputs and output. Times are the least of three rounds, in which all
take turns. The gathers are timed apart.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paged_reference import PagedBatch, Shape, dense_attention, make_batch
from benchmarks.paged_reference import relative_error as error_against
from worker_daemon.contracts.attention import AttentionLayer, KeyRange
from worker_daemon.contracts.fp8 import FP8, FP8_MAX
from worker_daemon.kernels.gathered_fp8 import FP8Context
from worker_daemon.kernels.gathered_prefill import TritonFP8Gathered, TritonGathered
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import PROVIDERS
from worker_daemon.layers.prompt_attention import cudnn_attention
from worker_daemon.layers.prompt_providers import (
    AttendGathered,
    FlashAttention,
    PromptCase,
    PromptProvider,
    ScoreKind,
)
from worker_daemon.layers.torch_ops import TorchOps

CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
MAX_ERROR, MAX_FP8_ERROR = 6e-3, 0.1
VARIANTS: dict[str, PromptProvider] = {
    **{provider.name: provider for provider in PROVIDERS},
    "fa4 unpacked": FlashAttention(pack_gqa=False),
}
"""The libraries as daemons use them, and with other options."""
IN_FP8 = "ours, fp8"
ROUNDS = 3
SERIES_S = 0.02
"""A series has as many launches as take this long, one at least."""


@dataclass(frozen=True)
class Case:
    """A chunk of a prompt."""

    shape: Shape
    num_queries: int
    num_earlier: int = 0
    window: int | None = None
    logit_softcap: float | None = None
    has_sinks: bool = False

    @property
    def num_keys(self) -> int:
        """Keys that are gathered."""
        earlier = self.num_earlier
        return self.num_queries + min(earlier, earlier if self.window is None else self.window - 1)

    @property
    def kind(self) -> ScoreKind:
        return ScoreKind(self.window, self.logit_softcap, self.has_sinks)

    def __str__(self) -> str:
        kind = "" if self.kind == ScoreKind(None, None, False) else f", {self.kind}"
        return f"D {self.shape.head_dim}: {self.num_queries:,} after {self.num_earlier:,}{kind}"

    def teraflops(self) -> float:
        """Two products of two operations for every visible query-key pair."""
        ends = range(self.num_earlier + 1, self.num_earlier + self.num_queries + 1)
        pairs = sum(ends) if self.window is None else sum(min(end, self.window) for end in ends)
        return 4 * pairs * self.shape.num_q_heads * self.shape.head_dim / 1e12


def cases() -> Iterator[Case]:
    """Yield the most telling first: the budget may end the run."""
    llama, small, large = Shape(32, 8, 128), Shape(32, 8, 64), Shape(16, 8, 256)
    for shape in (llama, small, large):
        yield from (Case(shape, length) for length in (2048, 8192, 30_000, 100_000))
        yield from (Case(shape, 8192, earlier) for earlier in (21_808, 91_808))
    yield from (Case(llama, *chunk) for chunk in ((1024, 0), (1024, 7168), (4096, 4096)))
    for shape in (llama, small, large):
        yield Case(shape, 8192, 21_808, window=4096)
    yield Case(llama, 8192, 21_808, window=1024)
    yield Case(llama, 8192, 21_808, logit_softcap=50.0)
    yield Case(small, 8192, 21_808, has_sinks=True)
    yield Case(small, 8192, 21_808, window=128, has_sinks=True)


@dataclass(frozen=True)
class Figure:
    """What one provider takes for one case."""

    case: str
    provider: str
    ms: float
    tflops: float
    error: float
    host_us: float
    first_s: float
    extra_mb: float
    """Allocated at the peak of a call, beyond inputs and output."""

    @property
    def is_wrong(self) -> bool:
        return not self.error < (MAX_FP8_ERROR if self.provider == IN_FP8 else MAX_ERROR)


@dataclass(frozen=True)
class _Values:
    """AttentionSinks or KVScales."""

    values: Tensor


class Gathered:
    """A case's inputs: gathered once, as each layer of a step does."""

    def __init__(self, case: Case, gathered: TritonGathered) -> None:
        shape, length = case.shape, case.num_earlier + case.num_queries
        self.batch: PagedBatch = make_batch(
            shape, [(case.num_queries, length)], dtype=DTYPE, device="cuda", seed=1
        )
        self.batch.store()
        sinks = torch.randn(shape.num_q_heads, device=CUDA, dtype=DTYPE)
        self.layer = AttentionLayer(
            TorchOps(),
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            case.window,
            norms=None,
            logit_softcap=case.logit_softcap,
            sinks=_Values(sinks) if case.has_sinks else None,
        )
        keys = KeyRange(0, length - case.num_keys, length, case.num_keys)
        cache, metadata = self.batch.kv_cache, self.batch.metadata

        def gather() -> Tensor:
            return gathered.gather(cache, self.layer, metadata, keys, DTYPE)

        self.context = gather()
        self.gather_ms = series_ms(gather, 5)
        largest = self.context.abs().amax(dim=(1, 3)).float()
        scales = largest.clamp(min=1e-6) / FP8_MAX
        narrow = (cache.float() / scales[:, None, :, None]).to(FP8)
        layer_fp8 = replace(self.layer, kv_scales=_Values(scales))
        in_fp8 = TritonFP8Gathered(CUDA)

        def gather_fp8() -> FP8Context:
            return in_fp8.gather(narrow, layer_fp8, metadata, keys, DTYPE)

        context_fp8 = gather_fp8()
        self.gather_fp8_ms = series_ms(gather_fp8, 5)
        self.attend_fp8 = lambda: in_fp8.attend(self.batch.q, context_fp8, layer_fp8, case.window)


def whole_by_cudnn(q: Tensor, context: Tensor, layer: AttentionLayer, window: int | None) -> Tensor:
    """AttendGathered by torch's cuDNN."""
    parts = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, *context))
    queries, keys, values = parts
    return cudnn_attention(queries, keys, values, layer.scale).squeeze(0).transpose(0, 1)


def open_libraries() -> dict[str, tuple[AttendGathered, Callable[[Case], str | None]]]:
    """Import what is installed; return the attention of each, and what it refuses. Prints what each
    import takes."""
    found = dict[str, tuple[AttendGathered, Callable[[Case], str | None]]]()
    for name, provider in VARIANTS.items():
        if provider.version is None:
            print(f"{provider.name}: not installed", flush=True)
            continue
        free, start = torch.cuda.mem_get_info()[0], time.monotonic()
        try:
            attend = provider.open()
        except Exception as failure:
            print(f"{provider.name} {provider.version}: {failure!r}", flush=True)
            continue
        took, held = time.monotonic() - start, free - torch.cuda.mem_get_info()[0]
        print(
            f"{provider.name} {provider.version}: imported in {took:.1f} s, {held / 1e6:.0f} MB",
            flush=True,
        )

        def refuse(case: Case, it: PromptProvider = provider) -> str | None:
            heads = HeadSizes(case.shape.num_q_heads, case.shape.num_kv_heads, case.shape.head_dim)
            return it.find_obstacle(PromptCase(CUDA, DTYPE, heads, (case.kind,)), case.kind)

        found[name] = attend, refuse
    return found


def series_ms(launch: Callable[[], object], count: int) -> float:
    """Return the mean time of some launches, in ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        launch()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def host_us(launch: Callable[[], object]) -> float:
    """Return the host's time of a call whose work the device has not begun."""
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # cycles: 10 ms
    start = time.perf_counter()
    for _ in range(5):
        launch()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / 5 * 1e6


def measure(
    case: Case, attends: dict[str, AttendGathered], gathered: TritonGathered
) -> list[Figure]:
    """Return the figures of one case. A provider that raises is printed and left out."""
    inputs = Gathered(case, gathered)
    q, context, layer = inputs.batch.q, inputs.context, inputs.layer
    launches: dict[str, Callable[[], Tensor]] = {
        name: lambda it=attend: it(q, context, layer, case.window)
        for name, attend in attends.items()
    }
    launches[IN_FP8] = inputs.attend_fp8
    expected = None
    if case.num_queries == 2048:
        expected = dense_attention(inputs.batch, case.window)
    figures = dict[str, Figure]()
    for name, launch in launches.items():
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        try:
            out = launch()
            torch.cuda.synchronize()
        except Exception as failure:
            print(f"{case}: {name} raised {failure!r}"[:400], flush=True)
            continue
        first_s = time.monotonic() - start
        extra = torch.cuda.max_memory_allocated() - held - out.numel() * out.element_size()
        expected = out if expected is None else expected
        error = error_against(out, expected)
        del out
        figures[name] = Figure(
            str(case), name, float("inf"), 0.0, error, host_us(launch), first_s, extra / 1e6
        )
    counts = {
        name: max(1, min(20, int(SERIES_S * 1e3 / series_ms(launches[name], 1))))
        for name in figures
    }
    for _ in range(ROUNDS):
        for name, figure in figures.items():
            ms = min(figure.ms, series_ms(launches[name], counts[name]))
            figures[name] = replace(figure, ms=ms, tflops=case.teraflops() / (ms * 1e-3))
    gathers = f"{inputs.gather_ms * 1e3:.0f} us, of FP8 {inputs.gather_fp8_ms * 1e3:.0f}"
    print(f"{case} (gather {gathers})")
    for figure in figures.values():
        wrong = "  WRONG" if figure.is_wrong else ""
        print(
            f"  {figure.provider:<14}{figure.ms * 1e3:>10.0f} us{figure.tflops:>7.0f} TFLOP/s"
            f"  error {figure.error:.1e}  host {figure.host_us:>5.0f} us"
            f"  first {figure.first_s:.2f} s  extra {figure.extra_mb:.0f} MB{wrong}",
            flush=True,
        )
    return list(figures.values())


@torch.inference_mode()
def main() -> int:
    """Print a block for each case; return 1 if a result is inaccurate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=150, help="begin no case after this long")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    start = time.monotonic()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    gathered = TritonGathered(CUDA)
    libraries = open_libraries()
    figures = list[Figure]()
    for case in cases():
        if time.monotonic() - start > options.budget_s:
            print(f"out of time: {case} and later ones are left out")
            break
        attends: dict[str, AttendGathered] = {"ours": gathered.attend}
        if case.num_earlier == 0 and case.kind == ScoreKind(None, None, False):
            attends["cudnn"] = whole_by_cudnn
        for name, (attend, refuse) in libraries.items():
            why = refuse(case)
            if why is None:
                attends[name] = attend
            else:
                print(f"{case}: {name} refuses: {why}")
        figures += measure(case, attends, gathered)
        torch.cuda.empty_cache()
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if any(figure.is_wrong for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
