"""The first process of a container without an init process. The kernel ignores signals to such a
process unless it handles them, even SIGKILL from inside, so it must not be the daemon itself."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run_below(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a command as a child; pass signals on to it, and wait for all processes that end. Return
    its exit code, 128 and N if signal N ended it."""
    awaited = {*_FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # A separate process group: the terminal's signals come to this process, which passes them
    # on once.
    child = os.posix_spawn(command[0], command, environment, setpgroup=0, setsigmask=())
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        status = _reap(child)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _reap(child: int) -> int | None:
    """Wait for every process that has ended; return the child's status if it is one of them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # the last one has ended
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def own_command() -> list[str]:
    """Return the command of this process."""
    return [sys.executable, *sys.orig_argv[1:]]
