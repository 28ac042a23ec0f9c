"""The daemon's threads beside the main one, and the doorbell of the step thread."""

import contextlib
import time
from typing import Protocol

import zmq

from rpc_schema.error_replies import ErrorReply
from worker_daemon.device.gpu_faults import Fault
from worker_daemon.server.auth.security import Security
from worker_daemon.server.completion import Completion
from worker_daemon.server.dispatch import MakeWorker
from worker_daemon.server.health.device_watch import DeviceWatch, OpenFaultWatch, OpenGauges
from worker_daemon.server.health.guard import Guard, GuardListener
from worker_daemon.server.health.hang_reports import HangReports
from worker_daemon.server.progress import Progress
from worker_daemon.server.step_thread import Command, StepEvents, StepThread, Stop
from worker_daemon.server.wire.reply_channel import ReplyDelays
from worker_daemon.server.wire.sockets import Sockets
from worker_daemon.worker.uploads import Uploads


class ThreadListener(StepEvents, GuardListener, Protocol):
    """Receives what the threads report, each on the thread that reports it; its methods return at
    once."""

    def link_aborted(self, link: int, cause: str) -> None:
        """Handle a link that the guard thread has aborted."""

    def result_failed(self, reply: ErrorReply, link: int) -> None:
        """Handle a result that failed on the completion thread, after its step had succeeded."""

    def gpu_fault(self, fault: Fault) -> None:
        """Handle a fault that the GPU's driver reports to the watch thread, perhaps of another
        process."""


class DaemonThreads:
    """Started and stopped in the order in which they feed each other. Owned by the daemon; main
    thread only."""

    def __init__(
        self,
        sockets: Sockets,
        progress: Progress,
        listener: ThreadListener,
        *,
        make_worker: MakeWorker,
        security: Security,
        uploads: Uploads,
        hang_reports: HangReports,
        open_watch: OpenFaultWatch,
        open_gauges: OpenGauges,
        delays: ReplyDelays | None = None,
    ) -> None:
        """delays: counts those of replies, for metrics."""
        self.guard = Guard(progress, listener.link_aborted, hang_reports, listener)
        self.completion = Completion(sockets.results, progress, listener.result_failed, delays)
        self.device_watch = DeviceWatch(open_watch, listener.gpu_fault, open_gauges)
        self._step = StepThread(
            step=sockets.step,
            completion=self.completion,
            progress=progress,
            events=listener,
            make_worker=make_worker,
            security=security,
            uploads=uploads,
        )
        self._doorbell: zmq.Socket[bytes] = sockets.doorbell

    def start(self) -> None:
        """Start them all."""
        for part in (self.guard, self.device_watch, self.completion, self._step):
            part.thread.start()

    def post(self, command: Command) -> None:
        """Pass a command to the step thread; it comes before queued steps."""
        self._step.commands.put(command)
        with contextlib.suppress(zmq.Again):  # the doorbell is full: the thread is awake
            self._doorbell.send(b"", zmq.NOBLOCK)

    def stop(self, deadline: float) -> bool:
        """Stop them all; return True if they ended by the deadline, of time.monotonic. Process exit
        ends a stuck thread."""
        self.device_watch.stop()
        self.post(Stop())
        joined = self._step.thread.join_within(deadline - time.monotonic())
        self.completion.stop()
        joined &= self.completion.thread.join_within(time_left(deadline))
        self.guard.stop()
        joined &= self.guard.thread.join_within(time_left(deadline))
        return joined & self.device_watch.thread.join_within(time_left(deadline, 0.3))

    def close(self) -> None:
        """Close the doorbell, after stop()."""
        self._doorbell.close(linger=0)


def time_left(deadline: float, least_s: float = 0.1) -> float:
    """Return the seconds until a time of time.monotonic, `least_s` at least."""
    return max(least_s, deadline - time.monotonic())
