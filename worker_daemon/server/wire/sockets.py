"""Makes the daemon's sockets with their limits and binds them, all on the main thread before the
other threads start: starting a thread is the memory barrier that libzmq requires when a socket
moves between threads."""

import errno
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from rpc_schema.codec import MAX_CONTROL_BYTES, MAX_STEP_BYTES
from worker_daemon.directories import unusable
from worker_daemon.server.auth.security import AnySocket, Security
from worker_daemon.server.wire.endpoints import AnyEndpoint, EndpointInUseError, private_umask

HIGH_WATER_MARK: Final = 64
MAX_SILENT_BYTES: Final = 512
"""Limit of a frame on the sockets that only send: the largest handshake (about 320 bytes), or one
subscription."""
EVENTS_RECEIVE_BYTES: Final = 16 << 10
"""The kernel's receive buffer for each subscriber, which limits the bytes that it can send before
the socket is checked."""
DOORBELL: Final = "inproc://step-commands"
"""A second address of the step socket, so that the step thread waits for requests and commands in
one blocking receive. An empty message, from any sender, only makes it check for commands."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets; each is used and closed only by its owner thread."""

    control: zmq.asyncio.Socket
    events: zmq.Socket[bytes]
    """Used on the main thread, outside its loop: a PUB socket never waits."""
    doorbell: zmq.Socket[bytes]
    """Used on the main thread: an empty message on it wakes the step thread."""
    step: zmq.Socket[bytes]
    results: zmq.Socket[bytes]


def bind_sockets(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: AnyEndpoint, security: Security
) -> Sockets:
    """Make and bind all of a daemon's sockets, and let peers connect; the caller holds the
    endpoint's lock.

    Raises:
        EndpointInUseError: another process listens on one of the ports.
        ConfigError: this host has no such address, or the directory cannot be written.
        StartLaterError: the host has no room for the sockets now.
    """
    loop_context = zmq.asyncio.Context.shadow(context)
    sockets = Sockets(
        control=loop_context.socket(zmq.ROUTER),
        events=context.socket(zmq.PUB),
        doorbell=context.socket(zmq.DEALER),
        step=context.socket(zmq.ROUTER),
        results=context.socket(zmq.ROUTER),
    )
    max_bytes_of: dict[str, tuple[AnySocket, int]] = {
        "control": (sockets.control, MAX_CONTROL_BYTES),
        "events": (sockets.events, MAX_SILENT_BYTES),
        "step": (sockets.step, MAX_STEP_BYTES),
        "results": (sockets.results, MAX_SILENT_BYTES),
    }
    for name, (socket, max_bytes) in max_bytes_of.items():
        _set_options(socket, max_bytes + security.frame_bytes)
        security.protect(socket, name)
    # The driver may connect again before its former connection has ended. No other peer knows the
    # routing id of its results socket; libzmq chooses the other sockets' ids.
    sockets.results.setsockopt(zmq.ROUTER_HANDOVER, 1)
    security.watch_ends(sockets.results)
    security.start()
    with private_umask():
        for name, (socket, _) in max_bytes_of.items():
            _bind(socket, endpoint, name)
    sockets.step.bind(DOORBELL)
    sockets.doorbell.connect(DOORBELL)
    return sockets


def events_socket(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: AnyEndpoint, security: Security
) -> "zmq.Socket[bytes]":
    """Make and bind a new events socket in place of one that was closed, so that all subscribers
    have to connect again.

    Raises:
        EndpointInUseError: the former one is still bound (on tcp; a file is taken over).
    """
    events = context.socket(zmq.PUB)
    _set_options(events, MAX_SILENT_BYTES + security.frame_bytes)
    security.protect(events, "events")
    with private_umask():
        _bind(events, endpoint, "events")
    return events


def _bind(socket: AnySocket, endpoint: AnyEndpoint, name: str) -> None:
    address = endpoint.address(name)
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"another process listens at {address}"
            fix = "choose a port that is free, as are the next three, or stop that process"
            raise EndpointInUseError(
                problem, field="endpoint", value=str(endpoint), fix=fix
            ) from None
        raise unusable(
            OSError(error.errno, error.strerror),
            f"{address} cannot be bound: {error.strerror}",
            "endpoint",
            endpoint.path,
            "use an address of this host, or a directory that this user may write",
        ) from None


def _set_options(socket: AnySocket, max_bytes: int) -> None:
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    # No heartbeats from this side: libzmq 4.3.5 aborts the process when the timer fires for a peer
    # that filled a queue and left ("!_io_error"). Drivers send them, and libzmq answers.
    if socket.type == zmq.PUB:
        socket.setsockopt(zmq.RCVBUF, EVENTS_RECEIVE_BYTES)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
