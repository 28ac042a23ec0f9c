"""Logs of the daemon: to stderr, as lines with time, process and rank or as JSON, or to systemd's
journal. Prompts and tokens are never logged."""

import logging
import os
import sys
from typing import Final

from worker_daemon.errors import config_error
from worker_host.log_lines import JournalHandler, JsonLines, TextLines, set_shown_rank

LEVELS: Final = ("debug", "info", "warning", "error")

_FORMAT: Final = (
    "%(asctime)s.%(msecs)03d %(levelname)-7s [%(process)d rank %(rank)s] %(name)s: %(message)s"
)
_IDENTIFIER: Final = "worker-daemon"


def configure_logs(level: str, journal_stream: str = "", log_format: str = "text") -> None:
    """Send all records of `level` (one of LEVELS) and above out in a format of LOG_FORMATS.
    journal_stream: the value of JOURNAL_STREAM, by which systemd says which file is its journal;
    lines of text have priorities if stderr is that file.

    Raises:
        ConfigError: the format is journald, and there is no journal.
    """
    handler = _handler(journal_stream, log_format)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def set_rank(rank: int) -> None:
    """Show the global rank in every record from now on. Called once a driver has set it."""
    set_shown_rank(rank)


def _handler(journal_stream: str, log_format: str) -> logging.Handler:
    if log_format == "journald":
        try:
            return JournalHandler(_IDENTIFIER)
        except OSError as error:
            problem = f"the journal cannot be reached: {error.strerror}"
            fix = "use text or json where systemd does not run"
            raise config_error("log-format", log_format, problem, fix) from None
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(TextLines(_FORMAT, has_priorities=_is_stderr(journal_stream)))
    return handler


def _is_stderr(journal_stream: str) -> bool:
    """Return True if stderr is the file DEVICE:INODE."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or not a file
        return False
    return journal_stream == f"{status.st_dev}:{status.st_ino}"
