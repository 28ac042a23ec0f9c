"""A process for work that requests bring and whose cost nobody knows before: it may hold the GIL,
run for minutes or take gigabytes, and it can be killed. Both ends of the pipe between the two.

The process is executed, not forked: a forked child would hold the driver's sockets open and hide
its death from daemons. It ends by itself when its parent has ended: between jobs it reads the end
of the pipe, and during a job the kernel's timer ends it, whether or not it runs Python.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

_LENGTH: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 1 << 20
_PARENT_FD: Final = "WORKER_CLIENT_PARENT_FD"


class ChildEnded(Exception):
    """The process has ended or was killed: its jobs are lost."""


class Messages:
    """Messages of bytes over a stream socket, each behind its length."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self._stream.fileno()

    def send(self, message: bytes, deadline: float | None = None) -> None:
        """Send a message. deadline: of time.monotonic.

        Raises:
            ChildEnded: the peer has ended.
            TimeoutError: it did not take the message in time.
        """
        try:
            self._stream.settimeout(_left(deadline))
            self._stream.sendall(_LENGTH.pack(len(message)) + message)
        except TimeoutError:
            raise
        except OSError:
            raise ChildEnded from None

    def receive(self, deadline: float | None = None) -> bytes | None:
        """Return the next message; None once `deadline` (of time.monotonic) has passed. Raises
        ChildEnded."""
        while (message := self._take()) is None:
            if not self._read(deadline):
                return None
        return message

    def _take(self) -> bytes | None:
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(received)[0]
        if length > MAX_MESSAGE_BYTES:
            raise ChildEnded
        if len(received) < _LENGTH.size + length:
            return None
        message = bytes(received[_LENGTH.size : _LENGTH.size + length])
        del received[: _LENGTH.size + length]
        return message

    def _read(self, deadline: float | None) -> bool:
        try:
            self._stream.settimeout(_left(deadline))
            chunk = self._stream.recv(_CHUNK_BYTES)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            raise ChildEnded from None
        if not chunk:
            raise ChildEnded
        self._received += chunk
        return True

    def close(self) -> None:
        """Close the socket."""
        self._stream.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class ChildProcess:
    """A process that runs a module of this package, which calls `run_jobs`. Owned by one thread;
    killed by close(), when this object is collected, and when the interpreter exits."""

    def __init__(self, module: str, *args: str, pass_fds: tuple[int, ...] = ()) -> None:
        """Start it; it imports the module meanwhile. pass_fds: descriptors that it inherits, under
        their numbers. Raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            path = os.pathsep.join(entry for entry in sys.path if Path(entry).is_absolute())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *args],
                env={**os.environ, "PYTHONPATH": path, _PARENT_FD: str(theirs.fileno())},
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
            )
            undo.pop_all()
        self.messages = Messages(ours)
        """Requests to the process and its answers."""
        self._end = weakref.finalize(self, _kill, self._process, self.messages)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process; any thread may. Who waits for its answer gets ChildEnded."""
        self._process.kill()

    def exit_code(self, timeout_s: float) -> int | None:
        """Return what the process exited with, or the number of the signal that ended it, negated;
        None if it still runs after timeout_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def close(self) -> int:
        """Kill the process, whatever it does, and wait for its end. Return its exit status: -N if
        signal N ended it, which may have been before."""
        self._end()
        return self._process.wait()


def _kill(process: "subprocess.Popen[bytes]", messages: Messages) -> None:
    messages.close()
    process.kill()
    process.wait()


def run_jobs(handle: Callable[[bytes], bytes], *, job_s: float, memory_bytes: int) -> None:
    """Answer the parent's messages until it ends. Called by the module that a ChildProcess runs,
    once it has imported what it needs.

    Args:
        handle: does one job; what it raises ends the process.
        job_s: seconds after which the kernel ends the process in the middle of a job. The parent
            kills it earlier; this is for a parent that cannot.
        memory_bytes: address space that jobs may take beyond what the process has now.
    """
    messages = open_parent(memory_bytes=memory_bytes)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ChildEnded):
        while (message := messages.receive()) is not None:
            signal.setitimer(signal.ITIMER_REAL, job_s)
            messages.send(handle(message))
            signal.setitimer(signal.ITIMER_REAL, 0)


def open_parent(*, memory_bytes: int) -> Messages:
    """Bound this process's memory, and return the messages of its parent: for a module that answers
    them itself, and sees to it that no job outlives the parent for long. They raise ChildEnded once
    the parent has ended."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the parent decides
        signal.signal(number, signal.SIG_IGN)
    _limit_memory(memory_bytes)
    return Messages(socket.socket(fileno=int(os.environ.pop(_PARENT_FD))))


def _limit_memory(memory_bytes: int) -> None:
    """Bound this process's memory, and offer it to the OOM killer before its parent."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


def wait_readable(children: list[ChildProcess], timeout_s: float) -> list[ChildProcess]:
    """Return the processes that have answered or ended, waiting up to timeout_s for the first."""
    poll = select.poll()
    by_fd = {child.messages.fileno(): child for child in children}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]
