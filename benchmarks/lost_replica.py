"""Measures the gap that a lost replica leaves: `python -m benchmarks.lost_replica --model DIR
[--replicas N] [--way apart|shared] [--requests N] [--tokens N] [--eager] [--device cpu]
[--out FILE.json]`.

Replicas of their own steps (apart), or in lockstep with shared experts, serve greedy requests of
512 tokens. Once all have tokens, the last replica's daemon gets kill -9, and its successor is
started at once. Prints the longest time between two tokens of a request, of those that went on in
another replica (or, in lockstep, in their own) and of the others; the tokens that are missing; and
the time until the successor serves.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import workloads
from benchmarks.local_group import devices_of
from benchmarks.replicas import as_requests, config_of
from rpc_schema.config import ParallelConfig
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.launcher import LocalDaemons
from worker_client.replicas.driver import DataParallelDriver
from worker_client.replicas.group import DataParallelGroup
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.requests import GenerationRequest, RequestOutput
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

PROMPT_LEN = 512
SETTLE_S = 1.0
MAX_MODEL_LEN = 4096


@dataclass
class Reader:
    """Reads one request, and notes when its tokens come."""

    request: GenerationRequest
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    output: RequestOutput | None = None

    async def read(self, driver: AsyncDriver | DataParallelDriver) -> None:
        """Read it to its end."""
        async for each in driver.generate(self.request):
            self.times.append(time.monotonic())
            self.num_tokens += len(each.token_ids)
            self.output = each.output or self.output

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two of its tokens."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((second - first for first, second in pairs), default=0.0)

    @property
    def was_moved(self) -> bool:
        """True if it was computed again."""
        return self.output is not None and self.output.num_preemptions > 0


@dataclass(frozen=True)
class Figures:
    """Gaps in seconds."""

    way: str
    num_replicas: int
    num_moved: int
    longest_gap_of_moved_s: float
    longest_gap_of_others_s: float
    num_missing_tokens: int
    tokens_per_s: float
    serves_again_s: float | None
    """From the kill; None: the requests had ended before."""


@dataclass
class Recovery:
    """Replaces the lost rank, and notes when."""

    daemons: LocalDaemons
    done: float | None = None

    def recover(self, group: WorkerGroup, died: WorkerDied) -> None:
        with self.daemons.kept_alive():
            report = group.replace(died.rank)
        self.done = time.monotonic()
        print(f"replaced: {report}", flush=True)


@contextlib.contextmanager
def open_driver(
    group: WorkerGroup, scheduler: Scheduler | LockstepScheduler, recovery: Recovery
) -> Iterator[Driver]:
    """Return a replica's driver, or that of all in lockstep."""
    yield Driver(group, scheduler, recover=partial(recovery.recover, group))


async def measure(
    driver: AsyncDriver | DataParallelDriver,
    requests: Sequence[GenerationRequest],
    pid: int,
    recovery: Recovery,
    options: argparse.Namespace,
) -> Figures:
    """Serve the requests, kill the process, and wait for all of them."""
    async with driver:
        await Reader(requests[0]).read(driver)
        readers = [Reader(request) for request in requests]
        began = time.monotonic()
        tasks = [asyncio.create_task(each.read(driver)) for each in readers]
        while not all(each.times for each in readers):
            await asyncio.sleep(0.01)
        await asyncio.sleep(SETTLE_S)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        seconds = time.monotonic() - began
        again = recovery.done
    moved = [each.longest_gap_s for each in readers if each.was_moved]
    others = [each.longest_gap_s for each in readers if not each.was_moved]
    missing = sum(each.request.max_tokens - each.num_tokens for each in readers)
    return Figures(
        options.way,
        options.replicas,
        len(moved),
        max(moved, default=0.0),
        max(others, default=0.0),
        missing,
        sum(each.num_tokens for each in readers) / seconds,
        None if again is None else again - killed,
    )


def main() -> None:
    """Measure once; with --out write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--way", choices=["apart", "shared"], default="apart")
    parser.add_argument("--requests", type=int, default=64, help="of each replica")
    parser.add_argument("--tokens", type=int, default=1024, help="of each request")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--num-gpu-blocks", type=int, help="default: what fits")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model, count = options.model.resolve(), options.replicas
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    made = workloads.fixed(vocab_size, options.requests * count, PROMPT_LEN, options.tokens)
    shares, blocks = options.way == "shared", {"num_gpu_blocks": options.num_gpu_blocks}
    parallel = ParallelConfig(data_parallel_size=count, data_parallel_lockstep=shares)
    config, root = config_of(options, parallel, shares=shares), options.model.parent
    driver: AsyncDriver | DataParallelDriver
    with LocalDaemons(devices_of(options.device, count), root) as daemons:
        recovery = Recovery(daemons)
        group: WorkerGroup | DataParallelGroup
        if shares:
            group = WorkerGroup(daemons.endpoints, parallel)
            group.attach()
            limits = scheduler_limits(group.prepare(config, **blocks), config)
            own = LockstepScheduler([Scheduler(limits) for _ in range(count)])
            driver = AsyncDriver(partial(open_driver, group, own, recovery))
        else:
            group = DataParallelGroup(daemons.endpoints, parallel)
            group.attach()
            loaded = group.prepare(config, **blocks)
            pairs = zip(group.replicas, loaded, strict=True)
            driver = DataParallelDriver(
                [
                    partial(open_driver, own, Scheduler(scheduler_limits(model, config)), recovery)
                    for own, model in pairs
                ]
            )
        with group:
            pid = daemons.pids[-1]
            figures = asyncio.run(measure(driver, as_requests(made), pid, recovery, options))
    print(json.dumps(asdict(figures), indent=1), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(figures)) + "\n")


if __name__ == "__main__":
    main()
