"""Stops processes. SIGSTOP takes effect later than kill(2) returns: until a thread of the process
has taken the signal, the others run on."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import wait_until

_NOT_RUNNING = frozenset("TtZX")
"""States in proc_pid_stat(5): stopped, traced, zombie, dead."""


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) <= _NOT_RUNNING, f"process {pid} has stopped")


@contextmanager
def slowed_process(pid: int, *, runs_s: float, stands_s: float) -> Iterator[None]:
    """Let the process run and stand by turns, as on a host that is slow or busy."""
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.wait(runs_s):
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(stands_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _states(pid: int) -> set[str]:
    """Return the states of its threads; of one that has ended, none."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(thread.read_text().rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
