"""Waits for the outcomes of a group's steps, and processes all replies that arrive meanwhile."""

import contextlib
import time

from rpc_schema.errors import (
    WorkerDaemonError,
)
from worker_client.group.group_channel import GroupChannel
from worker_client.group.outcomes import StepFuture, StepsInFlight

CLOSE_WAIT_S = 0.5
"""Wait of finish() for steps in flight, so that all ranks are left at the same one."""


class Waiter:
    """Waits on behalf of the futures of a group's steps. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel, steps: StepsInFlight) -> None:
        self._channel = channel
        self._steps = steps

    def take_replies(self, future: StepFuture) -> None:
        """Process the replies that are here, until `future` is settled; never waits."""
        while not future.settled and self._channel.take_reply(0.0):
            pass

    def wait_for(self, future: StepFuture, until: float) -> None:
        """Process replies until `future` is settled, its own deadline passes (which fails it), or
        `until` does. Raises as check_given_up_link does."""
        while not future.settled:
            now = time.monotonic()
            if now >= future.deadline:
                self.take_replies(future)  # replies that came while this process was stopped
                if not future.settled:
                    self._steps.fail_hung(future)
            elif now >= until:
                return
            else:
                self._channel.take_reply(min(until, future.deadline))
        self._channel.check_given_up_link()

    def wait_for_all(self) -> None:
        """Wait for the steps in flight, so that an operation on all rows finds none running."""
        for future in self._steps.pending:
            self.wait_for(future, future.deadline)

    def finish(self, *, is_attached: bool) -> None:
        """Wait for the steps in flight, and if attached for the ranks that owe no outcome; not for
        long, and raise nothing."""
        until = time.monotonic() + CLOSE_WAIT_S
        with contextlib.suppress(WorkerDaemonError):
            for future in self._steps.pending:
                self.wait_for(future, until)
            if is_attached:
                self._channel.await_ranks()
