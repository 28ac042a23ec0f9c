"""What is written down about a hang: the stacks of all threads, and what the communicators last
did. Owns the file of stacks; knows neither who hangs nor what becomes of it."""

import faulthandler
import logging
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO

from worker_daemon.directories import open_own_file, replace_own_file, unusable

MAX_STACKS_BYTES: Final = 1 << 20
"""A file that has grown beyond this begins anew."""

logger = logging.getLogger(__name__)


class HangReports:
    """Where the evidence of a hang goes. Used by the guard thread, made and closed by the daemon.

    The file of stacks is there from the start, because what writes it when the interpreter's lock
    is held can open none; close() removes it if nothing was written.
    """

    def __init__(self, path: Path) -> None:
        """path: of the stacks; what communicators did goes beside it, as NAME.flight.json.

        Raises:
            ConfigError: the file cannot be made.
            StartLaterError: there is no room for it now.
        """
        self.path = path
        try:
            self._file: TextIO = _open(path)
        except OSError as error:
            message = f"stacks cannot be written there: {error.strerror}"
            raise unusable(error, message, "state-dir", path.parent) from error

    def report(self, heading: str, dump_link: Callable[[], bytes]) -> str:
        """Write the stacks of all threads under a heading, and what dump_link() says of the
        communicators, if anything; return where. A failure is logged: evidence must not stand in
        the way of the abort."""
        try:
            if os.fstat(self._file.fileno()).st_size > MAX_STACKS_BYTES:
                self._file.truncate(0)
            self._file.write(f"\n{datetime.now().astimezone().isoformat()} {heading}\n")
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
            flight = dump_link()
            if flight:
                replace_own_file(self.path.with_suffix(".flight.json"), flight)
        except Exception:
            logger.exception("the stacks cannot be written to %s", self.path)
            faulthandler.dump_traceback(sys.stderr)
        return str(self.path)

    def arm(self, seconds: float) -> None:
        """Have the stacks written by then, whoever holds the interpreter's lock, unless armed
        again before."""
        if not self._file.closed:  # else the process ends
            faulthandler.dump_traceback_later(seconds, exit=False, file=self._file)

    def disarm(self) -> None:
        """Nothing is to be written any more."""
        faulthandler.cancel_dump_traceback_later()

    def close(self, *, keep: bool = False) -> None:
        """Close the file, and remove it if it is empty; keep: it is another daemon's by now. May be
        repeated."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not keep and self.path.is_file() and not self.path.stat().st_size:
            self.path.unlink()


def _open(path: Path) -> TextIO:
    """Open for appending, 0600."""
    fd = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.fdopen(fd, "a", encoding="utf-8")
