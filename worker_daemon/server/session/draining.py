"""Drains the daemon: it takes no steps and no drivers, at an operator's request or because it is
about to exit. Owned by the control thread; the step thread receives commands."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rpc_schema import lifecycle as lc
from rpc_schema.codec import ControlReplyMessage
from rpc_schema.errors import StateError
from rpc_schema.health import ServingState
from worker_daemon.server.lifecycle import shutting_down
from worker_daemon.server.progress import Progress
from worker_daemon.server.sequence import drained
from worker_daemon.server.session.lease import Lease
from worker_daemon.server.step_thread import Command, Resume, StopSteps

NOTICE_S: Final = 1.0
"""Time for the lease holder to stop, so that no rank of a group refuses a step that the others
run."""
_POLL_S: Final = 0.05
IDLE_SLACK_S: Final = 3.0
"""Limit of the wait for the running step, beyond the step deadline."""


@dataclass(slots=True, eq=False)
class Draining:
    """Drains and undoes drains, any number of times."""

    _post: Callable[[Command], None]
    """Sends a command to the step thread."""
    _tell: Callable[[], None]
    """Sends a heartbeat, because is_on has changed."""
    _lease: Lease
    _progress: Progress
    is_on: bool = field(default=False, init=False)
    ends: bool = field(default=False, init=False)
    """True once the daemon is about to end."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _serving: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._serving.set()

    @property
    def serving(self) -> ServingState:
        """The serving state that drivers see: that of the lifecycle, or DRAINING if no step is
        taken."""
        serving = self._progress.snapshot.state.serving
        return "DRAINING" if (self.ends or self.is_on) and serving == "SERVING" else serving

    def check_takes_drivers(self) -> None:
        """Raise ShuttingDownError or DrainingError if no driver may attach."""
        if self.ends:
            raise shutting_down()
        if self.is_on:
            raise drained()

    async def drain_or_undo(self, message: lc.Drain) -> ControlReplyMessage:
        """Drain or undo, and answer when done. Raises ShuttingDownError, and StateError as `drain`
        and `undo` do."""
        if self.ends:
            raise shutting_down()
        await (self.undo() if message.undo else self.drain())
        return lc.Acknowledged(call=message.call)

    async def undo(self) -> None:
        """Take steps and drivers again; return once they are accepted.

        Raises:
            StateError: the running step has not ended in time.
        """
        if self.is_on:
            self.is_on = False
            self._serving = asyncio.Event()
            self._post(Resume(_setter(self._serving)))
            self._tell()
        try:
            await asyncio.wait_for(self._serving.wait(), self._patience_s)
        except TimeoutError:
            raise self._stuck("steps are taken again once it ends") from None

    async def drain(self) -> None:
        """Drain; return once no step runs and none will.

        Raises:
            StateError: the running step has not ended in time, or the drain was undone.
        """
        if not self.is_on:
            self.is_on = True
            self._idle = asyncio.Event()
            self._tell()
            await self._give_notice(self._idle)
        await self._become_idle(self._idle)

    async def _give_notice(self, idle: asyncio.Event) -> None:
        until = time.monotonic() + NOTICE_S
        while time.monotonic() < until and self._lease.status().state in ("held", "claimable"):
            await asyncio.sleep(_POLL_S)
        if self._is_current(idle):
            self._post(StopSteps(_setter(idle), stays=True))

    async def _become_idle(self, idle: asyncio.Event) -> None:
        until = time.monotonic() + NOTICE_S + self._patience_s
        while not idle.is_set() and self._is_current(idle) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        if not self._is_current(idle):
            raise StateError("the drain was undone", fix="ask for it again")
        if not idle.is_set():
            raise self._stuck("nothing else will")

    @property
    def _patience_s(self) -> float:
        """The limit of the running step's remaining time."""
        return self._progress.step_deadline_s + IDLE_SLACK_S

    def _stuck(self, outlook: str) -> StateError:
        stamp = self._progress.stamp
        problem = f"{stamp.phase} has run for {stamp.age_ms(time.monotonic())} ms, and {outlook}"
        return StateError(problem, fix="ask again later, or shut the daemon down")

    def _is_current(self, idle: asyncio.Event) -> bool:
        return self.is_on and idle is self._idle


def _setter(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets the event from any thread."""
    loop = asyncio.get_running_loop()

    def set_event() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(event.set)

    return set_event
