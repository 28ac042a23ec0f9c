"""Whether this daemon takes steps and drivers: not where an operator wants it to drain (and stay),
nor when it is about to end. Owned by the control thread; the step thread is told by commands. Knows
no socket."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from rpc_schema import lifecycle as lc
from rpc_schema.codec import ControlReplyMessage
from worker_daemon.errors import StateError
from worker_daemon.server.progress import Progress
from worker_daemon.server.sequence import drained
from worker_daemon.server.session.lease import Lease
from worker_daemon.server.step_thread import Command, Resume, StopSteps

NOTICE_S: Final = 1.0
"""What the holder of the lease has to stop of its own accord, so that no rank of a group refuses a
step that the others run."""
_POLL_S: Final = 0.05
IDLE_SLACK_S: Final = 3.0
"""Beyond the step deadline, for the running step to end."""


class Draining:
    """Drains as often as it is told to."""

    def __init__(
        self,
        post: Callable[[Command], None],
        tell: Callable[[], None],
        lease: Lease,
        progress: Progress,
    ) -> None:
        """post: to the step thread. tell: whoever listens to heartbeats, that is_on has changed."""
        self.is_on = False
        self.ends = False
        """The daemon is about to end."""
        self._post = post
        self._tell = tell
        self._lease = lease
        self._progress = progress
        self._idle = asyncio.Event()
        self._serving = asyncio.Event()
        self._serving.set()

    @property
    def serving(self) -> lc.ServingState:
        """What drivers are told: the lifecycle's word, unless no step is taken."""
        serving = self._progress.snapshot.state.serving
        return "DRAINING" if (self.ends or self.is_on) and serving == "SERVING" else serving

    def check_takes_drivers(self) -> None:
        """Raise StateError or DrainingError where no driver may attach."""
        if self.ends:
            raise StateError("the daemon is shutting down", fix="attach to another one")
        if self.is_on:
            raise drained()

    async def drain_or_undo(self, message: lc.Drain) -> ControlReplyMessage:
        """Answer an operator, once it is so. Raises StateError, as `drain` and `undo` do."""
        if self.ends:
            raise StateError("the daemon is shutting down")
        await (self.undo() if message.undo else self.drain())
        return lc.Acknowledged(call=message.call)

    async def undo(self) -> None:
        """Take steps and drivers again; return once that is so.

        Raises:
            StateError: the running step has not ended in its time.
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
        """Return once no step runs or will.

        Raises:
            StateError: the running step has not ended in its time, or the drain was undone.
        """
        if not self.is_on:
            self.is_on = True
            self._idle = asyncio.Event()
            self._tell()
            await self._give_notice(self._idle)
        await self._become_idle(self._idle)

    async def _give_notice(self, idle: asyncio.Event) -> None:
        until = time.monotonic() + NOTICE_S
        while time.monotonic() < until and self._lease.status().state == "held":
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
        """How long the running step may still take."""
        return self._progress.step_deadline_s + IDLE_SLACK_S

    def _stuck(self, outlook: str) -> StateError:
        stamp = self._progress.stamp
        return StateError(
            f"{stamp.phase} has run for {stamp.age_ms(time.monotonic())} ms, and {outlook}",
            fix="ask again later, or shut the daemon down",
        )

    def _is_current(self, idle: asyncio.Event) -> bool:
        return self.is_on and idle is self._idle


def _setter(event: asyncio.Event) -> Callable[[], None]:
    """Return what sets the event, from any thread."""
    return partial(_set_threadsafe, asyncio.get_running_loop(), event)


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to hear it
        loop.call_soon_threadsafe(event.set)
