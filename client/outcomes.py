"""Outcomes to come: what a caller holds of a step in flight, and what a failure takes with it.
`client/worker_group.py` settles them; they know no socket.
"""

import time
from typing import Protocol

from client.errors import ClientError, DeadlineExceeded, RemoteError, StepFailed, WorkerDied
from client.scheduler_output import StepResult
from client.slots import EncodedStep
from rpc_schema.codec import StepReplyMessage
from rpc_schema.errors import ErrorCode, ErrorReply


class StepWaiter(Protocol):
    """Takes in replies, on behalf of whoever waits for one of them."""

    def take_replies(self, future: "StepFuture") -> None:
        """Take in what has come; never waits."""

    def wait_for(self, future: "StepFuture", until: float) -> None:
        """Take in replies until the future is settled, or `until` (time.monotonic) has passed."""


class Gather:
    """The replies of all ranks to one operation, by arrival: ranks are told apart only once they
    have numbers."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.replies: list[StepReplyMessage] = []
        self.errors: list[ErrorReply] = []


class Failure:
    """A failed step and what it takes with it; shared by the futures that it fails."""

    def __init__(self, error: ClientError, rank: int, code: ErrorCode, traceback: str) -> None:
        self.error = error
        self.rank = rank
        self.code = code
        self.traceback = traceback
        self.lost: set[str] = set()
        self.reported = False
        self._futures: list[StepFuture] = []

    def settle(self, future: "StepFuture") -> None:
        """Fail a future."""
        future.failure = self
        self._futures.append(future)

    def take_over(self, older: "Failure") -> None:
        """Tell an older failure's losses too, to whoever would have heard of that one."""
        self.lost |= older.lost
        for future in older._futures:
            self.settle(future)

    def to_exception(self) -> ClientError:
        """What the caller of result() gets; after this the group accepts steps again."""
        self.reported = True
        if isinstance(self.error, WorkerDied):
            return self.error
        message = self.error.message if isinstance(self.error, RemoteError) else str(self.error)
        failed = StepFailed(
            rank=self.rank,
            code=self.code,
            message=message,
            remote_traceback=self.traceback,
            lost_req_ids=frozenset(self.lost),
        )
        failed.__cause__ = self.error
        return failed


class StepFuture:
    """The outcome of one step, to come. `result` and `done` also take in the replies to other steps
    of the group."""

    def __init__(self, group: StepWaiter, seq: int, step: EncodedStep | None, deadline: float):
        self.seq = seq
        self.step = step
        self.deadline = deadline
        self.samples = step is not None
        """False for steps whose answer names no request."""
        self.value: StepResult | None = None
        self.failure: Failure | None = None
        self._group = group

    def done(self) -> bool:
        """Whether the outcome is known; never waits."""
        if not self.settled:
            self._group.take_replies(self)
        return self.settled

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the outcome.

        Raises:
            DeadlineExceeded: timeout_s passed; the step is still in flight.
            StepFailed: a rank failed the step or one before it, or the step's own deadline passed.
            From here on
                the group takes steps again, without the requests that the error calls lost.
            WorkerDied: the group is unusable.
        """
        until = self.deadline if timeout_s is None else time.monotonic() + timeout_s
        self._group.wait_for(self, until)
        if self.failure is not None:
            raise self.failure.to_exception()
        if self.value is None:
            raise DeadlineExceeded(f"step {self.seq}", timeout_s or 0.0)
        return self.value

    @property
    def settled(self) -> bool:
        """Whether the outcome is known already."""
        return self.value is not None or self.failure is not None
