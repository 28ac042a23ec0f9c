"""A soak for memory: an undisturbed load for a long time, while the memory of driver and daemons
must stay the same.

After a warm-up of a quarter of the time, the rest is cut into windows. A process's figure for a
window is its smallest resident set there: what is only used for a while does not count. The growth
is the slope of these figures by Theil and Sen (the median of the slopes between all pairs, which
single outliers do not move), times the length of the rest. It may be MAX_GROWTH_MIB, however long
the run is: the longer, the smaller the leak that shows."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.command_line import ask_status, environment, short_directory
from tests.support.serving import worker_config
from tests.support.soak.scene import weigh
from tests.support.soak.steady import SteadyLife

MAX_GROWTH_MIB = 4.0
WARM_UP_SHARE = 0.25
NUM_WINDOWS = 12
SAMPLE_S = 0.5
STARTS_WITHIN_S = 120.0
NUM_GPU_BLOCKS = 700
TRACE_S = 20.0
"""Time for a report of allocations."""


class Growth(NamedTuple):
    """What a process has gained."""

    name: str
    mib: float
    """By the slope, over all windows."""
    first_mib: float
    """Smallest resident set in the first window."""
    last_mib: float
    """The same, in the last one."""


class MemoryWatch:
    """The resident sets of some processes."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}

    def sample(self) -> None:
        """Take a sample of each."""
        for name, pid in self._pids.items():
            weight = weigh(pid)
            assert weight is not None, f"{name} has ended"
            self._samples[name].append((time.monotonic(), weight.rss_mib))

    def growths(self) -> list[Growth]:
        """Return the growth of each process over the samples so far."""
        return [growth_of(name, samples) for name, samples in self._samples.items()]


def growth_of(name: str, samples: Sequence[tuple[float, float]]) -> Growth:
    """Return a process's growth. samples: (seconds, MiB), in the order of time."""
    begin, end = samples[0][0], samples[-1][0]
    size = (end - begin) / NUM_WINDOWS
    windows: dict[int, list[tuple[float, float]]] = {}
    for at, mib in samples:
        windows.setdefault(min(NUM_WINDOWS - 1, int((at - begin) / size)), []).append((at, mib))
    least = [min(window, key=lambda sample: sample[1]) for _, window in sorted(windows.items())]
    slopes = [
        (after[1] - before[1]) / (after[0] - before[0]) for before, after in combinations(least, 2)
    ]
    slope = statistics.median(slopes)
    return Growth(name, slope * (end - begin), least[0][1], least[-1][1])


def memory_soak(
    *, seconds: float, seed: int, traces: bool = False, say: Callable[[str], object] = print
) -> dict[str, object]:
    """Run one; return its results. traces: trace the allocations of all processes after the
    warm-up, which takes time and memory, and print those of each that grows.

    Raises AssertionError: a process has grown by more than MAX_GROWTH_MIB.
    """
    say(f"seed {seed}: {seconds:g} s, of which {WARM_UP_SHARE:.0%} warm up")
    directory = short_directory()
    models = [make_checkpoint(directory, seed=95 + number).path for number in range(2)]
    config = worker_config(
        models[0], 2, 1, max_num_seqs=16, max_num_batched_tokens=64, enable_sleep_mode=True
    )
    endpoints = [f"ipc://{directory}/w{rank}" for rank in range(config.parallel.world_size)]
    commands = {
        f"daemon {rank}": [
            *("worker_daemon", "serve", "--endpoint", endpoint, "--device", "cpu"),
            *("--model-root", os.fspath(directory)),
        ]
        for rank, endpoint in enumerate(endpoints)
    }
    life = SteadyLife(
        endpoints, config, NUM_GPU_BLOCKS, list(map(os.fspath, models)), VOCAB_SIZE, seed
    )
    (directory / "life.json").write_bytes(msgspec.json.encode(life))
    commands["driver"] = ["tests.support.soak.steady", os.fspath(directory / "life.json")]
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, words in commands.items():
            if name == "driver":
                _wait_for(endpoints)
            processes[name] = _start(directory, name, words, traces=traces)
        driver = processes["driver"]
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n", (directory / "driver.log").read_text()[-4000:]
        growths = _watch(processes, seconds, traces=traces)
        counts, _ = driver.communicate("leave\n", timeout=STARTS_WITHIN_S)
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(STARTS_WITHIN_S)
    found = {growth.name: [round(figure, 2) for figure in growth[1:]] for growth in growths}
    say(json.dumps({"seconds": seconds, "counts": json.loads(counts), "growth_mib": found}))
    grown = [growth for growth in growths if growth.mib > MAX_GROWTH_MIB]
    reports = [directory / f"{growth.name}.traced" for growth in grown]
    texts = [f"{path.stem}:\n{path.read_text()}" for path in reports if path.exists()]
    if grown and not traces:
        texts = ["--trace shows where"]
    assert not grown, "\n".join([f"grown: {grown}", *texts])
    shutil.rmtree(directory)
    return found


def _start(
    directory: Path, name: str, words: Sequence[str], *, traces: bool
) -> "subprocess.Popen[str]":
    if traces:
        report = os.fspath(directory / f"{name}.traced")
        words = ["tests.support.soak.traced", report, *words]
    with (directory / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if name == "driver" else log,
            stderr=log,
            text=True,
            env=environment(directory),
        )


def _wait_for(endpoints: Sequence[str]) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    for endpoint in endpoints:
        while ask_status(endpoint) is None:
            assert time.monotonic() < until, f"{endpoint} does not answer"
            time.sleep(0.05)


def _watch(
    processes: "dict[str, subprocess.Popen[str]]", seconds: float, *, traces: bool
) -> list[Growth]:
    """Sample until the time is over; return the growth of each process since the warm-up."""
    time.sleep(WARM_UP_SHARE * seconds)
    if traces:
        _ask_for_traces(processes)
    watch = MemoryWatch({name: process.pid for name, process in processes.items()})
    for _ in range(2):
        until = time.monotonic() + (1.0 - WARM_UP_SHARE) * seconds / 2
        while time.monotonic() < until:
            watch.sample()
            time.sleep(SAMPLE_S)
        if traces:
            _ask_for_traces(processes)
    return watch.growths()


def _ask_for_traces(processes: "dict[str, subprocess.Popen[str]]") -> None:
    for process in processes.values():
        process.send_signal(signal.SIGUSR1)
    time.sleep(TRACE_S)  # outside of the samples: a snapshot takes much memory
