"""The daemon as a process: start, loop, shutdown. Wires the threads and decides the exit code;
knows no message."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final, NoReturn

import uvloop
import zmq

from rpc_schema.errors import ErrorReply
from rpc_schema.exit_codes import ExitCode
from worker_daemon.device.fault_watch import NoFaultWatch
from worker_daemon.device.gauges import NoGauges
from worker_daemon.device.gpu_faults import Fault
from worker_daemon.directories import claim_directory
from worker_daemon.errors import CapacityError, ConfigError
from worker_daemon.interfaces import interface_address
from worker_daemon.server.auth.security import open_security
from worker_daemon.server.completion import Completion
from worker_daemon.server.control import Control
from worker_daemon.server.dispatch import MakeWorker, OpenRendezvousServer, WorkerLike
from worker_daemon.server.events import Events
from worker_daemon.server.gpu_lock import GpuLock, GpuLockLike, NoGpuLock, lock_directory
from worker_daemon.server.health.device_watch import DeviceWatch, OpenFaultWatch, OpenGauges
from worker_daemon.server.health.guard import Guard
from worker_daemon.server.health.hang_reports import HangReports
from worker_daemon.server.health.systemd import open_notifier
from worker_daemon.server.health.tracing import Tracing
from worker_daemon.server.progress import Progress
from worker_daemon.server.session.attach import AttachHandler
from worker_daemon.server.session.draining import Draining
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.session.lease import Lease, suspended_s
from worker_daemon.server.session.rendezvous import LinkRendezvous
from worker_daemon.server.session.status import StatusReport
from worker_daemon.server.session.upload_handler import UploadHandler
from worker_daemon.server.step_thread import (
    Command,
    DeviceLost,
    LinkLost,
    StepThread,
    Stop,
    StopSteps,
    fatal_exit_code,
    link_failure,
)
from worker_daemon.server.wire.endpoints import (
    CLOSED_TO_OTHERS,
    AnyEndpoint,
    EndpointInUseError,
    EndpointLock,
    IpcEndpoint,
    SocketFiles,
    TcpEndpoint,
    remove_if_empty,
)
from worker_daemon.server.wire.file_limit import raise_file_limit
from worker_daemon.server.wire.sockets import bind_sockets, events_socket
from worker_daemon.server.wire.stale_files import remove_stale
from worker_daemon.settings import ONE_HOST, ProcessSettings, endpoint_home
from worker_daemon.worker.uploads import Uploads

HEARTBEAT_S: Final = 0.25
DRAIN_LIMIT_S: Final = 10.0
STOP_LIMIT_S: Final = 0.8
"""What an orderly end may take after the drain; a thread that is stuck for longer ends with the
process."""

LAST_WORDS_S: Final = 0.3
"""From the loss of the device to the end of the process: for the failure's way to the driver, and
for NVML to say more."""
DEVICE_LIMIT_S: Final = 1.5
"""Then the process ends even if its main thread hangs."""
FindGpu = Callable[[], str]
_DEVICE_CODES: Final = (ExitCode.CONTEXT_LOST, ExitCode.GPU_LOST)

logger = logging.getLogger(__name__)


def serve(
    settings: ProcessSettings,
    make_worker: MakeWorker,
    open_rendezvous: OpenRendezvousServer,
    open_watch: OpenFaultWatch = NoFaultWatch,
    open_gauges: OpenGauges = NoGauges,
    find_gpu: FindGpu = str,
) -> int:
    """Run a daemon on the main thread until it ends; return the exit code. find_gpu: the UUID of
    the device; empty: it has none that is known.

    Raises:
        GpuInUseError: another daemon has the GPU.
        ConfigError: the endpoint, the state directory or the parent's pipe cannot be used, or too
            few files may be open.
        EndpointInUseError: another daemon has the endpoint.
        StartLaterError: the host has no room for the daemon's files now.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # kept for its handler
    _check_parent_fd(settings.exit_with_parent_fd)
    raise_file_limit()
    premises = RuntimeFiles(settings, find_gpu)
    try:
        daemon = Daemon(settings, premises, make_worker, open_rendezvous, open_watch, open_gauges)
        return uvloop.run(daemon.run())
    finally:
        premises.leave()


