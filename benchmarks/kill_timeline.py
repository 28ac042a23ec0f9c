"""Records tokens per second while the driver and then a daemon are killed:
`python -m benchmarks.kill_timeline --model DIR [--device cuda|cpu] [--pp P] [--tp T] --out F.json`.

Local daemons with dummy weights of the shapes in the model's config.json. A driver keeps N requests
decoding; this process, which is neither driver nor daemon, submits them, and notes when it gets
each token. At 10 s the driver gets SIGKILL, and another one adopts the requests; at 40 s the last
rank's daemon gets SIGKILL and is started again. After 60 s nothing new is submitted, and all
requests end. Then the same requests run twice undisturbed. Prints the outages, tokens lost, and the
requests with equal tokens; ends with 1 if tokens were lost, or differ from those of the undisturbed
runs, which are equal.
"""

import argparse
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

import msgspec
import torch

from benchmarks.local_group import devices_of
from benchmarks.observed_driver import Load, Plan, Told
from benchmarks.records import BenchRun, current_commit
from rpc_schema.config import ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

WARM_TOKENS = 20
"""Tokens that each of the first requests has when the time of the record begins."""
DRIVER_TELLS_WITHIN_S = 600.0
"""Longest silence of a driver: it loads, compiles, or waits for a daemon."""
LINES_TOLD = 30
SCORED = 32
"""Most requests with differing tokens whose tokens are scored."""


class Kill(msgspec.Struct):
    """A kill, and what followed. Times in seconds, since the beginning of the record or since the
    kill."""

    what: str
    planned_s: float
    at_s: float = 0.0
    outage_s: float | None = None
    """From the kill to the first new token afterwards."""
    num_adopted: int = 0
    """Requests that the next driver found in the daemons, and the tokens whose KV was kept."""
    num_kv_tokens_kept: int = 0
    replaced_s: dict[str, float] = {}
    """Phases of the replacement of a daemon."""


@dataclass
class Received:
    """The tokens that the observer has, by request."""

    load: Load
    tokens: dict[int, list[int]] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens that were new."""
    num_lost: int = 0
    """Tokens that came with a gap before them, or again and different."""

    def take(self, now: float, told: Told) -> int:
        """Note a line's tokens; return how many were new."""
        num_new = 0
        for number, position, token in zip(told.requests, told.positions, told.tokens, strict=True):
            have = self.tokens[number]
            if position == len(have):
                have.append(token)
                num_new += 1
            elif position > len(have) or have[position] != token:
                self.num_lost += 1
        if num_new:
            self.arrivals.append((now, num_new))
        return num_new

    def has_ended(self, number: int) -> bool:
        """Return True if the request has all its tokens."""
        return len(self.tokens[number]) == self.load.num_tokens(number)


class ObservedDriver:
    """A driver's process, and a thread that notes when each of its lines arrives."""

    def __init__(self, plan: Plan) -> None:
        self._lines: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        words = ["-m", "benchmarks.observed_driver", msgspec.json.encode(plan).decode()]
        with ExitStack() as files:
            self._errors = files.enter_context(TemporaryFile("w+"))
            self._process = files.enter_context(
                subprocess.Popen(
                    [sys.executable, *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                )
            )
            self._files = files.pop_all()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, numbers: Iterable[int]) -> None:
        """Send requests to it."""
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):  # the next read() says why it has ended
            self._process.stdin.write(b"".join(b"%d\n" % number for number in numbers))
            self._process.stdin.flush()

    def read(self, wait_s: float) -> tuple[float, Told] | None:
        """Return the next line and the time at which it came; None if there is none in time.

        Raises:
            RuntimeError: the driver has ended; the text has what it said last.
        """
        try:
            now, line = self._lines.get(timeout=wait_s)
        except queue.Empty:
            return None
        if not line:
            raise RuntimeError(f"a driver has ended with {self._process.wait()}:\n{self._said()}")
        return now, msgspec.json.decode(line, type=Told)

    def kill(self) -> list[tuple[float, Told]]:
        """Kill it with SIGKILL; return the whole lines that it had written. A line that it was
        writing is dropped: the next driver has its tokens."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        self._files.close()
        return [
            (now, msgspec.json.decode(line, type=Told))
            for now, line in lines
            if line.endswith(b"\n")
        ]

    def leave(self) -> None:
        """Let it end by itself. Raises RuntimeError if it ends with an error."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        status = self._process.wait(DRIVER_TELLS_WITHIN_S)
        self._reader.join()
        said = self._said()
        self._files.close()
        if status:
            raise RuntimeError(f"a driver has ended with {status}:\n{said}")

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        while line := self._process.stdout.readline():
            self._lines.put((time.monotonic(), line))
        self._lines.put((time.monotonic(), b""))

    def _said(self) -> str:
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-LINES_TOLD:]).rstrip()


