"""Outcomes of steps on their way to the driver, in the order of the steps: at once from the step
thread where nothing has to be waited for, else by the completion thread, which waits for results.
Owns that thread; knows no socket and no device, and decides nothing."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import zmq

from rpc_schema.base import StepReply
from rpc_schema.errors import ErrorReply
from rpc_schema.lifecycle import Attached
from worker_daemon.server.dispatch import PendingReply
from worker_daemon.server.progress import NO_RESULT, Progress
from worker_daemon.server.wire.reply_channel import ReplyChannel, ReplyCounts, ReplyDelays

ATTACH_RETRY_S: Final = 0.005

logger = logging.getLogger(__name__)

OnFailure = Callable[[ErrorReply, int], None]


class _Kind(IntEnum):
    REPLY = 0
    PENDING = 1
    NOTHING = 2
    REPLAY = 3
    REFUSAL = 4
    ATTACHED = 5
    STOP = 6


def _nothing() -> None:
    return None


class _Outcome(NamedTuple):
    """What the step thread hands over. seq is 0 where it has no meaning; began_s is when its step
    began; link is the one that a pending result was made on, known_ns since when that is on the
    host (None: not yet); route is a refusal's or an attached driver's; heard is told that an
    attached driver's turn has come."""

    kind: _Kind
    seq: int = 0
    reply: StepReply | None = None
    pending: PendingReply | None = None
    route: bytes = b""
    heard: Callable[[], None] = _nothing
    link: int = 0
    known_ns: int | None = None
    began_s: float = 0.0


_STOP: Final = _Outcome(_Kind.STOP)


