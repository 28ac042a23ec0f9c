"""The driver's sockets: endpoints, correlation ids, bounds before sending, a deadline on every
wait.

One thread owns all sockets of a group. Per daemon: a control and a step DEALER. Per group: one
results DEALER, whose routing id is a secret of the driver's, and one SUB for events, each connected
to every daemon.
"""

import contextlib
import errno
import ipaddress
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from rpc_schema.base import Answered
from rpc_schema.codec import (
    CURVE_BYTES,
    MAX_CONTROL_BYTES,
    MAX_STEP_BYTES,
    ControlReplyMessage,
    EventMessage,
    Frame,
    decode_control_reply,
    decode_event,
    encode_control,
)
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import BadFrameError, WireError
from rpc_schema.key_files import Role
from rpc_schema.operations import CONTROL_OPERATIONS
from worker_client.errors import (
    AuthenticationError,
    DeadlineExceeded,
    EndpointError,
    OutOfDescriptors,
    WorkerDied,
    remote_error,
)
from worker_client.wire.ipc_owner import SCHEME, check_owner
from worker_client.wire.keys import HANDSHAKE_MS, NO_KEYS, Keys, Lock
from worker_client.wire.listener import Listener
from worker_client.wire.liveness import Watch
from worker_client.wire.processes import PeerProcesses, Process

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"
ReplyT = TypeVar("ReplyT", bound=ControlReplyMessage)

CheckDeaths: TypeAlias = Callable[[], None]

MAX_SOCKET_PATH_BYTES = 107
MAX_PORT = 65535
HIGH_WATER_MARK = 64
_HANDSHAKE_ENDED = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_CUT_OFF = (errno.EPIPE, errno.ECONNRESET)
"""Errors with which a handshake ends if the daemon hangs up: usually because keys are missing or
wrong, but also if it exits, or has too many handshakes in progress."""
CUT_OFF_S = 1.5
"""Time for which a daemon hangs up in each handshake before that counts as a refusal. libzmq tries
about every 0.15 s."""
_NOBLOCK = int(zmq.NOBLOCK)
# As plain numbers: pyzmq's flag enumerations cost a microsecond each time two are combined.
_PROBE = [b""]
"""By this message a daemon finds out whether it reaches us."""
DEATH_CHECK_MS = 20
"""Interval at which a wait for replies checks whether a daemon has died."""

HEARTBEAT_INTERVAL_MS = 250
HEARTBEAT_TIMEOUT_MS = 750
RECONNECT_MS = 10
"""Pause before the first attempt to make a results connection again; it doubles each time."""
MAX_RECONNECT_MS = 500
CONNECT_TIMEOUT_S = 5.0


class Endpoint(NamedTuple):
    """The four addresses of a daemon, and the keys of its sockets."""

    control: str
    step: str
    results: str
    events: str
    lock: Lock | None = None


def parse_endpoint(text: str, keys: Keys = NO_KEYS) -> Endpoint:
    """Return the addresses of the daemon at `ipc://DIR/NAME` or `tcp://HOST:PORT`.

    Raises:
        EndpointError: another scheme, a relative path, a path too long for a Unix socket, no port,
            a daemon whose key is not known, or (UntrustedEndpointError) one without a key where
            another user's process may listen.
    """
    lock = keys.lock(text)
    if text.startswith("tcp://"):
        return _parse_tcp(text, lock)
    path = text.removeprefix("ipc://")
    if path == text or not Path(path).is_absolute() or path.endswith("/"):
        fix = "use ipc:///DIRECTORY/NAME or, with keys, tcp://HOST:PORT"
        raise EndpointError("not an endpoint", text, fix)
    if len(os.fsencode(path + ".results")) > MAX_SOCKET_PATH_BYTES:
        problem = f"the socket's path is longer than {MAX_SOCKET_PATH_BYTES} bytes with its suffix"
        raise EndpointError(problem, text, "use a directory with a shorter path")
    _check_owner(text, lock)
    return Endpoint(text, f"{text}.step", f"{text}.results", f"{text}.events", lock)


