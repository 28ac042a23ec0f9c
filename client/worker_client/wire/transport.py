"""The driver's sockets for steps, their results, and events.

One thread owns all sockets of a group. Per daemon: a control and a step DEALER. Per group: one
results DEALER, whose routing id is a secret of the driver's, and one SUB for events, each connected
to every daemon.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

import zmq

from rpc_schema.codec import EventMessage, decode_event
from rpc_schema.errors import WireError
from rpc_schema.frames import MAX_CONTROL_BYTES, MAX_STEP_BYTES, Frame
from rpc_schema.roles import Role
from worker_client.errors import WorkerDied
from worker_client.wire.control_channel import DEATH_CHECK_MS, CheckDeaths
from worker_client.wire.endpoint import Endpoint
from worker_client.wire.liveness import Watch
from worker_client.wire.processes import PeerProcesses, Process
from worker_client.wire.sockets import Context, HandshakeWatch, connect, open_socket

_NOBLOCK = int(zmq.NOBLOCK)
# As plain numbers: pyzmq's flag enumerations cost a microsecond each time two are combined.
_PROBE = [b""]
"""By this message a daemon finds out whether it reaches us."""
RECONNECT_MS = 10
"""Pause before the first attempt to make a results connection again; it doubles each time."""
MAX_RECONNECT_MS = 500
CONNECT_TIMEOUT_S = 5.0


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
        self._socket = open_socket(context, zmq.DEALER, MAX_STEP_BYTES)
        self._handshakes = HandshakeWatch(self._socket, role=Role.DRIVER)
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
        first_rank: int = 0,
    ) -> None:
        """watch is notified of changes of connections; look is called while replies are waited for,
        and raises WorkerDied. first_rank: global rank of the first daemon."""
        self._look = look
        self._on_event: dict[str, Callable[[int], None]] = {
            "ended": watch.disconnected,
            "refused": watch.refused,
            "made": watch.connected,
        }
        self._socket = open_socket(context, zmq.DEALER, MAX_STEP_BYTES)
        self._socket.setsockopt(zmq.ROUTING_ID, route)
        # Without a connection the lease is open to others: libzmq connects again at once, whether
        # or not Python runs.
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        ranks = list(enumerate(endpoints, first_rank))
        self._ranks = {endpoint.results: rank for rank, endpoint in ranks}
        self._socket.setsockopt(zmq.RCVTIMEO, DEATH_CHECK_MS)
        self._processes = PeerProcesses()
        self._handshakes = HandshakeWatch(
            self._socket,
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED,
            Role.DRIVER,
        )
        for rank, endpoint in ranks:
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

    def read_connection_events(self, within_s: float = 0.0) -> None:
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
            elif kind in self._on_event:
                self._on_event[kind](rank)

    def is_connected(self, endpoint: Endpoint) -> bool:
        """Return True if a daemon's connection is made, as far as the monitors report."""
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
        self.read_connection_events()
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
        self._socket = open_socket(context, zmq.SUB, MAX_CONTROL_BYTES)
        self._socket.subscribe(b"")
        for endpoint in endpoints:
            connect(self._socket, endpoint.events, endpoint.lock)

    def move(self, old: Endpoint, new: Endpoint) -> None:
        """Receive one daemon's events from another endpoint from now on."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(old.events)
        connect(self._socket, new.events, new.lock)

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