def _check_parent_fd(fd: int | None) -> None:
    try:
        if fd is not None:
            os.fstat(fd)
    except OSError as error:
        raise ConfigError(
            f"it is not an open file descriptor: {error.strerror}",
            field="exit-with-parent-fd",
            value=fd,
            fix="pass the read end of a pipe to the daemon's process",
        ) from None


class RuntimeFiles:
    """What a daemon holds in the file system: directory, locks of the endpoint and the GPU, socket
    files, epoch file. Owned by the main thread."""

    def __init__(self, settings: ProcessSettings, find_gpu: FindGpu = str) -> None:
        """Claim them. Raises what `serve` does."""
        self.endpoint = _parse_endpoint(settings)
        self._directory = self.endpoint.path.parent
        self._state_dir = settings.state_dir or self._directory
        self._dies_with_parent = settings.exit_with_parent_fd is not None
        claim_directory(self._directory, "the endpoint", "endpoint", forbidden=CLOSED_TO_OTHERS)
        for dead in remove_stale(self._directory):
            logger.info("removed what a daemon left that was killed: %s", dead)
        self._lock = EndpointLock(self.endpoint)
        self._gpu_lock: GpuLockLike = NoGpuLock()
        try:
            self.sockets = SocketFiles(self.endpoint)
            self._gpu_lock = _lock_gpu(settings, find_gpu)
            self.epochs = EpochFile(self._state_dir, self.endpoint, reset=settings.reset_epoch)
            self.hang_reports = HangReports(self.epochs.path.with_suffix(".stacks"))
        except (ConfigError, CapacityError):
            self._gpu_lock.release()
            self._lock.release()
            remove_if_empty(self._directory)
            raise

    def keep(self) -> None:
        """Make sure that what we hold is still ours; to be called now and then.

        Raises:
            GpuInUseError: another daemon has locked the GPU.
            EndpointInUseError: the endpoint's files were removed, or another daemon's are there.
        """
        self._gpu_lock.keep()
        missing = self.sockets.missing()
        if missing:
            raise EndpointInUseError(
                f"{missing[0]} was removed or replaced: nobody can connect to this daemon any more",
                field="endpoint",
                value=str(self.endpoint),
                fix="keep other processes from removing files of the endpoint's directory",
            )
        self._lock.keep()

    def leave(self) -> None:
        """Remove what is ours; directories too, where nothing else is in them. The epoch file stays
        unless the endpoint belongs to a launcher, ends with it, and is still ours."""
        is_ours = self._lock.is_held()
        self.sockets.remove()
        self.hang_reports.close(keep=not is_ours)
        if self._dies_with_parent and is_ours:
            self.epochs.remove()
        self._gpu_lock.release()
        self._lock.release()
        if self._directory in self._state_dir.parents:
            remove_if_empty(self._state_dir)
        remove_if_empty(self._directory)


def _lock_gpu(settings: ProcessSettings, find_gpu: FindGpu) -> GpuLockLike:
    if settings.share_gpu:
        return NoGpuLock()
    uuid = find_gpu()
    return GpuLock(uuid, lock_directory(settings.gpu_lock_dir)) if uuid else NoGpuLock()


def _parse_endpoint(settings: ProcessSettings) -> AnyEndpoint:
    if settings.endpoint.startswith("tcp://"):
        return TcpEndpoint.parse(settings.endpoint, endpoint_home(settings))
    return IpcEndpoint.parse(settings.endpoint)