def _parse_tcp(text: str, lock: Lock | None) -> Endpoint:
    host, colon, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal()
    if not colon or not is_number or not _is_host(host.removeprefix("tcp://")):
        fix = "use tcp://HOST:PORT, an IPv6 address in brackets: tcp://[ADDRESS]:PORT"
        raise EndpointError("not an endpoint", text, fix)
    first = int(port)
    if not 1 <= first <= MAX_PORT - 3:
        problem = "the sockets use four ports from this one on"
        raise EndpointError(problem, text, f"use a port from 1 to {MAX_PORT - 3}")
    step, results, events = (f"{host}:{first + offset}" for offset in (1, 2, 3))
    return Endpoint(text, step, results, events, lock)


def _is_host(text: str) -> bool:
    """Return True for an IPv6 address in brackets, or text without colons: a name or an IPv4
    address."""
    if text.startswith("[") and text.endswith("]"):
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(text[1:-1])
            return True
    return bool(text) and not set(text) & set(":[]/")


def new_driver_id() -> bytes:
    """Return 16 random bytes for a driver's id, or for the routing id of its results socket. The
    first is not 0: ZeroMQ reserves routing ids that begin with 0."""
    random = os.urandom(16)
    return bytes([random[0] | 1]) + random[1:]


@contextlib.contextmanager
def _telling_limit() -> Iterator[None]:
    """Raise OutOfDescriptors in place of ZeroMQ's error."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OutOfDescriptors from error
        raise


def _open_socket(context: Context, kind: int, max_bytes: int) -> Socket:
    with _telling_limit():
        socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return socket


def _connect(socket: Socket, address: str, lock: Lock | None, *, is_watched: bool = False) -> None:
    """Connect to one daemon. The options apply to this connection, and to its reconnects.
    is_watched: its end reveals a daemon that does not answer."""
    if lock is not None:
        lock.prepare(socket)
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
    # On one host a connection ends with its daemon: there heartbeats would only cut off a daemon
    # that is starved of CPU, with the messages in transit. libzmq 4.3.5 aborts a process, on either
    # side, if a heartbeat finds a full queue from a peer that has exited: events may fill theirs.
    crosses_network = address.startswith("tcp://") and socket.type != zmq.SUB
    interval_ms = HEARTBEAT_INTERVAL_MS if is_watched or crosses_network else 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.connect(address)


def _check_owner(address: str, lock: Lock | None) -> None:
    """Check the owner of an ipc address, unless the daemon proves its identity by a key."""
    if lock is None and address.startswith(SCHEME):
        check_owner(address)


class _News(NamedTuple):
    """Change of a connection: opened (not yet made), made, ended after that, or refused."""

    kind: Literal["opened", "made", "ended", "refused", "nothing"]
    address: str
    descriptor: int = -1
    """File descriptor of a connection that was opened."""


class _Handshakes:
    """Watches the handshakes of a socket's connections: libzmq reports a daemon's refusal in no
    other way, and would retry forever."""

    def __init__(self, socket: Socket, events: int = 0, role: Role = Role.OBSERVER) -> None:
        """events: of the socket monitor, to report in addition. role: what a key needs for this
        socket. To be made before the first connect."""
        self._socket = socket
        self._role = role
        self._places: dict[str, tuple[int, Lock | None]] = {}
        self._made: set[str] = set()
        """Addresses with a successful handshake."""
        self.num_made = 0
        """Number of connections so far, as far as their events were processed."""
        self._cut_off_at: dict[str, float] = {}
        """First hang-up of each address that has hung up in every handshake since."""
        try:
            with _telling_limit():
                self.monitor: Socket = socket.get_monitor_socket(_HANDSHAKE_ENDED | events)
        except BaseException:
            socket.close(linger=0)  # otherwise its context could not terminate
            raise

    def connect(
        self, rank: int, address: str, lock: Lock | None, *, is_watched: bool = False
    ) -> None:
        """Connect the socket to one daemon, as _connect does."""
        self._places[address] = (rank, lock)
        _connect(self._socket, address, lock, is_watched=is_watched)

    def disconnect(self, address: str) -> None:
        """Disconnect from one daemon, and forget its state."""
        del self._places[address]
        self._made.discard(address)
        self._cut_off_at.pop(address, None)
        with contextlib.suppress(zmq.ZMQError):  # it may be disconnected already
            self._socket.disconnect(address)

    def check(self) -> None:
        """Process all events. Raises AuthenticationError if a daemon refused us."""
        while self.monitor.poll(0):
            self.take()

    def take(self) -> _News:
        """Process the next event.

        Raises:
            AuthenticationError: a daemon refused us.
        """
        event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
        kind, address = event["event"], event["endpoint"].decode()
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_made += 1
            self._made.add(address)
            self._cut_off_at.pop(address, None)
            return _News("made", address)
        news = self._of_connection(kind, address, int(event["value"]))
        if news is not None:
            return news
        if address not in self._places:
            return _News("nothing", address)  # of a connection that was given up
        if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if event["value"] not in _CUT_OFF:
                return _News("nothing", address)  # our timeout: a busy daemon has not answered
            now = time.monotonic()
            if now < self._cut_off_at.setdefault(address, now) + CUT_OFF_S:
                return _News("nothing", address)  # libzmq tries again
        rank, lock = self._places[address]
        raise AuthenticationError(rank, address, _why(kind, lock, self._role))

    def is_made(self, address: str) -> bool:
        """Return True if the address has a connection, as far as its events were processed."""
        return address in self._made

    def check_cut_off(self) -> None:
        """Raise AuthenticationError if the last handshake of a connection was cut off. To be called
        when there is no time left for another attempt."""
        for address in self._cut_off_at:
            rank, lock = self._places[address]
            why = _why(int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), lock, self._role)
            raise AuthenticationError(rank, address, why)

    def _of_connection(self, kind: int, address: str, value: int) -> _News | None:
        """Return the change of a connection, ignoring its handshake."""
        if kind == zmq.EVENT_CONNECTED:
            return _News("opened", address, value)
        if kind == zmq.EVENT_DISCONNECTED:
            was_made = address in self._made
            self._made.discard(address)
            return _News("ended" if was_made else "nothing", address)
        return _News("refused", address) if kind == zmq.EVENT_CLOSED else None

    def close(self) -> None:
        """Close the monitor; the socket is closed by its owner, after this."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


