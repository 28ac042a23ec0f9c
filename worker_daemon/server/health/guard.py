"""The guard thread: frees a step thread that cannot free itself. Executes aborts of the link,
notices phases past their deadline and steps that are far slower than others, and keeps a stack dump
armed for the case that the interpreter itself is stuck."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from worker_daemon.server.health.hang_reports import HangReports
from worker_daemon.server.progress import Progress, Stamp, StepTimes

TICK_S: Final = 0.25
LOCK_LIMIT_S: Final = 10.0
"""So long the interpreter's lock may be held, apart from phases that have announced silence."""
REARM_S: Final = 1.0
DEVICE_CHECK_S: Final = 5.0
SLOW_FACTOR: Final = 8.0
SLOW_AT_LEAST_S: Final = 1.0
RELAPSE_S: Final = 60.0
"""A link that hangs so soon after the one before it is a relapse."""
_ROUNDING_S: Final = 0.001

logger = logging.getLogger(__name__)


class GuardListener(Protocol):
    """Hears of hangs and slow steps, on the guard thread; returns at once."""

    def hung(self, phase: str, phase_ms: int, stacks: str) -> None:
        """A phase is past its deadline; stacks: where the evidence is."""

    def slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        """A step takes far longer than steps did of late."""

    def relapsed(self, cause: str) -> None:
        """Communicators hang again, soon after they were made anew."""


class Pace:
    """Judges a step by the times of those before it, and tells of each once."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._reported: Stamp | None = None

    def slow_at(self, stamp: Stamp) -> float:
        """When this step will have taken far longer than the others did, by the monotonic clock;
        never for what is idle or has been told of, and as long as no step has ended."""
        usual_s = self._times.usual_s
        if stamp is self._reported or stamp.idle or not usual_s:
            return math.inf
        return stamp.since + max(SLOW_AT_LEAST_S, SLOW_FACTOR * usual_s)

    def is_slow(self, stamp: Stamp, now: float) -> bool:
        """Whether this step takes far longer than the others did; told once a step."""
        if now < self.slow_at(stamp):
            return False
        self._reported = stamp
        return True


class HangHistory:
    """Tells whether communicators that were made anew hang again: then making them anew once more
    does not help, but new processes may.

    Used by the guard thread; any thread may call forgive().
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        """The link that hung last, and when."""

    def is_relapse(self, link: int, now: float) -> bool:
        """Take in that something that waits for other ranks hangs on `link` (now: seconds that only
        rise); tell whether another link did shortly before. Several waits of one link count as
        one."""
        last, self._last = self._last, (link, now)
        return last is not None and last[0] != link and now - last[1] < RELAPSE_S

    def forgive(self) -> None:
        """There is another explanation: a peer was lost, or a new driver begins."""
        self._last = None


def _no_record() -> bytes:
    return b""


