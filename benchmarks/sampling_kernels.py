"""Times sampling on a CUDA device: `python -m benchmarks.sampling_kernels [--kernels]`.

Each case is compared with plain torch, then replayed from a graph over logits that, for large
batches, do not fit the L2 cache. "host us" is the host time of an eager call. The floor is the
method's reads at 4.5 TB/s: the logits twice for a temperature, four times for a top-k or top-p.
--kernels also lists the time of each kernel for the largest batch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.testing

from benchmarks.kernels import host_us
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.sampling import Sampling, SamplingMetadata
from worker_daemon.sample.sampler import TorchSampling

HBM_BYTES_PER_S = 4.5e12
NUM_ROWS = (1, 8, 64, 256)
VOCAB_SIZES = (128_256, 151_936)
SPREADS = {"flat": 0.5, "wide": 3.0}
"""Standard deviations of the logits. A dummy model's are flat, a trained one's wide."""


@dataclass(frozen=True)
class Filters:
    """The sampling parameters of every row of a batch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def num_passes(self) -> int:
        return 2 if self.top_k == 0 and self.top_p == 1 else 4


FILTERS = {
    "greedy": Filters(temperature=0.0),
    "temperature": Filters(),
    "min-p": Filters(min_p=0.05),
    "top-p 0.9": Filters(top_p=0.9),
    "top-k 50": Filters(top_k=50),
    "top-k 50 top-p 0.9": Filters(top_k=50, top_p=0.9),
    "all": Filters(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
}


@dataclass(frozen=True)
class Case:
    """A batch of equal rows and random logits."""

    filters: str
    num_rows: int
    vocab_size: int
    spread: str
    dtype: torch.dtype

    def batch(self) -> tuple[torch.Tensor, SamplingMetadata]:
        random = torch.Generator("cuda").manual_seed(1)
        shape = (self.num_rows, self.vocab_size)
        logits = torch.randn(shape, generator=random, device="cuda") * SPREADS[self.spread]
        return logits.to(self.dtype), metadata(FILTERS[self.filters], self.num_rows)

    @property
    def floor_us(self) -> float:
        num_bytes = self.num_rows * self.vocab_size * self.dtype.itemsize
        return FILTERS[self.filters].num_passes * num_bytes / HBM_BYTES_PER_S * 1e6


def metadata(filters: Filters, num_rows: int) -> SamplingMetadata:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return SamplingMetadata(
        temperature=column(filters.temperature, torch.float32),
        top_k=column(filters.top_k, torch.int32),
        top_p=column(filters.top_p, torch.float32),
        min_p=column(filters.min_p, torch.float32),
        seeds=torch.arange(num_rows, device="cuda"),
        positions=torch.arange(num_rows, device="cuda"),
        any_random=filters.temperature > 0,
        any_top_k=filters.top_k > 0,
        any_top_p=filters.top_p < 1,
        any_min_p=filters.min_p > 0,
    )


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call; wrong: number of rows that differ from plain torch."""

    case: str
    num_rows: int
    us: float
    torch_us: float
    floor_us: float
    host_us: float
    wrong: int


def cases() -> Iterator[Case]:
    for vocab_size in VOCAB_SIZES:
        for num_rows in NUM_ROWS:
            for filters in FILTERS:
                for spread in SPREADS:
                    yield Case(filters, num_rows, vocab_size, spread, torch.bfloat16)
    for filters in FILTERS:
        yield Case(filters, 256, VOCAB_SIZES[0], "flat", torch.float32)


def graph_us(launch: Callable[[], object]) -> float:
    """Return the median time of a call in microseconds, replayed from a CUDA graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    ms = triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median")
    return float(ms) * 1e3


def eager_us(launch: Callable[[], object]) -> float:
    """Return the median time of an eager call in microseconds."""
    return float(triton.testing.do_bench(launch, warmup=5, rep=30, return_mode="median")) * 1e3


def measure(case: Case, sampling: Sampling) -> Timing:
    logits, rows = case.batch()
    plain = TorchSampling()
    wrong = int((sampling.tokens(logits, rows) != plain.tokens(logits, rows)).sum())
    name = f"{case.filters} {case.spread} V={case.vocab_size} {str(case.dtype)[6:]}"
    return Timing(
        name,
        case.num_rows,
        graph_us(lambda: sampling.tokens(logits, rows)),
        eager_us(lambda: plain.tokens(logits, rows)),
        case.floor_us,
        host_us(lambda: sampling.tokens(logits, rows)),
        wrong,
    )


def print_kernels(sampling: Sampling) -> None:
    """Print the mean time of each kernel at 256 rows."""
    for spread in SPREADS:
        for filters in FILTERS:
            case = Case(filters, 256, VOCAB_SIZES[0], spread, torch.bfloat16)
            logits, rows = case.batch()
            sampling.tokens(logits, rows)
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(10):
                    sampling.tokens(logits, rows)
                torch.cuda.synchronize()
            parts = ", ".join(
                f"{event.key.split('(')[0][:24]} {event.device_time_total / 10:.0f}"
                for event in profile.key_averages()
                if event.device_time_total > 0
            )
            print(f"{filters} {spread}: {parts}", flush=True)


HEADER = (
    f"{'case':<46}{'rows':>6}{'us':>9}{'torch us':>10}{'floor us':>10}{'of peak':>9}"
    f"{'host us':>9}{'wrong':>7}"
)


def line(timing: Timing) -> str:
    return (
        f"{timing.case:<46}{timing.num_rows:>6}{timing.us:>9.1f}{timing.torch_us:>10.1f}"
        f"{timing.floor_us:>10.1f}{timing.floor_us / timing.us:>9.0%}{timing.host_us:>9.1f}"
        f"{timing.wrong:>7}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write every measurement as JSON")
    parser.add_argument("--kernels", action="store_true", help="also time each kernel")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    sampling = choose_backend(torch.device("cuda")).sampling
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, sampling: {sampling.name}")
    print(HEADER)
    timings = []
    for case in cases():
        timings.append(measure(case, sampling))
        print(line(timings[-1]), flush=True)
    if arguments.kernels:
        print_kernels(sampling)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in timings], indent=1))
    wrong = [row for row in timings if row.wrong]
    for row in wrong:
        print(f"WRONG {line(row)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
