"""Conditions under which a drain ends, or fails."""

import asyncio
import time

import pytest

from rpc_schema.errors import StateError
from tests.support.waiting import PATIENCE_S
from worker_daemon.server.progress import Progress
from worker_daemon.server.session import draining as drains_module
from worker_daemon.server.session.draining import Draining
from worker_daemon.server.session.lease import DriverIdentity, Lease, LeaseRequest
from worker_daemon.server.step_thread import Resume, StopSteps

LIMIT_S = PATIENCE_S


class StepThreadSide:
    """Takes commands, and obeys them where no step runs."""

    def __init__(self, *, busy: bool) -> None:
        self.busy = busy
        self.commands: list[object] = []

    def post(self, command: object) -> None:
        self.commands.append(command)
        if self.busy:
            return
        if isinstance(command, StopSteps):
            command.on_idle()
        elif isinstance(command, Resume):
            command.on_serving()


def draining(side: StepThreadSide, told: list[bool], step_deadline_s: float = 60.0) -> Draining:
    progress = Progress("cpu")
    progress.step_deadline_s = step_deadline_s
    made = Draining(side.post, lambda: told.append(made.is_on), Lease(time.monotonic), progress)
    return made


@pytest.fixture
def long_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends in time has not waited for it."""
    monkeypatch.setattr(drains_module, "NOTICE_S", 10 * LIMIT_S)


@pytest.mark.usefixtures("long_notice")
def test_without_a_driver_nobody_is_given_notice() -> None:
    side, told = StepThreadSide(busy=False), list[bool]()
    drains = draining(side, told)
    asyncio.run(asyncio.wait_for(drains.drain(), LIMIT_S))
    assert (drains.is_on, told) == (True, [True])
    asyncio.run(drains.drain())
    asyncio.run(drains.undo())
    asyncio.run(drains.undo())
    assert (drains.is_on, told) == (False, [True, False])
    assert [type(command) for command in side.commands] == [StopSteps, Resume]


@pytest.mark.usefixtures("long_notice")
def test_holder_that_leaves_ends_its_notice() -> None:
    async def leave_while_draining() -> None:
        waits = asyncio.ensure_future(drains.drain())
        await asyncio.sleep(0.1)
        assert side.commands == []
        lease.release(1)
        await asyncio.wait_for(waits, LIMIT_S)

    side = StepThreadSide(busy=False)
    lease = Lease(time.monotonic)
    lease.grant(DriverIdentity("", b"d"), 1, LeaseRequest(60.0, 60.0))
    drains = Draining(side.post, lambda: None, lease, Progress("cpu"))
    asyncio.run(leave_while_draining())


def test_whoever_waits_hears_that_the_drain_was_undone() -> None:
    async def undo_while_draining() -> None:
        waits = [asyncio.ensure_future(drains.drain()) for _ in range(2)]
        await asyncio.sleep(0.1)
        undoing = asyncio.ensure_future(drains.undo())
        for wait in waits:
            with pytest.raises(StateError, match="undone"):
                await asyncio.wait_for(wait, LIMIT_S)
        assert not undoing.done(), "the step thread has not heard of it"
        side.commands[-1].on_serving()
        await asyncio.wait_for(undoing, LIMIT_S)

    side = StepThreadSide(busy=True)
    drains = draining(side, [])
    asyncio.run(undo_while_draining())


def test_step_that_does_not_end_is_named() -> None:
    drains = draining(StepThreadSide(busy=True), [], step_deadline_s=-3.9)
    with pytest.raises(StateError, match="STARTING has run for"):
        asyncio.run(drains.drain())
    assert drains.is_on
    with pytest.raises(StateError, match=r"STARTING has run for .* taken again once it ends"):
        asyncio.run(drains.undo())
