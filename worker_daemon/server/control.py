"""What a driver may ask of the daemon at any time: attach, health, status, shutdown. Runs on the
main thread's event loop and never waits for the device without a bound. Owns the control and events
sockets, the epochs and the lease."""

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Final, Protocol, TypedDict

import zmq
import zmq.asyncio

from rpc_schema import lease as ls
from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema.codec import (
    ControlMessage,
    ControlReplyMessage,
    EventMessage,
    decode_control,
    encode_control,
)
from rpc_schema.errors import ControlErrorReply, WireError
from rpc_schema.lifecycle import ServingState
from rpc_schema.version import PROTOCOL_VERSION
from rpc_schema.weight_transfer import WeightsStatus
from worker_daemon.device.gpu_load import GpuLoad
from worker_daemon.errors import (
    FencedError,
    ForbiddenError,
    IncompatibleError,
    NotAttachedError,
    StateError,
    WorkerError,
)
from worker_daemon.models.weight_state import WeightReport
from worker_daemon.server.bad_peers import Peer
from worker_daemon.server.dispatch import OpenRendezvousServer, RendezvousServerLike
from worker_daemon.server.draining import Draining
from worker_daemon.server.endpoints import AnyEndpoint
from worker_daemon.server.epochs import EpochFile
from worker_daemon.server.guard import Guard
from worker_daemon.server.lease import Lease, LeaseTerms, lease_terms, suspended_s
from worker_daemon.server.link_software import link_software
from worker_daemon.server.progress import Progress
from worker_daemon.server.replies import control_error_reply
from worker_daemon.server.reply_counts import ReplyCounts
from worker_daemon.server.reply_delays import ReplyDelays
from worker_daemon.server.security import Security
from worker_daemon.server.sequence import drained
from worker_daemon.server.step_thread import (
    UID_BYTES,
    Attach,
    Command,
    Detach,
    DropRequests,
    LinkBroke,
    Orphan,
    Standing,
)
from worker_daemon.server.systemd import Notifier
from worker_daemon.server.tracing import Tracing

HEARTBEAT_S: Final = 0.25
BUSY_GRACE_S: Final = 0.2
"""How long attach waits for a running step before it has the link aborted."""
ATTACH_SLACK_S: Final = 3.0
"""What attach waits beyond the step deadline: a wait on gloo ends one second after that."""
MAX_GREETED: Final = 256
"""Drivers whose version is remembered; one that attaches has said Hello just before."""

_TAKEN_OUT: Final = ForbiddenError("the key is not among the authorized keys any more")

logger = logging.getLogger(__name__)


class _Origin(TypedDict):
    """Who publishes an event."""

    worker_uid: bytes
    rank: int


class Commands(Protocol):
    """What control asks of the rest of the daemon."""

    def post(self, command: Command) -> None:
        """Hand a command to the step thread."""

    def begin_shutdown(self, cause: str) -> None:
        """Drain and end the process; returns at once."""


