"""What daemons that were killed have left in a directory: their sockets and lock files. Knows no
socket's use.

A lock file whose lock nobody holds is a dead daemon's: the kernel lets go of a lock with its
process. Shared memory is never left: what ranks share has no names, and goes with its last user.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from worker_daemon.server.endpoints import Endpoint, remove_sockets

_LOCK_SUFFIX = ".lock"


def remove_stale(directory: Path) -> list[str]:
    """Remove the files of dead daemons; return the names of their endpoints. Files that cannot be
    removed are left."""
    removed = []
    for lock in sorted(directory.glob(f"*{_LOCK_SUFFIX}")):
        endpoint = Endpoint(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX)))
        with contextlib.suppress(OSError):
            if _remove_if_dead(lock, endpoint):
                removed.append(str(endpoint))
    return removed


def _remove_if_dead(lock: Path, endpoint: Endpoint) -> bool:
    if _holder_lives(lock):  # or its number is another's by now: then its files wait for a restart
        return False
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), lock.stat()):
            return False
        remove_sockets(endpoint)
        lock.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _holder_lives(lock: Path) -> bool:
    """Asked before the lock is tried, which for that moment would keep its owner from it."""
    text = lock.read_text("ascii", errors="replace").strip()
    if not text.isdecimal():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(text), 0)
        return True
    return False
