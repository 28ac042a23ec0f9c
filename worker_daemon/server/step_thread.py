"""The step thread: receives requests, checks that each is legal and next in order, runs it, and
passes the outcome to the completion thread. Owns the step socket and the worker; the only thread
that may touch the device."""

import logging
import queue
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeAlias

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.codec import MAX_FRAMES, Frame, StepHead, StepMessage, decode_step
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import (
    CapacityError,
    ConfigError,
    ErrorCode,
    ForbiddenError,
    ProtocolError,
    WireError,
    WorkerError,
)
from rpc_schema.lease import LeaseState
from worker_daemon.logs import set_rank
from worker_daemon.server.auth.bad_peers import Peer
from worker_daemon.server.auth.security import Security
from worker_daemon.server.completion import Completion
from worker_daemon.server.dispatch import (
    RUN_STEPS,
    STEPS,
    STEPS_WITH_ARRAYS,
    WAITS_FOR_PEERS,
    MakeWorker,
    PendingReply,
    WorkerLike,
    legal_silence_s,
    request_handlers,
)
from worker_daemon.server.lifecycle import Lifecycle
from worker_daemon.server.progress import Progress
from worker_daemon.server.sequence import GateResult, StepGate
from worker_daemon.server.server_thread import ServerThread
from worker_daemon.server.step_senders import EpochOwner, StepSenders
from worker_daemon.server.wire.replies import classify, error_reply
from worker_daemon.server.wire.unreadable import head_of, is_step, refusal
from worker_daemon.worker.uploads import Uploads
from worker_host.exit_codes import ExitCode
from worker_host.plain_text import one_line

SWITCH_INTERVAL_S: Final = 0.0002
"""The interpreter's switch interval, which limits how long the step thread can block the completion
thread."""
MAX_FAILURE_BYTES: Final = 4096
"""Limit on the stored cause of a failure."""
UID_BYTES: Final = 16
_LOADING: Final = (lc.InitDevice, lc.LoadModel)
_FATAL: Final = {"DEVICE": ExitCode.CONTEXT_LOST, "INTERNAL": ExitCode.INTERNAL}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttachSnapshot:
    """The state of the daemon when a driver took it over."""

    epoch: int
    seq: int
    clean: bool


@dataclass(frozen=True, slots=True)
class Attach:
    """Begin an epoch. `on_taken` is called on the completion thread, once steps of the previous
    epoch can no longer run and none of their results is awaited."""

    epoch: int
    owner: EpochOwner
    on_taken: Callable[[AttachSnapshot], None]
    keep_requests: bool = False
    driver: str = ""
    """Name of its driver, for messages."""


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """End an epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """The lease of an epoch has expired: its steps are refused from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DropRequests:
    """Drop the requests of an expired epoch, which no driver has adopted in time."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """`link` is broken: a result reported a lost peer, or the guard aborted the link."""

    link: int
    cause: str


@dataclass(frozen=True, slots=True)
class StopSteps:
    """Refuse new steps; `on_idle` is called once the running step has ended. stays: until a Resume;
    otherwise the daemon ends."""

    on_idle: Callable[[], None]
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Take steps again after a StopSteps with `stays`; `on_serving` is called once they are
    taken."""

    on_serving: Callable[[], None]


@dataclass(frozen=True, slots=True)
class OutOfBandTask:
    """Work between two requests that belongs to no driver and changes no state. `work` never
    raises."""

    phase: str
    legal_silence_s: float
    work: Callable[[WorkerLike], None]


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """The device is lost: nothing may touch it any more."""

    exit_code: ExitCode
    cause: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command: TypeAlias = (
    Attach
    | EndEpoch
    | Orphan
    | DropRequests
    | LinkLost
    | StopSteps
    | Resume
    | OutOfBandTask
    | DeviceLost
    | Stop
)


class StepEvents(Protocol):
    """Receives events of the step thread, on that thread; its methods return at once."""

    def worker_ready(self, worker: WorkerLike) -> None: ...
    def state_changed(self, transition: str) -> None: ...
    def fatal(self, exit_code: ExitCode, cause: str) -> None: ...


