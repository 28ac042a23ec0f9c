"""Starts commands as forks of one process that has imported torch (fork_server.py), for tests that
do not check how a process starts: a daemon then costs 0.2 CPU seconds instead of 3. It runs its own
command line, with its own environment, descriptors and directory, which /proc shows as well, and is
our child. Its modules are imported by then, but it has no thread, no process group and no socket.

    ForkedPopen([sys.executable, "-m", "worker_daemon", "serve", ...])   # as subprocess.Popen
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons: ...       # forked_daemons.py

Tests of starts, environment variables, signals and what a process leaves use the originals. So
does the soak."""

import ctypes
import functools
import inspect
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.fork_server import READY, ROOM, Command

_PR_SET_CHILD_SUBREAPER = 36
_READ_ON_LOAD = (
    *("CUDA", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH"),
    "TRITON",
)
"""Beginnings of variables that libraries read when they are loaded. No server loads one that reads
HF_*."""
_SET_BY_TESTS = frozenset(
    ("PYTHONPATH", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
)
"""Those that do not matter here: a fork gets its own path, and sentence-transformers sets the
others in the process of the tests."""
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkServer:
    """Owns the process that forks, until close()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_ready = False
        self._environment = dict(os.environ)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(number), ROOM],
                pass_fds=(number,),
                env={**self._environment, "ROOM": ROOM},
            )

    @property
    def pid(self) -> int:
        """The process id of the process that forks."""
        return self._process.pid

    def start(self, command: Command, descriptors: Sequence[int]) -> int:
        """Start a command, which becomes our child; return its process id."""
        with self._lock, _adopting():
            socket.send_fds(self._channel, [command.encode()], list(descriptors))
            answer = self._channel.recv(32)
        assert answer, f"the fork server has ended: {self._process.wait()}"
        return int(answer)

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether it can fork by now, or within a time. It cannot if it has ended, as it
        does if its imports have started a thread."""
        with self._lock:
            if not self._is_ready and select.select([self._channel], [], [], timeout_s)[0]:
                self._is_ready = self._channel.recv(len(READY)) == READY
            return self._is_ready

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Say whether it can fork by now, and has loaded its libraries in such an environment. Not
        waiting for it, so that no command takes longer than it would without."""
        if not self.is_ready():
            return False
        names = (self._environment.keys() | environment.keys()) - _SET_BY_TESTS
        read = [name for name in names if name.startswith(_READ_ON_LOAD)]
        return all(self._environment.get(name) == environment.get(name) for name in read)

    def close(self) -> None:
        """End it. What it has started goes on."""
        self._channel.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """Return this process's server; start it if there is none."""
    return ForkServer()


def end_fork_server() -> None:
    """End this process's server, if it has one."""
    if fork_server.cache_info().currsize:
        fork_server().close()
        fork_server.cache_clear()


@contextmanager
def _adopting() -> Iterator[None]:
    """Make descendants whose parents end our children."""
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def _set_subreaper(is_on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ForkedPopen(subprocess.Popen):
    """A Popen whose process is a fork if its command is `python -m MODULE ...` of this interpreter,
    and if its environment has the same for libraries that read it when they are loaded. Others
    start as ever, and so do all while the server is still importing."""

    def _execute_child(self, args, *details):  # type: ignore[override]
        names = inspect.signature(super()._execute_child).parameters
        given = dict(zip([*names][1:], details, strict=True))
        environment = dict(os.environ if given["env"] is None else given["env"])
        is_module = not isinstance(args, str) and list(args[:2]) == [sys.executable, "-m"]
        if not is_module or given["preexec_fn"] or not fork_server().suits(environment):
            super()._execute_child(args, *details)
            return
        ends = (given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        standard = [number if end == -1 else end for number, end in enumerate(ends)]
        passed = sorted(given["pass_fds"])
        command = Command(
            module=args[2],
            arguments=[os.fspath(word) for word in args[3:]],
            environment=environment,
            directory=os.fspath(given["cwd"] or Path.cwd()),
            descriptors=[0, 1, 2, *passed],
            new_session=given["start_new_session"],
        )
        self.pid = fork_server().start(command, [*standard, *passed])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))
