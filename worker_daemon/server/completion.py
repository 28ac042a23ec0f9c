"""The completion thread: waits for results, encodes, keeps and sends them. Owns the results socket
and the reply ring; knows no device and decides nothing."""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import zmq

from rpc_schema.base import StepReply
from rpc_schema.codec import Frame, encode_step
from rpc_schema.errors import ErrorReply
from rpc_schema.lifecycle import Attached
from worker_daemon.errors import StaleError
from worker_daemon.server.dispatch import PendingReply
from worker_daemon.server.progress import NO_RESULT, Progress
from worker_daemon.server.replies import error_reply
from worker_daemon.server.sequence import REPLAYABLE

MAX_RING_BYTES: Final = 64 << 20
ATTACH_RETRY_S: Final = 0.005
ATTACH_LIMIT_S: Final = 5.0
STOP_LINGER_MS: Final = 200

logger = logging.getLogger(__name__)


class ReplyRing:
    """The encoded replies of the last REPLAYABLE steps, at most MAX_RING_BYTES, so that a repeated
    seq gets the same bytes. A step that owes no reply is kept as no frames."""

    __slots__ = ("_bytes", "_replies")

    def __init__(self) -> None:
        self._replies: OrderedDict[int, Sequence[Frame]] = OrderedDict()
        self._bytes = 0

    def keep(self, seq: int, frames: Sequence[Frame]) -> None:
        """Keep a reply; the oldest ones make room."""
        self._replies[seq] = frames
        self._bytes += _size(frames)
        while len(self._replies) > REPLAYABLE or self._bytes > MAX_RING_BYTES:
            self._bytes -= _size(self._replies.popitem(last=False)[1])

    def get(self, seq: int) -> Sequence[Frame] | None:
        """Return the frames of a seq that is still kept."""
        return self._replies.get(seq)


def _size(frames: Sequence[Frame]) -> int:
    return sum(map(len, frames))


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
    """What the step thread hands over. seq is 0 where it has no meaning; link is the one that a
    pending result was made on; route is a refusal's or an attached driver's; heard is told that an
    attached driver's turn has come."""

    kind: _Kind
    seq: int = 0
    reply: StepReply | None = None
    pending: PendingReply | None = None
    route: bytes = b""
    heard: Callable[[], None] = _nothing
    link: int = 0


_STOP: Final = _Outcome(_Kind.STOP)


class Completion:
    """Hands outcomes from the step thread (its methods) to the completion thread, in order."""

    def __init__(
        self,
        results: "zmq.Socket[bytes]",
        progress: Progress,
        on_failure: Callable[[ErrorReply, int], None],
    ) -> None:
        """results is used by the completion thread only. on_failure(reply, link) hears of steps
        whose result failed after the step thread was done with them; it is called on the completion
        thread."""
        self._queue: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._sender = _Sender(results, self._queue, progress, on_failure)
        self._thread = threading.Thread(target=self._sender.run, name="completion", daemon=True)

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
        self._queue.put(_Outcome(_Kind.REPLY, reply.seq, reply))

    def pending(self, seq: int, pending: PendingReply, link: int) -> None:
        """Wait for a result of a step that ran on `link`, then as `reply`."""
        self._queue.put(_Outcome(_Kind.PENDING, seq, None, pending, link=link))

    def nothing(self, seq: int) -> None:
        """Keep the fact that this rank owes no reply to `seq`."""
        self._queue.put(_Outcome(_Kind.NOTHING, seq))

    def replay(self, seq: int) -> None:
        """Send the reply to `seq` again."""
        self._queue.put(_Outcome(_Kind.REPLAY, seq))

    def refuse(self, route: bytes, reply: ErrorReply) -> None:
        """Send a refusal to any driver; it is not kept, because its request was not accepted."""
        self._queue.put(_Outcome(_Kind.REFUSAL, 0, reply, None, route))

    def attached(self, route: bytes, reply: Attached, heard: Callable[[], None]) -> None:
        """Forget the former driver and greet this one; `heard` is called (on the completion thread)
        once no result of the former one is waited for any more."""
        self._queue.put(_Outcome(_Kind.ATTACHED, 0, reply, None, route, heard))


