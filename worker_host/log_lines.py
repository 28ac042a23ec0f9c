"""Forms of log records: lines of text, JSON objects, and entries of systemd's journal. Text from a
peer cannot forge a line, and each record has the name of its event. Prompts, tokens and keys are
never logged."""

import json
import logging
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from worker_host.plain_text import printable

LOG_FORMATS: Final = ("text", "json", "journald")
JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
NO_RANK: Final = "-"
MAX_ENTRY_BYTES: Final = 64 << 10
"""Longer fields of the journal are cut, so that an entry fits into a datagram."""
MAX_EVENT_WORDS: Final = 8

_PRIORITIES: Final[Mapping[int, int]] = MappingProxyType(
    {
        logging.DEBUG: 7,
        logging.INFO: 6,
        logging.WARNING: 4,
        logging.ERROR: 3,
        logging.CRITICAL: 2,
    }
)
"""Priorities by level, as sd-daemon(3) and syslog(3) define them."""
_CONVERSION: Final = re.compile(r"%(?:\(\w+\))?[-#0 +]*[\d*]*(?:\.[\d*]+)?[a-zA-Z%]")
_WORD: Final = re.compile(r"[a-z][a-z0-9-]*")
_LEFT_OUT: Final = frozenset(("a", "an", "are", "is", "of", "that", "the", "was", "were"))
"""Words that names of events do without."""


def event_of(record: logging.LogRecord) -> str:
    """Return the name of a record's event: the first words of its message, without values. A
    message of values alone is named by its function. Call sites can choose: extra={"event": ...}.
    """
    chosen = getattr(record, "event", None)
    if isinstance(chosen, str):
        return chosen
    found = _WORD.findall(_CONVERSION.sub(" ", str(record.msg)).lower())
    words = [word for word in found if word not in _LEFT_OUT]
    name = "_".join(words[:MAX_EVENT_WORDS]).replace("-", "_")
    return name or record.funcName.strip("_")


class TextLines(logging.Formatter):
    """One line per record; unprintable characters are escaped, and a traceback is indented behind
    its line. has_priorities: begin each line with its priority, for systemd's journal."""

    def __init__(self, form: str, *, has_priorities: bool = False) -> None:
        """form: of a line, as logging.Formatter has it; %(rank)s is the rank."""
        super().__init__(form, "%Y-%m-%dT%H:%M:%S")
        self.has_priorities = has_priorities
        self.rank = NO_RANK

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, and those of its traceback."""
        record.rank = self.rank
        text = super().format(record)
        if not self.has_priorities:
            return text
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in text.split("\n"))

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """Return the record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # likewise
        """Return a traceback."""
        return "\n".join(
            f"    {printable(line)}" for line in super().formatException(ei).split("\n")
        )


class JsonLines(logging.Formatter):
    """One JSON object per line, of ASCII characters: time (RFC 3339), level, event, message,
    logger, pid, rank (null: none) and, if there is one, traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = NO_RANK

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": event_of(record),
            "message": record.getMessage(),
            "logger": record.name,
            "pid": record.process,
            "rank": None if self.rank == NO_RANK else int(self.rank),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class JournalHandler(logging.Handler):
    """Sends records to systemd's journal by its native protocol, with their fields: EVENT, LOGGER
    and RANK beside those that journalctl knows. Never waits: an entry that the journal does not
    take at once goes to stderr."""

    def __init__(self, identifier: str, path: Path = JOURNAL_SOCKET) -> None:
        """identifier: SYSLOG_IDENTIFIER of the entries. Raises OSError: there is no journal."""
        super().__init__()
        self.rank = NO_RANK
        self._identifier = identifier
        self._lines = TextLines("%(levelname)s %(name)s: %(message)s", has_priorities=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        try:
            self._socket.send(self._entry(record))
        except OSError:
            sys.stderr.write(f"{self._lines.format(record)}\n")
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _entry(self, record: logging.LogRecord) -> bytes:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self._lines.formatException(record.exc_info)
        fields = {
            "MESSAGE": message,
            "PRIORITY": str(_PRIORITIES.get(record.levelno, 6)),
            "SYSLOG_IDENTIFIER": self._identifier,
            "EVENT": event_of(record),
            "LOGGER": record.name,
        }
        if self.rank != NO_RANK:
            fields["RANK"] = self.rank
        return b"".join(_field(name, text) for name, text in fields.items())


def _field(name: str, text: str) -> bytes:
    """Return a field of the journal's native protocol: with its length, so that a newline of a
    value cannot begin another field."""
    data = text.encode(errors="backslashreplace")[:MAX_ENTRY_BYTES]
    return b"%b\n%b%b\n" % (name.encode(), struct.pack("<Q", len(data)), data)


def set_shown_rank(rank: int) -> None:
    """Show a rank in every record from now on."""
    for handler in logging.getLogger().handlers:
        for shows in (handler, handler.formatter):
            if isinstance(shows, TextLines | JsonLines | JournalHandler):
                shows.rank = str(rank)
