"""The guard thread: releases a step thread that hangs. Aborts links, reports phases past their
deadline and unusually slow steps, and keeps a stack dump armed in case the interpreter is stuck."""

import logging
import math
import queue
import time
from collections.abc import Callable
from typing import Final, Protocol

from worker_daemon.server.dispatch import WorkerLike
from worker_daemon.server.health.hang_reports import HangReports
from worker_daemon.server.progress import Progress, Stamp, StepTimes
from worker_daemon.server.server_thread import ServerThread

TICK_S: Final = 0.25
LOCK_LIMIT_S: Final = 10.0
"""Limit on holding the GIL, except in phases that announced a longer silence."""
DEVICE_CHECK_S: Final = 5.0
SLOW_FACTOR: Final = 8.0
SLOW_AT_LEAST_S: Final = 1.0
RELAPSE_S: Final = 60.0
"""A link that hangs within this time after the previous link's hang is a relapse."""
_ROUNDING_S: Final = 0.001

logger = logging.getLogger(__name__)


class GuardListener(Protocol):
    """Receives hangs and slow steps, on the guard thread; its methods return at once."""

    def hung(self, phase: str, phase_ms: int, stacks: str) -> None:
        """Report a phase past its deadline; stacks: path of the stack file."""

    def slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        """Report a step that takes much longer than recent steps."""

    def relapsed(self, cause: str) -> None:
        """Report communicators that hang again soon after a relink."""


class Pace:
    """Detects slow steps by comparing with earlier step times; reports each once."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._reported: Stamp | None = None

    def slow_at(self, stamp: Stamp) -> float:
        """Return the time.monotonic from which on this step counts as slow; infinite for an idle
        stamp, for one that was reported, and until a first step has ended."""
        usual_s = self._times.usual_s
        if stamp is self._reported or stamp.idle or not usual_s:
            return math.inf
        return stamp.since + max(SLOW_AT_LEAST_S, SLOW_FACTOR * usual_s)

    def is_slow(self, stamp: Stamp, now: float) -> bool:
        """Return True, once per step, if the step takes much longer than earlier ones."""
        if now < self.slow_at(stamp):
            return False
        self._reported = stamp
        return True


class HangHistory:
    """Detects communicators that hang again after a relink: another relink does not help then, but
    new processes may.

    Used by the guard thread; any thread may call forgive().
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        """The link of the last hang, and its time."""

    def is_relapse(self, link: int, now: float) -> bool:
        """Record that a wait for other ranks hangs on `link` at `now` (seconds of a monotonic
        clock); return True if another link hung shortly before. Several waits on one link count
        as one hang."""
        last, self._last = self._last, (link, now)
        return last is not None and last[0] != link and now - last[1] < RELAPSE_S

    def forgive(self) -> None:
        """Forget the last hang: it has another cause (a peer was lost, or a new driver begins)."""
        self._last = None


class DeviceCheck:
    """Runs the worker's device check at intervals. Used by the guard thread."""

    def __init__(self) -> None:
        self.problem = ""
        """The device's current problem; empty if none. Any thread may read it."""
        self._checked_at = 0.0

    def run(self, check: Callable[[], str], now: float) -> None:
        """Check the device if it is time; log a change."""
        if now - self._checked_at < DEVICE_CHECK_S:
            return
        self._checked_at = now
        try:
            problem = check()
        except Exception as error:
            problem = f"the device's state cannot be read: {error!r}"
        if problem != self.problem:
            logger.warning("the device's current problem: %s", problem or "none")
        self.problem = problem


