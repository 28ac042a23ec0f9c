"""Lock files: files that a living daemon holds a flock on, with its pid inside. Shared by the
endpoint's lock and the GPU's."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")
_PID_BYTES: Final = 32
_POLL_S: Final = 0.02

logger = logging.getLogger(__name__)


class LockHeldError(Exception):
    """Another process holds the lock. The text names that process, if the kernel reports it."""


class LockFile:
    """The flock on a file, from construction to `release`. Owned by the main thread."""

    def __init__(self, path: Path, open_file: Callable[[], int], patience_s: float) -> None:
        """Take the lock. open_file: opens the file at the path and returns its descriptor;
        patience_s: how long to wait for another holder.

        Raises:
            LockHeldError: another process holds it.
            OSError: the file cannot be opened or locked.
        """
        self._path = path
        self._open_file = open_file
        self._fd = self._lock(patience_s)

    def is_held(self) -> bool:
        """Return True if the file at the path is still the one that we locked."""
        return is_at(self._fd, self._path)

    def renew(self, patience_s: float) -> None:
        """Replace the lock, whose file was removed, with one on a new file. Raises as the
        constructor does."""
        renewed = self._lock(patience_s)
        os.close(self._fd)
        self._fd = renewed
        logger.warning("%s was removed; it has been made again", self._path)

    def write_pid(self) -> None:
        """Write our pid into the file. Raises OSError."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Remove the file if it is ours, then unlock it: in this order no process locks a file that
        is about to be removed."""
        if self.is_held():
            with contextlib.suppress(OSError):  # leave another user's file
                self._path.unlink()
        os.close(self._fd)

    def _lock(self, patience_s: float) -> int:
        """Open and lock the file at the path; a file that is removed while we wait does not
        count."""
        give_up = time.monotonic() + patience_s
        while True:
            fd = self._open_file()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, self._path):
                    return fd
            except BlockingIOError:
                holder = describe_holder(fd)
                if time.monotonic() >= give_up:
                    os.close(fd)
                    raise LockHeldError(holder) from None
                time.sleep(_POLL_S)
            except OSError:
                os.close(fd)
                raise
            os.close(fd)


def is_at(fd: int, path: Path) -> bool:
    """Return True if the open file is the one at the path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False


def read_pid(fd: int) -> int | None:
    """Return the pid in a lock file; None if it holds none. Any user may have written it."""
    text = os.pread(fd, _PID_BYTES, 0).decode("ascii", errors="replace").strip()
    return int(text) if text.isdecimal() else None


def describe_holder(fd: int) -> str:
    """Name the holder of the flock on an open file: a daemon, if the kernel lists the pid in the
    file as a holder; otherwise a process, if the kernel lists exactly one."""
    written, holders = read_pid(fd), set(_holders(os.fstat(fd).st_ino))
    if written in holders:
        return f"the daemon with pid {written}"
    if len(holders) == 1:
        return f"the process with pid {min(holders)}, whose pid is not in the file,"
    return "another process"


def _holders(inode: int) -> Iterator[int]:
    """Yield the pids that hold a flock on a file of this inode number, on any file system, as far
    as they are visible from this pid namespace (proc_locks(5))."""
    try:
        lines = _LOCKS.read_text("ascii").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        is_flock = len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE"
        if is_flock and words[5].rpartition(":")[2] == str(inode) and int(words[4]) > 0:
            yield int(words[4])
