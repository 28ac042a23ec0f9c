"""Compiles kernels in other processes, many at once, into Triton's cache on disk.

This module is the daemon's side: it starts the compile server (kernels/compile_server.py), sends it
requests and waits for the replies. It loads neither torch nor Triton, so the server starts, and
imports both, while the daemon imports torch itself. Nothing depends on the server: a kernel that it
did not compile is compiled at its first launch.

For each configuration whose kernels were all compiled there is a marker, an empty file in the
cache. A start that finds it requests nothing, which saves the launches.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

SERVER: Final = "worker_daemon.kernels.compile_server"
REPLY_TIMEOUT_S: Final = 120.0
"""The longest wait for the next reply, in case the server is stopped."""
COMPILED: Final = b"compiled"
"""The reply to a request whose kernel is in the cache. Any other reply is an error message."""
_MAX_REPLY_BYTES: Final = 4096

_LOG = logging.getLogger(__name__)


class CompileRequest(NamedTuple):
    """One kernel, with everything that its machine code depends on. Sent as a JSON array."""

    backend: str
    arch: int
    warp_size: int
    """The target, as in triton.backends.compiler.GPUTarget."""
    source_key: str
    """The daemon's hash of the kernel's source and of all that it calls. Triton's hash depends on
    the order in which a process hashes its kernels (seen in 3.6: the order decides where a cycle of
    calls is cut), so the server takes this one; another would name another entry of the cache."""
    sources: str
    """hash_sources in the daemon. If the package was replaced since the server imported it, other
    code would be cached under source_key."""
    specialization: str
    """JSON that JITFunction.preload reads."""


def hash_sources() -> str:
    """Return a hash of this package: its sources decide what kernels are, and with the measured
    tiles, which of them steps launch. Skips dangling links, which editors leave beside an open
    file."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for form in ("*.py", "*.json"):
        for path in sorted(root.rglob(form)):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


class KernelCompiler:
    """Owns the compile server, from start() to close(), and ends it. Used on one thread at a time.

    The server ends when this process ends, however it ends.
    """

    def __init__(
        self,
        control: socket.socket,
        server: "subprocess.Popen[bytes] | None",
        marker_dir: Path | None,
    ) -> None:
        self._control = control
        self._server = server
        self._marker_dir = marker_dir

    @classmethod
    def start(cls, marker_dir: Path | None = None) -> "KernelCompiler":
        """Start the server; return while it is importing. It inherits the environment, which names
        the directory of compiled kernels, and the standard error. marker_dir: the directory of
        markers; None keeps none. If the host cannot start it now, all batches fail: so a rank
        launches the same as its peers, and compiles each kernel when it needs it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = None
        with theirs, contextlib.suppress(OSError):  # each batch logs that the server is lost
            server = subprocess.Popen(
                # -P: no module is imported from the working directory, which others may write.
                [sys.executable, "-P", "-m", SERVER, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a signal from the terminal is for the daemon
            )
        return cls(ours, server, marker_dir)

    @property
    def server_pid(self) -> int:
        """The process id of the server, whose children compile."""
        assert self._server is not None
        return self._server.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_compiled(self, description: str) -> bool:
        """Return True if mark_compiled was called with this description, in any process. If kernels
        were deleted since, they are compiled when they are needed."""
        marker = self._marker(description)
        if marker is None:
            return False
        try:
            marker.lstat()
        except OSError:  # of a broken disk too
            return False
        return True

    def mark_compiled(self, description: str) -> None:
        """Record that the cache has all kernels of a configuration. description: everything that
        they depend on, in any form. If the marker cannot be written, the next start requests the
        kernels again."""
        marker = self._marker(description)
        if marker is not None:
            with contextlib.suppress(OSError):
                os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))

    def _marker(self, description: str) -> Path | None:
        if self._marker_dir is None:
            return None
        return self._marker_dir / f"{hashlib.sha256(description.encode()).hexdigest()}.compiled"

    @contextlib.contextmanager
    def batch(self) -> Iterator["CompileBatch"]:
        """Yield a batch of requests, which processes compile in parallel; when the block ends
        without an error, wait for all replies. The processes end with the block. There is one batch
        at a time. Another would wait for this one, so a server whose processes hang is ended."""
        with contextlib.closing(CompileBatch(self._control)) as batch:
            try:
                yield batch
                batch.wait()
            finally:
                if batch.is_hung:
                    self.close()

    def close(self) -> None:
        """End the server, and with it the processes of a batch. Idempotent."""
        self._control.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()


class CompileBatch:
    """A batch of requests, over its own socket. Once the server has failed, it sends no more."""

    def __init__(self, control: socket.socket) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._unsent: deque[bytes] = deque()
        self._num_waiting = 0
        """Requests without a reply so far."""
        self.has_failed = False
        """True once a kernel could not be compiled, or the server has failed."""
        self.is_hung = False
        """True once a reply did not come in time."""
        self._is_lost = False
        with theirs:
            try:
                socket.send_fds(control, [b"\0"], [theirs.fileno()])
            except OSError as error:
                self._lose(str(error))

    def close(self) -> None:
        """Close the socket, which ends the compiling processes."""
        self._socket.close()

    def send(self, request: CompileRequest) -> None:
        """Request a kernel. Never waits."""
        self._unsent.append(json.dumps(request).encode())
        self._flush()

    def wait(self) -> None:
        """Wait until every request has been replied to, or the server has failed."""
        while (self._unsent or self._num_waiting) and not self._is_lost:
            self._receive()
            self._flush()

    def _flush(self) -> None:
        """Send as many requests as the socket takes; a reply shows that it takes more."""
        self._socket.setblocking(False)  # with a timeout, MSG_DONTWAIT would wait too
        while self._unsent and not self._is_lost:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
                return
            self._unsent.popleft()
            self._num_waiting += 1

    def _receive(self) -> None:
        self._socket.settimeout(REPLY_TIMEOUT_S)
        try:
            data = self._socket.recv(_MAX_REPLY_BYTES)
        except TimeoutError:
            self.is_hung = True
            self._lose(f"no reply in {REPLY_TIMEOUT_S:g} s")
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("it has ended")
            return
        self._num_waiting -= 1
        if data != COMPILED:
            self.has_failed = True
            error_text = data.decode(errors="replace")
            _LOG.warning("a kernel will be compiled when it is needed: %s", error_text)

    def _lose(self, cause: str) -> None:
        self._is_lost = self.has_failed = True
        _LOG.warning("the compile server is lost, kernels are compiled when needed: %s", cause)