class Guard:
    """Made and started by the daemon; `request_abort` may be called from any thread."""

    def __init__(
        self,
        progress: Progress,
        on_abort: Callable[[int, str], None],
        reports: HangReports,
        listener: GuardListener,
    ) -> None:
        """on_abort(link, cause) hears, on the guard thread, that this link has been aborted."""
        self._progress = progress
        self._on_abort = on_abort
        self._reports = reports
        self._listener = listener
        self._pace = Pace(progress.step_times)
        self._hangs = HangHistory()
        self._dump_link: Callable[[], bytes] = _no_record
        self._check_device: Callable[[], str] = str
        self._device_checked_at = 0.0
        self.degraded = ""
        """What is amiss with the device, though it may compute; any thread may read it."""
        self.last_hang = ""
        """What was past its deadline last, and the evidence; any thread may read it."""
        self._requests: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        """Links to abort and why; an empty cause only wakes the thread."""
        self._abort_link: Callable[[], bool] | None = None
        self._running = True
        self._armed_at = self._armed_until = 0.0
        self._hung_phase: Stamp | None = None
        self._hung_result: Stamp | None = None
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def watch(
        self,
        abort_link: Callable[[], bool],
        dump_link: Callable[[], bytes] = _no_record,
        check_device: Callable[[], str] = str,
    ) -> None:
        """Say how a link is aborted (True: there was one), how to learn what its communicators did
        last, and what is amiss with the device (empty: nothing); called once, when the worker is
        there."""
        self._abort_link = abort_link
        self._dump_link = dump_link
        self._check_device = check_device

    def request_abort(self, cause: str) -> None:
        """Have the link of this moment aborted soon, on the guard thread; nothing is, if by then
        another has taken its place."""
        self._requests.put((self._progress.link, cause))

    def forgive_hangs(self) -> None:
        """Hangs so far were a lost peer's doing, or a former driver's; any thread may say so."""
        self._hangs.forgive()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._running = False
        self._requests.put((0, ""))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; tell whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._running:
            link, cause = self._next_request()
            if cause and link == self._progress.link:
                self._abort(cause)
            now = time.monotonic()
            self._arm(self._progress.stamp, now)
            self._watch_phase(self._progress.stamp, now)
            self._watch_result(self._progress.result, now)
            self._watch_pace(now)
            self._watch_device(now)
        self._reports.disarm()

    def _next_request(self) -> tuple[int, str]:
        try:
            return self._requests.get(timeout=self._pause_s())
        except queue.Empty:
            return 0, ""

    def _pause_s(self) -> float:
        """For how long there is nothing to look at; less than a tick where something falls due."""
        progress, now = self._progress, time.monotonic()
        slow_at = self._pace.slow_at(self._waited_for())
        due = (progress.stamp.deadline, progress.result.deadline, slow_at)
        return min(TICK_S, *(at - now if at > now else TICK_S for at in due))

    def _abort(self, cause: str) -> None:
        logger.warning("aborting the link: %s", cause)
        if self._abort_link is None:
            return
        link = self._progress.link
        try:
            if self._abort_link():
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
        """Free the completion thread from a result that hangs on the device, once."""
        if now >= stamp.deadline and stamp is not self._hung_result:
            self._hung_result = stamp
            self._report_hang(stamp, now, f"{stamp.phase} has not come")
            self._end_hang(stamp, now)

    def _end_hang(self, stamp: Stamp, now: float) -> None:
        """Abort the link that a phase hangs on; tell if that did not help the last time."""
        link = self._progress.link
        self._abort(f"{stamp.phase} is past its deadline")
        if self._hangs.is_relapse(link, now):
            self._listener.relapsed(
                f"{stamp.phase} hangs on link {link}, less than {RELAPSE_S:.0f} s after the link "
                "before it did"
            )

    def _report_hang(self, stamp: Stamp, now: float, what: str) -> None:
        heading = f"{what} for {stamp.age_ms(now)} ms: hung"
        stacks = self._reports.report(heading, self._dump_link)
        logger.error("%s; stacks: %s", heading, stacks)
        self.last_hang = f"{stamp.phase} was past its deadline; stacks: {stacks}"
        self._listener.hung(stamp.phase, stamp.age_ms(now), stacks)

    def _watch_pace(self, now: float) -> None:
        """Tell of a step, or of its result, that takes far longer than others did."""
        if self._has_announced(self._progress.stamp):  # a load, say
            return
        waited_for = self._waited_for()
        if self._pace.is_slow(waited_for, now):
            usual_ms = int(self._progress.step_times.usual_s * 1000)
            self._listener.slow(waited_for.phase, waited_for.age_ms(now), usual_ms)

    def _waited_for(self) -> Stamp:
        """What the step thread is at or, where that is idle, the result that has not come."""
        stamp = self._progress.stamp
        return self._progress.result if stamp.idle else stamp

    def _watch_device(self, now: float) -> None:
        """Look after the device itself now and then; a change goes to the log."""
        if now - self._device_checked_at < DEVICE_CHECK_S:
            return
        self._device_checked_at = now
        try:
            degraded = self._check_device()
        except Exception as error:
            degraded = f"the device's state cannot be asked for: {error!r}"
        if degraded != self.degraded:
            logger.warning("degraded: %s", degraded or "no longer")
        self.degraded = degraded

    def _arm(self, stamp: Stamp, now: float) -> None:
        """Let the C level dump the stacks should this thread not come by any more: it fires without
        the interpreter's lock."""
        announced_s = stamp.deadline - now if self._has_announced(stamp) else 0.0
        limit_s = max(LOCK_LIMIT_S, announced_s)
        if now - self._armed_at < REARM_S and self._armed_until <= now + limit_s:
            return
        self._armed_at, self._armed_until = now, now + limit_s
        self._reports.arm(limit_s)

    def _has_announced(self, stamp: Stamp) -> bool:
        """Whether a phase may be silent for longer than a step may."""
        step_s = self._progress.step_deadline_s + _ROUNDING_S
        return step_s < stamp.deadline - stamp.since < math.inf
