"""Refreshes the expert loads that a status reports. Posts one read request at a time to the step
thread; runs on the event loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from worker_daemon.server.dispatch import WorkerLike
from worker_daemon.server.progress import Progress
from worker_daemon.server.step_thread import Command, OutOfBandTask

LIMIT_S: Final = 0.2
"""Limit on the wait for a reading, in seconds; after it, the status has the previous reading."""
_POLL_S: Final = 0.001

logger = logging.getLogger(__name__)

HasArrived = Callable[[], bool]


@dataclass(slots=True, eq=False)
class ExpertLoadReader:
    """Brings the expert loads of the worker's description up to date."""

    _post: Callable[[Command], None]
    """Sends a command to the step thread."""
    _progress: Progress
    _asked: "Future[HasArrived] | None" = field(default=None, init=False)
    """The last read request; done once the copy has started. At most one waits for the step
    thread."""

    async def refresh(self) -> None:
        """Read the loads. Returns at once if the model has none, or if the step thread has been in
        one phase for longer than LIMIT_S; otherwise within LIMIT_S."""
        progress = self._progress
        snapshot = progress.snapshot
        if snapshot.failure or not snapshot.description.expert_loads():
            self._asked = None  # it may hold memory of a model that is gone
            return
        stamp = progress.stamp
        if not stamp.idle and stamp.age_ms(time.monotonic()) > 1000 * LIMIT_S:
            return
        # A copy that has started may lack tokens of steps whose results the asker knows.
        if self._asked is None or self._asked.done():
            self._asked = self._ask()
        asked = self._asked
        try:
            async with asyncio.timeout(LIMIT_S):
                has_arrived = await asyncio.shield(asyncio.wrap_future(asked))
                while not has_arrived():
                    await asyncio.sleep(_POLL_S)
            if self._asked is asked:
                self._asked = None
        except TimeoutError:
            return
        except Exception as error:  # the device was lost during the copy
            logger.warning("the expert loads cannot be read: %s", error)

    def _ask(self) -> "Future[HasArrived]":
        asked: Future[HasArrived] = Future()
        work = partial(_start, asked)
        self._post(OutOfBandTask("READING EXPERT LOADS", self._progress.step_deadline_s, work))
        return asked


def _start(asked: "Future[HasArrived]", worker: WorkerLike) -> None:
    try:
        has_arrived = worker.read_expert_loads()
    except Exception as error:  # the device may be lost, and a status is wanted all the more
        logger.warning("the expert loads cannot be read: %s", error)
        has_arrived = _is_done
    asked.set_result(has_arrived)


def _is_done() -> bool:
    return True
