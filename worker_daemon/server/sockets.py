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


@dataclass(frozen=True, slots=True)
class Sockets:
    """Each is handed to its owner thread, which alone uses and closes it."""

    control: zmq.asyncio.Socket
    events: zmq.asyncio.Socket
    doorbell_send: zmq.Socket[bytes]
    """Of the control thread: wakes the step thread."""
    doorbell: zmq.Socket[bytes]
    step: zmq.Socket[bytes]
    results: zmq.Socket[bytes]


def bind_sockets(context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> Sockets:
    """Make and bind all of a daemon's sockets; the caller holds the endpoint's lock."""
    loop_context = zmq.asyncio.Context.shadow(context)
    doorbell = context.socket(zmq.PAIR)
    doorbell.bind(DOORBELL)
    doorbell_send = context.socket(zmq.PAIR)
    doorbell_send.connect(DOORBELL)
    sockets = Sockets(
        control=loop_context.socket(zmq.ROUTER),
        events=loop_context.socket(zmq.PUB),
        doorbell_send=doorbell_send,
        doorbell=doorbell,
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
