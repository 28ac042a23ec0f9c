"""`python -m tests.support.soak.driver LIFE`: one driver of a soak. It adopts its predecessor's
requests, accepts requests as they arrive, delivers results to the ledger, and obeys lines on
standard input: `sleep SECONDS` and `leave`. Its exit code says how it ended; tracebacks go to
stderr."""

import os
import random
import select
import struct
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rpc_schema.config import WorkerConfig
from rpc_schema.errors import (
    FencedError,
    LeaseExpiredError,
    LeaseHeldError,
    NotAttachedError,
    WorkerDaemonError,
)
from tests.support.soak.ledger import Entry, Ledger, LedgerFenced
from tests.support.soak.plan import PlannedRequest
from tests.support.troubled_driver import hold
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.scheduler import RequestOutput, Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

LEASE_TTLS_S = (2.0, 30.0)
"""A driver takes one of them: the second outlasts all faults, the first only short ones."""
REPLACE_WITHIN_S = 180.0
"""Starting a daemon takes long on a busy host."""
IDLE_S = 0.005

DONE = 0
"""Every request has ended."""
BROKEN = 1
"""An unexpected exception: Python's exit code."""
UNSEATED = 3
"""Another driver has the daemons, or the lease expired."""
GAVE_UP = 4
"""The group could not recover."""
NEVER_SERVED = 6
"""It could not attach or load; the next driver may."""
LEFT = 5
"""It was asked to leave."""

SEATLESS = (FencedError, LeaseExpiredError, NotAttachedError, LeaseHeldError)

PROGRESS = struct.Struct("=qqd")
"""Steps, tokens, time of the last token (time.monotonic())."""


class Life(msgspec.Struct, frozen=True):
    """A driver's parameters."""

    endpoints: list[str]
    config: WorkerConfig
    num_gpu_blocks: int
    requests: str
    """The file of PlannedRequests."""
    ledger: str
    progress: str
    """The file for PROGRESS."""
    began: float
    """Start of the soak (time.monotonic()); arrivals count from it."""


class ProgressFile:
    """This driver's progress, in a file for the supervisor."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._steps = self._tokens = 0

    def count(self, result: StepResult) -> None:
        self._steps += 1
        self._tokens += len(result.token_ids)
        if result.token_ids:
            os.pwrite(self._fd, PROGRESS.pack(self._steps, self._tokens, time.monotonic()), 0)


@dataclass
class Application:
    """The application around the driver: arrivals, cancellations, deliveries."""

    life: Life
    group: WorkerGroup
    scheduler: Scheduler
    driver: Driver
    ledger: Ledger
    arrivals: list[PlannedRequest]
    """Requests not accepted yet, next one last."""
    cancellations: list[tuple[float, str]]
    """(time, request), next one last."""
    open: set[str]
    """Requests accepted, and neither ended nor cancelled."""

    def run(self) -> int:
        """Serve until all requests are done, or until asked to leave."""
        while self.arrivals or self.driver.busy:
            command = read_command()
            if command == "leave":
                return LEFT
            if command.startswith("hold "):
                hold(float(command.removeprefix("hold ")))
            if command.startswith("sleep "):
                self._sleep(float(command.removeprefix("sleep ")))
            self._take_arrivals()
            self._cancel()
            if self.driver.busy:
                self.deliver(self.driver.step())
            else:
                self._idle()
        assert not self.open, f"the driver is idle, but these are open: {sorted(self.open)}"
        return DONE

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        outputs = list(outputs)
        self.ledger.end((out.req_id, out.token_ids, out.finish_reason) for out in outputs)
        self.open.difference_update(out.req_id for out in outputs)

    def _take_arrivals(self) -> None:
        now = time.monotonic()
        arrived = []
        while self.arrivals and self.life.began + self.arrivals[-1].at_s <= now:
            arrived.append(self.arrivals.pop())
        self.ledger.accept(request.req_id for request in arrived)
        for request in arrived:
            self.open.add(request.req_id)
            self.driver.add_request(request.to_request())
            if request.cancel_after_s is not None:
                self.cancellations.append((now + request.cancel_after_s, request.req_id))
        self.cancellations.sort(reverse=True)

    def _cancel(self) -> None:
        now = time.monotonic()
        while self.cancellations and self.cancellations[-1][0] <= now:
            _, req_id = self.cancellations.pop()
            if req_id in self.open:
                self.ledger.cancel(req_id)
                self.open.remove(req_id)
                self.driver.abort_request(req_id)

    def _idle(self) -> None:
        try:
            self.group.look()
        except WorkerDied as died:
            recover(self.group, died)
        time.sleep(IDLE_S)

    def _sleep(self, seconds: float) -> None:
        try:
            self.group.memory.sleep(1)
            time.sleep(seconds)
            self.group.memory.wake_up()
        except WorkerDied as died:
            recover(self.group, died)
        self.scheduler.forget_prefixes()


def recover(group: WorkerGroup, died: WorkerDied) -> None:
    """Wait for the lost daemon's successor."""
    group.replace(died.rank, within_s=REPLACE_WITHIN_S)


