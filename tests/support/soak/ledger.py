"""The record of what was promised and what was delivered: one file that all drivers append to, each
entry on disk before the driver goes on. Knows no group and no scheduler.

A driver that has been replaced may still hold results, and not know yet that it was. So entries
are taken from the newest driver alone, by its epoch: the place where results are delivered fences
as the daemons do. Nothing else is filtered: a request that ends twice is two entries.
"""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    what: Literal["driver", "accepted", "ended", "cancelled"]
    epoch: int
    """Of the driver, as it was attached first."""
    at: float
    """Of time.monotonic(), which all processes of a host share."""
    req_id: str = ""
    token_ids: list[int] = []
    reason: str = ""
    pid: int = 0


class LedgerFenced(Exception):
    """A newer driver writes here now."""


def read(path: Path) -> list[Entry]:
    """All entries, oldest first; a last line that is not whole was never promised."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Entry) for line in lines]


class Ledger:
    """One driver's pen. `begin` comes first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest = path.with_suffix(".newest")
        """Holds the epoch of the newest driver."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._epoch = 0

    def begin(self, epoch: int) -> list[Entry]:
        """Become the driver that writes; return what was written before.

        Raises:
            LedgerFenced: a newer one is at it already.
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
        """Promise an end to each of these requests."""
        self._append([self._entry("accepted", req_id) for req_id in req_ids])

    def end(self, ends: Iterable[tuple[str, list[int], str]]) -> None:
        """Deliver: (request, tokens, finish reason)."""
        self._append([self._entry("ended", name, tokens, reason) for name, tokens, reason in ends])

    def cancel(self, req_id: str) -> None:
        """Whoever asked for it does not want it any more."""
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
        """Cut off what a killed driver has written of its last line."""
        whole = self._path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._fd, whole)
        return read(self._path)

    def _put(self, entries: list[Entry]) -> None:
        data = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        assert os.write(self._fd, data) == len(data)
        os.fsync(self._fd)