def _why(event: int, lock: Lock | None, role: Role) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        # The control socket, which every authorized key may use, tells a key that is not.
        if role is not Role.OBSERVER:
            return (
                f"the daemon does not let our key drive it, since it lacks the role {role}: ask to "
                "change its role in the daemon's --authorized-keys"
            )
        return "the daemon does not accept our key: ask to add it to its --authorized-keys"
    if lock is None:
        return "the daemon requires keys: give --key-file and --known-daemons"
    why = "the daemon's key is not the one in --known-daemons, or it uses none"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return f"cut off during the handshake, each time: {why}, or has too many connections"
    return why


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
        check_alive: CheckDeaths = lambda: None,
    ) -> None:
        """check_alive raises WorkerDied if this daemon is known to be dead; it is called while a
        reply is waited for."""
        self.rank = rank
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
        self._socket = _open_socket(context, zmq.DEALER, MAX_CONTROL_BYTES)
        self._handshakes = _Handshakes(self._socket)
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
        row = CONTROL_OPERATIONS[type(request)]
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
            _check_owner(self.endpoint.control, self.endpoint.lock)
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
        reply = decode_control_reply(self._socket.recv_multipart(zmq.NOBLOCK))
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


class StepChannel:
    """Sends one daemon's step requests. Replies come by the group's ResultsChannel."""

    def __init__(
        self, context: Context, endpoint: Endpoint, rank: int, check_deaths: CheckDeaths
    ) -> None:
        """check_deaths raises WorkerDied if a daemon is known to be dead; it is called while
        nothing takes a request."""
        self.rank = rank
        self.endpoint = endpoint
        self._check_deaths = check_deaths
        self._socket = _open_socket(context, zmq.DEALER, MAX_STEP_BYTES)
        self._handshakes = _Handshakes(self._socket, role=Role.DRIVER)
        self._handshakes.connect(rank, endpoint.step, endpoint.lock)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send an encoded request.

        Raises:
            WorkerDied: there is no connection that would take it, or a daemon has died.
            AuthenticationError: the daemon refused us.
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
            self._handshakes.check()
            self._check_deaths()
            if time.monotonic() >= deadline:
                raise WorkerDied(
                    self.rank, self.endpoint.step, "the step socket accepts no message"
                )
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket."""
        self._handshakes.close()
        self._socket.close()


class ResultsChannel:
    """Replies of all daemons of a group, and the state of its connections as a sign of their
    liveness."""

    def __init__(
        self,
        context: Context,
        endpoints: Sequence[Endpoint],
        route: bytes,
        watch: Watch,
        look: CheckDeaths,
    ) -> None:
        """watch is notified of changes of connections; look is called while replies are waited for,
        and raises WorkerDied."""
        self._look = look
        self._on_news: dict[str, Callable[[int], None]] = {
            "ended": watch.disconnected,
            "refused": watch.refused,
            "made": watch.connected,
        }
        self._socket = _open_socket(context, zmq.DEALER, MAX_STEP_BYTES)
        self._socket.setsockopt(zmq.ROUTING_ID, route)
        # Without a connection the lease is open to others: libzmq connects again at once, whether
        # or not Python runs.
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        self._ranks = {endpoint.results: rank for rank, endpoint in enumerate(endpoints)}
        self._socket.setsockopt(zmq.RCVTIMEO, DEATH_CHECK_MS)
        self._processes = PeerProcesses()
        self._handshakes = _Handshakes(
            self._socket,
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED,
            Role.DRIVER,
        )
        for rank, endpoint in enumerate(endpoints):
            self._handshakes.connect(rank, endpoint.results, endpoint.lock, is_watched=True)

    def receive(self, deadline: float) -> list[bytes] | None:
        """Return the next reply's frames, or None once `deadline` (of time.monotonic) has passed.

        It blocks in one receive, which returns now and then to check whether a daemon has died:
        cheaper than polling two sockets before each receive. Replies are returned before a death is
        raised, so that what a daemon sent before it died counts.

        Raises:
            WorkerDied: a daemon is dead.
            WorkerError: the lease is lost.
            AuthenticationError: a daemon refused us.
        """
        while True:
            try:
                return self._receive(0 if time.monotonic() < deadline else _NOBLOCK)
            except zmq.Again:
                self._look()
            if time.monotonic() >= deadline:
                return None

    def _receive(self, flags: int) -> list[bytes]:
        # A libzmq frame has the flag for further ones; reading it from the socket takes longer.
        frame = self._socket.recv(flags, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(flags, copy=False)
            frames.append(frame.bytes)
        if frames == _PROBE:
            raise zmq.Again
        return frames

    def read_news(self, within_s: float = 0.0) -> None:
        """Pass changes of connections to the watch, waiting up to `within_s` for the first. Raises
        AuthenticationError if a daemon refused us."""
        wait_ms = int(within_s * 1000)
        while self._handshakes.monitor.poll(wait_ms):
            wait_ms = 0
            kind, address, descriptor = self._handshakes.take()
            rank = self._ranks.get(address)
            if rank is None:
                continue
            if kind == "opened":
                self._processes.connected(address, descriptor)
            elif kind in self._on_news:
                self._on_news[kind](rank)

    def is_connected(self, endpoint: Endpoint) -> bool:
        """Return True if a daemon's connection is made, as far as the news tell."""
        return self._handshakes.is_made(endpoint.results)

    def process_at(self, address: str) -> Process:
        """Return the process that answers at an address of this host, as far as the connection to
        it shows; the caller closes it."""
        return self._processes.find(address)

    def move(self, old: Endpoint, new: Endpoint) -> None:
        """Receive one daemon's results from another endpoint from now on, or from another daemon at
        the same one."""
        rank = self._ranks.pop(old.results)
        self._handshakes.disconnect(old.results)
        self.read_news()
        self._processes.forget(old.results)
        self._ranks[new.results] = rank
        self._handshakes.connect(rank, new.results, new.lock, is_watched=True)

    def close(self) -> None:
        """Close the socket and its monitor."""
        self._handshakes.close()
        self._processes.close()
        self._socket.close()


class EventsChannel:
    """Heartbeats and state changes of all daemons of a group. If they are not read, the queue fills
    up and the newest are lost."""

    def __init__(self, context: Context, endpoints: Sequence[Endpoint]) -> None:
        self._socket = _open_socket(context, zmq.SUB, MAX_CONTROL_BYTES)
        self._socket.subscribe(b"")
        for endpoint in endpoints:
            _connect(self._socket, endpoint.events, endpoint.lock)

    def move(self, old: Endpoint, new: Endpoint) -> None:
        """Receive one daemon's events from another endpoint from now on."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(old.events)
        _connect(self._socket, new.events, new.lock)

    def receive_all(self) -> list[EventMessage]:
        """Return the events that are here, oldest first, without those that do not decode; never
        waits."""
        events: list[EventMessage] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return events
            with contextlib.suppress(WireError):
                events.append(decode_event(frames))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