class StepThread:
    """Started by the daemon with a socket that only it uses from then on. Commands arrive in
    `commands`, with an empty message on the step socket's inproc address."""

    def __init__(
        self,
        *,
        step: "zmq.Socket[bytes]",
        completion: Completion,
        progress: Progress,
        events: StepEvents,
        make_worker: MakeWorker,
        security: Security,
        uploads: Uploads,
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._step = step
        self._progress = progress
        self._events = events
        self._make_worker = make_worker
        self._find_upload = uploads.get
        self._make_loop = partial(
            _StepLoop,
            commands=self.commands,
            completion=completion,
            progress=progress,
            events=events,
            senders=StepSenders(security),
            uploads=uploads,
        )
        self.thread = ServerThread("step", self._run)

    def _run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            worker = self._make_worker(self._progress.set_phase, self._find_upload)
        except Exception as error:
            if not isinstance(error, ConfigError):  # the message is enough
                logger.exception("the worker cannot be made")
            self._events.fatal(_start_exit_code(error), str(error))
            return
        loop = self._make_loop(worker)
        self._events.worker_ready(worker)
        try:
            loop.serve(self._step)
        except Exception as error:
            logger.exception("the step loop broke")
            self._events.fatal(ExitCode.INTERNAL, repr(error))
        finally:
            self._step.close()
            if self._progress.snapshot.state.serving != "FAILED":
                worker.close()


def _start_exit_code(error: Exception) -> ExitCode:
    if isinstance(error, ConfigError):
        return ExitCode.CONFIG
    lacks_memory = isinstance(error, CapacityError | MemoryError)
    return ExitCode.RETRY_LATER if lacks_memory else ExitCode.INTERNAL


class _StepLoop:
    """Checks and runs requests and commands. Used only by the step thread."""

    def __init__(
        self,
        worker: WorkerLike,
        *,
        commands: "queue.SimpleQueue[Command]",
        completion: Completion,
        progress: Progress,
        events: StepEvents,
        senders: StepSenders,
        uploads: Uploads,
    ) -> None:
        self._worker = worker
        self._commands = commands
        self._completion = completion
        self._progress = progress
        self._events = events
        self._senders = senders
        self._uploads = uploads
        self._gate = StepGate()
        self._lifecycle = Lifecycle()
        self._running = True
        self._failed = False
        self._left_clean = True
        """False once a step was aborted in the current epoch."""
        self._handlers = request_handlers(worker)

    def serve(self, step: "zmq.Socket[bytes]") -> None:
        """Take requests and commands until stopped. Commands come first: a drain or a new driver
        never waits behind queued steps."""
        self._describe()
        self._publish("started")
        self._progress.idle()
        commands, senders = self._commands, self._senders
        known = senders.known
        while self._running:
            sender, first = step.recv(), step.recv(copy=False)
            frames, more = [first.bytes], first.more
            while more:
                frame = step.recv(copy=False)
                more = frame.more
                if len(frames) <= MAX_FRAMES:  # frames over the bound are counted, not kept
                    frames.append(frame.bytes)
            while not commands.empty():
                self._command(commands.get())
            if len(frames) > 1 or frames[0]:  # otherwise it is the doorbell
                self._take(sender, known.get(sender) or senders.identify(sender, first), frames)

    def _take(self, sender: bytes, peer: Peer, frames: list[bytes]) -> None:
        """Decode and check one request. The sender may be any peer."""
        senders = self._senders
        if sender != senders.driver and peer in senders.bad_peers:
            return
        rights, cleared = senders.access.keys.by_key, senders.cleared
        is_cleared = cleared.sender == sender and cleared.rights is rights
        if not is_cleared and not senders.access.opens(peer, "step"):
            self._refuse_unread(
                sender, ForbiddenError("steps need the role driver", fix="use its key")
            )
            return
        try:
            message = decode_step(frames)
        except WireError as error:
            self._refuse_frames(sender, peer, frames, error)
            return
        if not is_cleared or cleared.epoch != message.epoch or cleared.kind is not type(message):
            is_cleared = False
            owner = senders.owners.get(message.epoch)
            if owner is not None and owner.owner != senders.access.owner(peer):
                senders.bad_peers.note(peer, "step", _not_its_epoch(message.epoch))
                return  # no reply: the epoch's replies go to its driver
        result = self._gate.check(message)
        if result is GateResult.RUN:
            self._gate.accept(message)
            senders.driver = sender
            del frames[0]
            self._run(message, frames, None if is_cleared else (sender, peer, rights))
        elif result is GateResult.REPLAY:
            self._completion.replay(message.seq)
        else:
            self._refuse(message, self._gate.refusal(result, message))

    def _run(
        self,
        message: StepMessage,
        arrays: Sequence[Frame],
        unchecked: tuple[bytes, Peer, object] | None,
    ) -> None:
        """Run an accepted request. Exactly one outcome goes to the completion thread, after
        `progress` shows it: a driver that has the reply may ask for the status.

        unchecked: sender, peer and rights to check; None if they are cleared.
        """
        kind = type(message)
        try:
            if unchecked is not None:
                sender, peer, rights = unchecked
                self._senders.access.check(peer, message)
                self._senders.clear(sender, rights, message)
            if kind not in self._lifecycle.legal or kind is lc.Reset:  # a Reset also names a target
                self._lifecycle.check(message)
            self._begin(message)
            if kind in STEPS_WITH_ARRAYS:
                self._pend(message.seq, self._handlers[kind](message, arrays))
            elif kind in STEPS:
                self._pend(message.seq, self._handlers[kind](message))
            else:
                self._operate(message)
        except Exception as error:  # the dispatch boundary: every failure is an outcome of its seq
            self._fail(message, error)
        self._progress.idle()

    def _begin(self, message: StepMessage) -> None:
        """Enter the phase of a legal request. A load request also sets the step deadline."""
        kind, progress = type(message), self._progress
        if kind in STEPS_WITH_ARRAYS:
            progress.begin(kind.__name__, progress.step_deadline_s, True)
            return
        if isinstance(message, _LOADING):
            progress.step_deadline_s = message.scheduler.step_deadline_ms / 1000
        silence_s = legal_silence_s(kind, progress.step_deadline_s)
        progress.begin(kind.__name__, silence_s, kind in WAITS_FOR_PEERS)

    def _pend(self, seq: int, pending: PendingReply | None) -> None:
        self._progress.last_seq = seq
        if pending is None:
            self._completion.nothing(seq)
        else:
            self._completion.pending(seq, pending, self._gate.link)

    def _operate(self, message: StepMessage) -> None:
        if isinstance(message, lc.InitDevice | lc.Relink):
            self._gate.begin_link(message)
            self._progress.link = self._gate.link
        began_s = self._progress.stamp.since
        reply = self._handlers[type(message)](message)
        name = type(message).__name__
        self._progress.operation_s[name] = time.monotonic() - began_s
        changed = self._lifecycle.succeeded(message)
        if isinstance(message, lc.InitDevice):
            set_rank(self._worker.rank)
        self._describe()
        self._publish(self._lifecycle.transitions[-1] if changed else "")
        if isinstance(message, lc.Reset):
            self._uploads.drop_all()  # later uploads see the new state
        self._progress.last_seq = message.seq
        self._completion.reply(reply)

    def _fail(self, message: StepMessage, error: Exception) -> None:
        error = self._worker.typed_error(error)
        if not isinstance(error, WorkerError):
            logger.error("%s seq %d failed", type(message).__name__, message.seq, exc_info=error)
            if type(message) in RUN_STEPS:
                error = self._worker.step_error(error)
        reply = error_reply(error, epoch=message.epoch, seq=message.seq, rank=self._worker.rank)
        if type(message) in STEPS:
            self._progress.num_failed_steps += 1
        torn = isinstance(message, lc.Relink) and reply.code is not ErrorCode.ILLEGAL_STATE
        if torn or reply.code is ErrorCode.COMM:
            self._link_broke(f"{type(message).__name__}: {reply.code}")
        self._progress.last_seq = message.seq
        self._completion.reply(reply)
        if isinstance(error, WorkerError) and error.code in _FATAL:
            self._end(_FATAL[error.code], str(error))

    def _end(self, exit_code: ExitCode, cause: str) -> None:
        """Refuse all requests from here on; the daemon ends the process."""
        if not self._lifecycle.serve("FAILED", cause):
            return
        self._failed = True
        failure = one_line(cause, MAX_FAILURE_BYTES)
        self._progress.snapshot = replace(self._progress.snapshot, failure=failure)
        self._publish(self._lifecycle.transitions[-1])
        self._events.fatal(exit_code, cause)

    def _link_broke(self, cause: str) -> None:
        if self._lifecycle.link_broke(cause):
            self._publish(self._lifecycle.transitions[-1])

    def _refuse(self, message: StepMessage | StepHead, error: ProtocolError) -> None:
        """Answer a request that was not accepted, if its epoch has a driver."""
        self._progress.refusals[error.code] += 1
        owner = self._senders.owners.get(message.epoch)
        if owner is not None:
            reply = error_reply(error, epoch=message.epoch, seq=message.seq, rank=self._worker.rank)
            self._completion.refuse(owner.route, reply)

    def _refuse_frames(
        self, sender: bytes, peer: Peer, frames: Sequence[Frame], error: WireError
    ) -> None:
        """Answer frames that do not decode: to the driver of their epoch as the outcome of their
        seq, if both can be read. Frames of other senders are counted."""
        head = head_of(frames)
        senders = self._senders
        if head is None or not senders.is_driver(sender, peer, head.epoch):
            if sender != senders.driver:
                senders.bad_peers.note(peer, "step", error)
            self._refuse_unread(sender, error)
            return
        result = self._gate.check(head)
        if result is GateResult.RUN:
            self._gate.accept(head)
            senders.driver = sender
            self._fail_unread(head, refusal(head, frames, error))
        elif result is GateResult.REPLAY:
            self._completion.replay(head.seq)
        else:
            self._refuse(head, self._gate.refusal(result, head))

    def _fail_unread(self, head: StepHead, error: Exception) -> None:
        """Report the failure of a request that was accepted only by its head."""
        if is_step(head):
            self._worker.refuse_step(head.seq)
        reply = error_reply(error, epoch=head.epoch, seq=head.seq, rank=self._worker.rank)
        self._progress.last_seq = head.seq
        self._completion.reply(reply)

    def _refuse_unread(self, sender: bytes, error: Exception) -> None:
        """Answer a request that was not decoded, if the attached driver sent it."""
        self._progress.refusals[classify(error)[0]] += 1
        owner = self._senders.owners.get(self._gate.epoch)
        if owner is not None and sender == self._senders.driver:
            reply = error_reply(error, epoch=self._gate.epoch, seq=0, rank=self._worker.rank)
            self._completion.refuse(owner.route, reply)

    def _command(self, command: Command) -> None:
        if self._failed and not isinstance(command, StopSteps | Stop):
            return  # the process ends, and the device may be lost
        match command:
            case Attach():
                self._attach(command)
            case EndEpoch(epoch):
                self._gate.detach(epoch)
                self._leased(epoch, "free", "detached")
            case Orphan(epoch):
                self._expire(epoch)
            case DropRequests(epoch) if epoch == self._gate.epoch:
                self._leave_requests(keep=False)
                self._uploads.drop_all()
                logger.info("no driver adopted the requests of epoch %d: dropped", epoch)
            case LinkLost(link, cause) if link == self._gate.link:  # else a later link exists
                self._link_broke(cause)
            case StopSteps():
                self._drain(command)
            case Resume():
                self._resume(command)
            case OutOfBandTask():
                self._run_out_of_band(command)
            case DeviceLost(exit_code, cause):
                self._end(exit_code, cause)
            case Stop():
                self._lifecycle.serve("CLOSED", "stop")
                self._running = False

    def _expire(self, epoch: int) -> None:
        self._gate.expire(epoch)
        if epoch == self._gate.epoch:  # otherwise another driver has uploads
            self._uploads.keep_only(self._progress.snapshot.description.uploads_in_use())
        self._leased(epoch, "orphan", "the lease expired")

    def _drain(self, command: StopSteps) -> None:
        self._gate.draining = command.stays
        if self._lifecycle.serve("DRAINING", "drain" if command.stays else "shutdown"):
            self._publish(self._lifecycle.transitions[-1])
        command.on_idle()

    def _resume(self, command: Resume) -> None:
        if self._gate.draining and self._lifecycle.serve("SERVING", "the drain was undone"):
            self._gate.draining = False
            self._publish(self._lifecycle.transitions[-1])
        command.on_serving()

    def _run_out_of_band(self, command: OutOfBandTask) -> None:
        # Not on_link: a driver that attaches now waits, and does not abort the link.
        self._progress.begin(command.phase, command.legal_silence_s, False)
        command.work(self._worker)
        self._progress.idle()

    def _attach(self, command: Attach) -> None:
        gate = self._gate
        if command.epoch <= gate.epoch:
            return  # a later driver was attached first
        clean = self._leave_requests(keep=command.keep_requests)
        self._left_clean = True
        snapshot = AttachSnapshot(gate.epoch, gate.last_seq, clean)
        gate.attach(command.epoch, command.driver)
        self._senders.attach(command.epoch, command.owner)
        self._progress.epoch = command.epoch
        self._progress.last_seq = 0
        self._leased(command.epoch, "held", f"epoch {command.epoch} attached")
        self._completion.attached(
            command.owner.route,
            lc.Attached(epoch=command.epoch, seq=0, rank=self._worker.rank),
            lambda: command.on_taken(snapshot),
        )
        self._progress.idle()

    def _leave_requests(self, *, keep: bool) -> bool:
        """Make the worker drop all requests unless `keep`; return True if no step was aborted since
        the last attach."""
        try:
            clean = self._worker.on_attach(keep_requests=keep)
        except Exception:
            logger.exception("the requests of epoch %d cannot be kept or dropped", self._gate.epoch)
            clean = False
        self._left_clean = self._left_clean and clean
        return self._left_clean

    def _leased(self, epoch: int, to: LeaseState, cause: str) -> None:
        if epoch == self._gate.epoch and self._lifecycle.leased(to, cause):
            self._publish(self._lifecycle.transitions[-1])

    def _describe(self) -> None:
        """Publish the worker's description. Only after lifecycle operations: it waits for the
        device, which may hang after a failed step."""
        try:
            description = self._worker.describe()
        except Exception:
            logger.exception("the worker cannot describe the device")
            return
        self._progress.snapshot = replace(self._progress.snapshot, description=description)

    def _publish(self, transition: str) -> None:
        """Publish the state for other threads, after everything except a step."""
        self._progress.snapshot = replace(
            self._progress.snapshot,
            state=self._lifecycle.state,
            rank=self._worker.rank,
            transitions=self._lifecycle.transitions,
        )
        self._progress.link = self._gate.link
        if transition:
            self._events.state_changed(transition)


def _not_its_epoch(epoch: int) -> ForbiddenError:
    problem = "the epoch was granted to another key or user"
    fix = "attach, and use the epoch that was granted"
    return ForbiddenError(problem, field="epoch", value=epoch, fix=fix)


def link_failure(reply: ErrorReply, link: int) -> LinkLost | None:
    """Return the command for a late failure that broke `link`; None for other failures."""
    if reply.code is not ErrorCode.COMM:
        return None
    return LinkLost(link, f"seq {reply.seq}: {reply.code}")


def fatal_exit_code(reply: ErrorReply) -> ExitCode | None:
    """Return the exit code of a late failure; None if the daemon survives it."""
    return ExitCode.CONTEXT_LOST if reply.code is ErrorCode.DEVICE else None
