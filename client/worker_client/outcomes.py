"""Outcomes to come: what a caller holds of a step in flight, which steps those are, the rows of the
requests in them, and what a failure takes with it: steps, requests, the link, the group. Knows no
socket: `group_channel.py` brings the replies.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rpc_schema.codec import StepReplyMessage
from rpc_schema.errors import BadFrameError, ErrorCode, ErrorReply, ErrorScope, WireError
from rpc_schema.step import ModelRunnerOutput
from worker_client.encoded_step import EncodedStep
from worker_client.errors import (
    ClientError,
    DeadlineExceeded,
    DrainingError,
    FencedError,
    LeaseExpiredError,
    LinkGivenUp,
    NotAttachedError,
    RemoteError,
    StepFailed,
    WorkerDied,
)
from worker_client.link_tries import LinkTries
from worker_client.scheduler_output import StepResult
from worker_client.slots import SlotTable
from worker_client.step_checks import GroupLimits
from worker_client.step_times import StepTimes

ROOT_CAUSE_WAIT_S = 1.0
"""How long an UPSTREAM_FAILED waits for the rank that really failed."""

STEP_SLACK_S = 2.0
"""A step's own deadline plus this is how long its answer is waited for: the daemons' own timeouts
come first."""

DEFAULT_STEP_DEADLINE_S = 60.0
"""Assumed of a daemon that has no configuration yet."""


UNSEATED = (
    DrainingError,
    FencedError,
    LeaseExpiredError,
    LinkGivenUp,
    NotAttachedError,
    WorkerDied,
)
"""After these the group takes no steps: another driver has the daemons, or nobody, or they cannot
reach each other."""


class StepWaiter(Protocol):
    """Takes in replies, on behalf of whoever waits for one of them."""

    def take_replies(self, future: "StepFuture") -> None:
        """Take in what has come; never waits."""

    def wait_for(self, future: "StepFuture", until: float) -> None:
        """Take in replies until the future is settled, or `until` (time.monotonic) has passed."""


class Failure:
    """A failed step and what it takes with it; shared by the futures that it fails."""

    def __init__(self, error: ClientError, rank: int, code: ErrorCode, traceback: str) -> None:
        self.error = error
        self.rank = rank
        self.code = code
        self.traceback = traceback
        self.lost: set[str] = set()
        self.reported = False
        self.is_mended = False
        """The daemon that died has been replaced."""
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

    @property
    def is_open(self) -> bool:
        """Whether somebody has yet to hear of it, or of what it took with it."""
        return not self.reported or (isinstance(self.error, WorkerDied) and not self.is_mended)

    @property
    def has_futures(self) -> bool:
        """Whether somebody may hear of it by a future."""
        return bool(self._futures)

    def to_exception(self) -> ClientError:
        """What the caller of result() gets; after this the group accepts steps again."""
        self.reported = True
        if isinstance(self.error, UNSEATED) and not self.is_mended:
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
        self.replayed = False
        """Whether the answer that came was a daemon's second sending of it."""
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
            WorkerDied: the group is unusable. FencedError, LeaseExpiredError, NotAttachedError: it
                is not this driver's any more, unless it attaches again.
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


class _Suspect(NamedTuple):
    """An UPSTREAM_FAILED whose cause may still be told by another rank."""

    reply: ErrorReply
    error: RemoteError
    until: float


