"""Futures of steps in flight, the rows of the requests in them, and failure propagation. The effect
of a failure on the group is in `failure_state.py`."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rpc_schema.codec import StepReplyMessage
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import BadFrameError, ErrorCode, WorkerDaemonError, WorkerError
from worker_client.errors import ClientError, DeadlineExceeded, StepFailed, WorkerDied
from worker_client.group.failure_state import (
    ENDS_OWNERSHIP,
    Change,
    DeathFailed,
    Failed,
    FailureReported,
    FailureState,
    Suspect,
    loss_of,
)
from worker_client.scheduler_output import StepResult
from worker_client.steps.encoded_step import EncodedStep, decode_outcome
from worker_client.steps.lockstep import LockstepSlots
from worker_client.steps.lockstep_step import LockstepStep, ReplicaReplies
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits
from worker_client.tracing.step_times import StepHistory

ROOT_CAUSE_WAIT_S = 1.0
"""Time for which an UPSTREAM_FAILED waits for the report of the rank that really failed."""

STEP_SLACK_S = 2.0
"""Wait for a step's reply beyond its own deadline: the daemons' timeouts come first."""

DEFAULT_STEP_DEADLINE_S = 60.0
"""Assumed for a daemon that has no configuration yet."""


class StepWaiter(Protocol):
    """Processes replies on behalf of a caller that waits for one of them."""

    def take_replies(self, future: "StepFuture") -> None:
        """Process the replies that are here; never waits."""

    def wait_for(self, future: "StepFuture", until: float) -> None:
        """Process replies until the future is settled, or `until` (time.monotonic) has passed."""


@dataclass(eq=False, slots=True)
class Failure:
    """A failed step and all that fails with it; shared by the futures that it fails."""

    state: FailureState
    number: int
    error: WorkerDaemonError
    rank: int
    code: ErrorCode
    traceback: str = ""
    is_mended: bool = False
    """True if the dead daemon has been replaced."""
    lost: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    """Those of `lost` that are not to be admitted again."""
    futures: "list[StepFuture]" = field(default_factory=list)

    @property
    def ends_group(self) -> bool:
        """True if the group takes no steps after it. It is raised as it is, not as a StepFailed."""
        return isinstance(self.error, ENDS_OWNERSHIP) and not self.is_mended

    def settle(self, future: "StepFuture") -> None:
        """Fail a future."""
        future.failure = self
        self.futures.append(future)

    def refuse(self, waiter: StepWaiter) -> "StepFuture":
        """Return a future that fails at once: nothing was sent for it."""
        refused = StepFuture(waiter, 0, None, 0.0)
        self.settle(refused)
        return refused

    def take_over(self, older: "Failure") -> None:
        """Report an older failure's losses too, to the holders of its futures."""
        self.lost |= older.lost
        self.aborted |= older.aborted
        for future in older.futures:
            self.settle(future)

    def mended(self, number: int) -> "Failure":
        """Return the part that is still to be reported once the dead daemon is replaced."""
        left = replace(self, number=number, is_mended=True, lost=set(), aborted=set(), futures=[])
        left.take_over(self)
        return left

    def event(self, last_seq: int) -> Failed | DeathFailed:
        """Return its event for the group's state; last_seq: the last step that it failed."""
        is_death = self.ends_group and isinstance(self.error, WorkerDied)
        return (DeathFailed if is_death else Failed)(self.number, last_seq)

    def to_exception(self) -> WorkerDaemonError:
        """Return the exception for the caller of result(). After this the group accepts steps
        again, unless the failure ends it."""
        self.state.apply(FailureReported(self.number))
        if self.ends_group:
            return self.error
        message = self.error.message if isinstance(self.error, WorkerError) else str(self.error)
        failed = StepFailed(
            rank=self.rank,
            code=self.code,
            message=message,
            remote_traceback=self.traceback,
            lost_req_ids=frozenset(self.lost),
            aborted_req_ids=frozenset(self.aborted),
        )
        failed.__cause__ = self.error
        return failed


