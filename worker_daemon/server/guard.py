"""The guard thread: frees a step thread that cannot free itself. Executes aborts of the link,
notices phases past their deadline, and keeps a stack dump armed for the case that the interpreter
itself is stuck."""

import faulthandler
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from worker_daemon.server.progress import Progress, Stamp

TICK_S: Final = 0.25

logger = logging.getLogger(__name__)


class Guard:
    """Made and started by the daemon; `request_abort` may be called from any thread."""

    def __init__(self, progress: Progress, on_abort: Callable[[int, str], None]) -> None:
        """on_abort(link, cause) hears, on the guard thread, that this link has been aborted."""
        self._progress = progress
        self._on_abort = on_abort
        self._requests: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        """Links to abort and why; an empty cause only wakes the thread."""
        self._abort_link: Callable[[], bool] | None = None
        self._running = True
        self._armed: Stamp | None = None
        self._hung_phase: Stamp | None = None
        self._hung_result: Stamp | None = None
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def watch(self, abort_link: Callable[[], bool]) -> None:
        """Say how a link is aborted (True: there was one); called once, when the worker is
        there."""
        self._abort_link = abort_link

    def request_abort(self, cause: str) -> None:
        """Have the link of this moment aborted soon, on the guard thread; nothing is, if by then
        another has taken its place."""
        self._requests.put((self._progress.link, cause))

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
            self._watch_phase(self._progress.stamp, time.monotonic())
            self._watch_result(self._progress.result, time.monotonic())
        faulthandler.cancel_dump_traceback_later()

    def _next_request(self) -> tuple[int, str]:
        try:
            return self._requests.get(timeout=TICK_S)
        except queue.Empty:
            return 0, ""

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
        """Report a phase past its deadline once; keep the dump of all stacks armed while a phase
        runs."""
        if stamp.idle or stamp.deadline == float("inf"):
            self._disarm()
        elif now < stamp.deadline:
            self._arm(stamp, now)
        elif stamp is not self._hung_phase:
            self._hung_phase = stamp
            self._disarm()
            logger.error("%s has been silent for %d ms: hung", stamp.phase, stamp.age_ms(now))
            faulthandler.dump_traceback(sys.stderr)
            if stamp.on_link:
                self._abort(f"{stamp.phase} is past its deadline")

    def _watch_result(self, stamp: Stamp, now: float) -> None:
        """Free the completion thread from a result that hangs on the device, once."""
        if now >= stamp.deadline and stamp is not self._hung_result:
            self._hung_result = stamp
            logger.error("%s has not come for %d ms: hung", stamp.phase, stamp.age_ms(now))
            faulthandler.dump_traceback(sys.stderr)
            self._abort(f"{stamp.phase} is past its deadline")

    def _arm(self, stamp: Stamp, now: float) -> None:
        """Let the C level dump the stacks should this thread not come by any more: it fires without
        the interpreter's lock."""
        if stamp is not self._armed:
            self._armed = stamp
            faulthandler.dump_traceback_later(stamp.deadline - now + 2 * TICK_S, exit=False)

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed = None
            faulthandler.cancel_dump_traceback_later()
