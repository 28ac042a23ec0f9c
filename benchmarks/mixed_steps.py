"""Measures prompt chunks alone and beside decodes, in a worker in this process: `python -m
benchmarks.mixed_steps --model DIR [--quantization fp8] [--kv-cache-dtype fp8] [--decodes N]
[--context N] [--chunks 512,2048,7936,8192@21808] [--trace DIRECTORY] [--out FILE.json]`.

A chunk `N@M` has N tokens after M others. The cost of a mixed step is given as a multiple of the
two steps apart, a decode of all requests and the chunk alone; each is a median. With --trace, a
table of device time by kind of kernel for each step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.stage_driver import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    Chunk,
    StageDriver,
    pipelined,
    wait,
)
from benchmarks.step_trace import write_trace
from benchmarks.trace_table import StepTable, tabulate
from rpc_schema.config import CacheConfig
from rpc_schema.kv_cache import blocks_for
from worker_daemon.runner.output import PendingOutput

ROUNDS = 3
SERIES_S = 0.4
"""Time of a series of steps, at least three steps."""
TRACED_STEPS = 4

Launch = Callable[[], PendingOutput | None]


@dataclass(frozen=True)
class Figure:
    """A chunk's times, in ms a step."""

    chunk: str
    alone: float
    decodes: float
    """A step of the decodes alone."""
    beside: float
    """The chunk and the decodes in one step."""

    @property
    def multiple(self) -> float:
        """Time of the mixed step over that of the two steps apart."""
        return self.beside / (self.alone + self.decodes)


@dataclass
class MixedSteps:
    """The steps of some decodes and of a chunk."""

    driver: StageDriver
    num_decodes: int
    context: int
    trace: Path | None = None

    def measure(self, chunk: Chunk) -> Figure:
        """Time the chunk alone, the decodes alone, and both."""
        name = chunk_name(chunk)
        alone = self._time(f"chunk {name}", self._alone(chunk))
        self._admit()
        decodes = self._time(f"{self.num_decodes} decodes", self._decode)
        self._admit()
        beside = self._time(f"chunk {name} beside decodes", self._beside(chunk))
        return Figure(name, alone, decodes, beside)

    def _admit(self) -> None:
        self.driver.admit(self.num_decodes, self.context, self._room)

    @property
    def _room(self) -> int:
        return max(64, self.context // 2)

    def _alone(self, chunk: Chunk) -> Launch:
        self.driver.worker.on_attach()
        for start in range(0, chunk.num_computed, MAX_NUM_BATCHED_TOKENS):  # timed on real KV
            size = min(MAX_NUM_BATCHED_TOKENS, chunk.num_computed - start)
            wait(self._chunks(Chunk(size, start), 0)())
            self.driver.worker.on_attach()
        return self._chunks(chunk, 0)

    def _beside(self, chunk: Chunk) -> Launch:
        return self._chunks(chunk, self.num_decodes)

    def _chunks(self, chunk: Chunk, num_decodes: int) -> Launch:
        first = 1 + self.num_decodes * blocks_for(self.context + self._room, BLOCK_SIZE)
        is_first = True

        def launch() -> PendingOutput | None:
            nonlocal is_first
            message, tokens = self.driver.chunk(chunk, first, num_decodes, again=not is_first)
            is_first = False
            return self.driver.worker.execute_model(message, [tokens])

        return launch

    def _decode(self) -> PendingOutput | None:
        return self.driver.worker.execute_model(self.driver.decode(self.num_decodes), [])

    def _time(self, name: str, launch: Launch) -> float:
        once = self._series(launch, 2)
        steps = min(max(3, round(SERIES_S / once)), self._room // (ROUNDS + 2))
        times = [self._series(launch, steps) for _ in range(ROUNDS)]
        if self.trace is not None:
            show(name, self._traced(launch, self.trace / f"{name.replace(' ', '-')}.json.gz"))
        return statistics.median(times) * 1e3

    def _series(self, launch: Launch, steps: int) -> float:
        self.driver.synchronize()
        start = time.perf_counter()
        pipelined(steps, launch)
        self.driver.synchronize()
        return (time.perf_counter() - start) / steps

    def _traced(self, launch: Launch, path: Path) -> StepTable:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            pipelined(TRACED_STEPS, launch)
            self.driver.synchronize()
        return tabulate(write_trace(profiler, path), TRACED_STEPS)


def show(name: str, table: StepTable) -> None:
    """Print a step's device time by kind of kernel."""
    print(f"{name}: traced {table.step_us / 1e3:.2f} ms, {table.kernels_per_step:.0f} kernels")
    for group, us in table.groups.items():
        print(f"  {group:<16} {us / 1e3:>9.2f} ms {100 * table.share(group):>5.1f} %")


def chunk_name(chunk: Chunk) -> str:
    """Return the name of a chunk on the command line."""
    return f"{chunk.num_tokens}@{chunk.num_computed}" if chunk.num_computed else f"{chunk[0]}"


def parse_chunk(text: str) -> Chunk:
    """Read a chunk: `512`, or `512@1024` after 1,024 tokens.

    Raises:
        ValueError: the text is something else.
    """
    num_tokens, _, num_computed = text.partition("@")
    return Chunk(int(num_tokens), int(num_computed or 0))


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--decodes", type=int, default=255)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--chunks", default="512,2048,7936,8192@21808")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chunks = [parse_chunk(text) for text in options.chunks.split(",")]
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
    driver = StageDriver(
        options.model.resolve(),
        options.device,
        max(options.context * 2, *(chunk.num_tokens + chunk.num_computed for chunk in chunks)) + 1,
        options.dtype,
        quantization=options.quantization,
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=options.kv_cache_dtype),
        num_blocks=0 if options.device != "cpu" else 4096,
    )
    driver.start()
    steps = MixedSteps(driver, options.decodes, options.context, options.trace)
    print(f"{'chunk':<14} {'alone':>9} {'decodes':>9} {'beside':>9}  multiple")
    figures = []
    for chunk in chunks:
        figure = steps.measure(chunk)
        figures.append(figure)
        times = f"{figure.alone:>9.2f} {figure.decodes:>9.2f} {figure.beside:>9.2f}"
        print(f"{figure.chunk:<14} {times}  {figure.multiple:.3f}")
    if options.out is not None:
        content = {"model": options.model.name, "figures": [asdict(figure) for figure in figures]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    driver.worker.close()


if __name__ == "__main__":
    main()
