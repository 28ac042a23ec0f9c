"""One daemon as the driver sees it: a typed method for each control operation, and one that sends
any step request. Knows nothing of groups; the replies to step requests come by the group's results
socket.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema import uploads as up
from rpc_schema import weight_transfer as wt
from rpc_schema.codec import Frame, StepMessage, encode_step
from rpc_schema.errors import ErrorCode
from rpc_schema.version import PROTOCOL_VERSION
from worker_client.errors import WorkerDied, local_error
from worker_client.lease import LeaseTerms, holder_name
from worker_client.transport import (
    CheckDeaths,
    Context,
    ControlChannel,
    Endpoint,
    PendingCall,
    StepChannel,
)

CONTROL_TIMEOUT_S = 5.0
GREET_POLL_S = 0.1

OnSent: TypeAlias = Callable[[int, Sequence[Frame]], None]


class StepIds(NamedTuple):
    """What orders and fences a step request; the same on every rank of a group."""

    epoch: int
    link: int
    seq: int


class TensorList(NamedTuple):
    """What an update brings, in order; all of equal length, or all empty for what the round before
    brought."""

    names: tuple[str, ...] = ()
    dtypes: tuple[wt.TensorDtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


class AskingClient:
    """Sends one daemon's control requests. It opens no step socket, so an observer's key is enough.

    Methods that wait for the reply raise DeadlineExceeded, WorkerDied and RemoteError; send_*
    methods return at once. Belongs to one thread.
    """

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
        self._control = ControlChannel(context, endpoint, rank, check_alive)

    def close(self) -> None:
        """Close the sockets; nothing is sent to the daemon."""
        self._control.close()

    def greet(self, timeout_s: float, listens_by: float) -> lc.HelloReply:
        """Exchange versions with a daemon that may not be started yet, within timeout_s once
        something listens there.

        Args:
            listens_by: limit (of time.monotonic()) of the wait for a listener. A daemon that exits
                meanwhile may be started again.

        Raises:
            WorkerDied: nothing listens; see hello for the other errors.
        """
        while True:
            try:
                return self.hello(timeout_s)
            except WorkerDied:
                if time.monotonic() >= listens_by:
                    raise
            time.sleep(GREET_POLL_S)

    def hello(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.HelloReply:
        """Exchange versions.

        Raises:
            IncompatibleError: they differ; both are named.
        """
        reply = self._control.call(
            partial(lc.Hello, protocol_version=PROTOCOL_VERSION, driver_id=self._driver_id),
            timeout_s,
        )
        if reply.protocol_version != PROTOCOL_VERSION:
            raise local_error(
                ErrorCode.INCOMPATIBLE,
                f"the daemon ({reply.software}) has protocol version {reply.protocol_version}, "
                f"this driver {PROTOCOL_VERSION}; fix: run the same release on both sides",
                rank=self.rank,
                endpoint=self.endpoint.control,
            )
        return reply

    def prepare_attach(
        self, epoch: int, timeout_s: float = CONTROL_TIMEOUT_S, *, force: bool = False
    ) -> lc.PrepareAttachReply:
        """Announce an epoch; not granted where the daemon has seen a higher one.

        Raises:
            LeaseHeldError: another driver holds the lease, and force is False.
            ForbiddenError: force is True, and this driver may not.
        """
        return self._control.call(
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
        """Take the daemon over, without waiting: over gloo a rank may only be done once its peers
        let go. Requests of earlier drivers are dropped, unless they are to be kept. results_route:
        where replies go, see ResultsChannel. terms of the lease: the default ones."""
        lease = LeaseTerms() if terms is None else terms
        return self._control.send(
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

    def detach(self, epoch: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Leave in order; what is loaded stays."""
        self.send_detach(epoch, timeout_s).result()

    def send_detach(self, epoch: int, timeout_s: float) -> PendingCall[lc.Acknowledged]:
        """The same without waiting."""
        return self._control.send(partial(lc.Detach, epoch=epoch), timeout_s)

    def open_rendezvous(
        self, epoch: int, link: int, num_ranks: int, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> lc.OpenRendezvousReply:
        """Have the daemon serve the meeting of a new link's ranks."""
        return self._control.call(
            partial(lc.OpenRendezvous, epoch=epoch, link=link, num_ranks=num_ranks), timeout_s
        )

    def send_abort_link(
        self, epoch: int, cause: str, timeout_s: float
    ) -> PendingCall[lc.Acknowledged]:
        """Have the daemon leave its link, since a rank is lost; returns at once."""
        return self._control.send(partial(lc.AbortLink, epoch=epoch, cause=cause[:1024]), timeout_s)

    def check_health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.CheckHealthReply:
        """Ask whether the daemon is alive and its step thread makes progress."""
        return self._control.call(lc.CheckHealth, timeout_s)

    def get_status(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.Status:
        """Ask for everything that the daemon knows of itself."""
        reply = self._control.call(lc.GetStatus, timeout_s)
        return reply.status

    def shutdown(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """End the daemon."""
        self._control.call(lc.Shutdown, timeout_s)

    def send_drain(self, timeout_s: float, *, undo: bool = False) -> PendingCall[lc.Acknowledged]:
        """Have the daemon take no more steps and no more drivers, or take them again; answered once
        no step runs."""
        return self._control.send(partial(lc.Drain, undo=undo), timeout_s)

    def read_clock(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Ask for the time of the daemon's monotonic clock, in nanoseconds."""
        reply = self._control.call(tr.ReadClock, timeout_s)
        return reply.monotonic_ns

    def send_start_trace(
        self, trace: bytes, max_ms: int, timeout_s: float
    ) -> PendingCall[lc.Acknowledged]:
        """Have the daemon record whatever steps come, without attaching; returns at once."""
        return self._control.send(partial(tr.StartTrace, trace=trace, max_ms=max_ms), timeout_s)

    def send_stop_trace(
        self, trace: bytes, *, keep: bool, timeout_s: float
    ) -> PendingCall[tr.StopTraceReply]:
        """End that; returns at once. Answered once the trace can be read, if it is to be kept."""
        return self._control.send(partial(tr.StopTrace, trace=trace, keep=keep), timeout_s)

    def read_trace(self, trace: bytes, offset: int, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """Read a piece of the trace's file; empty at its end."""
        reply = self._control.call(partial(tr.ReadTrace, trace=trace, offset=offset), timeout_s)
        return reply.data

    def ask_driver(
        self, trace: bytes, begin_ns: int, end_ns: int, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Have the attached driver asked for its steps, between two times of the daemon's clock."""
        self._control.call(
            partial(tr.AskDriver, trace=trace, begin_ns=begin_ns, end_ns=end_ns), timeout_s
        )

    def put_driver_steps(
        self,
        epoch: int,
        trace: bytes,
        steps: tr.DriverSteps,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Answer that, as the attached driver."""
        self._control.call(
            partial(tr.PutDriverSteps, epoch=epoch, trace=trace, steps=steps), timeout_s
        )

    def read_driver_steps(
        self, trace: bytes, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> tr.DriverSteps | None:
        """Read the answer; None: there is none yet."""
        reply = self._control.call(partial(tr.ReadDriverSteps, trace=trace), timeout_s)
        return reply.steps

    def send_upload_chunk(
        self, chunk: up.UploadChunk, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> PendingCall[up.UploadChunkReply]:
        """Put a chunk of a tensor into the daemon's memory, whatever its `call`; returns at
        once."""
        return self._control.send(partial(msgspec.structs.replace, chunk), timeout_s)

    def find_uploads(
        self,
        epoch: int,
        content_hashes: tuple[bytes, ...],
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> tuple[bool, ...]:
        """Ask which tensors are there, whole."""
        reply = self._control.call(
            partial(up.FindUploads, epoch=epoch, content_hashes=content_hashes), timeout_s
        )
        return reply.are_complete

    def drop_uploads(
        self,
        epoch: int,
        content_hashes: tuple[bytes, ...],
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Have the daemon forget tensors."""
        self._control.call(
            partial(up.DropUploads, epoch=epoch, content_hashes=content_hashes), timeout_s
        )


class WorkerClient(AskingClient):
    """Sends one daemon's step requests too. Step methods return at once.

    They raise WorkerDied (nothing takes the request) and TooLargeError (over the wire's bounds;
    nothing was sent).
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

    def execute_model(self, frames: Sequence[Frame]) -> None:
        """Send a step that slots.py encoded once for all ranks."""
        self._steps.send(frames)
        self._on_sent(self.rank, frames)

    def send_again(self, frames: Sequence[Frame]) -> None:
        """Send a step request again: the daemon recognizes it by its seq."""
        self._steps.send(frames)

    def send(self, message: StepMessage, arrays: Sequence[Frame] = ()) -> None:
        """Send any other step request of the table of operations."""
        self.execute_model(encode_step(message, arrays))
