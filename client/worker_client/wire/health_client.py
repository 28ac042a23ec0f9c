"""A client that asks one daemon for its version and its health: the small part of a driver that a
health probe imports."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Final, TypeVar

import zmq

from rpc_schema.base import Answered
from rpc_schema.control import ControlOperations, ControlReplyMessage
from rpc_schema.errors import ErrorCode, error_of_rank
from rpc_schema.health import CheckHealth, CheckHealthReply, Hello, HelloReply
from rpc_schema.version import PROTOCOL_VERSION
from worker_client.errors import WorkerDied
from worker_client.wire.control_channel import CheckDeaths, ControlChannel, PendingCall
from worker_client.wire.endpoint import Endpoint, new_driver_id, parse_endpoint
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.sockets import Context

CONTROL_TIMEOUT_S: Final = 5.0
GREET_POLL_S: Final = 0.1

ReplyT = TypeVar("ReplyT", bound=ControlReplyMessage)


class HealthClient:
    """Greets one daemon, and asks for its health. An observer's key is enough.

    Methods that wait for the reply raise DeadlineExceeded, WorkerDied and WorkerError. Belongs to
    one thread.
    """

    operations: ClassVar[ControlOperations]
    """Operations that it can ask for, among them those of a greeting."""

    def __init__(
        self,
        context: Context,
        endpoint: Endpoint,
        rank: int,
        driver_id: bytes,
        check_alive: CheckDeaths = lambda: None,
    ) -> None:
        """check_alive: see ControlChannel."""
        self.endpoint = endpoint
        self.rank = rank
        self._driver_id = driver_id
        self._control = ControlChannel(context, endpoint, rank, self.operations, check_alive)

    def close(self) -> None:
        """Close the sockets; nothing is sent to the daemon."""
        self._control.close()

    def greet(self, timeout_s: float, answers_by: float) -> HelloReply:
        """Exchange versions with a daemon that may not be started yet, or listens before it can
        answer.

        Args:
            timeout_s: shortest limit on the wait for an answer once something listens.
            answers_by: limit (of time.monotonic()) of the wait for a listener and its answer. A
                daemon that exits meanwhile may be started again.

        Raises:
            WorkerDied: nothing listens; see hello for the other errors.
        """
        while True:
            try:
                return self.hello(max(timeout_s, answers_by - time.monotonic()))
            except WorkerDied:
                if time.monotonic() >= answers_by:
                    raise
            time.sleep(GREET_POLL_S)

    def ask(
        self, build: Callable[..., Answered[ReplyT]], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> ReplyT:
        """Send a control request and wait for its reply. build: its class, or a partial of it that
        lacks only `call`."""
        return self.begin(build, timeout_s).result()

    def begin(
        self, build: Callable[..., Answered[ReplyT]], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> PendingCall[ReplyT]:
        """Send a control request, like ask, without waiting for its reply."""
        return self._control.send(build, timeout_s)

    def hello(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HelloReply:
        """Exchange versions.

        Raises:
            IncompatibleError: they differ; both are named.
        """
        reply = self.ask(
            partial(Hello, protocol_version=PROTOCOL_VERSION, driver_id=self._driver_id),
            timeout_s,
        )
        if reply.protocol_version != PROTOCOL_VERSION:
            raise error_of_rank(
                ErrorCode.INCOMPATIBLE,
                f"the daemon ({reply.software}) has protocol version {reply.protocol_version}, "
                f"this driver {PROTOCOL_VERSION}; fix: run the same release on both sides",
                rank=self.rank,
                endpoint=self.endpoint.control,
            )
        return reply

    def check_health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> CheckHealthReply:
        """Return whether the daemon is healthy and its step thread makes progress."""
        return self.ask(CheckHealth, timeout_s)


ClientT = TypeVar("ClientT", bound=HealthClient)


@contextlib.contextmanager
def connected(
    kind: type[ClientT], endpoints: Sequence[str], keys: Keys = NO_KEYS, wait_s: float = 0.0
) -> Iterator[list[ClientT]]:
    """Open a client for each daemon, for control requests only; closed at the end. wait_s: seconds
    to wait for daemons that are not started, or do not answer, yet.

    Raises:
        EndpointError: one is not an endpoint.
        NothingListens: no daemon listens at one after wait_s.
        DeadlineExceeded: one listens, but has not answered after wait_s. Without wait_s the first
            request raises either.
    """
    parsed = [parse_endpoint(endpoint, keys) for endpoint in endpoints]
    context: Context = zmq.Context()
    driver_id = new_driver_id()
    clients = [kind(context, endpoint, rank, driver_id) for rank, endpoint in enumerate(parsed)]
    answer_by = time.monotonic() + wait_s
    try:
        for client in clients if wait_s else ():
            client.greet(CONTROL_TIMEOUT_S, answer_by)
        yield clients
    finally:
        for client in clients:
            client.close()
        context.term()
