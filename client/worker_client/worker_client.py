"""One daemon as the driver sees it: a typed method for each control operation, and one that sends
any step request. Knows nothing of groups; the replies to step requests come by the group's results
socket.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema import uploads as up
from rpc_schema import weight_transfer as wt
from rpc_schema.codec import Frame, StepMessage, encode_step
from rpc_schema.errors import ControlErrorReply, ErrorCode, ErrorScope
from rpc_schema.version import PROTOCOL_VERSION
from worker_client.errors import IncompatibleError
from worker_client.lease_terms import LeaseTerms, holder_name
from worker_client.transport import (
    CheckDeaths,
    Context,
    ControlChannel,
    Endpoint,
    NoSteps,
    PendingCall,
    StepChannel,
    StepSender,
)

CONTROL_TIMEOUT_S = 5.0

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


class WorkerClient:
    """Sends one daemon's requests. Control methods wait for their answer; step methods return at
    once.

    Control methods raise DeadlineExceeded, WorkerDied and RemoteError, step methods WorkerDied
    (nothing takes the request) and TooLargeError (over the wire's bounds; nothing was sent).
    Belongs to one thread.
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
        """check_deaths: see StepChannel; check_alive: see ControlChannel; the defaults know of
        none. on_sent(rank, frames) hears of every step request that was sent."""
        self._on_sent = on_sent
        self.endpoint = endpoint
        self.rank = rank
        self._driver_id = driver_id
        self._control = ControlChannel(context, endpoint, rank, check_alive)
        self._steps = self._open_steps(context, endpoint, rank, check_deaths)

    def _open_steps(
        self, context: Context, endpoint: Endpoint, rank: int, check_deaths: CheckDeaths
    ) -> StepSender:
        return StepChannel(context, endpoint, rank, check_deaths)

    def close(self) -> None:
        """Close the sockets; the daemon is not told."""
        self._control.close()
        self._steps.close()

    def hello(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.HelloReply:
        """Exchange versions.

        Raises:
            IncompatibleError: they differ; both are named.
        """
        reply = self._control.call(
            lambda call: lc.Hello(
                call=call, protocol_version=PROTOCOL_VERSION, driver_id=self._driver_id
            ),
            timeout_s,
        )
        if reply.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleError(
                _incompatible(reply), rank=self.rank, endpoint=self.endpoint.control
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
            lambda call: lc.PrepareAttach(
                call=call, driver_id=self._driver_id, epoch=epoch, force=force
            ),
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
            lambda call: lc.CommitAttach(
                call=call,
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
        return self._control.send(lambda call: lc.Detach(call=call, epoch=epoch), timeout_s)

    def open_rendezvous(
        self, epoch: int, link: int, num_ranks: int, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> lc.OpenRendezvousReply:
        """Have the daemon serve the meeting of a new link's ranks."""
        return self._control.call(
            lambda call: lc.OpenRendezvous(call=call, epoch=epoch, link=link, num_ranks=num_ranks),
            timeout_s,
        )

    def send_abort_link(
        self, epoch: int, cause: str, timeout_s: float
    ) -> PendingCall[lc.Acknowledged]:
        """Have the daemon leave its link, since a rank is lost; returns at once."""
        return self._control.send(
            lambda call: lc.AbortLink(call=call, epoch=epoch, cause=cause[:1024]),
            timeout_s,
        )

    def check_health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.CheckHealthReply:
        """Ask whether the daemon is alive and its step thread makes progress."""
        return self._control.call(lambda call: lc.CheckHealth(call=call), timeout_s)

    def get_status(self, timeout_s: float = CONTROL_TIMEOUT_S) -> lc.Status:
        """Ask for everything that the daemon knows of itself."""
        reply = self._control.call(lambda call: lc.GetStatus(call=call), timeout_s)
        return reply.status

    def shutdown(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """End the daemon."""
        self._control.call(lambda call: lc.Shutdown(call=call), timeout_s)

    def send_drain(self, timeout_s: float, *, undo: bool = False) -> PendingCall[lc.Acknowledged]:
        """Have the daemon take no more steps and no more drivers, or take them again; answered once
        no step runs."""
        return self._control.send(lambda call: lc.Drain(call=call, undo=undo), timeout_s)

    def read_clock(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Ask for the time of the daemon's monotonic clock, in nanoseconds."""
        reply = self._control.call(lambda call: tr.ReadClock(call=call), timeout_s)
        return reply.monotonic_ns

    def send_start_trace(
        self, trace: bytes, max_ms: int, timeout_s: float
    ) -> PendingCall[lc.Acknowledged]:
        """Have the daemon record whatever steps come, without attaching; returns at once."""
        return self._control.send(
            lambda call: tr.StartTrace(call=call, trace=trace, max_ms=max_ms),
            timeout_s,
        )

    def send_stop_trace(
        self, trace: bytes, *, keep: bool, timeout_s: float
    ) -> PendingCall[tr.StopTraceReply]:
        """End that; returns at once. Answered once the trace can be read, if it is to be kept."""
        return self._control.send(
            lambda call: tr.StopTrace(call=call, trace=trace, keep=keep),
            timeout_s,
        )

    def read_trace(self, trace: bytes, offset: int, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """Read a piece of the trace's file; empty at its end."""
        reply = self._control.call(
            lambda call: tr.ReadTrace(call=call, trace=trace, offset=offset),
            timeout_s,
        )
        return reply.data

    def ask_driver(
        self, trace: bytes, begin_ns: int, end_ns: int, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Have the attached driver asked for its steps, between two times of the daemon's clock."""
        self._control.call(
            lambda call: tr.AskDriver(call=call, trace=trace, begin_ns=begin_ns, end_ns=end_ns),
            timeout_s,
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
            lambda call: tr.PutDriverSteps(call=call, epoch=epoch, trace=trace, steps=steps),
            timeout_s,
        )

    def read_driver_steps(
        self, trace: bytes, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> tr.DriverSteps | None:
        """Read the answer; None: there is none yet."""
        reply = self._control.call(
            lambda call: tr.ReadDriverSteps(call=call, trace=trace),
            timeout_s,
        )
        return reply.steps

    def send_upload_chunk(
        self, chunk: up.UploadChunk, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> PendingCall[up.UploadChunkReply]:
        """Put a chunk of a tensor into the daemon's memory, whatever its `call`; returns at
        once."""
        return self._control.send(
            lambda call: msgspec.structs.replace(chunk, call=call),
            timeout_s,
        )

    def find_uploads(
        self,
        epoch: int,
        content_hashes: tuple[bytes, ...],
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> tuple[bool, ...]:
        """Ask which tensors are there, whole."""
        reply = self._control.call(
            lambda call: up.FindUploads(call=call, epoch=epoch, content_hashes=content_hashes),
            timeout_s,
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
            lambda call: up.DropUploads(call=call, epoch=epoch, content_hashes=content_hashes),
            timeout_s,
        )

    def execute_model(self, frames: Sequence[Frame]) -> None:
        """Send a step that slots.py encoded: once for all ranks."""
        self._steps.send(frames)
        self._on_sent(self.rank, frames)

    def send_again(self, frames: Sequence[Frame]) -> None:
        """Send a step request that was sent before: the daemon knows it by its seq."""
        self._steps.send(frames)

    def send(self, message: StepMessage, arrays: Sequence[Frame] = ()) -> None:
        """Send any other step request of the table of operations."""
        frames = encode_step(message, arrays)
        self._steps.send(frames)
        self._on_sent(self.rank, frames)


class AskingClient(WorkerClient):
    """A WorkerClient for control requests alone: it opens no step socket, so that an observer's key
    will do."""

    def _open_steps(
        self, context: Context, endpoint: Endpoint, rank: int, check_deaths: CheckDeaths
    ) -> StepSender:
        return NoSteps()


def _incompatible(reply: lc.HelloReply) -> ControlErrorReply:
    return ControlErrorReply(
        call=reply.call,
        code=ErrorCode.INCOMPATIBLE,
        scope=ErrorScope.WORKER,
        message=(
            f"the daemon ({reply.software}) speaks protocol version {reply.protocol_version}, "
            f"this driver {PROTOCOL_VERSION}; fix: run the same release on both sides"
        ),
    )