@dataclass(eq=False, slots=True)
class StepFuture:
    """The pending outcome of one step. `result` and `done` also process the replies to other steps
    of the group."""

    group: StepWaiter
    seq: int
    step: EncodedStep | LockstepStep | None
    deadline: float
    epoch: int = 0
    """Epoch in which the step was sent; 0: it was not sent."""
    replayed: bool = False
    """True if the reply was a replay."""
    value: StepResult | None = None
    failure: Failure | None = None
    replies: ReplicaReplies | None = None
    """Those of replicas in lockstep, until all of them are here."""

    def done(self) -> bool:
        """Return True if the outcome is known; never waits."""
        if not self.settled:
            self.group.take_replies(self)
        return self.settled

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the outcome.

        Raises:
            DeadlineExceeded: timeout_s passed; the step is still in flight.
            StepFailed: a rank failed the step or one before it, or the step's own deadline passed.
                From here on the group takes steps again, without the requests that the error names
                as lost.
            WorkerDied: the group is unusable.
            FencedError, LeaseExpiredError, NotAttachedError: this driver must attach again.
        """
        until = self.deadline if timeout_s is None else time.monotonic() + timeout_s
        self.group.wait_for(self, until)
        if self.failure is not None:
            raise self.failure.to_exception()
        if self.value is None:
            raise DeadlineExceeded(f"step {self.seq}", timeout_s or 0.0)
        return self.value

    @property
    def settled(self) -> bool:
        """True if the outcome is known already."""
        return self.value is not None or self.failure is not None


class StepsInFlight:
    """Settles the futures of a group's steps, from replies and failures. Belongs to one thread."""

    def __init__(self, state: FailureState, output_ranks: Sequence[int]) -> None:
        """Without rows until start(). state: the group's; every failure is applied to it.
        output_ranks: the rank of each replica that answers steps."""
        self.slots: SlotTable | LockstepSlots = SlotTable(1)
        self.times = StepHistory()
        """Times at which steps were sent and settled, for traces."""
        self.output_ranks = tuple(output_ranks)
        self.output_rank = output_ranks[0]
        """Rank of failures that are no rank's."""
        self._state = state
        self._timeout_s = DEFAULT_STEP_DEADLINE_S + STEP_SLACK_S
        self._futures: dict[int, StepFuture] = {}
        self._recently_done: deque[int] = deque(maxlen=16)
        self._latest: Failure | None = None
        """Latest failure; the state has whether it was reported."""
        self._num_failures = 0

    def start(self, max_num_seqs: int, limits: GroupLimits, step_deadline_s: float) -> None:
        """Begin with an empty table of slots; earlier failures are not reported any more."""
        self._timeout_s = step_deadline_s + STEP_SLACK_S
        num_replicas = len(self.output_ranks)
        self.slots = (
            SlotTable(max_num_seqs, limits)
            if num_replicas == 1
            else LockstepSlots(max_num_seqs, limits, num_replicas)
        )
        self.slots.require_resync()
        self._state.apply(Change.PREPARED)

    def abandon(self) -> None:
        """Fail all steps in flight, and forget everything else of the previous epoch."""
        error = ClientError("the group was attached again: earlier requests are dropped")
        failure = self._new_failure(error, self.output_rank, ErrorCode.FENCED)
        failure.lost |= self.slots.drop_all()
        self._fail_from(0, failure)
        self._state.apply(Change.ATTACH_BEGUN)
        self.times.clear()
        self._recently_done.clear()

    @property
    def pending(self) -> list[StepFuture]:
        """Futures whose outcome is unknown, oldest first."""
        return list(self._futures.values())

    @property
    def num_pending(self) -> int:
        """Number of futures whose outcome is unknown."""
        return len(self._futures)

    @property
    def oldest_seq(self) -> int:
        """First step whose outcome is unknown; 0 if there is none."""
        return min(self._futures, default=0)

    @property
    def unreported_failure(self) -> Failure | None:
        """Failure that no result() has reported yet, if any."""
        return self._latest if self._state.is_unreported else None

    def expect(
        self, waiter: StepWaiter, epoch: int, seq: int, step: EncodedStep | LockstepStep | None
    ) -> StepFuture:
        """Return the future of a step that is about to be sent."""
        future = StepFuture(waiter, seq, step, time.monotonic() + self._timeout_s, epoch)
        self._futures[seq] = future
        return future

    def take_outcome(
        self, reply: StepReplyMessage, arrays: Sequence[bytes], *, replayed: bool = False
    ) -> None:
        """Settle the step that the reply is for, once every replica in lockstep has replied; late
        and repeated replies, and those of other ranks, are dropped."""
        if reply.rank not in self.output_ranks or reply.seq not in self._futures:
            return
        future = self._futures[reply.seq]
        future.replayed = replayed
        try:
            if len(self.output_ranks) == 1:
                assert not isinstance(future.step, LockstepStep)
                future.value = decode_outcome(future.step, reply, arrays)
            elif not self._take_part(future, reply, arrays):
                return
            value = future.value
            if future.step is not None and value is not None and (value.refused or value.drafts):
                self.slots.take_outcome(future.step.seq, value)
        except BadFrameError as error:
            failure = self._new_failure(error, reply.rank, error.code)
            self._fail_from(reply.seq, failure)
            return
        del self._futures[reply.seq]
        self._state.worked(reply.seq)
        self.times.settled(reply.seq)
        self._recently_done.append(reply.seq)

    def _take_part(
        self, future: StepFuture, reply: StepReplyMessage, arrays: Sequence[bytes]
    ) -> bool:
        """Take one replica's result of a step; return True once the step has those of all."""
        replies = future.replies
        if replies is None:
            assert not isinstance(future.step, EncodedStep)
            replies = future.replies = ReplicaReplies(future.step, len(self.output_ranks))
        if not replies.take(self.output_ranks.index(reply.rank), reply, arrays):
            return False
        future.value = replies.result()
        return True

    def take_error(self, reply: ErrorReply, error: WorkerError) -> None:
        """Fail the step that the reply is for, and the later ones; `error` is the reply as an
        exception. An UPSTREAM_FAILED may wait for its cause."""
        if reply.seq in self._recently_done:
            self._fail_all_rows(reply, error)
        elif reply.seq not in self._futures:
            return
        elif reply.code is not ErrorCode.UPSTREAM_FAILED:
            self._fail_by_reply(reply, error)
        elif self._state.suspect is None:
            until = time.monotonic() + ROOT_CAUSE_WAIT_S
            self._state.apply(Suspect(reply, error, until))

    def fail_by_upstream_timeout(self) -> None:
        """Fail the step with the UPSTREAM_FAILED that reported it if no rank reports a root cause
        in time."""
        suspect = self._state.suspect
        if suspect is not None and time.monotonic() >= suspect.until:
            self._fail_by_reply(suspect.reply, suspect.error)

    def fail_hung(self, future: StepFuture) -> None:
        """Fail a step that has passed its deadline."""
        error = DeadlineExceeded(f"step {future.seq}", self._timeout_s)
        failure = self._new_failure(error, self.output_rank, ErrorCode.COMM)
        failure.lost |= self.slots.drop_all()
        self._state.apply(Change.LINK_BROKEN)
        self._fail_from(future.seq, failure)

    def fail_relink(self, error: WorkerDaemonError) -> None:
        """Fail the step before which relinking failed: its scheduler has committed to it."""
        cause = self._state.relink_failed(error)
        rank, code, traceback = self.output_rank, ErrorCode.COMM, ""
        if isinstance(error, WorkerError) and error.rank is not None:
            rank, code, traceback = error.rank, error.code, error.remote_traceback
        self._fail_from(0, self._new_failure(cause, rank, code, traceback))

    def lose_cache(self, reason: str) -> None:
        """Forget all requests as lose_rows does, and the contents of all KV blocks."""
        self.lose_rows(reason)
        self.slots.lose_contents()

    def lose_rows(
        self,
        reason: str,
        *,
        aborts: bool = False,
        req_ids: Collection[str] | None = None,
        cause: WorkerDaemonError | None = None,
    ) -> None:
        """Forget all requests, and have the next step fail so that the scheduler learns of it.
        aborts: they are not to be admitted again. req_ids: only these, which may be of a step that
        was not sent. cause: an operation's failure."""
        if req_ids is None:
            lost = self.slots.drop_all()
        else:
            lost = self.slots.drop(req_ids) | frozenset(req_ids)
        if lost:
            error = ClientError(reason)
            rank, code = self.output_rank, ErrorCode.PRECEDED_BY
            if isinstance(cause, WorkerError) and cause.rank is not None:
                rank, code = cause.rank, cause.code
            failure = self._new_failure(error, rank, code)
            failure.lost |= lost
            failure.aborted |= lost if aborts else frozenset()
            self._fail_from(0, failure)

    def die(self, error: WorkerDaemonError) -> None:
        """Fail everything: the group is unusable."""
        self._state.apply(loss_of(error))
        rank = error.rank if isinstance(error, WorkerDied) else self.output_rank
        self._fail_from(0, self._new_failure(error, rank, ErrorCode.COMM))

    def revive(self) -> None:
        """Begin again with another daemon in the dead one's place. No row is left, and no block has
        its contents on all ranks; futures of earlier steps, or the next step, report it."""
        failure = self._latest if self._state.has_failure else None
        self._state.apply(Change.RANK_REPLACED)
        self._recently_done.clear()
        self.times.clear()
        lost = self.slots.drop_all()
        self.slots.require_resync()
        if failure is None:
            return
        self._num_failures += 1
        left = failure.mended(self._num_failures)
        left.lost |= lost
        self._tell_next(left)

    def _fail_by_reply(self, reply: ErrorReply, error: WorkerError) -> None:
        suspect = self._state.suspect
        cause = self._state.step_failed(reply, error)
        seq = reply.seq if suspect is None else min(reply.seq, suspect.reply.seq)
        if reply.code is ErrorCode.GAP:
            seq = min(seq, reply.expected_seq)  # the missing ones never ran either
        self._fail_from(seq, self._new_failure(cause, reply.rank, reply.code, reply.traceback))

    def _fail_all_rows(self, reply: ErrorReply, error: WorkerError) -> None:
        """Handle the failure of a rank in a step whose result is out already: its rows lag behind
        all others."""
        self._state.apply(Change.LINK_BROKEN)
        failure = self._new_failure(error, reply.rank, reply.code, reply.traceback)
        failure.lost |= self.slots.drop_all()
        self._fail_from(0, failure)

    def _new_failure(
        self, error: WorkerDaemonError, rank: int, code: ErrorCode, traceback: str = ""
    ) -> Failure:
        self._num_failures += 1
        return Failure(self._state, self._num_failures, error, rank, code, traceback)

    def _fail_from(self, seq: int, failure: Failure) -> None:
        """Fail step `seq` and every later step; and all requests if the link is broken, since
        no row survives a relink."""
        failed = [future for number, future in self._futures.items() if number >= seq]
        steps = [future.step for future in failed if future.step is not None]
        failure.lost |= self.slots.fail(step.output for step in steps)
        if self._state.needs_relink or any(step.resync for step in steps):
            failure.lost |= self.slots.drop_all()
        if failed:  # nothing can be recomputed before the next step, which may depend on it
            failure.lost |= self.slots.drop_stale()
        for future in failed:
            failure.settle(future)
            del self._futures[future.seq]
            self.times.failed(future.seq)
        if self._latest is not None and self._state.is_open:
            failure.take_over(self._latest)
        self._tell_next(failure, max((future.seq for future in failed), default=0))

    def _tell_next(self, failure: Failure, last_seq: int = 0) -> None:
        self._latest = failure
        self._state.apply(failure.event(last_seq))
