"""Who holds a lock on a file, by the kernel's word: what is written in the file may be anybody's.
Takes no lock."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")
_PID_BYTES: Final = 32


def describe_holder(fd: int) -> str:
    """Say who holds the flock on an open file whose holder may have written its pid there: a
    daemon, if that pid is the holder's; else a process, if the kernel tells which."""
    written = os.pread(fd, _PID_BYTES, 0).decode("ascii", errors="replace").strip()
    holders = set(_holders(os.fstat(fd).st_ino))
    if written.isdecimal() and int(written) in holders:
        return f"the daemon with pid {int(written)}"
    if len(holders) == 1:
        return f"the process with pid {min(holders)}, which is no daemon that wrote its pid there,"
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
