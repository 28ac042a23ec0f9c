"""`python -m tests.support.far_driver PLAN`: a driver that obeys commands, one word per line:
`attach`, `load` (attach and load again), `generate` (all of the plan's requests), `begin` (the
same, but pause after some steps until the next line), `close`. Prints results and liveness events
as lines of JSON. For drivers on a separate host."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rpc_schema.config import WorkerConfig
from rpc_schema.errors import WorkerDaemonError
from tests.support.forked_processes import ForkedPopen
from tests.support.serving import greedy_request, scheduler_limits
from tests.support.waiting import PATIENCE_S
from worker_client.driver import Driver
from worker_client.group.loading import LoadedGroup
from worker_client.group.outcomes import StepFuture
from worker_client.scheduler import Scheduler
from worker_client.scheduler_output import SchedulerOutput
from worker_client.wire.keys import read_keys
from worker_client.wire.lease import LeaseTerms
from worker_client.wire.liveness import LivenessEvent
from worker_client.worker_group import WorkerGroup

NUM_GPU_BLOCKS = 128
WAIT_S = PATIENCE_S
STEPS_BEFORE_PAUSE = 6


class Plan(msgspec.Struct, frozen=True):
    """The daemons to drive, and the requests to generate."""

    endpoints: list[str]
    key_file: str
    known_daemons: str
    config: WorkerConfig
    prompts: dict[str, list[int]]
    max_tokens: int
    lease_ttl_s: float


class Said(NamedTuple):
    """A line that the driver printed: `ready`, `attached`, `paused`, `suspect`, `back`,
    `dead`, `generated`, or the name of an error."""

    what: str
    at: float
    """time.monotonic(), which all processes of a host share."""
    rank: int = 0
    detail: str = ""
    tokens: dict[str, list[int]] = {}  # noqa: RUF012  # never changed
    num_replayed: int = 0


class FarDriver:
    """A test's handle of such a process."""

    def __init__(self, plan: Plan, within: Sequence[str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = ForkedPopen(
                [*within, sys.executable, "-m", "tests.support.far_driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._heard: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        self.tell(msgspec.json.encode(plan).decode())

    def tell(self, word: str) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def wait_for(self, *what: str, rank: int | None = None) -> Said:
        """Return the next line about one of these; those before it are dropped."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                said = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the driver never said {what}") from None
            assert said.what not in ("end", *UNEXPECTED) or said.what in what, said
            if said.what in what and rank in (None, said.rank):
                return said

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(Said(*json.loads(line)))
        self._heard.put(Said("end", time.monotonic()))


UNEXPECTED = ("dead", "WorkerDied", "LeaseExpiredError", "FencedError", "LeaseHeldError")
"""Lines that fail a test unless it waits for them."""


def say(what: str, **fields: object) -> None:
    """Write a line."""
    said = Said(what, time.monotonic(), **fields)  # type: ignore[arg-type]
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


class ReplayCounter:
    """A group that counts replayed replies."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._futures: list[StepFuture] = []
        self.max_in_flight = group.max_in_flight

    def execute_model(self, output: SchedulerOutput) -> StepFuture:
        self._futures.append(self._group.execute_model(output))
        return self._futures[-1]

    @property
    def num_replayed(self) -> int:
        return sum(future.replayed for future in self._futures)


def generate(group: WorkerGroup, loaded: LoadedGroup, plan: Plan, pause_after: int = 0) -> None:
    """Serve all of the plan's requests. pause_after: a number of steps, 0 for no pause."""
    counter = ReplayCounter(group)

    def pause(_: object) -> None:
        if len(driver.records) == pause_after:
            say("paused")
            sys.stdin.readline()

    driver = Driver(counter, Scheduler(scheduler_limits(group, loaded)), pause)
    for name, prompt in plan.prompts.items():
        driver.add_request(greedy_request(name, prompt, plan.max_tokens))
    tokens = {output.req_id: list(map(int, output.token_ids)) for output in driver.run()}
    say("generated", tokens=tokens, num_replayed=counter.num_replayed)


def main() -> None:
    """Run the driver."""
    plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
    keys = read_keys(plan.key_file, Path(plan.known_daemons))
    terms = LeaseTerms(ttl_s=plan.lease_ttl_s)

    def hear(event: LivenessEvent) -> None:
        say(event.kind, rank=event.rank, detail=f"{event.signal}: {event.detail}")

    with WorkerGroup(plan.endpoints, plan.config.parallel, keys, lease=terms) as group:
        group.watch.on_event = hear
        say("ready")
        while line := sys.stdin.readline():
            try:
                if line.strip() in ("attach", "load"):
                    group.attach()
                    reload = line.strip() == "load"
                    loaded = group.prepare(
                        plan.config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=reload
                    )
                    say("attached")
                elif line.strip() == "generate":
                    generate(group, loaded, plan)
                elif line.strip() == "begin":
                    generate(group, loaded, plan, STEPS_BEFORE_PAUSE)
                else:
                    break
            except WorkerDaemonError as error:
                say(type(error).__name__, detail=str(error))


if __name__ == "__main__":
    main()
