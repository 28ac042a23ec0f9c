"""The cost of scrapes: `python -m benchmarks.scrapes [--model DIR] [--device cuda|cpu]
[--requests 32] [--tokens 1000] [--rounds 6]`.

One daemon with --metrics-listen decodes, in turns without a reader and with one in a process of its
own that reads /metrics ten times a second. Prints the median and the 99th percentile of the time
from step to step, of each round and of all. Target: p99 within 2 %.
"""

import argparse
import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.local_group import devices_of, local_group
from rpc_schema.config import (
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.launcher import serve_command
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits

EVERY_S: Final = 0.1
PROMPT: Final = 64
TARGET: Final = 1.02


class Connection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def read_on(path: str) -> None:
    """Read the metrics every EVERY_S seconds, until the process is ended."""
    due = time.monotonic()
    while True:
        connection = Connection(path)
        connection.request("GET", "/metrics")
        assert b"worker_daemon_step_seconds_count" in connection.getresponse().read()
        due += EVERY_S
        time.sleep(max(0.0, due - time.monotonic()))


def intervals_ms(driver: Driver, num_requests: int, num_tokens: int) -> list[float]:
    """Return the times from decode to decode, with all requests running, in milliseconds."""
    rng = np.random.default_rng(1)
    for index in range(num_requests):
        driver.add_request(
            GenerationRequest(
                id=str(index),
                prompt=rng.integers(100, 200, PROMPT).astype(np.int32),
                max_tokens=num_tokens,
                sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            )
        )
    for _ in driver.run():
        pass
    steps = [each for each in driver.records if each.kind == "decode"]
    return [each.interval_s * 1e3 for each in steps if each.num_requests == num_requests][10:-10]


def figures(times: list[float]) -> tuple[float, float]:
    """Return median and 99th percentile."""
    return statistics.median(times), float(np.quantile(times, 0.99))


def main() -> None:
    """Measure, and print a line for each round and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--model", type=Path, default=here / "models" / "llama-8b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        read_on(args.reader)
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    assert vocab_size > 200, "prompts have tokens 100 to 199"
    config = WorkerConfig(
        parallel=ParallelConfig(),
        model=ModelConfig(
            model=str(args.model.resolve()),
            load_format="dummy",
            max_model_len=PROMPT + args.tokens,
        ),
        scheduler=SchedulerConfig(max_num_seqs=args.requests),
    )
    directory = tempfile.mkdtemp(prefix="wd-metrics-")
    place = f"{directory}/m"
    root = args.model.resolve().parent
    command = serve_command("--metrics-listen", f"unix:{place}", "--model-root", str(root))
    try:
        with local_group(devices_of(args.device), root, command=command) as (group, _):
            loaded = group.prepare(config)
            measure(args, place, lambda: Driver(group, Scheduler(scheduler_limits(loaded, config))))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(args, place, make_driver) -> None:  # type: ignore[no-untyped-def]  # argparse's values
    """Run the rounds, after one that does not count."""
    intervals_ms(make_driver(), args.requests, args.tokens)
    all_times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * args.rounds):
        is_read = number % 2 == 1
        reader = None
        if is_read:
            words = (sys.executable, "-m", "benchmarks.scrapes", "--reader", place)
            reader = subprocess.Popen(words)
            time.sleep(1.0)
        times = intervals_ms(make_driver(), args.requests, args.tokens)
        if reader is not None:
            assert reader.poll() is None, "the reader has ended"
            reader.kill()
            reader.wait()
        all_times[is_read] += times
        p50, p99 = figures(times)
        name = "scraped" if is_read else "alone"
        print(f"{name:8} p50 {p50:7.3f} ms, p99 {p99:7.3f} ms, {len(times)} steps", flush=True)
    (alone_p50, alone_p99), (p50, p99) = figures(all_times[False]), figures(all_times[True])
    met = "met" if p99 <= TARGET * alone_p99 else "not met"
    print(
        f"scraped / alone: p50 {p50 / alone_p50:.3f}, p99 {p99 / alone_p99:.3f} "
        f"(target {TARGET}: {met})"
    )


if __name__ == "__main__":
    main()
