"""Reports of hangs: the stacks of all threads, and the last operations of the communicators. Owns
the file of stacks."""

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
"""A file larger than this is truncated."""
REARM_S: Final = 1.0

logger = logging.getLogger(__name__)


class HangReports:
    """Writes reports of hangs. Used by the guard thread, made and closed by the daemon.

    The file of stacks exists from the start, because the stack dump while the GIL is held cannot
    open one; close() removes it if it is empty.
    """

    def __init__(self, path: Path) -> None:
        """path: the file of stacks; the communicators' operations go next to it, as
        NAME.flight.json.

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
        self._armed_at = self._armed_until = 0.0

    def report(self, heading: str, dump_link: Callable[[], bytes]) -> str:
        """Write the stacks of all threads under a heading, and the bytes of dump_link(), if any;
        return the path. A failure is only logged: it must not prevent the abort."""
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

    def keep_armed(self, limit_s: float, now: float) -> None:
        """Arm a dump of the stacks in limit_s seconds, unless called again before. faulthandler
        dumps without the GIL. now: time.monotonic."""
        if now - self._armed_at < REARM_S and self._armed_until <= now + limit_s:
            return
        self._armed_at, self._armed_until = now, now + limit_s
        if not self._file.closed:  # else the process ends
            faulthandler.dump_traceback_later(limit_s, exit=False, file=self._file)

    def disarm(self) -> None:
        """Cancel the armed stack dump."""
        faulthandler.cancel_dump_traceback_later()

    def close(self, *, keep: bool = False) -> None:
        """Close the file, and remove it if it is empty; keep: do not remove it, because it now
        belongs to another daemon. Idempotent."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not keep and self.path.is_file() and not self.path.stat().st_size:
            self.path.unlink()


def _open(path: Path) -> TextIO:
    """Open for appending, 0600."""
    fd = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.fdopen(fd, "a", encoding="utf-8")
