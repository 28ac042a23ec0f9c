"""The step thread: takes requests in order, decides whether each is the next and legal, runs it,
and hands the outcome to the completion thread. Owns the step socket and the worker; the one thread
that may touch the device."""

import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.codec import MAX_FRAMES, Frame, StepHead, StepMessage, decode_step
from rpc_schema.errors import ErrorCode, ErrorReply, WireError
from rpc_schema.exit_codes import ExitCode
from rpc_schema.lease import LeaseState
from rpc_schema.plain_text import one_line
from worker_daemon.errors import (
    CapacityError,
    ConfigError,
    ForbiddenError,
    ProtocolError,
    WorkerError,
)
from worker_daemon.logs import set_rank
from worker_daemon.server.auth.bad_peers import Peer
from worker_daemon.server.auth.security import Security
from worker_daemon.server.completion import Completion
from worker_daemon.server.dispatch import (
    WAITS_FOR_PEERS,
    MakeWorker,
    WorkerLike,
    array_step_handlers,
    legal_silence_s,
    operation_handlers,
    step_handlers,
)
from worker_daemon.server.lifecycle import Lifecycle
from worker_daemon.server.progress import Progress
from worker_daemon.server.sequence import StepGate, Verdict
from worker_daemon.server.wire.replies import error_reply
from worker_daemon.server.wire.unreadable import head_of, is_step, refusal
from worker_daemon.worker.uploads import Uploads

SWITCH_INTERVAL_S: Final = 0.0002
"""The interpreter's: how long the step thread may keep the completion thread from the
interpreter."""
MAX_OLD_DRIVERS: Final = 16
MAX_KNOWN_PEERS: Final = 256
MAX_FAILURE_BYTES: Final = 4096
"""Of why the daemon has failed, as it is kept."""
UID_BYTES: Final = 16
_LOADING: Final = (lc.InitDevice, lc.LoadModel)
_FATAL: Final = {"DEVICE": ExitCode.CONTEXT_LOST, "INTERNAL": ExitCode.INTERNAL}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttachSnapshot:
    """Where the daemon stood when a driver took it over."""

    epoch: int
    seq: int
    clean: bool


@dataclass(frozen=True, slots=True)
class EpochOwner:
    """Whose an epoch is, and where its replies go."""

    owner: str
    """A public key or, without keys, a user."""
    route: bytes
    """Routing id of the driver's results socket."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Begin an epoch; `taken` hears (on the completion thread) once steps of the former one can no
    longer run and nobody waits for their results."""

    epoch: int
    seat: EpochOwner
    taken: Callable[[AttachSnapshot], None]
    keep_requests: bool = False


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """End an epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """The lease of an epoch has expired: nothing of it runs any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DropRequests:
    """Whoever might have adopted the requests of an expired epoch has not come."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Another thread knows that `link` is broken: a result said that a peer is lost, or the guard
    aborted it."""

    link: int
    cause: str