class Control:
    """Answers one request after the other; a commit that waits for the step thread is a task of its
    own."""

    def __init__(
        self,
        *,
        control: zmq.asyncio.Socket,
        events: "zmq.Socket[bytes]",
        endpoint: AnyEndpoint,
        epochs: EpochFile,
        progress: Progress,
        guard: Guard,
        reply_delays: ReplyDelays,
        reply_counts: ReplyCounts,
        read_load: Callable[[], GpuLoad | None],
        notifier: Notifier,
        commands: Commands,
        open_rendezvous: OpenRendezvousServer,
        security: Security,
        data_host: str,
    ) -> None:
        """read_load: what the device's gauges showed last. data_host: where the ranks of a link
        meet."""
        self.worker_uid = os.urandom(16)
        self.draining = False
        """The daemon is about to end."""
        self._control = control
        self._events = events
        self._endpoint = endpoint
        self._epochs = epochs
        self._progress = progress
        self._guard = guard
        self._reply_delays = reply_delays
        self._reply_counts = reply_counts
        self._read_load = read_load
        self._notifier = notifier
        self._commands = commands
        self._open_rendezvous = open_rendezvous
        self._security = security
        self._access = security.access
        self._bad_peers = security.bad_peers
        self._data_host = data_host
        # The newest, and the one before it: NCCL's watchdog of the old link still asks there.
        self._rendezvous: deque[RendezvousServerLike] = deque()
        self._versions: OrderedDict[bytes, int] = OrderedDict()
        self._prepared: tuple[int, bytes] = (0, b"")
        self._taken: tuple[tuple[int, bytes], asyncio.Task[Standing]] | None = None
        """Who took the daemon over last, or is about to."""
        self._lease = Lease(time.monotonic, suspended_s)
        self._drain = Draining(commands.post, self._tell_heartbeat, self._lease, self._progress)
        self._software = f"worker-daemon {metadata.version('worker-daemon')}"
        self._link_software = link_software()
        self._commits: set[asyncio.Task[None]] = set()
        self._last_hang = ""
        self._tracing = Tracing(self)
        self._handlers: Mapping[type[ControlMessage], Callable[..., ControlReplyMessage]] = {
            lc.Hello: self._hello,
            lc.PrepareAttach: self._prepare_attach,
            lc.Detach: self._detach,
            ls.RenewLease: self._renew_lease,
            lc.OpenRendezvous: self._open_rendezvous_server,
            lc.AbortLink: self._abort_link,
            lc.CheckHealth: self._check_health,
            lc.GetStatus: self._get_status,
            lc.Shutdown: self._shutdown,
            **self._tracing.handlers,
        }

    async def serve(self) -> None:
        """Answer control requests until cancelled."""
        while True:
            received = await self._control.recv_multipart(copy=False)
            sender, frames = received[0].bytes, received[1:]
            peer = self._access.peer("control", sender, received[-1])
            if peer in self._bad_peers:
                continue
            message = await self._admit(sender, peer, frames)
            if message is None:
                continue
            if isinstance(message, lc.CommitAttach):
                self._spawn(self._commit(sender, message))
            elif isinstance(message, tr.StartTrace):
                self._spawn(self._answer_late(sender, message, self._tracing.start(message)))
            elif isinstance(message, tr.StopTrace):
                self._spawn(self._answer_late(sender, message, self._tracing.stop(message)))
            elif isinstance(message, lc.Drain):
                self._spawn(self._answer_late(sender, message, self._drain_or_undo(message)))
            else:
                await self._reply(sender, self._outcome(message))

    async def _admit(
        self, sender: bytes, peer: Peer, frames: Sequence[zmq.Frame]
    ) -> ControlMessage | None:
        """Return a request that its sender may make; tell it why where it may not."""
        try:
            if not self._access.opens(peer, "control"):  # taken out since it came in
                await self._reply(sender, control_error_reply(_TAKEN_OUT, call=0))
                return None
            message = decode_control([frame.buffer for frame in frames])
        except WireError as error:
            self._bad_peers.note(peer, "control", error)
            await self._reply(sender, control_error_reply(error, call=0))
            return None
        try:
            self._access.check(peer, message)
        except ForbiddenError as error:
            reply = control_error_reply(error.with_traceback(None), call=message.call)
            await self._reply(sender, reply)
            return None
        return message

    async def beat(self) -> None:
        """Publish the heartbeat, and take notice of the lease's end, until cancelled."""
        while True:
            self._watch_lease()
            self._publish(self._heartbeat())
            if not self._overdue():
                self._notifier.notify("WATCHDOG=1")
            await asyncio.sleep(HEARTBEAT_S)

    def tell_hang(self, phase: str, phase_ms: int, stacks: str) -> None:
        """Publish that a phase is past its deadline."""
        self._last_hang = f"{phase} was past its deadline; stacks: {stacks}"
        self._publish(
            lc.Hung(
                **self._origin,
                phase=phase,
                phase_ms=phase_ms,
                stacks=stacks,
            )
        )

    def tell_slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        """Publish that a step takes far longer than others did."""
        self._publish(
            lc.Slow(
                **self._origin,
                phase=phase,
                phase_ms=phase_ms,
                usual_ms=usual_ms,
            )
        )

    def announce(self, transition: str) -> None:
        """Publish a state change, and the heartbeat that shows it."""
        self._publish(
            lc.StateChanged(
                **self._origin,
                transition=transition,
            )
        )
        self._publish(self._heartbeat())
        self._notifier.notify(f"STATUS={transition}")

    def close(self) -> None:
        """Close what control owns, sockets included."""
        self._tracing.close()
        for task in self._commits:
            task.cancel()
        if self._taken is not None:
            self._taken[1].cancel()
        for server in self._rendezvous:
            server.close()
        self._control.close(linger=100)
        self._events.close(linger=0)

    def close_events(self) -> None:
        """Close the events socket: nothing is published until there is another."""
        self._events.close(linger=0)

    def take_events(self, events: "zmq.Socket[bytes]") -> None:
        """Publish by this socket from here on."""
        self._events = events

    def post(self, command: Command) -> None:
        """See Commands."""
        self._commands.post(command)

    def ask_driver(self, trace: bytes, begin_ns: int, end_ns: int) -> None:
        """Ask the attached driver what it did, in that stretch of this host's monotonic clock."""
        self._publish(
            tr.DriverStepsWanted(
                **self._origin,
                trace=trace,
                begin_ns=begin_ns,
                end_ns=end_ns,
            )
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    async def _answer_late(
        self, sender: bytes, message: ControlMessage, work: Awaitable[ControlReplyMessage]
    ) -> None:
        try:
            reply = await work
        except Exception as error:  # the dispatch boundary once more
            reply = _failure(message, error)
        await self._reply(sender, reply)

    def _outcome(self, message: ControlMessage) -> ControlReplyMessage:
        try:
            return self._handlers[type(message)](message)
        except Exception as error:  # the dispatch boundary: a request never ends the daemon
            return _failure(message, error)

    def _hello(self, message: lc.Hello) -> ControlReplyMessage:
        """Answer whatever the version, and remember it; a driver that attaches has a proper id."""
        if len(message.driver_id) == UID_BYTES:
            self._versions[message.driver_id] = message.protocol_version
            self._versions.move_to_end(message.driver_id)
        if len(self._versions) > MAX_GREETED:
            self._versions.popitem(last=False)
        return lc.HelloReply(
            call=message.call,
            protocol_version=PROTOCOL_VERSION,
            worker_uid=self.worker_uid,
            software=self._software,
            link_software=self._link_software,
        )

    def _prepare_attach(self, message: lc.PrepareAttach) -> ControlReplyMessage:
        if self.draining:
            raise StateError("the daemon is shutting down", fix="attach to another one")
        if self._drain.is_on:
            raise drained()
        self._need_same_version(message.driver_id)
        self._lease.check_free_for(message.driver_id, force=message.force)
        last = self._epochs.last
        if message.epoch <= last:
            return lc.PrepareAttachReply(call=message.call, granted=False, last_epoch=last)
        self._epochs.record(message.epoch)
        self._prepared = (message.epoch, message.driver_id)
        return lc.PrepareAttachReply(call=message.call, granted=True, last_epoch=message.epoch)

    def _detach(self, message: lc.Detach) -> ControlReplyMessage:
        """Also after the lease has expired, or twice: a late goodbye does no harm."""
        if self._lease.release(message.epoch):
            self._commands.post(Detach(message.epoch))
        elif not self._lease.was_released(message.epoch):
            self.need_attached(message.epoch)
        return lc.Acknowledged(call=message.call)

    def _renew_lease(self, message: ls.RenewLease) -> ControlReplyMessage:
        remaining_s = self._lease.renew(message.driver_id, message.epoch)
        return ls.RenewLeaseReply(call=message.call, remaining_ms=round(remaining_s * 1000))

    def _watch_lease(self) -> None:
        """Have the step thread take notice of what the lease's end means for it."""
        expired = self._lease.take_expiry()
        if expired:
            logger.warning("the lease of epoch %d has expired: waiting for a driver", expired)
            self._commands.post(Orphan(expired))
        unclaimed = self._lease.take_kv_end()
        if unclaimed:
            self._commands.post(DropRequests(unclaimed))

    def _open_rendezvous_server(self, message: lc.OpenRendezvous) -> ControlReplyMessage:
        self.need_attached(message.epoch)
        if message.link <= self._progress.link:
            raise FencedError(
                f"link {message.link} is not above link {self._progress.link}", fix="raise it"
            )
        while len(self._rendezvous) > 1:
            self._rendezvous.popleft().close()
        server = self._open_rendezvous(self._data_host)
        self._rendezvous.append(server)
        return lc.OpenRendezvousReply(call=message.call, host=server.host, port=server.port)

    def _abort_link(self, message: lc.AbortLink) -> ControlReplyMessage:
        """Free whoever waits for other ranks: on NCCL by an abort, at a meeting place by closing
        it; on gloo a lost neighbour's connections have ended by themselves."""
        self.need_attached(message.epoch)
        link = self._progress.link
        self._guard.forgive_hangs()
        if self._progress.snapshot.state.link != "none":
            self._guard.request_abort(message.cause)
            self._commands.post(LinkBroke(link, message.cause))
        if self._rendezvous:
            self._rendezvous.pop().close()
        return lc.Acknowledged(call=message.call)

    def _check_health(self, message: lc.CheckHealth) -> ControlReplyMessage:
        stamp = self._progress.stamp
        now = time.monotonic()
        failure = self._progress.snapshot.failure or self._overdue()
        return lc.CheckHealthReply(
            call=message.call,
            healthy=not failure,
            phase=stamp.phase,
            phase_ms=stamp.age_ms(now),
            detail=failure or self._last_hang,
        )

    def _overdue(self) -> str:
        """What the step or the completion thread should be done with long ago; empty: nothing."""
        now = time.monotonic()
        for stamp in (self._progress.stamp, self._progress.result):
            if now > stamp.deadline:
                return f"{stamp.phase} is past its deadline"
        return ""

    def _get_status(self, message: lc.GetStatus) -> ControlReplyMessage:
        return lc.GetStatusReply(call=message.call, status=self._status())

    def _shutdown(self, message: lc.Shutdown) -> ControlReplyMessage:
        self._commands.begin_shutdown("a driver asked for it")
        return lc.Acknowledged(call=message.call)

    async def _drain_or_undo(self, message: lc.Drain) -> ControlReplyMessage:
        if self.draining:
            raise StateError("the daemon is shutting down")
        if message.undo:
            await self._drain.undo()
        else:
            await self._drain.drain()
        return lc.Acknowledged(call=message.call)

    def _tell_heartbeat(self) -> None:
        self._publish(self._heartbeat())

    async def _commit(self, sender: bytes, message: lc.CommitAttach) -> None:
        reply: ControlReplyMessage
        try:
            standing = await asyncio.shield(self._taking(message))
            reply = lc.CommitAttachReply(
                call=message.call,
                previous_epoch=standing.epoch,
                previous_seq=standing.seq,
                previous_clean=standing.clean,
                status=self._status(),
            )
        except Exception as error:  # the dispatch boundary again, for the request that waits
            reply = _failure(message, error)
        await self._reply(sender, reply)

    def _taking(self, message: lc.CommitAttach) -> "asyncio.Task[Standing]":
        """Begin to take the prepared epoch; the same driver's repeated request joins the attempt,
        however far it is.

        Raises:
            FencedError: another driver has prepared a higher epoch.
            NotAttachedError: the epoch was never prepared.
            ConfigError: the lease's terms are out of bounds.
        """
        asked = (message.epoch, message.driver_id)
        if message.epoch < self._prepared[0]:
            raise FencedError(
                f"epoch {message.epoch} is fenced by {self._prepared[0]}", fix="prepare again"
            )
        if asked != self._prepared:
            raise NotAttachedError(f"epoch {message.epoch} was not prepared", fix="prepare first")
        if self._taken is None or self._taken[0] != asked:
            terms = lease_terms(message.lease_ttl_ms, message.orphan_kv_ttl_ms, message.holder_name)
            self._taken = asked, asyncio.ensure_future(self._take_epoch(message, terms))
        return self._taken[1]

    async def _take_epoch(self, message: lc.CommitAttach, terms: LeaseTerms) -> Standing:
        """Have the step thread take the prepared epoch; free it from a step that hangs on its
        peers. The lease begins at once: whoever waits for a hanging step renews it meanwhile.

        Raises:
            StateError: the step thread did not come back in time.
        """
        epoch, driver_id = message.epoch, message.driver_id
        self._lease.grant(driver_id, epoch, terms)
        self._guard.forgive_hangs()
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[Standing] = loop.create_future()
        settle = _threadsafe(loop, taken)
        self._commands.post(Attach(epoch, driver_id, settle, message.keep_requests))
        done, _ = await asyncio.wait((taken,), timeout=BUSY_GRACE_S)
        if not done:
            self._free_from_peers(f"epoch {epoch} attaches")
            await asyncio.wait((taken,), timeout=self._progress.step_deadline_s + ATTACH_SLACK_S)
        if taken.done():
            standing = taken.result()
            return standing if done else replace(standing, clean=False)
        self._lease.release(epoch)
        self._commands.post(Detach(epoch))  # should it take the epoch after all
        stamp = self._progress.stamp
        raise StateError(
            f"the step thread has been in {stamp.phase} for {stamp.age_ms(time.monotonic())} ms",
            fix="attach again later, or restart this daemon",
        )

    def _free_from_peers(self, cause: str) -> None:
        """Abort the link if the step or a result may be waiting for other ranks."""
        for stamp in (self._progress.stamp, self._progress.result):
            if stamp.on_link:
                self._guard.request_abort(f"{cause} while {stamp.phase} is waited for")
                return

    def _need_same_version(self, driver_id: bytes) -> None:
        version = self._versions.get(driver_id)
        if version == PROTOCOL_VERSION:
            return
        spoken = "has not said Hello" if version is None else f"speaks protocol version {version}"
        raise IncompatibleError(
            f"the driver {spoken}; the daemon speaks protocol version {PROTOCOL_VERSION}",
            fix="say Hello first" if version is None else "use releases of the same version",
        )

    def need_attached(self, epoch: int) -> None:
        """Raise FencedError, LeaseExpiredError or NotAttachedError unless the epoch is the attached
        driver's."""
        current = self._progress.epoch
        if epoch < current:
            raise FencedError(f"epoch {epoch} is fenced by {current}", fix="attach")
        if epoch > current or epoch == 0:
            raise NotAttachedError(f"epoch {epoch} is not attached; {current} is", fix="attach")
        self._lease.need_held(epoch)

    @property
    def _origin(self) -> _Origin:
        return {"worker_uid": self.worker_uid, "rank": self._progress.snapshot.rank}

    def _serving(self) -> ServingState:
        serving = self._progress.snapshot.state.serving
        drains = self.draining or self._drain.is_on
        return "DRAINING" if drains and serving == "SERVING" else serving

    def _status(self) -> lc.Status:
        progress = self._progress
        stamp, snapshot = progress.stamp, progress.snapshot
        return lc.Status(
            worker_uid=self.worker_uid,
            pid=os.getpid(),
            endpoint=str(self._endpoint),
            device=snapshot.description.device,
            serving=self._serving(),
            load=snapshot.state.load,
            link_state=snapshot.state.link,
            link=progress.link,
            epoch=progress.epoch,
            last_seq=progress.last_seq,
            rank=snapshot.rank,
            phase=stamp.phase,
            phase_ms=stamp.age_ms(time.monotonic()),
            config=snapshot.description.config,
            kv_cache=snapshot.description.kv_cache,
            memory_bytes=dict(snapshot.description.memory_bytes),
            providers=dict(snapshot.description.providers),
            input_wait_share=snapshot.description.input_wait_share(),
            reply_delay=self._reply_delays.summary(),
            transitions=snapshot.transitions,
            failure=snapshot.failure,
            degraded=self._guard.degraded,
            kv_cache_advice=snapshot.description.kv_cache_advice,
            memory_tags=dict(snapshot.description.memory_tags),
            weights=_weights_status(snapshot.description.weights()),
            lease=self._lease.status(),
            num_bad_frames=self._bad_peers.num_bad_frames,
            num_refused=self._security.num_refused,
            num_tokens=self._reply_counts.num_tokens,
            num_requests=self._reply_counts.num_requests,
            usual_step_us=min(int(self._guard.usual_step_s * 1e6), 2**31 - 1),
            gpu_load=_gpu_load(self._read_load()),
        )

    def _heartbeat(self) -> lc.Heartbeat:
        progress, lease = self._progress, self._lease.status()
        stamp, snapshot = progress.stamp, progress.snapshot
        return lc.Heartbeat(
            worker_uid=self.worker_uid,
            rank=snapshot.rank,
            serving=self._serving(),
            load=snapshot.state.load,
            link_state=snapshot.state.link,
            epoch=progress.epoch,
            link=progress.link,
            last_seq=progress.last_seq,
            phase=stamp.phase,
            phase_ms=stamp.age_ms(time.monotonic()),
            phase_limit_ms=stamp.limit_ms,
            drains=self._drain.is_on,
            lease=lease.state,
            lease_remaining_ms=lease.remaining_ms,
        )

    async def _reply(self, route: bytes, reply: ControlReplyMessage) -> None:
        """Send without waiting: a driver that is gone, or does not read, asks again if it ever
        can."""
        try:
            await self._control.send_multipart([route, _encoded(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("a control reply could not be sent: %s", error)

    def _publish(self, event: EventMessage) -> None:
        try:
            self._events.send(encode_control(event), zmq.NOBLOCK)
        except (zmq.ZMQError, WireError) as error:
            logger.debug("an event could not be sent: %s", error)


def _failure(message: ControlMessage, error: Exception) -> ControlErrorReply:
    """Return the answer to a request that failed; what nobody foresaw goes to the log too."""
    if not isinstance(error, WorkerError):
        logger.error("%s failed", type(message).__name__, exc_info=error)
    return control_error_reply(error, call=message.call)


def _encoded(reply: ControlReplyMessage) -> bytes:
    """Encode a reply or, where it cannot be sent (over a bound, say), the reason."""
    try:
        return encode_control(reply)
    except Exception as error:
        logger.exception("%s cannot be encoded", type(reply).__name__)
        return encode_control(control_error_reply(error, call=reply.call))


def _threadsafe(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Standing]"
) -> Callable[[Standing], None]:
    """Return what sets the future's result from another thread, if somebody still waits for it."""

    def settle(standing: Standing) -> None:
        if not future.done():
            future.set_result(standing)

    def taken(standing: Standing) -> None:
        loop.call_soon_threadsafe(settle, standing)

    return taken


def _gpu_load(load: GpuLoad | None) -> lc.GpuLoad | None:
    return None if load is None else lc.GpuLoad(**asdict(load))


def _weights_status(report: WeightReport | None) -> WeightsStatus | None:
    if report is None:
        return None
    return WeightsStatus(
        state=report.state,
        num_tensors=report.num_tensors,
        num_updates=report.num_updates,
        num_dirty=report.num_dirty,
        dirty=report.dirty,
        num_missing=report.num_missing,
        missing=report.missing,
        cause=report.cause,
    )
