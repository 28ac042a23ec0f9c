"""The driver's sockets: endpoints, correlation ids, bounds before sending, a deadline on every
wait. Knows frames and messages, but nothing of steps, slots or what a daemon does.

One thread owns all sockets of a group. Per daemon: a control and a step DEALER. Per group: one
results DEALER, whose routing id is the driver's id, and one SUB for events, each connected to every
daemon.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from client.errors import DeadlineExceeded, EndpointError, WorkerDied, remote_error
from rpc_schema.codec import (
    MAX_CONTROL_BYTES,
    MAX_STEP_BYTES,
    ControlMessage,
    ControlReplyMessage,
    EventMessage,
    Frame,
    decode_control_reply,
    decode_event,
    encode_control,
)
from rpc_schema.errors import BadFrameError, ControlErrorReply

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"
ReplyT = TypeVar("ReplyT", bound=ControlReplyMessage)

CheckDeaths: TypeAlias = Callable[[], None]

MAX_SOCKET_PATH_BYTES = 107
HIGH_WATER_MARK = 64
_NOBLOCK = int(zmq.NOBLOCK)
_RCVMORE = int(zmq.RCVMORE)
# As plain numbers: pyzmq's flag enumerations cost a microsecond each time two are combined.
DEATH_CHECK_MS = 20
"""How long a wait for replies goes on before it looks whether a daemon has died."""

HEARTBEAT_INTERVAL_MS = 250
HEARTBEAT_TIMEOUT_MS = 750
CONNECT_TIMEOUT_S = 5.0


class Endpoint(NamedTuple):
    """The four addresses of a daemon."""

    control: str
    step: str
    results: str
    events: str


def parse_endpoint(text: str) -> Endpoint:
    """Return the addresses of the daemon at `ipc://DIR/NAME`.

    Raises:
        EndpointError: another scheme, a relative path, or a path too long for a Unix socket.
    """
    if text.startswith("tcp://"):
        raise EndpointError(
            "tcp needs keys, which this version does not have yet",
            field="endpoint",
            value=text,
            fix="use ipc://DIR/NAME",
        )
    path = text.removeprefix("ipc://")
    if path == text or not Path(path).is_absolute() or path.endswith("/"):
        raise EndpointError(
            "not an endpoint", field="endpoint", value=text, fix="use ipc:///DIRECTORY/NAME"
        )
    if len(os.fsencode(path + ".results")) > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(
            f"the socket's path is longer than {MAX_SOCKET_PATH_BYTES} bytes with its suffix",
            field="endpoint",
            value=text,
            fix="use a directory with a shorter path",
        )
    return Endpoint(text, f"{text}.step", f"{text}.results", f"{text}.events")


def new_driver_id() -> bytes:
    """Return 16 random bytes, the first not 0: ZeroMQ keeps routing ids that begin with 0 for
    itself."""
    random = os.urandom(16)
    return bytes([random[0] | 1]) + random[1:]


def _open_socket(context: Context, kind: int, max_bytes: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    if kind != zmq.SUB:
        # libzmq 4.3.5 aborts the process when the heartbeat timer fires for a peer that filled a
        # queue and went away; events may fill theirs, replies never do.
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return socket


def _milliseconds_until(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)


class PendingCall(Generic[ReplyT]):
    """A control request that was sent, and its reply to come. Of one channel, only the latest can
    still be answered."""

    def __init__(
        self,
        channel: "ControlChannel",
        call: int,
        what: str,
        reply_type: type[ReplyT],
        timeout_s: float,
        deadline: float,
    ) -> None:
        self._channel = channel
        self._call = call
        self._what = what
        self._reply_type = reply_type
        self._timeout_s = timeout_s
        self._deadline = deadline

    def result(self) -> ReplyT:
        """Wait for the reply; late replies to earlier calls are dropped.

        Raises:
            DeadlineExceeded: none came within the timeout, which began with the sending.
            RemoteError: the daemon answered with an error.
            BadFrameError: the answer is of another type.
        """
        reply = self.poll(self._deadline)
        if reply is None:
            raise DeadlineExceeded(self._what, self._timeout_s)
        return reply

    def poll(self, until: float) -> ReplyT | None:
        """Wait for the reply until `until` (of time.monotonic); None when it has not come. Raises
        as result() does otherwise."""
        channel = self._channel
        while (reply := channel.receive(until)) is not None:
            if reply.call != self._call:
                continue
            if isinstance(reply, ControlErrorReply):
                raise remote_error(reply, rank=channel.rank, endpoint=channel.endpoint.control)
            if not isinstance(reply, self._reply_type):
                raise BadFrameError(f"{self._what} was answered with {type(reply).__name__}")
            return reply
        return None


class ControlChannel:
    """Requests and replies on one daemon's control socket, matched by correlation id."""

    def __init__(self, context: Context, endpoint: Endpoint, rank: int) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self._last_call = 0
        self._socket = _open_socket(context, zmq.DEALER, MAX_CONTROL_BYTES)
        self._socket.connect(endpoint.control)

    def call(
        self, build: Callable[[int], ControlMessage], reply_type: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        """Send build(correlation id) and return its reply. Raises as send() and
        PendingCall.result() do."""
        return self.send(build, reply_type, timeout_s).result()

    def send(
        self, build: Callable[[int], ControlMessage], reply_type: type[ReplyT], timeout_s: float
    ) -> PendingCall[ReplyT]:
        """Send build(correlation id); the reply is waited for by result().

        Raises:
            DeadlineExceeded: no daemon took the request.
        """
        self._last_call += 1
        request = build(self._last_call)
        what = f"{type(request).__name__} to rank {self.rank} at {self.endpoint.control}"
        deadline = time.monotonic() + timeout_s
        frame = encode_control(request)
        if not self._socket.poll(_milliseconds_until(deadline), zmq.POLLOUT):
            raise DeadlineExceeded(what, timeout_s)
        self._socket.send(frame, zmq.NOBLOCK)
        return PendingCall(self, self._last_call, what, reply_type, timeout_s, deadline)

    def receive(self, deadline: float) -> ControlReplyMessage | None:
        """Return the next reply to any call, or None when `deadline` (of time.monotonic) has
        passed."""
        if not self._socket.poll(_milliseconds_until(deadline), zmq.POLLIN):
            return None
        return decode_control_reply(self._socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class StepChannel:
    """Where one daemon's step requests go. Send only: replies come by the group's
    ResultsChannel."""

    def __init__(
        self, context: Context, endpoint: Endpoint, rank: int, check_deaths: CheckDeaths
    ) -> None:
        """check_deaths raises WorkerDied once a daemon is known to be gone; it is asked while a
        request finds nobody to take it."""
        self.rank = rank
        self.endpoint = endpoint
        self._check_deaths = check_deaths
        self._socket = _open_socket(context, zmq.DEALER, MAX_STEP_BYTES)
        self._socket.connect(endpoint.step)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send an encoded request.

        Raises:
            WorkerDied: there is no connection that would take it, or a daemon has died.
        """
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], _NOBLOCK)
            else:
                self._socket.send_multipart(frames, _NOBLOCK)
        except zmq.Again:
            self._send_once_connected(frames)

    def _send_once_connected(self, frames: Sequence[Frame]) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._socket.poll(DEATH_CHECK_MS, zmq.POLLOUT):
            self._check_deaths()
            if time.monotonic() >= deadline:
                raise WorkerDied(self.rank, self.endpoint.step, "the step socket takes nothing")
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class ResultsChannel:
    """Replies of all daemons of a group, and the news that one of them is gone."""

    def __init__(
        self,
        context: Context,
        endpoints: Sequence[Endpoint],
        driver_id: bytes,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """check_lease raises the error that ended the driver's lease; it is asked while nothing
        comes."""
        self._check_lease = check_lease
        self._socket = _open_socket(context, zmq.DEALER, MAX_STEP_BYTES)
        self._socket.setsockopt(zmq.ROUTING_ID, driver_id)
        self._ranks = {endpoint.results: rank for rank, endpoint in enumerate(endpoints)}
        self._endpoints = endpoints
        self._socket.setsockopt(zmq.RCVTIMEO, DEATH_CHECK_MS)
        self._monitor: Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for endpoint in endpoints:
            self._socket.connect(endpoint.results)

    def receive(self, deadline: float) -> list[bytes] | None:
        """Return the next reply's frames, or None when `deadline` (of time.monotonic) has passed.

        It is one blocking receive, which ends now and then to look whether a daemon has died:
        cheaper than polling two sockets before each. Replies are returned before the news of a
        death, so that what a daemon sent before it died counts.

        Raises:
            WorkerDied: a daemon's connection ended.
            RemoteError: the lease is lost.
        """
        while True:
            try:
                return self._receive(0 if time.monotonic() < deadline else _NOBLOCK)
            except zmq.Again:
                self.check_deaths()
                self._check_lease()
            if time.monotonic() >= deadline:
                return None

    def _receive(self, flags: int) -> list[bytes]:
        frames = [self._socket.recv(flags)]
        while self._socket.getsockopt(_RCVMORE):
            frames.append(self._socket.recv(flags))
        return frames

    def check_deaths(self, within_s: float = 0.0) -> None:
        """Raise WorkerDied if a daemon's connection has ended, or does so within the time."""
        if self._monitor.poll(int(within_s * 1000)):
            self._raise_death()

    def _raise_death(self) -> None:
        event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
        address = event["endpoint"].decode()
        rank = self._ranks[address]
        raise WorkerDied(rank, self._endpoints[rank].control)

    def close(self) -> None:
        """Close the socket and its monitor."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class EventsChannel:
    """Heartbeats and state changes of all daemons of a group. When nobody reads, the queue fills
    and then the newest are lost."""

    def __init__(self, context: Context, endpoints: Sequence[Endpoint]) -> None:
        self._socket = _open_socket(context, zmq.SUB, MAX_CONTROL_BYTES)
        self._socket.subscribe(b"")
        for endpoint in endpoints:
            self._socket.connect(endpoint.events)

    def discard_all(self) -> None:
        """Drop the events that are here, unread: a full queue would lose the newest instead."""
        while True:
            try:
                self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def receive_all(self) -> list[EventMessage]:
        """Return the events that are here, oldest first; never waits."""
        events: list[EventMessage] = []
        while True:
            try:
                events.append(decode_event(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return events

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
