"""Finds what a test session has started and not ended."""

import psutil


def own_programs() -> list[psutil.Process]:
    """Return the processes below this one that run one of our programs; forks, too, show their
    command (fork_server.py)."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any("worker_daemon" in word or "tests.support" in word for word in words):
            found.append(process)
    return found