class _Sender:
    """The thread's own state."""

    def __init__(
        self,
        results: "zmq.Socket[bytes]",
        outcomes: "queue.SimpleQueue[_Outcome]",
        progress: Progress,
        on_failure: Callable[[ErrorReply, int], None],
    ) -> None:
        self._results = results
        self._queue = outcomes
        self._progress = progress
        self._on_failure = on_failure
        self._ring = ReplyRing()
        self._route = b""
        self._epoch = 0
        self._rank = 0
        self._greeting: Sequence[Frame] | None = None
        self._greet_until = 0.0

    def run(self) -> None:
        """Serve until told to stop. Nothing that a driver or a result does ends it."""
        try:
            while (outcome := self._next()) is not _STOP:
                if outcome is not None:
                    try:
                        self._take(outcome)
                    except Exception:
                        logger.exception("the outcome of seq %d is lost", outcome.seq)
        finally:
            self._results.close(STOP_LINGER_MS)

    def _next(self) -> _Outcome | None:
        if self._greeting is None:
            return self._queue.get()
        try:
            return self._queue.get(timeout=ATTACH_RETRY_S)
        except queue.Empty:
            self._greet()
            return None

    def _take(self, outcome: _Outcome) -> None:
        kind = outcome.kind
        if kind is _Kind.PENDING:
            self._finish(outcome)
        elif kind is _Kind.REPLY:
            assert outcome.reply is not None
            self._keep_and_send(outcome.reply, ())
        elif kind is _Kind.NOTHING:
            self._ring.keep(outcome.seq, ())
        elif kind is _Kind.REPLAY:
            self._replay(outcome.seq)
        elif kind is _Kind.REFUSAL:
            self._send(outcome.route, encode_step(outcome.reply))  # type: ignore[arg-type]  # an ErrorReply
        else:
            self._attach(outcome)

    def _finish(self, outcome: _Outcome) -> None:
        assert outcome.pending is not None
        self._progress.await_result(outcome.seq)
        try:
            reply, arrays = outcome.pending.result()
        except Exception as error:  # the dispatch boundary, where it ends a step on this thread
            failure = error_reply(error, epoch=self._epoch, seq=outcome.seq, rank=self._rank)
            self._keep_and_send(failure, ())
            self._on_failure(failure, outcome.link)
            return
        finally:
            self._progress.result = NO_RESULT
        self._keep_and_send(reply, arrays)

    def _keep_and_send(self, reply: StepReply, arrays: Sequence[Frame]) -> None:
        self._rank = reply.rank
        try:
            frames = encode_step(reply, arrays)  # type: ignore[arg-type]  # every StepReply is in the union
        except Exception as error:  # a reply that cannot be sent is an outcome of its seq too
            frames = encode_step(
                error_reply(error, epoch=reply.epoch, seq=reply.seq, rank=reply.rank)
            )
        self._ring.keep(reply.seq, frames)
        self._send(self._route, frames)

    def _replay(self, seq: int) -> None:
        frames = self._ring.get(seq)
        if frames is None:
            stale = StaleError(f"the reply to seq {seq} is no longer kept")
            frames = encode_step(error_reply(stale, epoch=self._epoch, seq=seq, rank=self._rank))
        if frames:
            self._send(self._route, frames)

    def _attach(self, outcome: _Outcome) -> None:
        assert isinstance(outcome.reply, Attached)
        self._route = outcome.route
        self._epoch = outcome.reply.epoch
        self._rank = outcome.reply.rank
        self._ring = ReplyRing()
        self._greeting = encode_step(outcome.reply)
        self._greet_until = time.monotonic() + ATTACH_LIMIT_S
        self._greet()
        outcome.heard()

    def _greet(self) -> None:
        """Send Attached once the driver's results socket is there, or give up at the limit."""
        assert self._greeting is not None
        if self._send(self._route, self._greeting):
            self._greeting = None
        elif time.monotonic() > self._greet_until:
            logger.warning("epoch %d: the driver's results socket never came", self._epoch)
            self._greeting = None

    def _send(self, route: bytes, frames: Sequence[Frame]) -> bool:
        """Send without waiting: a driver that is gone or does not read asks for the seq again, if
        it ever can."""
        try:
            self._results.send_multipart([route, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