@dataclass
class Run:
    """One run of requests: submits them, notes their tokens, and kills."""

    plan: Plan
    num_open: int
    """Requests that are open at any time, as long as there are more."""
    daemons: LocalDaemons
    numbers: Iterator[int]
    """Requests to submit."""
    kills: list[Kill]
    seconds: float = float("inf")
    """Time after which nothing more is submitted, if tokens have come after the last kill."""
    origin: float = 0.0
    """Start of the record (time.monotonic()), once the first requests decode."""
    awaited: Kill | None = None
    """The last kill, until a new token has come."""
    is_back: bool = True
    """False from a kill until its victim's successor serves."""

    def __post_init__(self) -> None:
        self.received = Received(self.plan.load)
        self.open: list[int] = []
        self.driver = ObservedDriver(self.plan)
        self._to_come = list(self.kills)

    def run(self, restarts: ThreadPoolExecutor) -> None:
        """Run until all requests have ended, and the driver has left.

        Raises:
            RuntimeError: a driver has ended or is silent, or a daemon was not started again.
        """
        heard = time.monotonic()
        self._submit()
        while self.open:
            self._kill_if_due(restarts)
            found = self.driver.read(0.005)
            if found is not None:
                heard = found[0]
                self._take(*found)
            elif time.monotonic() - heard > DRIVER_TELLS_WITHIN_S:
                raise RuntimeError(f"the driver is silent for {DRIVER_TELLS_WITHIN_S:g} s")
        self.driver.leave()

    @property
    def elapsed_s(self) -> float:
        """Time since the record began."""
        return time.monotonic() - self.origin if self.origin else 0.0

    def _submit(self) -> None:
        """Submit requests until enough are open, or there are no more."""
        begun: list[int] = []
        is_over = self.elapsed_s >= self.seconds and not self._to_come and self.awaited is None
        while len(self.open) < self.num_open and not is_over:
            number = next(self.numbers, None)
            if number is None:
                break
            self.received.tokens[number] = []
            self.open.append(number)
            begun.append(number)
        if begun:
            self.driver.submit(begun)

    def _take(self, now: float, told: Told) -> None:
        if self.awaited is not None and told.num_adopted:
            self.awaited.num_adopted = told.num_adopted
            self.awaited.num_kv_tokens_kept = told.num_kv_tokens_kept
        if self.awaited is not None and told.replaced_s is not None:
            self.awaited.replaced_s = told.replaced_s
            self.is_back = True
        num_new = self.received.take(now, told)
        if self.awaited is not None and self.is_back and num_new:
            self.awaited.outage_s = now - self.origin - self.awaited.at_s
            self.awaited = None
        ended = {number for number in told.requests if self.received.has_ended(number)}
        if ended:
            self.open = [number for number in self.open if number not in ended]
            self._submit()
        if not self.origin and all(
            len(self.received.tokens[number]) >= WARM_TOKENS for number in self.open
        ):
            self.origin = now

    def _kill_if_due(self, restarts: ThreadPoolExecutor) -> None:
        """Kill what is due, once tokens have come after the kill before it."""
        if not self._to_come or self.awaited is not None or not self.origin:
            return
        if self.elapsed_s < self._to_come[0].planned_s:
            return
        kill = self._to_come.pop(0)
        kill.at_s = self.elapsed_s
        act = self._kill_driver if kill.what == "driver" else self._kill_daemon
        act(restarts)
        self.awaited = kill

    def _kill_driver(self, _: ThreadPoolExecutor) -> None:
        for now, told in self.driver.kill():
            self.received.take(now, told)
        self.open = [number for number in self.open if not self.received.has_ended(number)]
        self.driver = ObservedDriver(
            msgspec.structs.replace(self.plan, open=self.open, reload=False)
        )

    def _kill_daemon(self, restarts: ThreadPoolExecutor) -> None:
        self.is_back = False
        os.kill(self.daemons.pids[-1], signal.SIGKILL)
        restarts.submit(self.daemons.restart_dead)


