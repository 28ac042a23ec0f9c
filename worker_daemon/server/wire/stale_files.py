"""What daemons that were killed have left in a directory: their sockets and lock files. Knows no
socket's use.

A lock file whose lock nobody holds is a dead daemon's: the kernel lets go of a lock with its
process. Shared memory is never left: what ranks share has no names, and goes with its last user.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from worker_daemon.directories import open_own_file
from worker_daemon.server.wire.endpoints import IpcEndpoint, remove_sockets

_LOCK_SUFFIX = ".lock"
_PID_BYTES = 32


def remove_stale(directory: Path) -> list[str]:
    """Remove the files of dead daemons; return the names of their endpoints. Files that cannot be
    removed are left."""
    removed = []
    for lock in sorted(directory.glob(f"*{_LOCK_SUFFIX}")):
        endpoint = IpcEndpoint(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX)))
        with contextlib.suppress(OSError):
            if _remove_if_dead(lock, endpoint):
                removed.append(str(endpoint))
    return removed


def _remove_if_dead(lock: Path, endpoint: IpcEndpoint) -> bool:
    fd = open_own_file(lock, os.O_RDWR)
    try:
        if _holder_lives(fd):  # or its number is another's by now: its files wait for a restart
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), lock.lstat()):
            return False
        remove_sockets(endpoint)
        lock.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _holder_lives(lock: int) -> bool:
    """Asked before the lock is tried, which for that moment would keep its owner from it."""
    text = os.pread(lock, _PID_BYTES, 0).decode("ascii", errors="replace").strip()
    if not text.isdecimal():
        return False
    with contextlib.suppress(ProcessLookupError, OverflowError):
        os.kill(int(text), 0)
        return True
    return False
