"""`python -m tests.support.fork_server SOCKET ROOM`: starts commands `python -m MODULE ...` as
forks of itself, which has imported torch and what daemons and clients import: 4 CPU seconds, once.
It imports only: it has one thread, computes nothing, and opens none of the project's sockets.
forked_processes.py starts it."""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 32
READY: Final = b"ready"
"""Sent once it can fork."""
ROOM: Final = " " * 16384
"""A word of the server's command line and environment: a fork's own have room there."""
_FREE = 512
"""No descriptor has this number or a higher one."""
_PRELOADED: Final = (
    "pytest",
    "tests.support.mock_schedulers",
    *(f"worker_client.cli.{command}" for command in ("control", "embed", "lora", "run", "trace")),
    "worker_client.structured.opening",
    "worker_daemon.cli",
    "worker_daemon.device.init",
    "worker_daemon.distributed.rendezvous",
    "worker_daemon.server.assembly",
    "worker_daemon.worker.worker",
)


@dataclass(frozen=True)
class Command:
    """What a fork becomes: `python -m module *arguments`."""

    module: str
    arguments: Sequence[str]
    environment: dict[str, str]
    directory: str
    descriptors: Sequence[int]
    """The numbers of the descriptors that come with this, in their order; 0, 1 and 2 first."""
    new_session: bool

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()


def main() -> None:
    """Serve until the other end of the socket closes. In a fork: run the command."""
    from worker_daemon.settings import prepare_environment

    prepare_environment()
    gc.disable()
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    assert not {"huggingface_hub", "transformers"} & sys.modules.keys(), "they read HF_* on import"
    channel = socket.socket(fileno=int(sys.argv[1]))
    if _num_threads() > 1:
        return  # a fork would lack the others
    channel.send(READY)
    while True:
        data, received, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            return
        command = Command(**json.loads(data))
        if _fork_orphan(channel):
            break
        for descriptor in received:
            os.close(descriptor)
    _take_descriptors(received, command.descriptors)
    channel.detach()
    _become(command)


def _fork_orphan(channel: socket.socket) -> bool:
    """Return True in a fork whose parent has ended, so that the subreaper adopts it; elsewhere,
    send its process id."""
    assert _num_threads() == 1, "a fork would lack the other threads"
    ours, theirs = os.pipe()
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child != 0:
            os.write(theirs, str(child).encode())
            os._exit(0)
        return True
    os.waitpid(parent, 0)
    channel.send(os.read(ours, 32))
    os.close(ours)
    os.close(theirs)
    return False


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _take_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors their numbers, and close all others."""
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE) for descriptor in received]
    os.closerange(0, _FREE)
    for descriptor, number in zip(kept, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(command: Command) -> None:
    """Run it as this interpreter would have from the start, and end without freeing every object:
    each would be copied from the server's memory first, in a quarter of a CPU second."""
    if command.new_session:
        os.setsid()
    os.chdir(command.directory)
    own = _entries(os.environ)
    sys.path[: 1 + len(own)] = [command.directory, *_entries(command.environment)]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(command.environment)
    sys.orig_argv[1:] = ["-m", command.module, *command.arguments]
    sys.argv[:] = [command.module, *command.arguments]
    _show(sys.orig_argv, command.environment)
    if not hasattr(sys.modules.get(command.module), "__path__"):
        sys.modules.pop(command.module, None)  # preloaded, of which runpy warns
    code: object = None
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    if code is not None and not isinstance(code, int):
        sys.exit(code)  # a message
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)  # says so, and has a code of its own
    os._exit((code or 0) & 0xFF)


def _show(words: Iterable[str], environment: dict[str, str]) -> None:
    """Write a command line and an environment to where /proc and `ps` read them (proc_pid_stat(5)),
    as far as there is room. Zeros follow."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    word_start, word_end, variable_start, variable_end = map(int, fields[45:49])
    variables = (f"{name}={value}" for name, value in environment.items())
    for start, end, texts in (
        (word_start, word_end, words),
        (variable_start, variable_end, variables),
    ):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        size = max(0, end - start - 1)
        ctypes.memmove(start, data[:size].ljust(size, b"\0"), size)


def _entries(environment: "os._Environ[str] | dict[str, str]") -> list[str]:
    """Return the directories of PYTHONPATH."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


if __name__ == "__main__":
    main()
