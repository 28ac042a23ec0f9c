"""Measures recovery from a rank killed under load: `python -m benchmarks.recovery --model
benchmarks/models/llama-8b [--shape pp|tp ...] [--rank 0|1] [--page-cache DIR] [--device cuda|cpu]
[--rounds N] [--out FILE]`.

Two daemons serve the shape in the model's config.json with dummy weights. With --page-cache the
weights are first saved to DIR (best on tmpfs) and loaded from there, like a checkpoint in the page
cache; DIR must be empty. Under load one rank gets kill -9, and its successor is started at once.
Prints the times from the kill until the driver knows, the survivor has left its link, the successor
answers and the group serves again, and the parts of the last. Checks that the survivor kept its
process, its weights and its graphs (those without communication). Then, on GPUs, the abort of a
link while the survivor's step thread waits inside CUDA for a rank that is stopped.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.local_group import devices_of, local_group
from rpc_schema.codec import encode_step
from rpc_schema.config import (
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.lifecycle import AbortLink, Profile, Status
from worker_client.driver import Driver
from worker_client.errors import StepFailed, WorkerDied
from worker_client.group.loading import LoadedGroup
from worker_client.group.replacement import ReplacementReport
from worker_client.launcher import Command, LocalDaemons, serve_command
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.wire.liveness import LivenessEvent
from worker_client.wire.worker_client import StepIds, WorkerClient
from worker_client.worker_group import WorkerGroup

NUM_REQUESTS = 32
PROMPT_LEN = 200
NUM_TOKENS = 256
STEPS_BEFORE = 40
MAX_MODEL_LEN = 1024
STEP_DEADLINE_MS = 10_000
SETTLE_S = 0.3
FREE_LIMIT_S = 30.0
TARGETS_S = {"driver knows": 0.1, "survivor free": 2.0, "serving again": 10.0}


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    shape: str
    name: str
    value: float
    unit: str = "s"
    target: float | None = None


def configuration(
    model: Path, shape: str, load_format: Literal["dummy", "sharded_state"]
) -> WorkerConfig:
    """Return a configuration of two ranks."""
    parallel = ParallelConfig(
        pipeline_parallel_size=2 if shape == "pp" else 1,
        tensor_parallel_size=2 if shape == "tp" else 1,
    )
    return WorkerConfig(
        parallel=parallel,
        model=ModelConfig(model=str(model), load_format=load_format, max_model_len=MAX_MODEL_LEN),
        scheduler=SchedulerConfig(
            max_num_seqs=64, max_num_batched_tokens=2048, step_deadline_ms=STEP_DEADLINE_MS
        ),
    )


def command_of(options: argparse.Namespace) -> Command:
    """Return the command lines of daemons that may read the model, and save to and read from the
    page-cache directory."""
    words = ["--model-root", str(options.model.parent)]
    if options.page_cache is not None:
        words += ["--model-root", str(options.page_cache), "--save-root", str(options.page_cache)]
    return serve_command(*words)


def prepare(group: WorkerGroup, options: argparse.Namespace, shape: str) -> LoadedGroup:
    """Load the model, through the page-cache directory if requested."""
    blocks = options.num_blocks or None
    loaded = group.prepare(configuration(options.model, shape, "dummy"), num_gpu_blocks=blocks)
    if options.page_cache is None:
        return loaded
    group.weights.save_sharded_state(shape)
    saved = configuration(options.page_cache / shape, shape, "sharded_state")
    return group.prepare(saved, num_gpu_blocks=blocks, reload=True)


class Load:
    """A load of requests, with a fault injected during it."""

    def __init__(
        self,
        group: WorkerGroup,
        loaded: LoadedGroup,
        act: Callable[[], None],
        recover: Callable[[WorkerDied], object],
    ) -> None:
        """act: called after STEPS_BEFORE steps."""
        self._act = act
        self.results: list[float] = []
        """Arrival times of the steps' results."""
        status = group.get_status()[0]
        assert status.config is not None, "it is loaded"
        self.driver = Driver(
            group,
            Scheduler(scheduler_limits(loaded, status.config)),
            self._count,
            recover=recover,
        )
        rng = np.random.default_rng()
        for index in range(NUM_REQUESTS):
            prompt = rng.integers(3, loaded.metadata.vocab_size, PROMPT_LEN).astype(np.int32)
            self.driver.add_request(
                GenerationRequest(
                    str(index),
                    prompt,
                    max_tokens=NUM_TOKENS,
                    sampling=SamplingParams(ignore_eos=True),
                )
            )

    def run(self) -> None:
        """Serve all requests. Raises RuntimeError if a request did not end with all of its
        tokens."""
        outputs = list(self.driver.run())
        short = [o.req_id for o in outputs if len(o.token_ids) != NUM_TOKENS]
        if len(outputs) != NUM_REQUESTS or short:
            raise RuntimeError(f"{len(outputs)} requests ended, {short} of them too early")

    def _count(self, _: object) -> None:
        self.results.append(time.monotonic())
        if len(self.results) == STEPS_BEFORE:
            self._act()


def free_status(client: WorkerClient) -> Status:
    """Wait until a daemon's step thread is idle and its link left; return the status."""
    deadline = time.monotonic() + FREE_LIMIT_S
    while time.monotonic() < deadline:
        status = client.get_status()
        if status.phase == "IDLE" and status.link_state == "broken":
            return status
        time.sleep(0.005)
    raise RuntimeError(f"the survivor is still in {status.phase}, link {status.link_state}")


