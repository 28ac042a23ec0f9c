"""The daemon as a process: start, loop, shutdown. Connects the threads and determines the exit
code."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

import uvloop
import zmq

from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ConfigError
from worker_daemon.device.gpu_faults import Fault
from worker_daemon.errors import config_error
from worker_daemon.interfaces import interface_address
from worker_daemon.server.auth.security import open_security
from worker_daemon.server.dispatch import MakeWorker, OpenRendezvousServer, WorkerLike
from worker_daemon.server.driver_side import DriverSide
from worker_daemon.server.health.device_watch import OpenFaultWatch, OpenGauges
from worker_daemon.server.health.systemd import ServiceManager
from worker_daemon.server.metrics.counted_times import CountedTimes
from worker_daemon.server.metrics.http_server import MetricsServer, MetricsText
from worker_daemon.server.metrics.startup import StartPhase, StartupTimes
from worker_daemon.server.process_exit import DEVICE_CODES, ProcessExit
from worker_daemon.server.progress import Progress
from worker_daemon.server.runtime_files import FindGpu, RuntimeFiles, raise_file_limit
from worker_daemon.server.session.status import StatusReport
from worker_daemon.server.step_thread import (
    DeviceLost,
    LinkLost,
    StopSteps,
    fatal_exit_code,
    link_failure,
)
from worker_daemon.server.stop_signals import OneShotHandler, StopSignals
from worker_daemon.server.threads import DaemonThreads, time_left
from worker_daemon.server.wire.sockets import bind_sockets, events_socket
from worker_daemon.settings import ONE_HOST, ProcessSettings
from worker_daemon.worker.description import MoveEnd
from worker_daemon.worker.uploads import Uploads
from worker_host.exit_codes import ExitCode

HEARTBEAT_S: Final = 0.25
DRAIN_LIMIT_S: Final = 10.0
STOP_LIMIT_S: Final = 0.8
"""Limit of an orderly shutdown after the drain; a thread that is stuck for longer ends with the
process."""
LAST_WORDS_S: Final = 0.3
"""Time from the loss of the device to process exit, for the failure to reach the driver and for
NVML to report more."""

logger = logging.getLogger(__name__)


def serve(
    settings: ProcessSettings,
    make_worker: MakeWorker,
    open_rendezvous: OpenRendezvousServer,
    open_watch: OpenFaultWatch,
    open_gauges: OpenGauges,
    find_gpu: FindGpu,
) -> int:
    """Run a daemon on the main thread until it ends; return the exit code.

    Raises:
        GpuInUseError: another daemon has the GPU.
        ConfigError: the endpoint, the state directory or the parent's pipe cannot be used, or too
            few files may be open.
        EndpointInUseError: another daemon has the endpoint.
        StartLaterError: the host has no room for the daemon's files now.
    """
    OneShotHandler(signal.SIGINT).install()  # it raises KeyboardInterrupt
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # keep a reference for its handler
    _check_parent_fd(settings.exit_with_parent_fd)
    raise_file_limit()
    files = RuntimeFiles(settings, find_gpu)
    try:
        daemon = Daemon(settings, files, make_worker, open_rendezvous, open_watch, open_gauges)
        return uvloop.run(daemon.run())
    finally:
        files.leave()


def _check_parent_fd(fd: int | None) -> None:
    try:
        if fd is not None:
            os.fstat(fd)
    except OSError as error:
        problem = f"it is not an open file descriptor: {error.strerror}"
        fix = "pass the read end of a pipe to the daemon's process"
        raise config_error("exit-with-parent-fd", fd, problem, fix) from None


class Daemon:
    """One process's threads and sockets. `run` is start, loop and shutdown, in this order."""

    def __init__(
        self,
        settings: ProcessSettings,
        files: RuntimeFiles,
        make_worker: MakeWorker,
        open_rendezvous: OpenRendezvousServer,
        open_watch: OpenFaultWatch,
        open_gauges: OpenGauges,
    ) -> None:
        self._settings = settings
        self._files = files
        self._exit = ProcessExit(files)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        data_host = interface_address(settings.data_interface or ONE_HOST)
        self._security = open_security(self._context, settings)
        sockets = bind_sockets(self._context, files.endpoint, self._security)
        files.sockets.are_bound()
        counted = CountedTimes() if files.metrics is not None else None
        self._progress = Progress(settings.device, None if counted is None else counted.steps)
        uploads = Uploads(settings.upload_memory_bytes)
        self._threads = DaemonThreads(
            sockets,
            self._progress,
            self,
            make_worker=make_worker,
            security=self._security,
            uploads=uploads,
            hang_reports=files.hang_reports,
            open_watch=open_watch,
            open_gauges=open_gauges,
            delays=None if counted is None else counted.delays,
        )
        self._drivers = DriverSide(
            files,
            sockets,
            self._threads,
            self._progress,
            self._security,
            uploads,
            open_rendezvous=open_rendezvous,
            data_host=data_host,
            begin_shutdown=self.begin_shutdown,
        )
        self._startup = StartupTimes()
        self._metrics: MetricsServer | None = None
        if files.metrics is not None and counted is not None:
            report = self._drivers.report
            metrics = _metrics_text(report, counted, self._startup)
            self._metrics = MetricsServer(
                files.metrics, report, metrics, lambda: self._ready.done()
            )
        self._service_manager = ServiceManager(settings.notify_socket)
        self._stop_signals = StopSignals(
            self.begin_shutdown, lambda number: self._exit.now(128 + number)
        )
        self._tasks: set[asyncio.Future[None]] = set()

    async def run(self) -> int:
        """Serve until the end; return the exit code."""
        self._start()
        exit_code = await self._loop_until_end()
        self._shut_down(exit_code)
        self._stop_signals.close()
        return exit_code

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[int] = self._loop.create_future()
        self._end = self._exit.open(self._loop)
        self._stop_signals.open(self._loop)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
        parent_fd = self._settings.exit_with_parent_fd
        if parent_fd is not None:
            self._loop.add_reader(parent_fd, self._parent_wrote, parent_fd)
        self._security.report_ends(self._loop, self._drivers.contact.connection_ended)
        self._startup.reached(StartPhase.BOUND)
        if self._metrics is not None:
            self._spawn(self._metrics.serve())
        self._threads.start()

    async def _loop_until_end(self) -> int:
        """Answer control requests once the worker is ready: to a driver, an answered Hello means a
        working daemon."""
        await asyncio.wait((self._ready, self._end), return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            return self._end.result()
        self._service_manager.notify("READY=1")
        logger.info("serving %s on %s", self._settings.device, self._files.endpoint)
        serving = {self._spawn(self._drivers.control.serve()), self._spawn(self._beat())}
        waits: set[asyncio.Future[None] | asyncio.Future[int]] = {*serving, self._end}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            return self._end.result()
        for task in serving:
            if task.done():
                logger.error("the control loop broke", exc_info=task.exception())
        return ExitCode.INTERNAL

    async def _beat(self) -> None:
        """Watch the lease and the runtime files; send heartbeats to drivers and the service
        manager."""
        while True:
            self._keep_files()
            self._drivers.beat()
            if not self._progress.overdue():
                self._service_manager.notify("WATCHDOG=1")
            await asyncio.sleep(HEARTBEAT_S)

    def _keep_files(self) -> None:
        if self._drivers.draining.ends:
            return
        try:
            self._files.keep()
        except ConfigError as error:
            logger.critical("%s", error)
            self.begin_shutdown("its files belong to another process now", ExitCode.IN_USE)

    def _shut_down(self, exit_code: int) -> None:
        """Stop the threads and close the sockets; end the process at once if a thread is stuck."""
        for task in self._tasks:
            task.cancel()
        deadline = time.monotonic() + STOP_LIMIT_S
        joined = self._threads.stop(deadline)
        if self._metrics is not None:
            self._metrics.close()
        self._drivers.close()
        joined &= self._security.stop(time_left(deadline))
        left = threading.active_count() > 1  # such as a link's disposal, which waits for dead peers
        if not joined or left or exit_code != 0:
            self._exit.now(exit_code)
        self._threads.close()
        self._context.term()

    def _spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reload_keys(self) -> None:
        """Read the authorized keys again. Messages on open connections are checked against them
        from now on; subscribers of events are disconnected, so that they authenticate again."""
        if self._settings.authorized_keys is None:
            logger.info("SIGHUP: this daemon has no authorized keys, so there is nothing to reload")
            return
        if self._security.reload():
            self._drivers.events.close()
            self._spawn(self._reopen_events())

    async def _reopen_events(self) -> None:
        bind = partial(events_socket, self._context, self._files.endpoint, self._security)
        if not await self._drivers.events.reopen(bind):
            logger.critical("the events socket cannot be bound again")
            self._exit.finish(ExitCode.INTERNAL)
        self._files.sockets.are_bound()

    def _parent_wrote(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(fd, 4096):
                return
            self._loop.remove_reader(fd)
            logger.info("the parent process has ended")
            self._exit.finish(0)

    def begin_shutdown(self, cause: str, exit_code: ExitCode = ExitCode.OK) -> None:
        """Refuse new steps, let the running one finish, end with exit_code."""
        if self._drivers.draining.ends:
            return
        logger.info("draining: %s", cause)
        self._service_manager.notify("STOPPING=1")
        self._drivers.draining.ends = True
        self._spawn(self._drain(exit_code))

    async def _drain(self, exit_code: ExitCode) -> None:
        if self._ready.done():
            idle = asyncio.Event()
            self._threads.post(StopSteps(lambda: self._to_loop(idle.set)))
            if not await _within(idle, DRAIN_LIMIT_S):
                self._threads.guard.request_abort("the drain time is over")
                await _within(idle, 1.0)
        self._exit.finish(exit_code)

    # Called on other threads; the work is done on the main thread.

    def worker_ready(self, worker: WorkerLike) -> None:
        """See StepEvents."""
        self._startup.reached(StartPhase.WORKER)
        self._threads.guard.watch(worker)
        worker.listen_to_moves(self.move_ended)
        self._to_loop(lambda: self._ready.set_result(0))

    def state_changed(self, transition: str) -> None:
        """See StepEvents."""
        logger.info("%s", transition)
        self._to_loop(lambda: self._announce(transition))

    def _announce(self, transition: str) -> None:
        self._drivers.events.publish_transition(transition)
        self._service_manager.notify(f"STATUS={transition}")

    def fatal(self, exit_code: ExitCode, cause: str) -> None:
        """End the process with exit_code. Any thread may call this; the first call counts, except
        that a lost GPU replaces a lost context."""
        if not self._exit.record_fatal(exit_code):
            return
        logger.critical("the process ends with %d: %s", exit_code, cause)
        if exit_code in DEVICE_CODES:
            self._to_loop(lambda: self._end_without_device(exit_code, cause))
        else:
            self._to_loop(lambda: self._exit.finish(exit_code))

    def _end_without_device(self, exit_code: ExitCode, cause: str) -> None:
        """Announce the failure, and end without waiting: every further call to the device could
        hang."""
        self._threads.post(DeviceLost(exit_code, cause))
        self._announce(f"{self._progress.snapshot.state} -> FAILED ({cause})")
        self._loop.call_later(
            LAST_WORDS_S, lambda: self._exit.now(self._exit.fatal_code or exit_code)
        )

    def gpu_fault(self, fault: Fault) -> None:
        """See ThreadListener. A fault of this process also fails its own calls."""
        if fault.action.ends_gpu:
            self.fatal(ExitCode.GPU_LOST, str(fault))
        else:
            logger.warning("%s", fault)

    def hung(self, phase: str, phase_ms: int, stacks: str) -> None:
        """See GuardListener."""
        self._to_loop(lambda: self._drivers.events.publish_hang(phase, phase_ms, stacks))

    def slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        """See GuardListener."""
        self._to_loop(lambda: self._drivers.events.publish_slow(phase, phase_ms, usual_ms))

    def move_ended(self, end: MoveEnd) -> None:
        """See WorkerLike.listen_to_moves."""
        if end.fault:
            logger.warning("layer %d keeps its experts where they are: %s", end.layer, end.fault)
        self._to_loop(lambda: self._drivers.events.publish_move_end(end))

    def relapsed(self, cause: str) -> None:
        """See GuardListener. The service manager restarts this daemon and every rank in the same
        hang."""
        self.fatal(ExitCode.LINK_UNUSABLE, cause)

    def link_aborted(self, link: int, cause: str) -> None:
        """See ThreadListener."""
        self._to_loop(lambda: self._threads.post(LinkLost(link, cause)))

    def result_failed(self, reply: ErrorReply, link: int) -> None:
        """See ThreadListener."""
        exit_code = fatal_exit_code(reply)
        if exit_code is not None:
            self.fatal(exit_code, reply.message)
        broke = link_failure(reply, link)
        if broke is not None:
            self._to_loop(lambda: self._threads.post(broke))

    def _to_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)


def _metrics_text(
    report: StatusReport, counted: CountedTimes, startup: StartupTimes
) -> MetricsText:
    # Imported late: prometheus-client, which only a daemon with --metrics-listen needs.
    from worker_daemon.server.metrics.rendered import rendered_metrics

    return rendered_metrics(report, counted, startup.seconds)


async def _within(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
    return event.is_set()
