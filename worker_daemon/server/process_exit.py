"""Process exit: the exit code, in order or at once."""

import asyncio
import logging
import os
import threading
from typing import Final, NoReturn

from worker_daemon.server.runtime_files import RuntimeFiles
from worker_host.exit_codes import ExitCode

DEVICE_LIMIT_S: Final = 1.5
"""After the loss of the device the process ends within this time, even if its main thread hangs."""
DEVICE_CODES: Final = (ExitCode.CONTEXT_LOST, ExitCode.GPU_LOST)

logger = logging.getLogger(__name__)


class ProcessExit:
    """Decides the exit code and ends the process. Owned by the main thread; `record_fatal` may be
    called from any."""

    def __init__(self, files: RuntimeFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._code: asyncio.Future[int] | None = None
        self.fatal_code: ExitCode | None = None
        """The first fatal error's code, unless a lost GPU has replaced it."""

    def open(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[int]":
        """Return the future of the exit code; called once, when the event loop runs."""
        self._code = loop.create_future()
        return self._code

    def finish(self, exit_code: int) -> None:
        """Start an orderly shutdown with this code, unless the daemon is already ending."""
        if self._code is not None and not self._code.done():
            self._code.set_result(exit_code)

    def record_fatal(self, exit_code: ExitCode) -> bool:
        """Record a fatal error; return True if it is the first. The first code counts, except that
        a lost GPU replaces a lost context."""
        with self._lock:
            is_first = self.fatal_code is None
            if is_first or exit_code is ExitCode.GPU_LOST:
                self.fatal_code = exit_code
        if is_first and exit_code in DEVICE_CODES:
            backstop = threading.Timer(DEVICE_LIMIT_S, lambda: os._exit(self.fatal_code or 0))
            backstop.daemon = True
            backstop.start()
        return is_first

    def now(self, exit_code: int) -> NoReturn:
        """End the process without the interpreter's teardown, which would wait for a stuck thread
        or a lost device."""
        logger.info("exit %d", exit_code)
        self._files.leave()
        logging.shutdown()
        os._exit(exit_code)