@dataclass(frozen=True, slots=True)
class StopSteps:
    """Refuse new steps from here on; `idle` hears once the running one is over. stays: until
    Resume, if that comes; else the daemon ends."""

    idle: Callable[[], None]
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Take steps again, after a Drain that stays; `serving` hears once that is so."""

    serving: Callable[[], None]


@dataclass(frozen=True, slots=True)
class OutOfBandTask:
    """Something that belongs to no driver and changes no state, between two requests. `work` never
    raises."""

    phase: str
    legal_silence_s: float
    work: Callable[[WorkerLike], None]


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """Another thread knows that the device is lost: nothing may touch it any more."""

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
    """What the step thread tells the daemon. Each method is called on the step thread and returns
    at once."""

    def worker_ready(self, worker: WorkerLike) -> None: ...
    def state_changed(self, transition: str) -> None: ...
    def fatal(self, exit_code: ExitCode, cause: str) -> None: ...


class StepThread:
    """Started by the daemon with sockets that it alone uses from then on. Commands come by
    `commands` and an empty message on the step socket's inner address."""

    def __init__(
        self,
        *,
        step: "zmq.Socket[bytes]",
        completion: Completion,
        progress: Progress,
        events: StepEvents,
        make_worker: MakeWorker,
        device: str,
        model_roots: Sequence[Path],
        save_root: Path | None,
        security: Security,
        uploads: Uploads,
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._step = step
        self._completion = completion
        self._progress = progress
        self._events = events
        self._make_worker = make_worker
        self._device = device
        self._model_roots = model_roots
        self._save_root = save_root
        self._security = security
        self._uploads = uploads
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Start the thread; events.worker_ready follows."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; tell whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            worker = self._make_worker(
                self._device, self._model_roots, self._progress.set_phase, self._save_root
            )
        except Exception as error:
            if not isinstance(error, ConfigError):  # which says all that there is to know
                logger.exception("the worker cannot be made")
            self._events.fatal(_start_exit_code(error), str(error))
            return
        loop = _StepLoop(
            worker,
            self.commands,
            self._completion,
            self._progress,
            self._events,
            self._security,
            self._uploads,
        )
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
    """What happens to a request; the thread's own state."""

    def __init__(
        self,
        worker: WorkerLike,
        commands: "queue.SimpleQueue[Command]",
        completion: Completion,
        progress: Progress,
        events: StepEvents,
        security: Security,
        uploads: Uploads,
    ) -> None:
        self._worker = worker
        self._commands = commands
        self._completion = completion
        self._progress = progress
        self._events = events
        self._access = security.access
        self._bad_peers = security.bad_peers
        self._uploads = uploads
        self._gate = StepGate()
        self._lifecycle = Lifecycle()
        self._seats: dict[int, EpochOwner] = {}
        """By epoch."""
        self._peers: dict[bytes, Peer] = {}
        """By routing id, as far as that is nobody else's."""
        self._sender = b""
        self._running = True
        self._failed = False
        self._left_clean = True
        """Whether no step has been cut off in the current epoch, as far as it was asked."""
        self._array_steps = array_step_handlers(worker)
        self._steps = step_handlers(worker)
        self._operations = operation_handlers(worker)
        self._command_handlers: Mapping[type[Command], Callable[..., None]] = {
            Attach: self._attach,
            EndEpoch: self._detach,
            Orphan: self._orphan,
            DropRequests: self._drop_requests,
            LinkLost: self._lose_link,
            StopSteps: self._drain,
            Resume: self._resume,
            OutOfBandTask: self._work_aside,
            DeviceLost: self._lose_device,
            Stop: self._stop,
        }

    def serve(self, step: "zmq.Socket[bytes]") -> None:
        """Take requests and commands until told to stop. Commands come first: a drain or a new
        driver never waits behind queued steps."""
        self._describe()
        self._publish("started")
        self._progress.idle()
        commands = self._commands
        while self._running:
            sender, first = step.recv(), step.recv(copy=False)
            frames, more = [first.bytes], first.more
            while more:
                frame = step.recv(copy=False)
                more = frame.more
                if len(frames) <= MAX_FRAMES:  # what is over the bound is counted, not kept
                    frames.append(frame.bytes)
            while not commands.empty():
                self._command(commands.get())
            if len(frames) > 1 or frames[0]:  # else the doorbell, or somebody who rings it
                self._take(sender, self._peers.get(sender) or self._meet(sender, first), frames)

    def _meet(self, sender: bytes, frame: zmq.Frame) -> Peer:
        """Return whose a step socket is; asked once where its routing id is ZeroMQ's own, which
        counts connections from 32 random bits on and tells nobody."""
        peer = self._access.peer("step", sender, frame)
        if sender[:1] == b"\0":
            if len(self._peers) == MAX_KNOWN_PEERS:
                self._peers.clear()
            self._peers[sender] = peer
        return peer

    def _take(self, sender: bytes, peer: Peer, frames: list[bytes]) -> None:
        """Decode and judge one request of a peer that may send any."""
        if sender != self._sender and peer in self._bad_peers:
            return
        if not self._access.opens(peer, "step"):
            self._tell(sender, ForbiddenError("steps need the role driver", fix="use its key"))
            return
        try:
            message = decode_step(frames)
        except WireError as error:
            self._refuse_frames(sender, peer, frames, error)
            return
        seat = self._seats.get(message.epoch)
        if seat is not None and seat.owner != self._access.owner(peer):
            self._bad_peers.note(peer, "step", _not_its_epoch(message.epoch))
            return  # nobody is told: the epoch's replies are its driver's
        verdict = self._gate.judge(message)
        if verdict is Verdict.RUN:
            self._gate.accept(message)
            self._sender = sender
            del frames[0]
            self._run(message, frames, peer)
        elif verdict is Verdict.REPLAY:
            self._completion.replay(message.seq)
        else:
            self._refuse(message, self._gate.refusal(verdict, message))

    def _run(self, message: StepMessage, arrays: Sequence[Frame], peer: Peer) -> None:
        """Run an accepted request: exactly one outcome goes to the completion thread, whatever
        happens, and not before `progress` shows it: who has the answer may ask for the status."""
        kind = type(message)
        try:
            self._access.check(peer, message)
            if kind not in self._array_steps or kind not in self._lifecycle.legal:
                self._lifecycle.check(message)
            self._begin(message)
            if kind in self._array_steps:
                self._pend(message.seq, self._array_steps[kind](message, arrays))
            elif kind in self._steps:
                self._pend(message.seq, self._steps[kind](message))
            else:
                self._operate(message)
        except Exception as error:  # the dispatch boundary: every failure is an outcome of its seq
            self._fail(message, error)
        self._progress.idle()

    def _begin(self, message: StepMessage) -> None:
        """Enter the phase of a legal request, under the step deadline that it may bring along."""
        kind, progress = type(message), self._progress
        if kind in self._array_steps:
            progress.begin(kind.__name__, progress.step_deadline_s, True)
            return
        if isinstance(message, _LOADING):
            progress.step_deadline_s = message.scheduler.step_deadline_ms / 1000
        silence_s = legal_silence_s(kind, progress.step_deadline_s)
        progress.begin(kind.__name__, silence_s, kind in WAITS_FOR_PEERS)

    def _pend(self, seq: int, pending: object) -> None:
        self._progress.last_seq = seq
        if pending is None:
            self._completion.nothing(seq)
        else:
            self._completion.pending(seq, pending, self._gate.link)  # type: ignore[arg-type]  # a PendingReply, by the table

    def _operate(self, message: StepMessage) -> None:
        if isinstance(message, lc.InitDevice | lc.Relink):
            self._gate.begin_link(message)
            self._progress.link = self._gate.link
        reply = self._operations[type(message)](message)
        changed = self._lifecycle.succeeded(message)
        if isinstance(message, lc.InitDevice):
            set_rank(self._worker.rank)
        self._describe()
        self._publish(self._lifecycle.transitions[-1] if changed else "")
        if isinstance(message, lc.Reset):
            self._uploads.drop_all()  # what comes from here on sees the new state
        self._progress.last_seq = message.seq
        self._completion.reply(reply)

    def _fail(self, message: StepMessage, error: Exception) -> None:
        error = self._worker.typed_error(error)
        if not isinstance(error, WorkerError):
            logger.error("%s seq %d failed", type(message).__name__, message.seq, exc_info=error)
            if type(message) in self._array_steps or type(message) in self._steps:
                error = self._worker.step_error(error)
        reply = error_reply(error, epoch=message.epoch, seq=message.seq, rank=self._worker.rank)
        torn = isinstance(message, lc.Relink) and reply.code is not ErrorCode.ILLEGAL_STATE
        if torn or reply.code is ErrorCode.COMM:
            self._link_broke(f"{type(message).__name__}: {reply.code}")
        self._progress.last_seq = message.seq
        self._completion.reply(reply)
        if isinstance(error, WorkerError) and error.code in _FATAL:
            self._end(_FATAL[error.code], str(error))

    def _end(self, exit_code: ExitCode, cause: str) -> None:
        """Refuse everything from here on; the daemon ends the process."""
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
        """Answer a request that was not accepted, if its epoch is a driver's."""
        seat = self._seats.get(message.epoch)
        if seat is not None:
            reply = error_reply(error, epoch=message.epoch, seq=message.seq, rank=self._worker.rank)
            self._completion.refuse(seat.route, reply)

    def _refuse_frames(
        self, sender: bytes, peer: Peer, frames: Sequence[Frame], error: WireError
    ) -> None:
        """Answer frames that do not decode: to the driver of their epoch as the outcome of their
        seq, where both can be read. Those of anybody else are counted."""
        head = head_of(frames)
        if head is None or not self._is_drivers(sender, peer, head.epoch):
            if sender != self._sender:
                self._bad_peers.note(peer, "step", error)
            self._tell(sender, error)
            return
        verdict = self._gate.judge(head)
        if verdict is Verdict.RUN:
            self._gate.accept(head)
            self._sender = sender
            self._fail_unread(head, refusal(head, frames, error))
        elif verdict is Verdict.REPLAY:
            self._completion.replay(head.seq)
        else:
            self._refuse(head, self._gate.refusal(verdict, head))

    def _fail_unread(self, head: StepHead, error: Exception) -> None:
        """Refuse a request that was accepted by its head alone."""
        if is_step(head):
            self._worker.refuse_step(head.seq)
        reply = error_reply(error, epoch=head.epoch, seq=head.seq, rank=self._worker.rank)
        self._progress.last_seq = head.seq
        self._completion.reply(reply)

    def _is_drivers(self, sender: bytes, peer: Peer, epoch: int) -> bool:
        """Tell whether a step socket is that of an epoch's driver, which may have connected again.
        Without keys all peers have the same owner: then the socket that sent the last request is,
        or the first that sends one."""
        seat = self._seats.get(epoch)
        if seat is None or seat.owner != self._access.owner(peer):
            return False
        return self._access.proves_owners or self._sender in (sender, b"")

    def _tell(self, sender: bytes, error: Exception) -> None:
        """Answer what was not decoded: to the attached driver, if it comes from its step socket."""
        seat = self._seats.get(self._gate.epoch)
        if seat is not None and sender == self._sender:
            reply = error_reply(error, epoch=self._gate.epoch, seq=0, rank=self._worker.rank)
            self._completion.refuse(seat.route, reply)

    def _command(self, command: Command) -> None:
        if self._failed and not isinstance(command, StopSteps | Stop):
            return  # the process ends, and the device may be lost
        self._command_handlers[type(command)](command)

    def _detach(self, command: EndEpoch) -> None:
        self._gate.detach(command.epoch)
        self._leased(command.epoch, "free", "detached")

    def _orphan(self, command: Orphan) -> None:
        self._gate.expire(command.epoch)
        self._leased(command.epoch, "orphan", "the lease expired")

    def _drop_requests(self, command: DropRequests) -> None:
        if command.epoch == self._gate.epoch:
            self._leave_requests(keep=False)
            logger.info("nobody came for the requests of epoch %d: dropped", command.epoch)

    def _lose_link(self, command: LinkLost) -> None:
        if command.link == self._gate.link:  # else it has been replaced since
            self._link_broke(command.cause)

    def _drain(self, command: StopSteps) -> None:
        self._gate.draining = command.stays
        if self._lifecycle.serve("DRAINING", "drain" if command.stays else "shutdown"):
            self._publish(self._lifecycle.transitions[-1])
        command.idle()

    def _resume(self, command: Resume) -> None:
        if self._gate.draining and self._lifecycle.serve("SERVING", "the drain was undone"):
            self._gate.draining = False
            self._publish(self._lifecycle.transitions[-1])
        command.serving()

    def _work_aside(self, command: OutOfBandTask) -> None:
        # Not on_link: whoever attaches meanwhile waits, and aborts nobody's link.
        self._progress.begin(command.phase, command.legal_silence_s, False)
        command.work(self._worker)
        self._progress.idle()

    def _lose_device(self, command: DeviceLost) -> None:
        self._end(command.exit_code, command.cause)

    def _stop(self, command: Stop) -> None:
        self._lifecycle.serve("CLOSED", "stop")
        self._running = False

    def _attach(self, command: Attach) -> None:
        gate = self._gate
        if command.epoch <= gate.epoch:
            return  # overtaken: a driver behind this one was taken first
        clean = self._leave_requests(keep=command.keep_requests)
        self._left_clean = True
        standing = AttachSnapshot(gate.epoch, gate.last_seq, clean)
        gate.attach(command.epoch)
        self._sender = b""
        self._progress.epoch = command.epoch
        self._progress.last_seq = 0
        self._seats[command.epoch] = command.seat
        if len(self._seats) > MAX_OLD_DRIVERS:
            del self._seats[min(self._seats)]
        self._leased(command.epoch, "held", f"epoch {command.epoch} attached")
        self._completion.attached(
            command.seat.route,
            lc.Attached(epoch=command.epoch, seq=0, rank=self._worker.rank),
            lambda: command.taken(standing),
        )
        self._progress.idle()

    def _leave_requests(self, *, keep: bool) -> bool:
        """Have the worker forget all requests, unless they are to be kept; tell whether none was
        cut off since the last attach."""
        try:
            clean = self._worker.on_attach(keep_requests=keep)
        except Exception:
            logger.exception("the requests of epoch %d cannot be taken over", self._gate.epoch)
            clean = False
        self._left_clean = self._left_clean and clean
        return self._left_clean

    def _leased(self, epoch: int, to: LeaseState, cause: str) -> None:
        if epoch == self._gate.epoch and self._lifecycle.leased(to, cause):
            self._publish(self._lifecycle.transitions[-1])

    def _describe(self) -> None:
        """Renew what is known of the device. After lifecycle operations only: it waits for the
        device, which a failed step may have left hanging."""
        try:
            description = self._worker.describe()
        except Exception:
            logger.exception("the worker cannot say what is on the device")
            return
        self._progress.snapshot = replace(self._progress.snapshot, description=description)

    def _publish(self, transition: str) -> None:
        """Renew the state that other threads read, after anything but a step."""
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
    return ForbiddenError(
        "the epoch was granted to another key or user",
        field="epoch",
        value=epoch,
        fix="attach, and use the epoch that was granted",
    )


def link_failure(reply: ErrorReply, link: int) -> LinkLost | None:
    """Return the command for a late failure that broke `link`; None for the others."""
    if reply.code is not ErrorCode.COMM:
        return None
    return LinkLost(link, f"seq {reply.seq}: {reply.code}")


def fatal_exit_code(reply: ErrorReply) -> ExitCode | None:
    """Return the exit code that a late failure asks for; None for a failure that the daemon
    survives."""
    return ExitCode.CONTEXT_LOST if reply.code is ErrorCode.DEVICE else None
