"""`python -m tests.support.soak.steady LIFE`: a driver under a load that stays the same: requests
of several kinds, aborted ones among them, weight updates, and sleep. A line on standard input ends
it."""

import random
import select
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from rpc_schema.config import WorkerConfig
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.soak.plan import FIRST_TOKEN_ID, plan_request
from worker_client.driver import Driver
from worker_client.group.weights import RunningRequests
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

LOAD = 24
"""Unfinished requests at a time."""
UPDATE_S = 2.0
SLEEP_S = 7.0
ABORTED = 0.02
"""Share of the steps with which a request is aborted."""
MAX_HISTORY = 256
"""Of a driver's times, which are not to count as growth."""
RUNNING: tuple[RunningRequests, ...] = ("keep", "drop", "abort")


class SteadyLife(msgspec.Struct, frozen=True):
    """The driver's parameters."""

    endpoints: list[str]
    config: WorkerConfig
    num_gpu_blocks: int
    models: list[str]
    """Checkpoints, in turn."""
    vocab_size: int
    seed: int


class Load:
    """A driver and its counts."""

    def __init__(self, life: SteadyLife, group: WorkerGroup) -> None:
        loaded = group.prepare(life.config, num_gpu_blocks=life.num_gpu_blocks)
        self._life, self._group = life, group
        self._scheduler = Scheduler(scheduler_limits(loaded, life.config))
        self._driver = Driver(group, self._scheduler, max_history=MAX_HISTORY)
        self._rng = random.Random(life.seed)
        self._stem: list[int] = []
        self._open: dict[str, None] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Serve until standard input has a line."""
        update_at = sleep_at = time.monotonic()
        while not select.select([sys.stdin], [], [], 0)[0]:
            now = time.monotonic()
            if now >= update_at:
                self._update()
                update_at = now + UPDATE_S
            if now >= sleep_at:
                self._sleep()
                sleep_at = now + SLEEP_S
            self._step()

    def _step(self) -> None:
        while len(self._open) < LOAD:
            size, number = self._life.vocab_size, self.counts["requests"]
            if number % 8 == 0:  # groups of requests begin alike
                self._stem = [
                    self._rng.randrange(FIRST_TOKEN_ID, self._life.vocab_size) for _ in range(22)
                ]
            request = plan_request(self._rng, f"r{number}", 0.0, self._stem, size)
            self._driver.add_request(request.to_request())
            self._open[request.req_id] = None
            self.counts["requests"] += 1
        if self._rng.random() < ABORTED:
            req_id = self._rng.choice([*self._open])
            self._driver.abort_request(req_id)
            del self._open[req_id]
            self.counts["aborted"] += 1
        for output in self._driver.step():
            self._open.pop(output.req_id, None)
            self.counts[output.finish_reason] += 1
        self.counts["steps"] += 1

    def _update(self) -> None:
        number = self.counts["updates"] = self.counts["updates"] + 1
        weights = self._group.weights
        weights.init_transfer_engine(DiskEngine())
        weights.start_update(running=RUNNING[number % len(RUNNING)])
        weights.update(
            TensorList(), DiskSource(model=self._life.models[number % len(self._life.models)])
        )
        weights.finish_update()

    def _sleep(self) -> None:
        self._group.memory.sleep(1)
        self._group.memory.wake_up()
        self._scheduler.forget_prefixes()
        self.counts["sleeps"] += 1


def main(path: Path) -> None:
    """Run the driver that a file describes; print its counts."""
    life = msgspec.json.decode(path.read_bytes(), type=SteadyLife)
    with WorkerGroup(life.endpoints, life.config.parallel) as group:
        group.attach()
        load = Load(life, group)
        print("ready", flush=True)
        load.run()
        group.detach()
    print(msgspec.json.encode(load.counts).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