class Daemon:
    """One process's threads and sockets. `run` is start, loop and shutdown, in this order."""

    def __init__(
        self,
        settings: ProcessSettings,
        premises: RuntimeFiles,
        make_worker: MakeWorker,
        open_rendezvous: OpenRendezvousServer,
        open_watch: OpenFaultWatch,
        open_gauges: OpenGauges,
    ) -> None:
        self._settings = settings
        self._premises = premises
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        data_host = interface_address(settings.data_interface or ONE_HOST)
        self._security = open_security(self._context, settings)
        self._sockets = bind_sockets(self._context, premises.endpoint, self._security)
        premises.sockets.are_bound()
        self._progress = Progress(settings.device)
        self._uploads = Uploads(settings.upload_memory_bytes)
        self._notifier = open_notifier(settings.notify_socket)
        self._guard = Guard(self._progress, self._link_aborted, premises.hang_reports, self)
        self._completion = Completion(self._sockets.results, self._progress, self._result_failed)
        self._step_thread = StepThread(
            step=self._sockets.step,
            completion=self._completion,
            progress=self._progress,
            events=self,
            make_worker=make_worker,
            device=settings.device,
            model_roots=settings.model_roots,
            save_root=settings.save_root,
            security=self._security,
            uploads=self._uploads,
        )
        self._device_watch = DeviceWatch(open_watch, self._gpu_fault, open_gauges)
        self._furnish_main_thread(open_rendezvous, data_host)
        self._tasks: set[asyncio.Future[None]] = set()
        self._signals = 0
        self._fatal_lock = threading.Lock()
        self._fatal_code: ExitCode | None = None

    def _furnish_main_thread(self, open_rendezvous: OpenRendezvousServer, data_host: str) -> None:
        """Make what answers drivers and tells them; only the main thread may call any of it."""
        progress, guard, lease = self._progress, self._guard, Lease(time.monotonic, suspended_s)
        self._draining = Draining(self.post, lambda: self._events.tell_heartbeat(), lease, progress)
        report = StatusReport(
            endpoint=self._premises.endpoint,
            progress=progress,
            guard=guard,
            lease=lease,
            draining=self._draining,
            security=self._security,
            completion=self._completion,
            device_watch=self._device_watch,
            uploads=self._uploads,
        )
        self._events = Events(self._sockets.events, report)
        self._attaching = AttachHandler(
            self._premises.epochs,
            lease,
            self._draining,
            progress,
            guard,
            report,
            self._uploads,
            self.post,
        )
        need_attached = self._attaching.need_attached
        self._control = Control(
            socket=self._sockets.control,
            security=self._security,
            attaching=self._attaching,
            meeting_places=LinkRendezvous(
                open_rendezvous, data_host, need_attached, progress, guard, self.post
            ),
            report=report,
            draining=self._draining,
            tracing=Tracing(self.post, need_attached, self._events.ask_driver),
            uploading=UploadHandler(self._uploads, need_attached, self._draining, progress),
            begin_shutdown=self.begin_shutdown,
        )

    async def run(self) -> int:
        """Serve until somebody ends it; return the exit code."""
        self._start()
        exit_code = await self._loop_until_end()
        self._shut_down(exit_code)
        return exit_code

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[int] = self._loop.create_future()
        self._end: asyncio.Future[int] = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
        parent_fd = self._settings.exit_with_parent_fd
        if parent_fd is not None:
            self._loop.add_reader(parent_fd, self._parent_wrote, parent_fd)
        self._guard.start()
        self._device_watch.start()
        self._completion.start()
        self._step_thread.start()

    async def _loop_until_end(self) -> int:
        """Answer control once the worker is there: a Hello that is answered means a daemon that can
        work."""
        await asyncio.wait((self._ready, self._end), return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            return self._end.result()
        self._notifier.notify("READY=1")
        logger.info("serving %s on %s", self._settings.device, self._premises.endpoint)
        serving = {self._spawn(self._control.serve()), self._spawn(self._beat())}
        waits: set[asyncio.Future[None] | asyncio.Future[int]] = {*serving, self._end}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            return self._end.result()
        for task in serving:
            if task.done():
                logger.error("the control loop broke", exc_info=task.exception())
        return ExitCode.INTERNAL

    async def _beat(self) -> None:
        """Take notice of the lease's end and of files that are gone; tell drivers and the
        supervisor that we live."""
        while True:
            self._keep_premises()
            self._attaching.watch_lease()
            self._events.tell_heartbeat()
            if not self._progress.overdue():
                self._notifier.notify("WATCHDOG=1")
            await asyncio.sleep(HEARTBEAT_S)

    def _keep_premises(self) -> None:
        if self._draining.ends:
            return
        try:
            self._premises.keep()
        except ConfigError as error:
            logger.critical("%s", error)
            self.begin_shutdown("its files are not its own any more", ExitCode.IN_USE)

    def _shut_down(self, exit_code: int) -> None:
        """Stop the threads in the order in which they feed each other; leave a stuck one to the end
        of the process."""
        for task in self._tasks:
            task.cancel()
        deadline = time.monotonic() + STOP_LIMIT_S
        self._device_watch.stop()
        self.post(Stop())
        joined = self._step_thread.join(deadline - time.monotonic())
        self._completion.stop()
        joined &= self._completion.join(max(0.1, deadline - time.monotonic()))
        self._guard.stop()
        joined &= self._guard.join(max(0.1, deadline - time.monotonic()))
        joined &= self._device_watch.join(max(0.3, deadline - time.monotonic()))
        self._control.close()
        self._events.close()
        joined &= self._security.stop(max(0.1, deadline - time.monotonic()))
        left = threading.active_count() > 1  # a link's disposal, say, which waits for dead peers
        if not joined or left or exit_code != 0:
            self._exit_now(exit_code)
        self._sockets.doorbell.close(linger=0)
        self._context.term()

    def _exit_now(self, exit_code: int) -> NoReturn:
        """End without the interpreter's teardown, which would wait for a stuck thread or a lost
        device."""
        logger.info("exit %d", exit_code)
        self._premises.leave()
        logging.shutdown()
        os._exit(exit_code)

    def _finish(self, exit_code: int) -> None:
        if not self._end.done():
            self._end.set_result(exit_code)

    def _spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Signals and the parent's pipe: on the main thread, by the event loop.

    def _signalled(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            self._exit_now(128 + number)
        self.begin_shutdown(signal.Signals(number).name)

    def _reload_keys(self) -> None:
        """Read the authorized keys again. What comes over open connections is judged by them from
        here on; those who only listen to events are made to come in anew."""
        if self._settings.authorized_keys is None:
            logger.info("SIGHUP: this daemon has no authorized keys, so there is nothing to reload")
            return
        if self._security.reload():
            self._events.close()
            self._spawn(self._reopen_events())

    async def _reopen_events(self) -> None:
        bind = partial(events_socket, self._context, self._premises.endpoint, self._security)
        if not await self._events.reopen(bind):
            logger.critical("the events socket cannot be bound again")
            self._finish(ExitCode.INTERNAL)
        self._premises.sockets.are_bound()

    def _parent_wrote(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(fd, 4096):
                return
            self._loop.remove_reader(fd)
            logger.info("the parent is gone")
            self._finish(0)

    # What control asks for.

    def post(self, command: Command) -> None:
        """Hand a command to the step thread; it comes before queued steps. Main thread only."""
        self._step_thread.commands.put(command)
        with contextlib.suppress(zmq.Again):  # a full doorbell has been heard
            self._sockets.doorbell.send(b"", zmq.NOBLOCK)

    def begin_shutdown(self, cause: str, exit_code: ExitCode = ExitCode.OK) -> None:
        """Refuse new steps, let the running one finish, end with exit_code."""
        if self._draining.ends:
            return
        logger.info("draining: %s", cause)
        self._notifier.notify("STOPPING=1")
        self._draining.ends = True
        self._spawn(self._drain(exit_code))

    async def _drain(self, exit_code: ExitCode) -> None:
        if self._ready.done():
            idle = asyncio.Event()
            self.post(StopSteps(lambda: self._to_loop(idle.set)))
            if not await _within(idle, DRAIN_LIMIT_S):
                self._guard.request_abort("the drain time is over")
                await _within(idle, 1.0)
        self._finish(exit_code)

    # What the other threads tell: called there, done on the main thread.

    def worker_ready(self, worker: WorkerLike) -> None:
        """See StepEvents."""
        self._guard.watch(worker.abort_link, worker.dump_link, worker.check_device)
        self._to_loop(lambda: self._ready.set_result(0))

    def state_changed(self, transition: str) -> None:
        """See StepEvents."""
        logger.info("%s", transition)
        self._to_loop(lambda: self._announce(transition))

    def _announce(self, transition: str) -> None:
        self._events.tell_transition(transition)
        self._notifier.notify(f"STATUS={transition}")

    def fatal(self, exit_code: ExitCode, cause: str) -> None:
        """End the process with exit_code; any thread may call this, and the first is heard, but
        that a lost GPU outweighs a lost context."""
        with self._fatal_lock:
            is_first = self._fatal_code is None
            if is_first or exit_code is ExitCode.GPU_LOST:
                self._fatal_code = exit_code
        if not is_first:
            return
        logger.critical("the process ends with %d: %s", exit_code, cause)
        if exit_code in _DEVICE_CODES:
            backstop = threading.Timer(DEVICE_LIMIT_S, lambda: os._exit(self._fatal_code or 0))
            backstop.daemon = True
            backstop.start()
            self._to_loop(lambda: self._end_without_device(exit_code, cause))
        else:
            self._to_loop(lambda: self._finish(exit_code))

    def _end_without_device(self, exit_code: ExitCode, cause: str) -> None:
        """Tell whoever listens, and end: nothing is waited for, since every further call of the
        device's could hang."""
        self.post(DeviceLost(exit_code, cause))
        self._announce(f"{self._progress.snapshot.state} -> FAILED ({cause})")
        self._loop.call_later(LAST_WORDS_S, lambda: self._exit_now(self._fatal_code or exit_code))

    def _gpu_fault(self, fault: Fault) -> None:
        """The GPU's driver reports a fault, perhaps another process's; heard on the watch's thread.
        What is ours alone shows as an error of our own calls."""
        if fault.action.ends_gpu:
            self.fatal(ExitCode.GPU_LOST, str(fault))
        else:
            logger.warning("%s", fault)

    def hung(self, phase: str, phase_ms: int, stacks: str) -> None:
        """See GuardListener."""
        self._to_loop(lambda: self._events.tell_hang(phase, phase_ms, stacks))

    def slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        """See GuardListener."""
        self._to_loop(lambda: self._events.tell_slow(phase, phase_ms, usual_ms))

    def relapsed(self, cause: str) -> None:
        """See GuardListener. A supervisor starts us again; so it does with each rank that waits in
        the same hang."""
        self.fatal(ExitCode.LINK_UNUSABLE, cause)

    def _link_aborted(self, link: int, cause: str) -> None:
        """The guard thread has aborted `link`: whoever waited may come back with any outcome."""
        self._to_loop(lambda: self.post(LinkLost(link, cause)))

    def _result_failed(self, reply: ErrorReply, link: int) -> None:
        """A result failed on the completion thread, after the step thread was done with it."""
        exit_code = fatal_exit_code(reply)
        if exit_code is not None:
            self.fatal(exit_code, reply.message)
        broke = link_failure(reply, link)
        if broke is not None:
            self._to_loop(lambda: self.post(broke))

    def _to_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to hear it
            self._loop.call_soon_threadsafe(callback)


async def _within(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
    return event.is_set()
