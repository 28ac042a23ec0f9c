"""Logs to stderr: one line per record, with time, process and rank; text from a peer cannot forge
a line. The journal of systemd gets each line's priority. Prompts and tokens are never logged."""

import logging
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from worker_host.plain_text import printable

LEVELS: Final = ("debug", "info", "warning", "error")

_FORMAT: Final = (
    "%(asctime)s.%(msecs)03d %(levelname)-7s [%(process)d rank {rank}] %(name)s: %(message)s"
)


_PRIORITIES: Final[Mapping[int, str]] = MappingProxyType(
    {
        logging.DEBUG: "<7>",
        logging.INFO: "<6>",
        logging.WARNING: "<4>",
        logging.ERROR: "<3>",
        logging.CRITICAL: "<2>",
    }
)
"""Prefixes of lines by level, as sd-daemon(3) defines them."""


def configure_logs(level: str, journal_stream: str = "") -> None:
    """Send all records of `level` (one of LEVELS) and above to stderr. journal_stream: the value of
    JOURNAL_STREAM, by which systemd says which file is its journal; lines have priorities if stderr
    is that file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter("-", has_priorities=_is_stderr(journal_stream)))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def set_rank(rank: int) -> None:
    """Show the global rank in every line from now on. Called once a driver has set it."""
    for handler in logging.getLogger().handlers:
        shown = handler.formatter
        has_priorities = isinstance(shown, _Lines) and shown.has_priorities
        handler.setFormatter(_formatter(str(rank), has_priorities=has_priorities))


def _is_stderr(journal_stream: str) -> bool:
    """Return True if stderr is the file DEVICE:INODE."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or not a file
        return False
    return journal_stream == f"{status.st_dev}:{status.st_ino}"


class _Lines(logging.Formatter):
    """Escapes unprintable characters, and indents the traceback after the line."""

    def __init__(self, form: str, times: str, *, has_priorities: bool) -> None:
        super().__init__(form, times)
        self.has_priorities = has_priorities

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, and those of its traceback, each with the priority."""
        text = super().format(record)
        if not self.has_priorities:
            return text
        prefix = _PRIORITIES.get(record.levelno, "")
        return "\n".join(prefix + line for line in text.split("\n"))

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """Return the record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # likewise
        """Return a traceback."""
        return "\n".join(
            f"    {printable(line)}" for line in super().formatException(ei).split("\n")
        )


def _formatter(rank: str, *, has_priorities: bool = False) -> logging.Formatter:
    form = _FORMAT.format(rank=rank)
    return _Lines(form, "%Y-%m-%dT%H:%M:%S", has_priorities=has_priorities)
