"""Clients of one daemon: control requests, and step requests whose replies come by the group's
results socket."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema import weight_transfer as wt
from rpc_schema.codec import DRIVER_OPERATIONS, Frame
from worker_client.errors import WorkerDied
from worker_client.wire.control_channel import CheckDeaths, PendingCall
from worker_client.wire.endpoint import Endpoint
from worker_client.wire.health_client import CONTROL_TIMEOUT_S, HealthClient
from worker_client.wire.lease import LeaseTerms, holder_name
from worker_client.wire.sockets import Context
from worker_client.wire.transport import StepChannel

OnSent: TypeAlias = Callable[[int, Sequence[Frame]], None]


class StepIds(NamedTuple):
    """Ids that order and fence a step request; the same on every rank of a group."""

    epoch: int
    link: int
    seq: int


class TensorList(NamedTuple):
    """Tensors of an update, in order; all of equal length, or all empty to repeat the previous
    round."""

    names: tuple[str, ...] = ()
    dtypes: tuple[wt.TensorDtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    origins: tuple[tuple[int, ...], ...] = ()
    """Places of pieces; see UpdateWeights."""


class AskingClient(HealthClient):
    """Sends one daemon's control requests. It opens no step socket, so an observer's key is enough.

    Methods that wait for the reply raise DeadlineExceeded, WorkerDied and WorkerError. Belongs to
    one thread.
    """

    operations = DRIVER_OPERATIONS

    def prepare_attach(
        self, epoch: int, timeout_s: float = CONTROL_TIMEOUT_S, *, force: bool = False
    ) -> lc.PrepareAttachReply:
        """Announce an epoch; not granted if the daemon has seen a higher one.

        Raises:
            LeaseHeldError: another driver holds the lease, and force is False.
            ForbiddenError: force is True, and this driver may not.
        """
        return self.ask(
            partial(lc.PrepareAttach, driver_id=self._driver_id, epoch=epoch, force=force),
            timeout_s,
        )

    def send_commit_attach(
        self,
        epoch: int,
        results_route: bytes,
        timeout_s: float = CONTROL_TIMEOUT_S,
        terms: LeaseTerms | None = None,
        *,
        keep_requests: bool = False,
    ) -> PendingCall[lc.CommitAttachReply]:
        """Attach to the daemon, without waiting: over gloo a rank may only finish once its peers
        let go. Requests of earlier drivers are dropped, unless keep_requests. results_route:
        routing id for replies, see ResultsChannel. terms: of the lease; None: the defaults."""
        lease = LeaseTerms() if terms is None else terms
        return self.begin(
            partial(
                lc.CommitAttach,
                driver_id=self._driver_id,
                epoch=epoch,
                results_route=results_route,
                keep_requests=keep_requests,
                lease_ttl_ms=round(lease.ttl_s * 1000),
                orphan_kv_ttl_ms=round(lease.orphan_kv_ttl_s * 1000),
                holder_name=holder_name(),
            ),
            timeout_s,
        )

    def get_status(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.Status:
        """Return the daemon's state."""
        reply = self.ask(lc.GetStatus, timeout_s)
        return reply.status

    def shutdown(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stop the daemon. One that ended before its reply was read has stopped: libzmq drops an
        unread reply with the connection."""
        request = self.begin(lc.Shutdown, timeout_s)
        with contextlib.suppress(WorkerDied):
            request.result()

    def read_clock(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Return the time of the daemon's monotonic clock, in nanoseconds."""
        reply = self.ask(tr.ReadClock, timeout_s)
        return reply.monotonic_ns


class WorkerClient(AskingClient):
    """Sends one daemon's step requests too. Step methods return at once.

    They raise WorkerDied: nothing takes the request.
    """

    def __init__(
        self,
        context: Context,
        endpoint: Endpoint,
        rank: int,
        driver_id: bytes,
        check_deaths: CheckDeaths = lambda: None,
        check_alive: CheckDeaths = lambda: None,
        on_sent: OnSent = lambda rank, frames: None,
    ) -> None:
        """check_deaths: see StepChannel. on_sent(rank, frames) is called after every new step
        request."""
        super().__init__(context, endpoint, rank, driver_id, check_alive)
        self._on_sent = on_sent
        self._steps = StepChannel(context, endpoint, rank, check_deaths)

    def close(self) -> None:
        """See AskingClient."""
        super().close()
        self._steps.close()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send an encoded step request of the table of operations."""
        self._steps.send(frames)
        self._on_sent(self.rank, frames)

    def send_again(self, frames: Sequence[Frame]) -> None:
        """Send a step request again: the daemon recognizes it by its seq."""
        self._steps.send(frames)
