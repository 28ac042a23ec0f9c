"""Sends replies to the driver: encodes them, and keeps the last ones for replays. Owns the results
socket and the reply ring.

Two threads use it, one at a time behind its lock, which is the full fence that libzmq requires when
a socket moves between threads. completion.py decides which thread sends.
"""

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, TypeAlias

import zmq

from rpc_schema.base import StepReply
from rpc_schema.codec import Frame, encode_step, mark_replayed
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode, StaleError
from rpc_schema.lifecycle import Attached, ReplyDelay
from rpc_schema.step import ModelRunnerOutput
from worker_daemon.server.progress import PHASE_BOUNDS_S
from worker_daemon.server.sequence import REPLAYABLE
from worker_daemon.server.wire.replies import error_reply
from worker_host.metrics import HistogramCounts

MAX_RING_BYTES: Final = 64 << 20
MAX_DELAYS: Final = 1024
ATTACH_LIMIT_S: Final = 5.0
STOP_LINGER_MS: Final = 200
_NOBLOCK: Final = int(zmq.NOBLOCK)
_ADDRESS: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
# Plain integers: combining two of pyzmq's flag enums takes a microsecond.

logger = logging.getLogger(__name__)


_Kept: TypeAlias = tuple[int, Sequence[Frame], int]
"""seq, the frames of its reply, their bytes."""
_NOTHING_KEPT: Final[_Kept] = (-1, (), 0)


class ReplyRing:
    """The encoded replies of the last REPLAYABLE steps, at most MAX_RING_BYTES, so that a repeated
    seq gets the same bytes. A step without a reply is kept as no frames."""

    __slots__ = ("_bytes", "_kept")

    def __init__(self) -> None:
        self._kept: list[_Kept] = [_NOTHING_KEPT] * REPLAYABLE
        """The reply to a seq is at seq % REPLAYABLE."""
        self._bytes = 0

    def keep(self, seq: int, frames: Sequence[Frame]) -> None:
        """Keep a reply; the oldest ones make room."""
        self._put(seq % REPLAYABLE, (seq, frames, sum(map(len, frames))))
        while self._bytes > MAX_RING_BYTES:
            oldest = min((kept for kept in self._kept if kept[2]), key=itemgetter(0))
            self._put(oldest[0] % REPLAYABLE, _NOTHING_KEPT)

    def get(self, seq: int) -> Sequence[Frame] | None:
        """Return the frames of a seq that is still kept."""
        kept_seq, frames, _ = self._kept[seq % REPLAYABLE]
        return frames if kept_seq == seq else None

    def _put(self, index: int, kept: "_Kept") -> None:
        self._bytes += kept[2] - self._kept[index][2]
        self._kept[index] = kept


