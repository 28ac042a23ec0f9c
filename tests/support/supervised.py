"""Daemons under a supervisor: separate processes with separate endpoints, to be killed, stopped,
continued and restarted."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.command_line import start_daemon, wait_for_daemons
from tests.support.forked_processes import ForkedPopen
from tests.support.stopping import stop_process


class Supervised:
    """Owns some daemons until close()."""

    def __init__(
        self,
        count: int,
        model_root: Path,
        directory: Path,
        within: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        """Start them and wait until they answer. within: a command that starts each, if any.
        python: their interpreter."""
        self.directory = directory
        self.endpoints = [f"ipc://{directory}/{rank}/w" for rank in range(count)]
        self._model_root = model_root
        self._within = within
        self._python = python
        self._restarts: list[threading.Thread] = []
        self.processes = [self._start(rank) for rank in range(count)]
        wait_for_daemons(self.endpoints, self.processes)

    def kill(self, rank: int) -> float:
        """Send SIGKILL; return the time (time.monotonic)."""
        at = time.monotonic()
        self.processes[rank].kill()
        return at

    def stop(self, rank: int) -> float:
        """Send SIGSTOP; return the time."""
        at = time.monotonic()
        stop_process(self.processes[rank].pid)
        return at

    def go_on(self, rank: int) -> None:
        """Send SIGCONT."""
        self.processes[rank].send_signal(signal.SIGCONT)

    def restart(self, rank: int) -> None:
        """Start a dead daemon's successor; returns at once."""
        self.processes[rank].wait()
        self.processes[rank] = self._start(rank)

    def restart_later(self, rank: int, seconds: float = 0.0) -> None:
        """Restart it from another thread, once the daemon is dead."""
        self._later(seconds, lambda: self.restart(rank))

    def revive(self) -> None:
        """Wait for later restarts, and start dead daemons."""
        self._join()
        for rank, process in enumerate(self.processes):
            self.go_on(rank)
            if process.poll() is not None:
                self.restart(rank)
        wait_for_daemons(self.endpoints, self.processes)

    def log(self) -> str:
        """Return the logs of all daemons."""
        return (self.directory / "daemon.log").read_text(errors="replace")

    def close(self) -> None:
        """End all of them, stopped ones too."""
        self._join()
        for process in self.processes:
            process.kill()
            process.wait()

    def _join(self) -> None:
        while self._restarts:
            self._restarts.pop().join()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        thread = threading.Timer(seconds, act)
        thread.start()
        self._restarts.append(thread)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        words = ("--endpoint", self.endpoints[rank], "--device", "cpu")
        roots = ("--model-root", os.fspath(self._model_root))
        return start_daemon(
            self.directory,
            *words,
            *roots,
            within=self._within,
            python=self._python,
            start=ForkedPopen,
        )