class StepsInFlight:
    """Settles the futures of a group's steps, by replies and by failures. Belongs to one thread."""

    def __init__(self, world_size: int, output_rank: int) -> None:
        """Without rows until start()."""
        self.slots = SlotTable(1)
        self.needs_relink = False
        """Bytes may be left between ranks, or a rank has lost its peers: no row survives that."""
        self.has_doomed = False
        """A rank has told of a failure that ends its process, or the link is given up, which ends
        ranks too; that end has not been waited for."""
        self.dead: ClientError | None = None
        """Why the group takes no steps any more; a WorkerDied is for good."""
        self.times = StepTimes()
        """When steps were sent and settled, for traces."""
        self.last_given_up = 0
        """The last step that has failed: neither it nor those before it may be sent again."""
        self._has_link = world_size > 1
        self.output_rank = output_rank
        self._timeout_s = DEFAULT_STEP_DEADLINE_S + STEP_SLACK_S
        self._futures: dict[int, StepFuture] = {}
        self._recently_done: deque[int] = deque(maxlen=16)
        self._failure: Failure | None = None
        self._suspect: _Suspect | None = None
        self._link_tries = LinkTries()

    def start(self, max_num_seqs: int, limits: GroupLimits, step_deadline_s: float) -> None:
        """Begin with an empty table of slots; no failure of before is told any more."""
        self._timeout_s = step_deadline_s + STEP_SLACK_S
        self.slots = SlotTable(max_num_seqs, limits)
        self.slots.require_resync()
        self._failure = None

    def abandon(self) -> None:
        """Fail all that is in flight, and forget everything else of the epoch before."""
        error = ClientError("the group was attached anew: requests of before are dropped")
        failure = Failure(error, self.output_rank, ErrorCode.FENCED, "")
        failure.lost |= self.slots.drop_all()
        self._fail_from(0, failure)
        self.times.clear()
        self._link_tries.clear()
        self.has_doomed = False
        self._failure = self.dead = None
        self.last_given_up = 0
        self._recently_done.clear()

    @property
    def pending(self) -> list[StepFuture]:
        """Futures whose outcome is not known, oldest first."""
        return list(self._futures.values())

    @property
    def oldest_seq(self) -> int:
        """The first step whose outcome is not known; 0 where there is none."""
        return min(self._futures, default=0)

    @property
    def untold_failure(self) -> Failure | None:
        """The failure that no result() has told yet, if any."""
        return self._failure if self._failure is not None and not self._failure.reported else None

    @property
    def is_link_given_up(self) -> bool:
        """Whether the group takes no steps for that reason, as far as is known."""
        return isinstance(self.dead, LinkGivenUp)

    @property
    def verdict_due(self) -> float:
        """When (time.monotonic) to call convict_suspect(); inf where nobody is suspect."""
        return math.inf if self._suspect is None else self._suspect.until

    def expect(
        self, waiter: StepWaiter, seq: int, step: EncodedStep | None, *, samples: bool
    ) -> StepFuture:
        """Return the future of a step that is about to be sent."""
        future = StepFuture(waiter, seq, step, time.monotonic() + self._timeout_s)
        future.samples = samples
        self._futures[seq] = future
        return future

    def take_back(self, seq: int) -> None:
        """Step `seq`, if it was one, has not been sent after all."""
        self._futures.pop(seq, None)

    def take_outcome(
        self, reply: StepReplyMessage, arrays: Sequence[bytes], *, replayed: bool = False
    ) -> None:
        """Settle the step that the reply is for; other ranks', late and repeated ones are
        dropped."""
        if reply.rank != self.output_rank or reply.seq not in self._futures:
            return
        future = self._futures[reply.seq]
        future.replayed = replayed
        try:
            future.value = _decode_outcome(future, reply, arrays)
            if future.step is not None and future.value.refused:
                self.slots.count_refused(future.step, future.value.refused)
        except BadFrameError as error:
            self._fail_from(reply.seq, Failure(_as_client(error), reply.rank, error.code, ""))
            return
        del self._futures[reply.seq]
        self._link_tries.worked(reply.seq)
        self.times.settled(reply.seq)
        self._recently_done.append(reply.seq)

    def take_omen(self, reply: ErrorReply) -> None:
        """Note whether the daemon that says so ends: the same codes may be a step's alone."""
        fatal = (ErrorCode.DEVICE, ErrorCode.INTERNAL)
        if reply.code in fatal and reply.scope is ErrorScope.WORKER:
            self.has_doomed = True

    def take_error(self, reply: ErrorReply, error: RemoteError) -> None:
        """Fail the step that the reply is for, and those behind it; `error` is the reply as an
        exception. An UPSTREAM_FAILED may wait for its cause."""
        if reply.seq in self._recently_done:
            self._fail_all_rows(reply, error)
        elif reply.seq not in self._futures:
            return
        elif reply.code is ErrorCode.UPSTREAM_FAILED and self._suspect is None:
            self._suspect = _Suspect(reply, error, time.monotonic() + ROOT_CAUSE_WAIT_S)
        elif reply.code is not ErrorCode.UPSTREAM_FAILED:
            self._fail_by_reply(reply, error)

    def convict_suspect(self) -> None:
        """Where nobody else has owned up in time, the step fails with the UPSTREAM_FAILED that told
        of it."""
        if self._suspect is not None and time.monotonic() >= self._suspect.until:
            self._fail_by_reply(self._suspect.reply, self._suspect.error)

    def fail_hung(self, future: StepFuture) -> None:
        """Fail a step that has passed its deadline."""
        error = DeadlineExceeded(f"step {future.seq}", self._timeout_s)
        failure = Failure(error, self.output_rank, ErrorCode.COMM, "")
        failure.lost |= self.slots.drop_all()
        self.needs_relink = self.needs_relink or self._has_link
        self._fail_from(future.seq, failure)

    def fail_relink(self, error: ClientError | WireError) -> None:
        """Fail the step that a link could not be mended for: its scheduler has committed to it."""
        remote = error if isinstance(error, RemoteError) else None
        if isinstance(error, UNSEATED):
            self.dead = error
        elif isinstance(error, ClientError):
            error = self._count_link_failure(0, error)
        rank = self.output_rank if remote is None else remote.rank
        code = ErrorCode.COMM if remote is None else remote.code
        traceback = "" if remote is None else remote.remote_traceback
        self._fail_from(0, Failure(_as_client(error), rank, code, traceback))

    def lose_rows(self, reason: str) -> None:
        """Forget all requests, and have the next step fail so that the scheduler hears of it."""
        lost = self.slots.drop_all()
        if lost:
            failure = Failure(ClientError(reason), self.output_rank, ErrorCode.PRECEDED_BY, "")
            failure.lost |= lost
            self._fail_from(0, failure)

    def die(self, error: ClientError | WireError) -> None:
        """Fail everything: the group is unusable."""
        self.dead = _as_client(error)
        rank = error.rank if isinstance(error, WorkerDied) else self.output_rank
        self._fail_from(0, Failure(self.dead, rank, ErrorCode.COMM, ""))

    def revive(self) -> None:
        """Another daemon is in the dead one's place: no row is left, and whoever holds a step of
        before, or sends the next one, hears what was lost."""
        failure = self._failure
        self.dead = None
        self.has_doomed = False
        self.needs_relink = False
        self._recently_done.clear()
        self.times.clear()
        self._link_tries.clear()
        lost = self.slots.drop_all()
        self.slots.require_resync()
        if failure is None:
            return
        failure.lost |= lost
        failure.is_mended = True
        if failure.lost or failure.has_futures:
            failure.reported = False
        else:
            self._failure = None

    def _fail_by_reply(self, reply: ErrorReply, error: RemoteError) -> None:
        broken = reply.scope is ErrorScope.GROUP or reply.code in (ErrorCode.COMM, ErrorCode.GAP)
        self.needs_relink = self.needs_relink or (broken and self._has_link)
        cause: ClientError = error
        if isinstance(error, UNSEATED):
            self.dead = error
        elif broken and self._has_link and reply.code is not ErrorCode.GAP:
            cause = self._count_link_failure(reply.seq, error)
        seq = reply.seq if self._suspect is None else min(reply.seq, self._suspect.reply.seq)
        if reply.code is ErrorCode.GAP:
            seq = min(seq, reply.expected_seq)  # what is missing never ran either
        self._fail_from(seq, Failure(cause, reply.rank, reply.code, reply.traceback))

    def _count_link_failure(self, seq: int, error: ClientError) -> ClientError:
        """Return the error to fail with: this one, or that the link is given up, for good."""
        given_up = self._link_tries.failed(seq, error)
        if given_up is None:
            return error
        self.dead = given_up
        self.has_doomed = True
        return given_up

    def _fail_all_rows(self, reply: ErrorReply, error: RemoteError) -> None:
        """A rank failed a step whose result is out already: its rows are behind everybody
        else's."""
        self.needs_relink = self.needs_relink or self._has_link
        failure = Failure(error, reply.rank, reply.code, reply.traceback)
        failure.lost |= self.slots.drop_all()
        self._fail_from(0, failure)

    def _fail_from(self, seq: int, failure: Failure) -> None:
        """Fail step `seq` and every step behind it; and all requests where the link is broken,
        since no row survives a relink."""
        failed = [future for number, future in self._futures.items() if number >= seq]
        steps = [future.step for future in failed if future.step is not None]
        failure.lost |= self.slots.fail(step.output for step in steps)
        if self.needs_relink or any(step.resync for step in steps):
            failure.lost |= self.slots.drop_all()
        for future in failed:
            failure.settle(future)
            self.last_given_up = max(self.last_given_up, future.seq)
            del self._futures[future.seq]
            self.times.failed(future.seq)
        if self._failure is not None and self._failure.is_open:
            failure.take_over(self._failure)
        self._failure = failure
        self._suspect = None


def _as_client(error: ClientError | WireError) -> ClientError:
    return error if isinstance(error, ClientError) else ClientError(f"{error.code}: {error}")


def _decode_outcome(
    future: StepFuture, reply: StepReplyMessage, arrays: Sequence[bytes]
) -> StepResult:
    if not isinstance(reply, ModelRunnerOutput):
        raise BadFrameError(f"step {future.seq} was answered with {type(reply).__name__}")
    if future.step is None or not future.samples:
        return StepResult((), ())
    return SlotTable.decode(future.step, reply, arrays)
