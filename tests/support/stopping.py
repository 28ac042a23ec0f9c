"""Stops processes. SIGSTOP takes effect later than kill(2) returns: until a thread of the process
has taken the signal, the others run on."""

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_until

_NOT_RUNNING = frozenset("TtZX")
"""States in proc_pid_stat(5): stopped, traced, zombie, dead."""


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) <= _NOT_RUNNING, f"process {pid} has stopped")


def _states(pid: int) -> set[str]:
    """Return the states of its threads; of one that has ended, none."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(thread.read_text().rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
