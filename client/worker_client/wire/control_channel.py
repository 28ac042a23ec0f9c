"""Requests and replies on a daemon's control socket, with a deadline on every wait."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import zmq

from rpc_schema.base import Answered
from rpc_schema.control import ControlOperations, ControlReplyMessage
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import BadFrameError, ErrorCode, WireError
from rpc_schema.frames import MAX_CONTROL_BYTES, encode_control
from worker_client.errors import DeadlineExceeded, WorkerShutsDown, remote_error
from worker_client.wire.endpoint import Endpoint, check_keyless_owner
from worker_client.wire.listener import Listener
from worker_client.wire.sockets import Context, HandshakeWatch, open_socket

ReplyT = TypeVar("ReplyT", bound=ControlReplyMessage)

CheckDeaths: TypeAlias = Callable[[], None]

DEATH_CHECK_MS = 20
"""Interval at which a wait for replies checks whether a daemon has died."""


def _milliseconds_until(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)


@dataclass(frozen=True, slots=True)
class PendingCall(Generic[ReplyT]):
    """A control request that was sent, and its pending reply. Of one channel, only the latest can
    still be answered."""

    channel: "ControlChannel"
    call: int
    what: str
    reply_type: type[ReplyT]
    timeout_s: float
    deadline: float

    def result(self) -> ReplyT:
        """Wait for the reply; late replies to earlier calls are dropped.

        Raises:
            DeadlineExceeded: none came within the timeout, which began with the sending.
            WorkerError: the daemon answered with an error.
            WorkerShutsDown: it refused, because it ends.
            BadFrameError: the answer is of another type.
        """
        reply = self.poll(self.deadline)
        if reply is None:
            raise DeadlineExceeded(self.what, self.timeout_s)
        return reply

    @property
    def is_answered(self) -> bool:
        """True once a reply to this or a later call has come. Drops the replies that are here: for
        a call whose result is not asked for."""
        return self.channel.drop_replies() >= self.call

    def poll(self, until: float) -> ReplyT | None:
        """Wait for the reply until `until` (of time.monotonic); None if it has not come. Raises as
        result() does otherwise."""
        channel = self.channel
        while (reply := channel.receive(until)) is not None:
            is_error = isinstance(reply, ControlErrorReply)
            if reply.call != self.call and not (is_error and reply.call == 0):
                continue  # 0: for a message of ours that the daemon could not read
            if isinstance(reply, ControlErrorReply):
                if reply.code is ErrorCode.SHUTTING_DOWN:
                    raise WorkerShutsDown(channel.rank, channel.endpoint.control)
                raise remote_error(reply, rank=channel.rank, endpoint=channel.endpoint.control)
            if not isinstance(reply, self.reply_type):
                raise BadFrameError(f"{self.what} was answered with {type(reply).__name__}")
            return reply
        return None


class ControlChannel:
    """Requests and replies on one daemon's control socket, matched by correlation id. If the
    connection ends while a reply is waited for, a repeatable request (see rpc_schema/operations.py)
    is sent again on the next one: it, or the reply, may be lost. If nothing listens any more, the
    wait ends at once."""

    def __init__(
        self,
        context: Context,
        endpoint: Endpoint,
        rank: int,
        operations: ControlOperations,
        check_alive: CheckDeaths = lambda: None,
    ) -> None:
        """operations: those whose requests are sent here. check_alive raises WorkerDied if this
        daemon is known to be dead; it is called while a reply is waited for."""
        self.rank = rank
        self._operations = operations
        self.endpoint = endpoint
        self._check_alive = check_alive
        self._last_call = 0
        self._last_answered = 0
        self._repeatable: bytes | None = None
        """Last request, if it may be sent again."""
        self._sent_on = 0
        """Number of the connection that took it."""
        self._checked_on = 0
        """Number of the connection whose daemon's owner was checked."""
        self._socket = open_socket(context, zmq.DEALER, MAX_CONTROL_BYTES)
        self._handshakes = HandshakeWatch(self._socket)
        self._handshakes.connect(rank, endpoint.control, endpoint.lock)
        self._listener = Listener(endpoint.control, rank)

    def send(self, build: Callable[..., Answered[ReplyT]], timeout_s: float) -> PendingCall[ReplyT]:
        """Send build(call=correlation id); result() waits for the reply.

        Raises:
            DeadlineExceeded: no daemon took the request.
            WorkerDied: the daemon is known to have ended
            NothingListens: it never listened.
            AuthenticationError: the daemon refused us.
            UntrustedEndpointError: another user's process may listen there.
        """
        self._last_call += 1
        request = build(call=self._last_call)
        row = self._operations.rows[type(request)]
        what = f"{type(request).__name__} to rank {self.rank} at {self.endpoint.control}"
        deadline = time.monotonic() + timeout_s
        frame = encode_control(request)
        self._repeatable = None
        while not self._try_to_send(frame, deadline):
            if time.monotonic() >= deadline:
                self._handshakes.check_cut_off()
                raise DeadlineExceeded(what, timeout_s)
        self._listener.is_there()
        self._sent_on = max(1, self._handshakes.num_made)  # its event may come later
        if row.repeatable:
            self._repeatable = frame
        return PendingCall(self, self._last_call, what, row.reply, timeout_s, deadline)

    def _try_to_send(self, frame: bytes, deadline: float) -> bool:
        """Send a frame once there is a connection, which may end meanwhile. Return True if one took
        it by the deadline."""
        if not self._wait(zmq.POLLOUT, deadline):
            return False
        self._handshakes.check()
        self._check_owner()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _check_owner(self) -> None:
        """Check the owner once for each connection: the listener may have changed since we began to
        connect."""
        num_made = max(1, self._handshakes.num_made)
        if num_made != self._checked_on:
            check_keyless_owner(self.endpoint.control, self.endpoint.lock)
            self._checked_on = num_made

    def receive(self, deadline: float) -> ControlReplyMessage | None:
        """Return the next reply to any call, or None once `deadline` (of time.monotonic) has
        passed. Raises AuthenticationError and WorkerDied as send() does."""
        if not self._wait(zmq.POLLIN, deadline):
            return None
        return self._receive()

    def drop_replies(self) -> int:
        """Drop the replies that are here; return the latest call that has had one."""
        with contextlib.suppress(zmq.Again):
            while True:
                with contextlib.suppress(WireError):
                    self._receive()
        return self._last_answered

    def _receive(self) -> ControlReplyMessage:
        reply = self._operations.decode_reply(self._socket.recv_multipart(zmq.NOBLOCK))
        self._last_answered = max(self._last_answered, reply.call)
        return reply

    def _wait(self, readiness: int, deadline: float) -> bool:
        """Wait until the socket is ready; return False at the deadline. Checks for refusals, for
        the daemon's death, and for an endpoint without a listener meanwhile."""
        if self._socket.poll(0, readiness):
            return True
        poller = zmq.Poller()
        poller.register(self._socket, readiness)
        poller.register(self._handshakes.monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(min(DEATH_CHECK_MS, _milliseconds_until(deadline))))
            if self._socket in ready:
                return True
            self._handshakes.check()
            self._check_alive()
            self._check_listener()
            self._send_again()
            if not ready and time.monotonic() >= deadline:
                return False

    def _check_listener(self) -> None:
        """Raise WorkerDied if there is no connection, and no listener for one."""
        if self._socket.poll(0, zmq.POLLOUT):
            self._listener.is_there()
        else:
            self._listener.check()

    def _send_again(self) -> None:
        """Repeat the pending request once there is a newer connection than the one that took it.
        Before that the socket may still queue messages for the connection that has ended."""
        if self._repeatable is None or self._handshakes.num_made <= self._sent_on:
            return
        if self._socket.poll(0, zmq.POLLOUT):
            self._check_owner()
            with contextlib.suppress(zmq.Again):  # the connection has ended: on the next one
                self._socket.send(self._repeatable, zmq.NOBLOCK)
                self._sent_on = self._handshakes.num_made

    def close(self) -> None:
        """Close the socket."""
        self._handshakes.close()
        self._socket.close()
