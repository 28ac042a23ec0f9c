"""Publishes events: heartbeats, transitions, hangs, slow steps, ends of moves of experts, and the
trace's question to the driver. Owns the events socket (PUB). Main thread only."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, TypedDict

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema.codec import EventMessage, encode_control
from rpc_schema.errors import WireError
from rpc_schema.expert_placement import ExpertMoveEnded
from worker_daemon.server.lifecycle import MAX_CAUSE_BYTES
from worker_daemon.server.session.status import StatusReport
from worker_daemon.server.wire.endpoints import EndpointInUseError
from worker_daemon.worker.description import MoveEnd
from worker_host.plain_text import one_line

REOPEN_INTERVAL_S: Final = 0.02
REOPEN_TRIES: Final = 100

logger = logging.getLogger(__name__)


class _Origin(TypedDict):
    """The publisher of an event."""

    worker_uid: bytes
    rank: int


class Events:
    """Sends without waiting: a subscriber that does not read misses events."""

    def __init__(self, socket: "zmq.Socket[bytes]", report: StatusReport) -> None:
        self._socket = socket
        self._report = report

    def publish_heartbeat(self) -> None:
        """Publish a heartbeat, with the daemon's state."""
        self._publish(self._report.heartbeat())

    def publish_transition(self, transition: str) -> None:
        """Publish a state change, and the heartbeat that shows it."""
        self._publish(lc.StateChanged(**self._origin, transition=transition))
        self.publish_heartbeat()

    def publish_hang(self, phase: str, phase_ms: int, stacks: str) -> None:
        """Publish that a phase is past its deadline."""
        self._publish(lc.Hung(**self._origin, phase=phase, phase_ms=phase_ms, stacks=stacks))

    def publish_slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        """Publish that a step takes much longer than recent steps."""
        self._publish(lc.Slow(**self._origin, phase=phase, phase_ms=phase_ms, usual_ms=usual_ms))

    def publish_move_end(self, end: MoveEnd) -> None:
        """Publish that a move of experts has ended."""
        fault = one_line(end.fault, MAX_CAUSE_BYTES)
        event = ExpertMoveEnded(**self._origin, **end._replace(fault=fault)._asdict())
        self._publish(event)

    def ask_driver(self, trace: bytes, begin_ns: int, end_ns: int) -> None:
        """Ask the attached driver for its steps in that period of this host's monotonic clock."""
        self._publish(
            tr.DriverStepsWanted(**self._origin, trace=trace, begin_ns=begin_ns, end_ns=end_ns)
        )

    def close(self) -> None:
        """Stop publishing, unless the socket is opened again."""
        self._socket.close(linger=0)

    async def reopen(self, bind: Callable[[], "zmq.Socket[bytes]"]) -> bool:
        """Publish on another socket, after `close`; return True if it was bound. Waits until the
        address is free: a thread of libzmq closes the former socket."""
        for _ in range(REOPEN_TRIES):
            await asyncio.sleep(REOPEN_INTERVAL_S)
            with contextlib.suppress(EndpointInUseError):
                self._socket = bind()
                return True
        return False

    @property
    def _origin(self) -> _Origin:
        return {"worker_uid": self._report.worker_uid, "rank": self._report.progress.snapshot.rank}

    def _publish(self, event: EventMessage) -> None:
        try:
            self._socket.send(encode_control(event), zmq.NOBLOCK)
        except (zmq.ZMQError, WireError) as error:
            logger.debug("an event could not be sent: %s", error)