def buckets(
    arrivals: Iterable[tuple[float, int]], origin: float, seconds: float, bucket_s: float
) -> list[int]:
    """Return the number of tokens that arrived in each bucket of the record."""
    counts = [0] * round(seconds / bucket_s)
    for moment, num_tokens in arrivals:
        index = int((moment - origin) // bucket_s)
        if 0 <= index < len(counts):
            counts[index] += num_tokens
    return counts


def num_equal(one: dict[int, list[int]], other: dict[int, list[int]]) -> int:
    """Return how many requests have the same tokens in both runs."""
    return sum(one[number] == other[number] for number in one)


def largest_shortfall(plan: Plan, tokens: dict[int, list[int]]) -> float:
    """Compute, in one pass over each request's prompt and tokens, by how many nats a token was less
    likely than the most likely one at its place: 0 if all were the most likely."""
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach()
        loaded = group.prepare(plan.config, reload=True)
        driver = Driver(group, Scheduler(scheduler_limits(loaded, plan.config)))
        sampling = SamplingParams(prompt_logprobs=1, ignore_eos=True)
        for number, generated in tokens.items():
            context = plan.load.prompt(number) + generated
            driver.add_request(
                GenerationRequest(str(number), context, max_tokens=1, sampling=sampling)
            )
        shortfall = 0.0
        for output in driver.run():
            if output.prompt_logprobs is None:
                raise RuntimeError(f"request {output.req_id} was not scored: {output.error}")
            for found in output.prompt_logprobs[plan.load.prompt_len :]:
                assert found is not None, "only the first token has none"
                shortfall = max(shortfall, float(found.logprobs[1] - found.logprobs[0]))
        group.detach()
    return shortfall


def plan_of(options: argparse.Namespace, endpoints: list[str]) -> Plan:
    """Return what the first driver is started with."""
    shape = json.loads((options.model / "config.json").read_text())
    most = options.prompt_len + options.most_tokens
    config = WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=options.pp, tensor_parallel_size=options.tp),
        model=ModelConfig(model=str(options.model), load_format="dummy", max_model_len=most + 1),
        scheduler=SchedulerConfig(max_num_seqs=options.requests),
    )
    load = Load(
        options.seed,
        shape["vocab_size"],
        options.prompt_len,
        options.least_tokens,
        options.most_tokens,
    )
    return Plan(endpoints, config, load)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run with kills and without, compare, print, and return what was found."""
    kills = [Kill("driver", options.driver_kill), Kill("daemon", options.daemon_kill)]
    devices = devices_of(options.device, options.pp * options.tp)
    with (
        LocalDaemons(devices, options.model.parent) as daemons,
        ThreadPoolExecutor(1, "restarts") as restarts,
    ):
        plan = plan_of(options, daemons.endpoints)
        run = Run(plan, options.requests, daemons, count(), kills, options.seconds)
        run.run(restarts)
        found = run.received
        for kill in kills:
            assert kill.outage_s is not None, "the load goes on until a token has come"
            say(f"{kill.what} killed at {kill.at_s:.2f} s: no token for {kill.outage_s:.2f} s")
            phases = [f"{phase} {seconds:.2f}" for phase, seconds in kill.replaced_s.items()]
            if phases:
                say(f"  of which its successor's {', '.join(phases)}")
        num_tokens = sum(map(len, found.tokens.values()))
        say(f"{len(found.tokens)} requests, {num_tokens} tokens, tokens lost {found.num_lost}")
        result = {
            "tokens": buckets(found.arrivals, run.origin, options.seconds, options.bucket),
            "kills": msgspec.to_builtins(kills),
            "num_requests": len(found.tokens),
            "num_tokens": num_tokens,
            "tokens_lost": found.num_lost,
        }
        if options.undisturbed:
            again = msgspec.structs.replace(plan, reload=True)
            controls = []
            for _ in range(options.undisturbed):
                numbers = iter(sorted(found.tokens))
                control = Run(again, options.requests, daemons, numbers, [])
                control.run(restarts)
                controls.append(control.received.tokens)
            result |= compared(again, found.tokens, controls)
    return result


def compared(
    plan: Plan, tokens: dict[int, list[int]], controls: list[dict[int, list[int]]]
) -> dict[str, Any]:
    """Compare a run's tokens with those of undisturbed runs, and these with each other; print and
    return it. Where rounding decides, two undisturbed runs differ too: so the tokens of requests
    that differ are also scored in one pass over each."""
    equal = num_equal(tokens, controls[0])
    distinct = statistics.median(len(set(of_request)) for of_request in tokens.values())
    say(f"a request has {distinct:g} distinct tokens (median)")
    say(f"tokens equal those of an undisturbed run: {equal} of {len(tokens)} requests")
    result: dict[str, Any] = {"num_equal": equal, "num_distinct_tokens": distinct}
    if len(controls) > 1:
        repeated = num_equal(controls[0], controls[1])
        say(f"two undisturbed runs equal each other: {repeated} of {len(tokens)} requests")
        result["num_repeated"] = repeated
    differing = [number for number in tokens if tokens[number] != controls[0][number]][:SCORED]
    if differing:
        scored = {number: tokens[number] for number in differing}
        same = {number: controls[0][number] for number in differing}
        result["num_scored"] = len(differing)
        result["shortfall_nats"] = largest_shortfall(plan, scored)
        result["undisturbed_shortfall_nats"] = largest_shortfall(plan, same)
        say(
            f"each token of {len(differing)} requests that differ is within "
            f"{result['shortfall_nats']:.3g} nats of the most likely one, undisturbed "
            f"{result['undisturbed_shortfall_nats']:.3g}"
        )
    return result


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64, help="that are open at any time")
    parser.add_argument("--prompt-len", type=int, default=500)
    parser.add_argument("--least-tokens", type=int, default=256, help="that a request generates")
    parser.add_argument("--most-tokens", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--driver-kill", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--daemon-kill", type=float, default=40.0, metavar="SECONDS")
    parser.add_argument("--bucket", type=float, default=0.25, metavar="SECONDS")
    parser.add_argument("--undisturbed", type=int, choices=[0, 1, 2], default=2, metavar="RUNS")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    return options


def main() -> None:
    """Measure, print, and with --out write the record."""
    options = read_options()
    say(f"seed {options.seed}")
    result = measure(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    command = " ".join(["python -m benchmarks.kill_timeline", *sys.argv[1:]])
    run = asdict(BenchRun(datetime.now(UTC).date().isoformat(), device, current_commit(), command))
    settings = {
        name: getattr(options, name)
        for name in ("pp", "tp", "requests", "prompt_len", "least_tokens", "most_tokens", "seconds")
    }
    record = {
        "run": run,
        "model": options.model.name,
        **settings,
        "bucket_s": options.bucket,
        "seed": options.seed,
        **result,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record) + "\n")
    is_repeated = result.get("num_repeated") == result["num_requests"]
    differs = is_repeated and result["num_equal"] != result["num_requests"]
    if result["tokens_lost"] or differs:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
