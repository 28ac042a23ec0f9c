"""Measures the parts of a step's time: `python -m benchmarks.step_trace --model DIR
[--quantization fp8] [--kv-cache-dtype fp8] [--out DIRECTORY] [--json FILE]`.

Device side: torch's profiler around a few decodes of 1, 64 and 256 requests and prefills of 8,192
tokens of a worker in this process (two steps in flight, as a driver keeps them); a table by kind of
kernel, and a Chrome trace for each case. Also the time of a step without the profiler.

Host side: the step thread's time at 256 running requests by phase: decode (the message's bytes),
apply (checked against the rows), build (the inputs), launch (forward pass or graph, and everything
else), publish (sampling and the result's copies), hand-over (to the thread that waits for the
result). The clock is read around public methods, which this script replaces with timed ones; the
daemon's code does not measure itself.
"""

import argparse
import gzip
import json
import queue
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.stage_driver import BLOCK_SIZE, StageDriver, pipelined
from benchmarks.trace_table import StepTable, tabulate
from rpc_schema.codec import decode_step, encode_step
from rpc_schema.config import CacheConfig
from rpc_schema.step import ExecuteModel
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.model_runner import SoleStage
from worker_daemon.runner.output import PendingOutput
from worker_daemon.runner.request_state import RequestState

CONTEXT = 160
TRACED_STEPS = 8
TIMED_STEPS = 50
PHASE_STEPS = 200
WARM_UP_STEPS = 8
PREFILL_TOKENS = 8192
DECODES = (1, 64, 256)
TIMED_METHODS: tuple[tuple[str, type, str], ...] = (
    ("apply", RequestState, "apply"),
    ("build", InputBuilder, "build"),
    ("publish", SoleStage, "sample"),
)


@dataclass(frozen=True)
class Case:
    """The measurements of one kind of step."""

    name: str
    wall_us: float
    """Time of a step without the profiler, host and device together."""
    table: StepTable | None
    """None without a device."""


@dataclass(frozen=True)
class Phase:
    """The host's time in one phase of a step, in us."""

    name: str
    p50: float
    p99: float


def decode_case(driver: StageDriver, num_requests: int, traces: Path) -> Case:
    """Decode num_requests requests of CONTEXT tokens and more."""
    driver.admit(num_requests, CONTEXT, WARM_UP_STEPS + TIMED_STEPS + 2 * TRACED_STEPS)

    def launch() -> PendingOutput | None:
        frames = driver.decode_frames(num_requests)
        message = decode_step(frames)
        assert isinstance(message, ExecuteModel)
        return driver.worker.execute_model(message, [])

    return measure_case(driver, f"decode {num_requests}", launch, traces)


def prefill_case(driver: StageDriver, traces: Path) -> Case:
    """Prefill one prompt of PREFILL_TOKENS, a new one each step."""

    def launch() -> PendingOutput | None:
        driver.worker.on_attach()
        message, tokens = driver.prefill(np.zeros(1, np.int64), PREFILL_TOKENS, 0)
        return driver.worker.execute_model(message, [tokens])

    return measure_case(driver, f"prefill {PREFILL_TOKENS}", launch, traces, TRACED_STEPS)


def measure_case(
    driver: StageDriver,
    name: str,
    launch: Callable[[], PendingOutput | None],
    traces: Path,
    timed_steps: int = TIMED_STEPS,
) -> Case:
    """Warm up, time, then trace."""
    pipelined(WARM_UP_STEPS, launch)
    driver.synchronize()
    start = time.perf_counter()
    pipelined(timed_steps, launch)
    driver.synchronize()
    wall_us = (time.perf_counter() - start) / timed_steps * 1e6
    if driver.device == "cpu":
        return Case(name, wall_us, None)
    path = traces / f"{name.replace(' ', '-')}.json.gz"
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        pipelined(TRACED_STEPS, launch)
        driver.synchronize()
    return Case(name, wall_us, tabulate(write_trace(profiler, path), TRACED_STEPS))


