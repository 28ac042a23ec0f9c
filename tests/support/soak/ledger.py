"""The record of accepted requests and delivered results: one file to which all drivers append, each
entry on disk before the driver continues.

A replaced driver may still hold results before it notices. So the ledger accepts entries only from
the newest driver, by its epoch: it fences as the daemons do. It filters nothing else: a request
that ends twice is two entries.
"""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the file."""

    what: Literal["driver", "accepted", "ended", "cancelled"]
    epoch: int
    """The driver's epoch at its first attach."""
    at: float
    """time.monotonic(), which all processes of a host share."""
    req_id: str = ""
    token_ids: list[int] = []
    reason: str = ""
    pid: int = 0


class LedgerFenced(Exception):
    """A newer driver writes here now."""


def read(path: Path) -> list[Entry]:
    """Return all entries, oldest first; an incomplete last line does not count."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Entry) for line in lines]


class Ledger:
    """One driver's access to the ledger. Call `begin` first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest = path.with_suffix(".newest")
        """Holds the epoch of the newest driver."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._epoch = 0

    def begin(self, epoch: int) -> list[Entry]:
        """Become the writing driver; return the earlier entries.

        Raises:
            LedgerFenced: a newer driver writes already.
        """
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            before = self._mend()
            if epoch <= max((entry.epoch for entry in before), default=0):
                raise LedgerFenced(f"epoch {epoch} comes too late")
            self._epoch = epoch
            self._newest.write_text(str(epoch))
            self._put([Entry("driver", epoch, time.monotonic(), pid=os.getpid())])
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return before

    def accept(self, req_ids: Iterable[str]) -> None:
        """Record these requests as accepted."""
        self._append([self._entry("accepted", req_id) for req_id in req_ids])

    def end(self, ends: Iterable[tuple[str, list[int], str]]) -> None:
        """Record deliveries: (request, tokens, finish reason)."""
        self._append([self._entry("ended", name, tokens, reason) for name, tokens, reason in ends])

    def cancel(self, req_id: str) -> None:
        """Record that its sender cancelled a request."""
        self._append([self._entry("cancelled", req_id)])

    def _entry(
        self, what: Literal["accepted", "ended", "cancelled"], req_id: str, *more: object
    ) -> Entry:
        return Entry(what, self._epoch, time.monotonic(), req_id, *more)  # type: ignore[arg-type]

    def _append(self, entries: list[Entry]) -> None:
        if not entries:
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            newest = int(self._newest.read_text())
            if newest != self._epoch:
                raise LedgerFenced(f"epoch {newest} writes now")
            self._put(entries)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _mend(self) -> list[Entry]:
        """Remove a killed driver's incomplete last line."""
        whole = self._path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._fd, whole)
        return read(self._path)

    def _put(self, entries: list[Entry]) -> None:
        data = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        assert os.write(self._fd, data) == len(data)
        os.fsync(self._fd)