class ReplyCounts:
    """Counts since the daemon's start. Written by one thread at a time, read by any."""

    __slots__ = ("errors", "num_failed_results", "num_replays", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens sampled."""
        self.num_replays = 0
        """Replies that were sent again."""
        self.num_failed_results = 0
        """Steps that failed after the step thread's work for them."""
        self.errors: Counter[ErrorCode] = Counter()
        """Failures of accepted requests."""

    def add(self, reply: StepReply) -> None:
        """Count a reply that is sent for the first time."""
        if type(reply) is ModelRunnerOutput:
            if reply.sampled_token_ids:
                self.num_tokens += len(reply.sampled_token_ids) // 4
        elif type(reply) is ErrorReply:
            self.errors[reply.code] += 1


class ReplyDelays:
    """The delays of the last MAX_DELAYS results. Written by one thread at a time; any thread may
    call summary(), which sorts them, so that steps need not."""

    __slots__ = ("_delays_ns",)

    def __init__(self) -> None:
        self._delays_ns: deque[int] = deque(maxlen=MAX_DELAYS)

    def add(self, delay_ns: int) -> None:
        """Record one delay, in nanoseconds."""
        self._delays_ns.append(delay_ns)

    def clear(self) -> None:
        """Forget all delays: another driver begins."""
        self._delays_ns.clear()

    def summary(self) -> ReplyDelay:
        """Return median and 99th percentile, each as the delay at its rank (no interpolation)."""
        ordered = sorted(self._delays_ns.copy())
        if not ordered:
            return ReplyDelay(num_replies=0, p50_us=0.0, p99_us=0.0)
        return ReplyDelay(
            num_replies=len(ordered),
            p50_us=_at_rank(ordered, 50) / 1000,
            p99_us=_at_rank(ordered, 99) / 1000,
        )


class CountedReplyDelays(ReplyDelays):
    """The same, and how many took how long since the start, for a daemon with metrics."""

    __slots__ = ("since_start",)

    def __init__(self) -> None:
        super().__init__()
        self.since_start = HistogramCounts(PHASE_BOUNDS_S)
        """In seconds, of all drivers."""

    def add(self, delay_ns: int) -> None:
        """Record one delay, in nanoseconds, and count it."""
        super().add(delay_ns)
        self.since_start.observe(delay_ns / 1e9)


class ReplyChannel:
    """Sends replies and keeps them for replay. Every method may be called from any thread and
    returns without waiting for a peer."""

    def __init__(self, results: "zmq.Socket[bytes]", delays: ReplyDelays | None = None) -> None:
        """Take over the socket: no other object uses or closes it from now on. delays: where they
        are recorded; None: in a ReplyDelays."""
        self._results = results
        # pyzmq's compiled send: its Python wrapper is slow if it last ran 5 ms ago or earlier.
        self._send_part = super(zmq.Socket, results).send
        self.delays = ReplyDelays() if delays is None else delays
        """Delays of the attached driver's results, from the host to the socket."""
        self.counts = ReplyCounts()
        self._lock = threading.Lock()
        self._ring = ReplyRing()
        self._route = b""
        self._epoch = 0
        self._rank = 0
        self._greeting: Sequence[Frame] = ()
        self._greet_until = 0.0

    @property
    def is_greeting(self) -> bool:
        """True if an attached driver has not been greeted yet."""
        return bool(self._greeting)

    def reply(
        self, reply: StepReply, arrays: Sequence[Frame] = (), known_ns: int | None = None
    ) -> None:
        """Send a reply, and keep it for its seq. known_ns: time.monotonic_ns since which its result
        was known to be on the host."""
        try:
            frames = encode_step(reply, arrays)
        except Exception as error:
            frames = encode_step(
                error_reply(error, epoch=reply.epoch, seq=reply.seq, rank=reply.rank)
            )
        with self._lock:
            self._send(self._route, frames)
            if known_ns is not None:
                self.delays.add(time.monotonic_ns() - known_ns)
            self._rank = reply.rank
            self.counts.add(reply)
            self._ring.keep(reply.seq, frames)

    def fail(self, seq: int, error: Exception) -> ErrorReply:
        """Send the failure of `seq`, a step of the attached driver, and keep it; return the
        reply."""
        failure = error_reply(error, epoch=self._epoch, seq=seq, rank=self._rank)
        self.counts.num_failed_results += 1
        self.reply(failure)
        return failure

    def nothing(self, seq: int) -> None:
        """Record that this rank owes no reply to `seq`."""
        with self._lock:
            self._ring.keep(seq, ())

    def replay(self, seq: int) -> None:
        """Send the reply to `seq` again, with the same bytes, marked as a replay; or an error if it
        is no longer kept."""
        with self._lock:
            frames = self._ring.get(seq)
            if frames is None:
                stale = StaleError(f"the reply to seq {seq} is no longer kept")
                reply = error_reply(stale, epoch=self._epoch, seq=seq, rank=self._rank)
                self._send(self._route, encode_step(reply))
            elif frames:
                self.counts.num_replays += 1
                self._send(self._route, mark_replayed(frames))

    def refuse(self, route: bytes, reply: ErrorReply) -> None:
        """Send a refusal to any driver; it is not kept, because its request was not accepted."""
        frames = encode_step(reply)
        with self._lock:
            self._send(route, frames)

    def attach(self, route: bytes, reply: Attached) -> None:
        """Forget the former driver and its replies, and start to greet this one."""
        frames = encode_step(reply)
        with self._lock:
            self._route = route
            self._epoch = reply.epoch
            self._rank = reply.rank
            self._ring = ReplyRing()
            self.delays.clear()
            self._greeting = frames
            self._greet_until = time.monotonic() + ATTACH_LIMIT_S
        self.greet()

    def greet(self) -> None:
        """Send Attached if the driver's results socket is connected; give up at the limit."""
        with self._lock:
            if self._send(self._route, self._greeting):
                self._greeting = ()
            elif time.monotonic() > self._greet_until:
                logger.warning("epoch %d: the driver's results socket never connected", self._epoch)
                self._greeting = ()

    def reaches(self, route: bytes) -> bool:
        """Send an empty message; return False if no connection has this routing id. A connection
        that takes no more messages at the moment has."""
        with self._lock:
            try:
                self._send_part(route, _ADDRESS)
                self._send_part(b"", _NOBLOCK)
            except zmq.ZMQError as error:
                return error.errno == errno.EAGAIN
        return True

    def close(self) -> None:
        """Close the socket, after a moment for the last replies to leave."""
        with self._lock:
            self._results.close(STOP_LINGER_MS)

    def _send(self, route: bytes, frames: Sequence[Frame]) -> bool:
        """Send without waiting, with the lock held; a driver that missed a reply asks for the seq
        again."""
        try:
            self._send_part(route, _ADDRESS)
            if len(frames) == 1:
                self._send_part(frames[0], _NOBLOCK)
            else:
                self._results.send_multipart(frames, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


def _at_rank(ordered: list[int], percent: int) -> int:
    """Return the smallest value that at least `percent` of all values do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]