def write_trace(profiler: profile, path: Path) -> dict[str, Any]:
    """Write the Chrome trace, compressed, and return it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as plain:
        profiler.export_chrome_trace(plain.name)
        data = Path(plain.name).read_bytes()
    path.write_bytes(gzip.compress(data, 6))
    trace: dict[str, Any] = json.loads(data)
    return trace


class Clock:
    """Adds up the time of a step by phase."""

    def __init__(self) -> None:
        self.steps: defaultdict[str, list[float]] = defaultdict(list)
        self._current: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._current[name] += time.perf_counter() - start

    def end_step(self) -> None:
        """Keep this step's times; the rest of `execute` is `launch`."""
        parts = sum(self._current[name] for name, _, _ in TIMED_METHODS)
        self._current["launch"] = self._current.pop("execute") - parts
        for name, seconds in self._current.items():
            self.steps[name].append(seconds)
        self.steps["all"].append(sum(self._current.values()))
        self._current.clear()

    def phases(self) -> list[Phase]:
        """Median and 99th percentile of each phase."""
        order = ("decode", "apply", "build", "launch", "publish", "hand-over", "all")
        return [
            Phase(name, *(float(v) for v in np.percentile(self.steps[name], (50, 99)) * 1e6))
            for name in order
        ]


@contextmanager
def timed_methods(clock: Clock) -> Iterator[None]:
    """Replace the methods with timed ones while the block runs."""
    originals = [(kind, method, getattr(kind, method)) for _, kind, method in TIMED_METHODS]

    def timed(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            with clock.phase(name):
                return original(*arguments, **options)

        return call

    for (name, _, _), (kind, method, original) in zip(TIMED_METHODS, originals, strict=True):
        setattr(kind, method, timed(name, original))
    try:
        yield
    finally:
        for kind, method, original in originals:
            setattr(kind, method, original)


class Results:
    """A thread that waits for results and encodes them, like the daemon's completion thread; at
    most two steps are ahead of it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PendingOutput | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(2)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_room(self) -> None:
        self._room.acquire()

    def put(self, reply: PendingOutput | None) -> None:
        self._queue.put(reply)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (reply := self._queue.get()) is not None:
            message, arrays = reply.result()
            encode_step(message, arrays)
            self._room.release()


def host_phases(driver: StageDriver, num_requests: int = max(DECODES)) -> list[Phase]:
    """Time PHASE_STEPS decodes of num_requests running requests, phase by phase."""
    driver.admit(num_requests, CONTEXT, WARM_UP_STEPS + PHASE_STEPS)
    clock, results = Clock(), Results()
    with timed_methods(clock):
        for step in range(WARM_UP_STEPS + PHASE_STEPS):
            frames = driver.decode_frames(num_requests)
            results.wait_for_room()
            with clock.phase("decode"):
                message = decode_step(frames)
            assert isinstance(message, ExecuteModel)
            with clock.phase("execute"):
                reply = driver.worker.execute_model(message, [])
            with clock.phase("hand-over"):
                results.put(reply)
            clock.end_step()
            if step == WARM_UP_STEPS - 1:
                clock.steps.clear()
    results.close()
    return clock.phases()


def show(case: Case) -> None:
    """Print one case."""
    print(f"\n{case.name}: {case.wall_us:.0f} us a step")
    if case.table is None:
        return
    table = case.table
    print(f"  traced: {table.step_us:.0f} us, {table.kernels_per_step:.0f} kernels")
    for group, us in table.groups.items():
        print(f"  {group:<16} {us:>9.1f} us {100 * table.share(group):>5.1f} %")


def main() -> None:
    """Measure, print, and write the figures and the traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/step_trace"))
    parser.add_argument("--json", type=Path, help="default: step_trace.json beside the traces")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.model.resolve()
    driver = StageDriver(
        model,
        options.device,
        PREFILL_TOKENS + 1,
        options.dtype,
        quantization=options.quantization,
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=options.kv_cache_dtype),
    )
    driver.start()
    cases = [decode_case(driver, count, options.out) for count in DECODES]
    cases.append(prefill_case(driver, options.out))
    for case in cases:
        show(case)
    phases = host_phases(driver)
    print(f"\nstep thread, {max(DECODES)} requests, us   p50       p99")
    for phase in phases:
        print(f"  {phase.name:<26} {phase.p50:>8.1f} {phase.p99:>9.1f}")
    content = {
        "model": model.name,
        "cases": [asdict(case) for case in cases],
        "phases": [asdict(phase) for phase in phases],
    }
    figures = options.json or options.out / "step_trace.json"
    figures.write_text(json.dumps(content, indent=1) + "\n")
    driver.worker.close()


if __name__ == "__main__":
    main()
