"""Sends the outcomes of steps to the driver, in the order of the steps: from the step thread at
once if there is nothing to wait for, otherwise from the completion thread, which waits for results.
Owns that thread."""

import logging
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import zmq

from rpc_schema.base import StepReply
from rpc_schema.error_replies import ErrorReply
from rpc_schema.lifecycle import Attached
from worker_daemon.server.dispatch import PendingReply
from worker_daemon.server.progress import NO_RESULT, Progress
from worker_daemon.server.server_thread import ServerThread
from worker_daemon.server.wire.reply_channel import ReplyChannel, ReplyDelays

ATTACH_RETRY_S: Final = 0.005

logger = logging.getLogger(__name__)

OnFailure = Callable[[ErrorReply, int], None]
_StepStart: TypeAlias = tuple[float, int, bool]
"""A step's start (time.monotonic), the end of the step thread's work for it (time.monotonic_ns),
and True if its result was on the host by then."""


class _Outcome(NamedTuple):
    """Work for the completion thread. seq: of the step; 0 if none."""

    seq: int
    send: Callable[[], None]


class _Stop(Exception):
    """The request to end the thread."""


def _stop() -> None:
    raise _Stop


class Completion:
    """Takes the outcomes of the step thread, the only caller of the public methods except stop.

    While no outcome is queued or awaited, an outcome that is ready is sent at once: queueing it
    would cost more than sending it. Otherwise it is queued, so that outcomes leave in order.
    """

    def __init__(
        self,
        results: "zmq.Socket[bytes]",
        progress: Progress,
        on_failure: OnFailure,
        delays: ReplyDelays | None = None,
    ) -> None:
        """on_failure(reply, link) is called for a step whose result failed after the step itself
        had succeeded, on the thread that took the result. delays: see ReplyChannel."""
        self.channel = ReplyChannel(results, delays)
        """Any thread may read its `delays` and `counts`."""
        self._progress = progress
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._num_queued = 0
        self._num_finished = 0
        """Outcomes that the completion thread has finished; written only by it, after their last
        use of the channel."""
        self.thread = ServerThread("completion", self._run)

    def stop(self) -> None:
        """Ask the thread to end once all queued outcomes are sent."""
        self._queue.put(_Outcome(0, _stop))

    def reply(self, reply: StepReply) -> None:
        """Send a finished reply and keep it for its seq."""
        if self._is_idle:
            self.channel.reply(reply)
        else:
            self._enqueue(reply.seq, partial(self.channel.reply, reply))

    def pending(self, seq: int, pending: PendingReply, link: int) -> None:
        """Wait for a result of the running step, which is on `link`, then send it as `reply`
        does."""
        launched_ns = time.monotonic_ns()
        times = (self._progress.stamp.since, launched_ns, pending.is_ready)
        if times[2] and self._is_idle:
            self._finish(seq, pending, link, times)
        else:
            self._enqueue(seq, partial(self._wait, seq, pending, link, times))

    def nothing(self, seq: int) -> None:
        """Record that this rank owes no reply to `seq`, the running step."""
        began_s = self._progress.stamp.since
        if self._is_idle:
            self._finish_without_reply(seq, began_s)
        else:
            self._enqueue(seq, partial(self._finish_without_reply, seq, began_s))

    def replay(self, seq: int) -> None:
        """Send the reply to `seq` again."""
        self._enqueue(seq, partial(self.channel.replay, seq))

    def refuse(self, route: bytes, reply: ErrorReply) -> None:
        """Send a refusal to any driver; it is not kept, because its request was not accepted."""
        self._enqueue(0, partial(self.channel.refuse, route, reply))

    def attached(self, route: bytes, reply: Attached, on_greeting: Callable[[], None]) -> None:
        """Forget the former driver and greet this one. `on_greeting` is called on the completion
        thread once no result of the former driver is awaited."""

        def attach() -> None:
            self.channel.attach(route, reply)
            on_greeting()

        self._enqueue(0, attach)

    @property
    def num_waiting(self) -> int:
        """Outcomes that wait for their turn or for their result. Any thread may read it."""
        return self._num_queued - self._num_finished

    @property
    def _is_idle(self) -> bool:
        """True once the completion thread has finished all queued outcomes."""
        return self._num_finished == self._num_queued

    def _enqueue(self, seq: int, send: Callable[[], None]) -> None:
        self._num_queued += 1
        self._queue.put(_Outcome(seq, send))

    def _run(self) -> None:
        """Serve until stopped, on the completion thread. No driver and no result can end it."""
        try:
            while True:
                outcome = self._next()
                try:
                    outcome.send()
                except _Stop:
                    return
                except Exception:
                    logger.exception("the outcome of seq %d is lost", outcome.seq)
                self._num_finished += 1
        finally:
            self.channel.close()

    def _next(self) -> _Outcome:
        """Wait for the next outcome; meanwhile try to greet a driver that has just attached."""
        while self.channel.is_greeting:
            try:
                return self._queue.get(timeout=ATTACH_RETRY_S)
            except queue.Empty:
                self.channel.greet()
        return self._queue.get()

    def _wait(self, seq: int, pending: PendingReply, link: int, times: _StepStart) -> None:
        """Finish a result under its deadline."""
        self._progress.await_result(seq)
        try:
            self._finish(seq, pending, link, times)
        finally:
            self._progress.result = NO_RESULT

    def _finish(self, seq: int, pending: PendingReply, link: int, times: _StepStart) -> None:
        """Take a pending result of a step on `link`, record the durations of the step, and send the
        result or its failure. Called by the step thread too, while that thread is idle."""
        began_s, launched_ns, was_ready = times
        try:
            reply, arrays = pending.result()
        except Exception as error:  # the dispatch boundary, where a result ends a step
            self._on_failure(self.channel.fail(seq, error), link)
            return
        now_ns = time.monotonic_ns()
        self._progress.step_times.add(began_s, now_ns / 1e9, launched_ns / 1e9)
        self.channel.reply(reply, arrays, launched_ns if was_ready else now_ns)

    def _finish_without_reply(self, seq: int, began_s: float) -> None:
        """Record the duration of a step, and that this rank owes no reply to it."""
        self._progress.step_times.add(began_s, time.monotonic())
        self.channel.nothing(seq)
