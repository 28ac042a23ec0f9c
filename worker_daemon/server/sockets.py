"""Makes the daemon's sockets with their bounds and binds them, all on the main thread before the
other threads start: the start of a thread is the memory barrier that libzmq asks for when a socket
changes hands."""

from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from rpc_schema.codec import MAX_CONTROL_BYTES, MAX_STEP_BYTES
from worker_daemon.server.endpoints import Endpoint, private_umask

HIGH_WATER_MARK: Final = 64
DOORBELL: Final = "inproc://step-commands"
"""A second address of the step socket, so that the step thread waits for requests and commands in
one blocking receive. Whoever else sends an empty message only makes it look for commands."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Each is handed to its owner thread, which alone uses and closes it."""

    control: zmq.asyncio.Socket
    events: zmq.Socket[bytes]
    """Of the main thread too, but not of its loop: a PUB socket never waits."""
    doorbell: zmq.Socket[bytes]
    """Of the control thread: an empty message on it wakes the step thread."""
    step: zmq.Socket[bytes]
    results: zmq.Socket[bytes]


def bind_sockets(context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> Sockets:
    """Make and bind all of a daemon's sockets; the caller holds the endpoint's lock."""
    loop_context = zmq.asyncio.Context.shadow(context)
    sockets = Sockets(
        control=loop_context.socket(zmq.ROUTER),
        events=context.socket(zmq.PUB),
        doorbell=context.socket(zmq.DEALER),
        step=context.socket(zmq.ROUTER),
        results=context.socket(zmq.ROUTER),
    )
    _bound(sockets.control, MAX_CONTROL_BYTES)
    _bound(sockets.events, MAX_CONTROL_BYTES)
    _bound(sockets.step, MAX_STEP_BYTES)
    _bound(sockets.results, MAX_STEP_BYTES)
    with private_umask():
        sockets.control.bind(endpoint.address("control"))
        sockets.events.bind(endpoint.address("events"))
        sockets.step.bind(endpoint.address("step"))
        sockets.results.bind(endpoint.address("results"))
    sockets.step.bind(DOORBELL)
    sockets.doorbell.connect(DOORBELL)
    return sockets


def _bound(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, max_bytes: int) -> None:
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    # No heartbeats from this side: libzmq 4.3.5 aborts the process when the timer fires for a peer
    # that filled a queue and went away ("!_io_error"). Drivers send them, and libzmq answers.
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
