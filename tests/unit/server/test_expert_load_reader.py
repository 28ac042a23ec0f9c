"""The reading of expert loads for a status: fresh if the step thread is free, never a long wait,
and at most one question at a time."""

import asyncio
import time
from dataclasses import dataclass, field, replace

import pytest

from tests.support.waiting import PATIENCE_S
from worker_daemon.server.progress import Progress
from worker_daemon.server.session.expert_loads import LIMIT_S, ExpertLoadReader


@dataclass
class Worker:
    """Starts a reading whenever it is asked; it arrives after some questions."""

    num_polls: int = 3
    num_started: int = 0
    num_arrived: int = 0
    error: Exception | None = None

    def read_expert_loads(self):
        if self.error is not None:
            raise self.error
        self.num_started += 1
        left = iter(range(self.num_polls))

        def has_arrived():
            if next(left, None) is not None:
                return False
            self.num_arrived += 1
            return True

        return has_arrived


@dataclass
class Bench:
    """A reader, and a step thread that runs commands when it is told."""

    worker: Worker = field(default_factory=Worker)
    progress: Progress = field(default_factory=lambda: Progress("cpu"))
    posted: list[object] = field(default_factory=list)
    is_free: bool = True

    def __post_init__(self):
        self.progress.idle()
        snapshot = self.progress.snapshot
        description = replace(snapshot.description, expert_loads=lambda: {0: bytes(16)})
        self.progress.snapshot = replace(snapshot, description=description)
        self.reader = ExpertLoadReader(self.post, self.progress)

    def post(self, command):
        self.posted.append(command)
        if self.is_free:
            command.work(self.worker)

    async def refresh(self):
        async with asyncio.timeout(PATIENCE_S):
            await self.reader.refresh()


def test_a_reading_has_arrived_when_the_status_is_made():
    bench = Bench()
    for count in range(1, 4):
        asyncio.run(bench.refresh())
        assert bench.worker.num_arrived == len(bench.posted) == count


def test_nothing_is_read_without_experts():
    bench = Bench()
    snapshot = bench.progress.snapshot
    description = replace(snapshot.description, expert_loads=dict)
    bench.progress.snapshot = replace(snapshot, description=description)
    asyncio.run(bench.refresh())
    assert not bench.posted


def test_nothing_is_asked_after_a_failure():
    bench = Bench()
    bench.progress.snapshot = replace(bench.progress.snapshot, failure="the device was lost")
    asyncio.run(bench.refresh())
    assert not bench.posted


def test_a_busy_step_thread_has_one_question_and_no_status_waits_for_it():
    async def ask():
        bench = Bench(is_free=False)
        await asyncio.gather(*(bench.refresh() for _ in range(20)))
        await bench.refresh()
        assert len(bench.posted) == 1
        assert not bench.worker.num_started
        bench.is_free = True
        bench.posted[0].work(bench.worker)  # its step has ended
        await bench.refresh()
        assert len(bench.posted) == 2
        assert bench.worker.num_arrived == 1

    asyncio.run(ask())


def test_nothing_is_asked_in_a_long_operation():
    bench = Bench(is_free=False)
    bench.progress.begin("LOADING", 60.0, False)
    stamp = bench.progress.stamp
    bench.progress.stamp = type(stamp)(stamp.phase, time.monotonic() - 2 * LIMIT_S, 1e9, False)
    asyncio.run(bench.refresh())
    assert not bench.posted


@pytest.mark.parametrize("when", ["at the start", "while it is copied"])
def test_a_lost_device_does_not_cost_the_status(when):
    bench = Bench()
    if when == "at the start":
        bench.worker.error = RuntimeError("made up")
    else:
        bench.worker.num_polls = -1
        bench.worker.read_expert_loads = lambda: lambda: 1 // 0
    asyncio.run(bench.refresh())
    assert not bench.worker.num_arrived
