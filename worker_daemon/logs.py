"""Logs to stderr: one line per record, with time, process and rank; text from a peer cannot forge
a line. Prompts and tokens are never logged."""

import logging
import sys
from typing import Final

from rpc_schema.plain_text import printable

LEVELS: Final = ("debug", "info", "warning", "error")

_FORMAT: Final = (
    "%(asctime)s.%(msecs)03d %(levelname)-7s [%(process)d rank {rank}] %(name)s: %(message)s"
)


def configure_logs(level: str) -> None:
    """Send all records of `level` (one of LEVELS) and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter("-"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def set_rank(rank: int) -> None:
    """Show the global rank in every line from now on. Called once a driver has set it."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_formatter(str(rank)))


class _Lines(logging.Formatter):
    """Escapes unprintable characters, and indents the traceback after the line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """Return the record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # likewise
        """Return a traceback."""
        return "\n".join(
            f"    {printable(line)}" for line in super().formatException(ei).split("\n")
        )


def _formatter(rank: str) -> logging.Formatter:
    return _Lines(_FORMAT.format(rank=rank), "%Y-%m-%dT%H:%M:%S")