class Guard:
    """Owns and runs the guard thread. Made and started by the daemon; `request_abort` may be
    called from any thread."""

    def __init__(
        self,
        progress: Progress,
        on_abort: Callable[[int, str], None],
        reports: HangReports,
        listener: GuardListener,
    ) -> None:
        """on_abort(link, cause) is called on the guard thread once the link has been aborted."""
        self._progress = progress
        self._on_abort = on_abort
        self._reports = reports
        self._listener = listener
        self._pace = Pace(progress.step_times)
        self.hangs = HangHistory()
        self.device = DeviceCheck()
        self.num_hangs = 0
        """Phases past their deadline; any thread may read it."""
        self.num_aborts = 0
        """Links that were aborted; any thread may read it."""
        self.last_hang = ""
        """The last phase past its deadline, and its stack file; any thread may read it."""
        self._requests: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        """Links to abort, and the causes; an empty cause only wakes the thread."""
        self._worker: WorkerLike | None = None
        self._running = True
        self._hung_phase: Stamp | None = None
        self._hung_result: Stamp | None = None
        self.thread = ServerThread("guard", self._run)

    def watch(self, worker: WorkerLike) -> None:
        """Watch this worker's link and device; called once, when the worker is ready."""
        self._worker = worker

    def request_abort(self, cause: str) -> None:
        """Request an abort of the current link on the guard thread; does nothing if another link
        has replaced it by then."""
        self._requests.put((self._progress.link, cause))

    def stop(self) -> None:
        """Ask the thread to end."""
        self._running = False
        self._requests.put((0, ""))

    def _run(self) -> None:
        while self._running:
            link, cause = self._next_request()
            if cause and link == self._progress.link:
                self._abort(cause, frees_peers=True)
            now = time.monotonic()
            self._arm(self._progress.stamp, now)
            self._watch_phase(self._progress.stamp, now)
            self._watch_result(self._progress.result, now)
            self._watch_pace(now)
            if self._worker is not None:
                self.device.run(self._worker.check_device, now)
        self._reports.disarm()

    def _next_request(self) -> tuple[int, str]:
        try:
            return self._requests.get(timeout=self._pause_s())
        except queue.Empty:
            return 0, ""

    def _pause_s(self) -> float:
        """Return the time until the next deadline, at most a tick."""
        progress, now = self._progress, time.monotonic()
        slow_at = self._pace.slow_at(self._waited_for())
        due = (progress.stamp.deadline, progress.result.deadline, slow_at)
        return min(TICK_S, *(at - now if at > now else TICK_S for at in due))

    def _abort(self, cause: str, *, frees_peers: bool) -> None:
        logger.warning("aborting the link: %s", cause)
        if self._worker is None:
            return
        link = self._progress.link
        try:
            if self._worker.abort_link(frees_peers=frees_peers):
                self.num_aborts += 1
                self._on_abort(link, cause)
        except Exception:
            logger.exception("the link cannot be aborted")

    def _watch_phase(self, stamp: Stamp, now: float) -> None:
        """Report a phase past its deadline once."""
        if now >= stamp.deadline and stamp is not self._hung_phase:
            self._hung_phase = stamp
            self._report_hang(stamp, now, f"{stamp.phase} has been silent")
            if stamp.on_link:
                self._end_hang(stamp, now)

    def _watch_result(self, stamp: Stamp, now: float) -> None:
        """Release the completion thread, once, from a result that hangs on the device."""
        if now >= stamp.deadline and stamp is not self._hung_result:
            self._hung_result = stamp
            self._report_hang(stamp, now, f"{stamp.phase} has not come")
            self._end_hang(stamp, now)

    def _end_hang(self, stamp: Stamp, now: float) -> None:
        """Abort the link that a phase hangs on; report a relapse. Peers that hang in the same step
        are left to their own guards: a freed one would report a lost connection instead, and forget
        that it hung."""
        link = self._progress.link
        self._abort(f"{stamp.phase} is past its deadline", frees_peers=False)
        if self.hangs.is_relapse(link, now):
            self._listener.relapsed(
                f"{stamp.phase} hangs on link {link}, less than {RELAPSE_S:.0f} s after the link "
                "before it did"
            )

    def _report_hang(self, stamp: Stamp, now: float, what: str) -> None:
        self.num_hangs += 1
        heading = f"{what} for {stamp.age_ms(now)} ms: hung"
        stacks = self._reports.report(heading, self._worker.dump_link if self._worker else bytes)
        logger.error("%s; stacks: %s", heading, stacks)
        self.last_hang = f"{stamp.phase} was past its deadline; stacks: {stacks}"
        self._listener.hung(stamp.phase, stamp.age_ms(now), stacks)

    def _watch_pace(self, now: float) -> None:
        """Report a step or result that takes much longer than earlier ones."""
        if self._has_announced(self._progress.stamp):  # such as a load
            return
        waited_for = self._waited_for()
        if self._pace.is_slow(waited_for, now):
            usual_ms = int(self._progress.step_times.usual_s * 1000)
            self._listener.slow(waited_for.phase, waited_for.age_ms(now), usual_ms)

    def _waited_for(self) -> Stamp:
        """Return the phase of the step thread or, if that is idle, the awaited result."""
        stamp = self._progress.stamp
        return self._progress.result if stamp.idle else stamp

    def _arm(self, stamp: Stamp, now: float) -> None:
        """Arm the stack dump for a stuck interpreter: it fires unless this thread runs first."""
        announced_s = stamp.deadline - now if self._has_announced(stamp) else 0.0
        self._reports.keep_armed(max(LOCK_LIMIT_S, announced_s), now)

    def _has_announced(self, stamp: Stamp) -> bool:
        """Return True if the phase may be silent for longer than a step."""
        step_s = self._progress.step_deadline_s + _ROUNDING_S
        return step_s < stamp.deadline - stamp.since < math.inf