class Completion:
    """Takes the outcomes of the step thread, which alone calls these methods (start, stop and join
    apart).

    While nothing that was handed over is unfinished, an outcome that is there already is sent at
    once: the hand-over would cost more than the sending. Otherwise it queues, so that outcomes
    leave in the order in which they came.
    """

    def __init__(
        self,
        results: "zmq.Socket[bytes]",
        progress: Progress,
        on_failure: OnFailure,
    ) -> None:
        """on_failure(reply, link) hears of steps whose result failed after the step itself had
        succeeded; it is called on the thread that took the result."""
        self._channel = ReplyChannel(results)
        self._progress = progress
        self._queue: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._waiter = _Waiter(self._channel, self._queue, progress, on_failure)
        self._num_handed_over = 0
        self._thread = threading.Thread(target=self._waiter.run, name="completion", daemon=True)

    @property
    def reply_delays(self) -> ReplyDelays:
        """From results on the host to their replies sent; any thread may ask it."""
        return self._channel.delays

    @property
    def reply_counts(self) -> ReplyCounts:
        """What replies have brought; any thread may ask it."""
        return self._channel.counts

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end once all that was handed over is sent."""
        self._queue.put(_STOP)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; tell whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def reply(self, reply: StepReply) -> None:
        """Send a finished reply and keep it for its seq."""
        if self._is_idle:
            self._channel.reply(reply)
        else:
            self._hand_over(_Outcome(_Kind.REPLY, reply.seq, reply))

    def pending(self, seq: int, pending: PendingReply, link: int) -> None:
        """Wait for a result of the running step, which is on `link`, then as `reply`."""
        known_ns = time.monotonic_ns() if pending.is_ready else None
        began_s = self._progress.stamp.since
        if known_ns is not None and self._is_idle:
            self._waiter.finish(seq, pending, link, known_ns, began_s)
        else:
            self._hand_over(
                _Outcome(_Kind.PENDING, seq, None, pending, b"", _nothing, link, known_ns, began_s)
            )

    def nothing(self, seq: int) -> None:
        """Keep the fact that this rank owes no reply to `seq`, the running step."""
        began_s = self._progress.stamp.since
        if self._is_idle:
            self._progress.step_times.add(began_s, time.monotonic())
            self._channel.nothing(seq)
        else:
            self._hand_over(_Outcome(_Kind.NOTHING, seq, began_s=began_s))

    def replay(self, seq: int) -> None:
        """Send the reply to `seq` again."""
        self._hand_over(_Outcome(_Kind.REPLAY, seq))

    def refuse(self, route: bytes, reply: ErrorReply) -> None:
        """Send a refusal to any driver; it is not kept, because its request was not accepted."""
        self._hand_over(_Outcome(_Kind.REFUSAL, 0, reply, None, route))

    def attached(self, route: bytes, reply: Attached, heard: Callable[[], None]) -> None:
        """Forget the former driver and greet this one; `heard` is called (on the completion thread)
        once no result of the former one is waited for any more."""
        self._hand_over(_Outcome(_Kind.ATTACHED, 0, reply, None, route, heard))

    @property
    def _is_idle(self) -> bool:
        """Whether the completion thread has finished all that it was ever given."""
        return self._waiter.num_finished == self._num_handed_over

    def _hand_over(self, outcome: _Outcome) -> None:
        self._num_handed_over += 1
        self._queue.put(outcome)


class _Waiter:
    """The thread's own state."""

    def __init__(
        self,
        channel: ReplyChannel,
        outcomes: "queue.SimpleQueue[_Outcome]",
        progress: Progress,
        on_failure: OnFailure,
    ) -> None:
        self.num_finished = 0
        """Outcomes that need this thread no more; written by it alone, after their last use of the
        channel."""
        self._channel = channel
        self._queue = outcomes
        self._progress = progress
        self._on_failure = on_failure

    def run(self) -> None:
        """Serve until told to stop. Nothing that a driver or a result does ends it."""
        try:
            while (outcome := self._next()) is not _STOP:
                try:
                    self._take(outcome)
                except Exception:
                    logger.exception("the outcome of seq %d is lost", outcome.seq)
                self.num_finished += 1
        finally:
            self._channel.close()

    def _next(self) -> _Outcome:
        """Wait for the next outcome; meanwhile look for the driver that is to be greeted."""
        while self._channel.is_greeting:
            try:
                return self._queue.get(timeout=ATTACH_RETRY_S)
            except queue.Empty:
                self._channel.greet()
        return self._queue.get()

    def _take(self, outcome: _Outcome) -> None:
        kind, channel = outcome.kind, self._channel
        if kind is _Kind.PENDING:
            self._await(outcome)
        elif kind is _Kind.REPLY:
            assert outcome.reply is not None
            channel.reply(outcome.reply)
        elif kind is _Kind.NOTHING:
            self._progress.step_times.add(outcome.began_s, time.monotonic())
            channel.nothing(outcome.seq)
        elif kind is _Kind.REPLAY:
            channel.replay(outcome.seq)
        elif kind is _Kind.REFUSAL:
            assert isinstance(outcome.reply, ErrorReply)
            channel.refuse(outcome.route, outcome.reply)
        else:
            assert isinstance(outcome.reply, Attached)
            channel.attach(outcome.route, outcome.reply)
            outcome.heard()

    def _await(self, outcome: _Outcome) -> None:
        assert outcome.pending is not None
        self._progress.await_result(outcome.seq)
        try:
            self.finish(
                outcome.seq, outcome.pending, outcome.link, outcome.known_ns, outcome.began_s
            )
        finally:
            self._progress.result = NO_RESULT

    def finish(
        self, seq: int, pending: PendingReply, link: int, known_ns: int | None, began_s: float
    ) -> None:
        """Take a pending result, note how long its step took, and send it, or its failure. One that
        is not known to be on the host (known_ns None) is there once it can be taken. Also for the
        step thread, while this one is idle."""
        try:
            reply, arrays = pending.result()
        except Exception as error:  # the dispatch boundary, where a result ends a step
            self._on_failure(self._channel.fail(seq, error), link)
            return
        now_ns = time.monotonic_ns()
        self._progress.step_times.add(began_s, now_ns / 1e9)
        self._channel.reply(reply, arrays, now_ns if known_ns is None else known_ns)