def kill_and_replace(
    daemons: LocalDaemons, group: WorkerGroup, loaded: LoadedGroup, shape: str, rank: int
) -> Iterator[Figure]:
    """Kill a rank under load, and start its successor."""
    survivor = group.clients[1 - rank]
    before = survivor.get_status()
    at: dict[str, float] = {}
    replaced: list[ReplacementReport] = []

    def kill() -> None:
        at["killed"] = time.monotonic()
        os.kill(daemons.pids[rank], signal.SIGKILL)

    def recover(died: WorkerDied) -> None:
        at["noticed"] = time.monotonic()
        print(f"  {died}")
        daemons.restart_dead()
        free = free_status(survivor)
        at["free"] = time.monotonic()
        print(f"  survivor: {free.load}, graphs {free.providers.get('graphs')}")
        replaced.append(group.replace(died.rank))
        at["replaced"] = time.monotonic()

    load = Load(group, loaded, kill, recover)
    load.run()
    again = next(moment for moment in load.results if moment > at["replaced"])
    after = survivor.get_status()
    if (after.worker_uid, after.pid) != (before.worker_uid, before.pid):
        raise RuntimeError("the survivor is another process")
    if after.memory_bytes.get("weights") != before.memory_bytes.get("weights"):
        raise RuntimeError("the survivor's weights have changed")
    loads = [sum("(LoadModel)" in line for line in s.transitions) for s in (before, after)]
    if loads[0] != loads[1]:
        raise RuntimeError("the survivor has loaded again")
    killed = at["killed"]
    moments = {"driver knows": at["noticed"], "survivor free": at["free"], "serving again": again}
    for name, moment in moments.items():
        yield Figure(shape, name, moment - killed, target=TARGETS_S[name])
    for phase, seconds in replaced[0].seconds.items():
        yield Figure(shape, f"  {phase}", seconds)
    for when, status in (("before", before), ("after", after)):
        graphs = float(status.providers.get("graphs", "0"))
        yield Figure(shape, f"survivor's graphs {when}", graphs, "")


def abort_inside_cuda(
    daemons: LocalDaemons, group: WorkerGroup, loaded: LoadedGroup, shape: str
) -> Iterator[Figure]:
    """Stop rank 1, let rank 0's step thread wait for the device, and abort its link. The group is
    unusable afterwards."""
    waiting = group.clients[0]
    seconds: list[float] = []

    def abort(event: LivenessEvent) -> None:
        if event.kind != "suspect" or seconds:
            return
        status = waiting.get_status()  # its device waits for rank 1 by now
        ids = StepIds(status.epoch, status.link, status.last_seq + 1)
        # The operation starts with torch.cuda.synchronize.
        profile = Profile(**ids._asdict(), action="start", kind="cuda", prefix="")
        waiting.send(encode_step(profile))
        time.sleep(SETTLE_S)
        stuck = waiting.get_status()
        began = time.monotonic()
        waiting.begin(partial(AbortLink, epoch=status.epoch, cause="the benchmark asks"), 1.0)
        free_status(waiting)
        seconds.append(time.monotonic() - began)
        print(f"  rank 0 had been in {stuck.phase} for {stuck.phase_ms} ms")
        if stuck.phase != "Profile":
            print("  it did not wait inside CUDA: the figure is meaningless")
        os.kill(daemons.pids[1], signal.SIGCONT)

    group.watch.on_event = abort
    load = Load(group, loaded, lambda: os.kill(daemons.pids[1], signal.SIGSTOP), _give_up)
    with suppress(StepFailed, WorkerDied):
        load.run()
    yield Figure(shape, "abort inside CUDA to step thread idle", seconds[0], target=2.0)


def _give_up(died: WorkerDied) -> None:
    raise died


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures, in the order in which they are measured."""
    for shape in options.shapes:
        parallel = configuration(options.model, shape, "dummy").parallel
        devices, root = devices_of(options.device, 2), options.model.parent
        with local_group(devices, root, parallel, command_of(options)) as (group, daemons):
            group.watch.on_event = lambda event: print(f"  {event.kind}: rank {event.rank}")
            loaded = prepare(group, options, shape)
            for _ in range(options.rounds):
                yield from kill_and_replace(daemons, group, loaded, shape, options.rank)
            if options.device == "cuda":
                yield from abort_inside_cuda(daemons, group, loaded, shape)


def main() -> None:
    """Measure, print, and with --out write a list of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", dest="shapes", choices=["pp", "tp"], action="append")
    parser.add_argument("--rank", type=int, choices=[0, 1], default=1)
    parser.add_argument("--page-cache", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--num-blocks", type=int, default=0, help="of the KV cache; 0: what fits")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model = options.model.resolve()
    options.shapes = options.shapes or ["pp", "tp"]
    if options.page_cache is not None:
        options.page_cache.mkdir(parents=True, exist_ok=True)
        options.page_cache = options.page_cache.resolve()
    figures = []
    for figure in measure(options):
        target = "" if figure.target is None else f"  target {figure.target:g}"
        print(f"{figure.shape} {figure.name:<40} {figure.value:9.3f} {figure.unit}{target}")
        sys.stdout.flush()
        figures.append(asdict(figure))
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