def wake(group: WorkerGroup) -> None:
    """Wake the group: the previous driver may have died while it slept."""
    tags = [status.memory_tags for status in group.get_status()]
    if all(tags) and any("asleep" in of_rank.values() for of_rank in tags):
        group.memory.wake_up()


def read_command() -> str:
    """Return a line of standard input if there is one."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return ""
    return os.read(0, 4096).decode().strip()


def read_requests(path: Path) -> list[PlannedRequest]:
    return msgspec.json.decode(path.read_bytes(), type=list[PlannedRequest])


def serve(life: Life) -> int:
    """Run a driver; return its exit code."""
    terms = LeaseTerms(ttl_s=random.choice(LEASE_TTLS_S))
    print(f"lease of {terms.ttl_s:g} s", file=sys.stderr, flush=True)
    progress = ProgressFile(life.progress)
    with WorkerGroup(life.endpoints, life.config.parallel, lease=terms) as group:
        group.attach(keep_requests=True, wait_s=30.0)
        ledger = Ledger(Path(life.ledger))
        before = ledger.begin(group.get_status()[0].epoch)
        wake(group)
        loaded = group.prepare(life.config, num_gpu_blocks=life.num_gpu_blocks)
        scheduler = Scheduler(scheduler_limits(loaded, life.config))
        driver = Driver(
            group,
            scheduler,
            progress.count,
            recover=lambda died: recover(group, died),
        )
        application = make_application(life, group, scheduler, driver, ledger, before)
        adopted = [r for r in group.adopt_requests() if r.req_id in application.open]
        done = scheduler.adopt_requests(adopted)
        running = {request.req_id for request in adopted}
        for request in read_requests(Path(life.requests)):
            if request.req_id in application.open - running:
                driver.add_request(request.to_request())
        print(f"adopted {len(running)} of {len(application.open)}", file=sys.stderr, flush=True)
        application.deliver(done)
        try:
            return application.run()
        except WorkerDaemonError as error:
            if isinstance(error, SEATLESS):
                raise
            traceback.print_exc()
            return GAVE_UP


def make_application(
    life: Life,
    group: WorkerGroup,
    scheduler: Scheduler,
    driver: Driver,
    ledger: Ledger,
    before: list[Entry],
) -> Application:
    """Return the application in the state that the ledger records."""
    accepted = {entry.req_id for entry in before if entry.what == "accepted"}
    ended = {entry.req_id for entry in before if entry.what in ("ended", "cancelled")}
    requests = read_requests(Path(life.requests))
    now = time.monotonic()
    return Application(
        life=life,
        group=group,
        scheduler=scheduler,
        driver=driver,
        ledger=ledger,
        arrivals=[r for r in reversed(requests) if r.req_id not in accepted],
        cancellations=[
            (now + r.cancel_after_s, r.req_id)
            for r in requests
            if r.cancel_after_s is not None and r.req_id in accepted - ended
        ],
        open=accepted - ended,
    )


def main(path: Path) -> int:
    """Run the driver that a file describes."""
    life = msgspec.json.decode(path.read_bytes(), type=Life)
    try:
        return serve(life)
    except (*SEATLESS, LedgerFenced):
        traceback.print_exc()
        return UNSEATED
    except WorkerDaemonError:
        traceback.print_exc()
        return NEVER_SERVED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
