"""Handles control requests: receives each, checks its sender, calls the object that answers it, and
sends the reply. Owns the control socket; runs on the main thread's event loop and never waits for
the device without a limit."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Final, TypeAlias

import zmq
import zmq.asyncio

from rpc_schema import lease as ls
from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema.codec import ControlMessage, ControlReplyMessage, decode_control, encode_control
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import ForbiddenError, WireError, WorkerError
from rpc_schema.health import CheckHealth, Hello
from rpc_schema.roles import Role
from worker_daemon.server.auth.access import needed_role, sender
from worker_daemon.server.auth.bad_peers import Peer
from worker_daemon.server.auth.request_rate import RequestRate
from worker_daemon.server.auth.security import Security
from worker_daemon.server.health.tracing import Tracing
from worker_daemon.server.session.attach import AttachHandler
from worker_daemon.server.session.cached_blocks_handler import CachedBlocksHandler
from worker_daemon.server.session.draining import Draining
from worker_daemon.server.session.kv_transfer_handler import KVTransferHandler
from worker_daemon.server.session.rendezvous import LinkRendezvous
from worker_daemon.server.session.status import StatusReport
from worker_daemon.server.session.upload_handler import UploadHandler
from worker_daemon.server.wire.replies import control_error_reply

Handler: TypeAlias = Callable[..., ControlReplyMessage]
LateHandler: TypeAlias = Callable[..., Awaitable[ControlReplyMessage]]

_ATTACHING: Final = (lc.PrepareAttach, lc.CommitAttach)
"""Requests whose epoch is not granted yet."""

_TAKEN_OUT: Final = ForbiddenError("the key is no longer authorized")

logger = logging.getLogger(__name__)


class Control:
    """Answers requests one at a time; a request that waits for the step thread runs as a separate
    task, so that others are still answered."""

    def __init__(
        self,
        *,
        socket: zmq.asyncio.Socket,
        security: Security,
        attaching: AttachHandler,
        rendezvous: LinkRendezvous,
        report: StatusReport,
        draining: Draining,
        tracing: Tracing,
        uploading: UploadHandler,
        caching: CachedBlocksHandler,
        moving: KVTransferHandler,
        begin_shutdown: Callable[[str], None],
    ) -> None:
        """begin_shutdown(cause) starts the shutdown, and returns at once."""
        self._socket = socket
        self._access = security.access
        self._bad_peers = security.bad_peers
        self._rate = RequestRate()
        self._begin_shutdown = begin_shutdown
        self._parts = (tracing, attaching, rendezvous)
        self._late: set[asyncio.Task[None]] = set()
        self._check_owner = attaching.check_owner
        self._handlers: Mapping[type[ControlMessage], Handler] = {
            lc.Detach: attaching.detach,
            lc.OpenRendezvous: rendezvous.open,
            lc.AbortLink: rendezvous.abort_link,
            CheckHealth: report.check_health,
            lc.Shutdown: self._shutdown,
            **tracing.handlers,
            **uploading.handlers,
            **caching.handlers,
            **moving.handlers,
        }
        self._driver_handlers: Mapping[type[ControlMessage], Handler] = {
            Hello: attaching.hello,
            lc.PrepareAttach: attaching.prepare,
            ls.RenewLease: attaching.renew_lease,
        }
        """Handlers that also receive the sender, as CommitAttach's does."""
        self._commit = attaching.commit
        self._late_handlers: Mapping[type[ControlMessage], LateHandler] = {
            lc.Drain: draining.drain_or_undo,
            lc.GetStatus: report.get_status,
            tr.StartTrace: tracing.start,
            tr.StopTrace: tracing.stop,
        }

    async def serve(self) -> None:
        """Answer control requests until cancelled."""
        while True:
            received = await self._socket.recv_multipart(copy=False)
            route, frames = received[0].bytes, received[1:]
            peer = self._access.peer("control", route, received[-1])
            if peer not in self._bad_peers:
                await self._take(route, peer, frames)
            # A receive does not yield while messages are there: a flood would stop all tasks.
            await asyncio.sleep(0)

    async def _take(self, route: bytes, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        """Answer a request now, later, or not at all if its sender floods."""
        wait_s = self._rate.wait_s(peer) if self._access.only_observes(peer) else 0.0
        if wait_s is None:
            return
        if wait_s:
            self._spawn(self._answer_after(wait_s, route, peer, frames))
        else:
            await self._answer(route, peer, frames)

    async def _answer_after(
        self, wait_s: float, route: bytes, peer: Peer, frames: Sequence[zmq.Frame]
    ) -> None:
        await asyncio.sleep(wait_s)
        await self._answer(route, peer, frames)

    async def _answer(self, route: bytes, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        message = await self._admit(route, peer, frames)
        if message is None:
            return
        if needed_role(message) is Role.ADMIN:
            who = sender(self._access, peer, frames[-1]).shown
            logger.info("%s asked for by %s", type(message).__name__, who)
        late = self._late_answer(message, peer, frames[-1])
        if late is None:
            await self._reply(route, self._outcome(message, peer, frames[-1]))
        else:
            self._spawn(self._answer_late(route, message, late))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def close(self) -> None:
        """Stop answering, and close the parts that answer."""
        for task in self._late:
            task.cancel()
        for part in self._parts:
            part.close()
        self._socket.close(linger=100)

    async def _admit(
        self, route: bytes, peer: Peer, frames: Sequence[zmq.Frame]
    ) -> ControlMessage | None:
        """Decode a request and check its sender's rights; on failure send the error and return
        None."""
        try:
            if not self._access.opens(peer, "control"):  # removed since it connected
                await self._reply(route, control_error_reply(_TAKEN_OUT, call=0))
                return None
            message = decode_control([frame.buffer for frame in frames])
        except WireError as error:
            self._bad_peers.note(peer, "control", error)
            await self._reply(route, control_error_reply(error, call=0))
            return None
        try:
            self._access.check(peer, message)
            epoch = getattr(message, "epoch", None)
            if epoch is not None and not isinstance(message, _ATTACHING):
                self._check_owner(epoch, self._access.owner(peer))
        except ForbiddenError as error:
            reply = control_error_reply(error.with_traceback(None), call=message.call)
            await self._reply(route, reply)
            return None
        return message

    def _late_answer(
        self, message: ControlMessage, peer: Peer, frame: zmq.Frame
    ) -> Awaitable[ControlReplyMessage] | None:
        """Return the awaitable reply of a request that waits for the step thread; None for other
        requests."""
        if isinstance(message, lc.CommitAttach):
            return self._commit(message, sender(self._access, peer, frame))
        late = self._late_handlers.get(type(message))
        return None if late is None else late(message)

    def _outcome(
        self, message: ControlMessage, peer: Peer, frame: zmq.Frame
    ) -> ControlReplyMessage:
        kind = type(message)
        try:
            if kind in self._driver_handlers:
                return self._driver_handlers[kind](message, sender(self._access, peer, frame))
            return self._handlers[kind](message)
        except Exception as error:  # the dispatch boundary: a request never ends the daemon
            return _failure(message, error)

    async def _answer_late(
        self, route: bytes, message: ControlMessage, answer: Awaitable[ControlReplyMessage]
    ) -> None:
        try:
            reply = await answer
        except Exception as error:  # the dispatch boundary again, for a request that waits
            reply = _failure(message, error)
        await self._reply(route, reply)

    def _shutdown(self, message: lc.Shutdown) -> ControlReplyMessage:
        self._begin_shutdown("a driver asked for it")
        return lc.Acknowledged(call=message.call)

    async def _reply(self, route: bytes, reply: ControlReplyMessage) -> None:
        """Send without waiting: a driver that misses the reply asks again."""
        try:
            await self._socket.send_multipart([route, _encoded(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("a control reply could not be sent: %s", error)


def _failure(message: ControlMessage, error: Exception) -> ControlErrorReply:
    """Return the error reply of a failed request; an unexpected error is logged too."""
    if not isinstance(error, WorkerError):
        logger.error("%s failed", type(message).__name__, exc_info=error)
    return control_error_reply(error, call=message.call)


def _encoded(reply: ControlReplyMessage) -> bytes:
    """Encode a reply or, if it cannot be encoded (over a limit, say), the reason."""
    try:
        return encode_control(reply)
    except Exception as error:
        logger.exception("%s cannot be encoded", type(reply).__name__)
        return encode_control(control_error_reply(error, call=reply.call))
