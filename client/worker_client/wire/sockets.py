"""Opens and connects the driver's sockets, and watches the handshakes of their connections."""

import contextlib
import errno
import struct
import time
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import zmq

from rpc_schema.frames import CURVE_BYTES
from rpc_schema.roles import Role
from worker_client.errors import AuthenticationError, OutOfDescriptors
from worker_client.wire.keys import HANDSHAKE_MS, Lock

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

HIGH_WATER_MARK = 64
_HANDSHAKE_ENDED = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT: Final = struct.Struct("=Hi")
"""First frame of a monitor's message (zmq_socket_monitor(3)): event and value. pyzmq's own reader
would import asyncio, which a health probe need not."""
_CUT_OFF = (errno.EPIPE, errno.ECONNRESET)
"""Errors with which a handshake ends if the daemon hangs up: usually because keys are missing or
wrong, but also if it exits, or has too many handshakes in progress."""
CUT_OFF_S = 1.5
"""Time for which a daemon hangs up in each handshake before that counts as a refusal. libzmq tries
about every 0.15 s."""
_NOBLOCK = int(zmq.NOBLOCK)
HEARTBEAT_INTERVAL_MS = 250
HEARTBEAT_TIMEOUT_MS = 750


@contextlib.contextmanager
def _telling_limit() -> Iterator[None]:
    """Raise OutOfDescriptors in place of ZeroMQ's error."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OutOfDescriptors from error
        raise


def open_socket(context: Context, kind: int, max_bytes: int) -> Socket:
    """Open a socket with bounded queues and messages of at most max_bytes. Raises
    OutOfDescriptors."""
    with _telling_limit():
        socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return socket


def connect(socket: Socket, address: str, lock: Lock | None, *, is_watched: bool = False) -> None:
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


class ConnectionEvent(NamedTuple):
    """Change of a connection: opened (not yet made), made, ended after that, or refused."""

    kind: Literal["opened", "made", "ended", "refused", "nothing"]
    address: str
    descriptor: int = -1
    """File descriptor of a connection that was opened."""


class HandshakeWatch:
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
        """Connect the socket to one daemon: see connect()."""
        self._places[address] = (rank, lock)
        connect(self._socket, address, lock, is_watched=is_watched)

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

    def take(self) -> ConnectionEvent:
        """Process the next event.

        Raises:
            AuthenticationError: a daemon refused us.
        """
        event, endpoint = self.monitor.recv_multipart(_NOBLOCK)
        kind, value = _EVENT.unpack(event)
        address = endpoint.decode()
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_made += 1
            self._made.add(address)
            self._cut_off_at.pop(address, None)
            return ConnectionEvent("made", address)
        change = self._of_connection(kind, address, value)
        if change is not None:
            return change
        if address not in self._places:
            return ConnectionEvent("nothing", address)  # of a connection that was given up
        if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if value not in _CUT_OFF:
                return ConnectionEvent(
                    "nothing", address
                )  # our timeout: a busy daemon has not answered
            now = time.monotonic()
            if now < self._cut_off_at.setdefault(address, now) + CUT_OFF_S:
                return ConnectionEvent("nothing", address)  # libzmq tries again
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

    def _of_connection(self, kind: int, address: str, value: int) -> ConnectionEvent | None:
        """Return the change of a connection, ignoring its handshake."""
        if kind == zmq.EVENT_CONNECTED:
            return ConnectionEvent("opened", address, value)
        if kind == zmq.EVENT_DISCONNECTED:
            was_made = address in self._made
            self._made.discard(address)
            return ConnectionEvent("ended" if was_made else "nothing", address)
        return ConnectionEvent("refused", address) if kind == zmq.EVENT_CLOSED else None

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
