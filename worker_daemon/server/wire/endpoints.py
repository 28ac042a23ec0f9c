"""Endpoints: parses ipc and tcp addresses, and handles their lock and socket files."""

import contextlib
import ipaddress
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from rpc_schema.errors import ConfigError, WorkerError
from worker_daemon.directories import open_own_file, unusable
from worker_daemon.errors import config_error
from worker_daemon.raising import Translation
from worker_daemon.server.lock_file import LockFile, LockHeldError

MAX_PATH_BYTES: Final = 107
"""sockaddr_un's 108 bytes minus the final zero."""

LOCK_PATIENCE_S: Final = 0.1
"""Time to wait for the lock, which a daemon may hold briefly to look for dead daemons' files."""

SOCKETS: Final = ("control", "step", "results", "events")
RESERVED_SUFFIXES: Final = (
    *(".step", ".results", ".events", ".lock", ".epoch", ".stacks", ".flight.json", ".tmp"),
)
"""Suffixes of the files next to a control socket: another endpoint's name must not end in one."""
MAX_PORT: Final = 65535


class EndpointInUseError(ConfigError):
    """Another daemon serves this endpoint. The process ends with exit code 73."""


TCP_DIRECTORY: Final = "tcp"
_HOST_AND_PORT: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


class _Endpoint:
    """The parts of an endpoint that do not depend on its transport."""

    __slots__ = ()
    path: Path

    def address(self, socket: str) -> str:
        """Return the address that zmq binds for one of SOCKETS."""
        raise NotImplementedError

    @property
    def lock_path(self) -> Path:
        """The endpoint's lock file, which holds the daemon's pid."""
        return self.path.with_name(f"{self.path.name}.lock")

    @property
    def socket_paths(self) -> tuple[Path, ...]:
        """The files of all sockets: none for ports."""
        return ()

    def __str__(self) -> str:
        return self.address("control")


@dataclass(frozen=True, slots=True)
class IpcEndpoint(_Endpoint):
    """An `ipc://DIR/NAME` address: the control socket's; the other sockets' paths append a
    suffix."""

    path: Path

    @classmethod
    def parse(cls, text: str) -> "IpcEndpoint":
        """Parse an endpoint.

        Raises:
            ConfigError: not ipc, not absolute, too long for a Unix socket, or a name that another
                endpoint's files may have.
        """
        path = Path(text.removeprefix("ipc://"))
        if not text.startswith("ipc:///") or not path.name or "\0" in text:
            problem = "an endpoint is ipc:// and an absolute path"
            raise _invalid(text, problem, "use ipc:///DIR/NAME or, with keys, tcp://ADDRESS:PORT")
        if path.name.endswith(RESERVED_SUFFIXES):
            raise _invalid(
                text,
                f"its name ends in {path.suffix}, which is reserved for files of other endpoints",
                f"use a name that does not end in {', '.join(RESERVED_SUFFIXES)}",
            )
        endpoint = cls(path)
        longest = max(len(os.fsencode(endpoint.socket_path(name))) for name in SOCKETS)
        if longest > MAX_PATH_BYTES:
            problem = f"its longest socket path has {longest} bytes; the limit is {MAX_PATH_BYTES}"
            raise _invalid(text, problem, "use a shorter directory or name")
        return endpoint

    def socket_path(self, socket: str) -> Path:
        """Return the file of one of SOCKETS."""
        return (
            self.path if socket == "control" else self.path.with_name(f"{self.path.name}.{socket}")
        )

    def address(self, socket: str) -> str:
        """Return the address that zmq binds for one of SOCKETS."""
        return f"ipc://{self.socket_path(socket)}"

    @property
    def socket_paths(self) -> tuple[Path, ...]:
        """See _Endpoint."""
        return tuple(self.socket_path(name) for name in SOCKETS)


@dataclass(frozen=True, slots=True)
class TcpEndpoint(_Endpoint):
    """A `tcp://ADDRESS:PORT` address: the control socket's; the other sockets have the next ports.
    Its files are in the state directory."""

    host: str
    """An address of this host; IPv6 in brackets."""
    port: int
    path: Path
    """Base path of the endpoint's files; not a file itself."""

    @classmethod
    def parse(cls, text: str, state_dir: Path) -> "TcpEndpoint":
        """Parse an endpoint.

        Raises:
            ConfigError: no address and port, or all addresses of the host.
        """
        found = _HOST_AND_PORT.fullmatch(text)
        address = None
        if found is not None:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(found[1] or found[2])
        if found is None or address is None or (address.version == 6) != bool(found[1]):
            fix = "use tcp://ADDRESS:PORT with an address of this host, [...] around IPv6"
            raise _invalid(text, "a tcp endpoint is tcp:// and a numeric address and port", fix)
        if address.is_unspecified:
            problem = "it would listen on every interface of this host"
            raise _invalid(text, problem, "name the address of one interface")
        port = int(found[3])
        if not 1 <= port <= MAX_PORT - (len(SOCKETS) - 1):
            problem = "the sockets take four ports from this one on"
            raise _invalid(text, problem, f"use a port from 1 to {MAX_PORT - (len(SOCKETS) - 1)}")
        host = f"[{address}]" if address.version == 6 else str(address)
        return cls(
            host, port, state_dir / TCP_DIRECTORY / f"{str(address).replace(':', '.')}-{port}"
        )

    def address(self, socket: str) -> str:
        """Return the address that zmq binds for one of SOCKETS."""
        return f"tcp://{self.host}:{self.port + SOCKETS.index(socket)}"


def _invalid(endpoint: str, message: str, fix: str) -> ConfigError:
    return config_error("endpoint", endpoint, message, fix)


AnyEndpoint: TypeAlias = IpcEndpoint | TcpEndpoint


CLOSED_TO_OTHERS: Final = 0o077
"""Permission bits that an endpoint's directory must not have: a user who can open the sockets can
drive the daemon."""


class EndpointLock:
    """The flock on an endpoint, from construction to `release`. Owned by the main thread."""

    def __init__(self, endpoint: AnyEndpoint) -> None:
        """Take the lock.

        Raises:
            EndpointInUseError: another process holds it; the message names that process if
                possible.
            ConfigError: the lock file cannot be opened, or is not a regular file of ours.
            StartLaterError: there is no room for the file now.
        """
        self._endpoint = endpoint
        path = endpoint.lock_path
        with Translation((LockHeldError, OSError), self._typed):
            self._file = LockFile(
                path, lambda: open_own_file(path, os.O_RDWR | os.O_CREAT), LOCK_PATIENCE_S
            )
            try:
                self._file.write_pid()
            except OSError:
                self._file.release()
                raise

    def keep(self) -> None:
        """Check that the lock still keeps other daemons off; if its file was removed, lock a new
        one.

        Raises:
            EndpointInUseError: another process has put its own lock there, or none can be made.
        """
        if self.is_held():
            return
        try:
            with Translation((LockHeldError, OSError), self._typed):
                self._file.renew(LOCK_PATIENCE_S)
                self._file.write_pid()
        except WorkerError as error:
            problem = f"the endpoint's lock file was removed, and cannot be made again: {error}"
            fix = "keep other processes from removing files of the endpoint's directory"
            raise EndpointInUseError(
                problem, field="endpoint", value=str(self._endpoint), fix=fix
            ) from error

    def is_held(self) -> bool:
        """Return True if the lock file is still the one that we locked."""
        return self._file.is_held()

    def release(self) -> None:
        """Remove the file if it is ours, and unlock it."""
        self._file.release()

    def _typed(self, error: Exception) -> WorkerError:
        if isinstance(error, LockHeldError):
            problem = f"{error} serves this endpoint"
            fix = "choose another endpoint or stop that daemon"
            return EndpointInUseError(problem, field="endpoint", value=str(self._endpoint), fix=fix)
        assert isinstance(error, OSError)
        path = self._endpoint.lock_path
        message = f"the endpoint's lock {path} cannot be used: {error.strerror}"
        fix = f"remove {path} if it is not a daemon's, or choose another endpoint"
        return unusable(error, message, "endpoint", path, fix)


class SocketFiles:
    """The files of an endpoint's sockets, identified by inode and time at binding: the files of a
    daemon that has taken the endpoint over are left alone. An inode alone is not enough: its number
    is reused once our sockets are closed. Owned by the main thread, which holds the endpoint's
    lock."""

    def __init__(self, endpoint: AnyEndpoint) -> None:
        """Check the paths: libzmq would remove any file there.

        Raises:
            ConfigError: a file other than a socket is at a socket's path.
        """
        self._paths = endpoint.socket_paths
        self._bound: dict[Path, os.stat_result] = {}
        for path in self._paths:
            facts = _facts(path)
            if facts is not None and not stat.S_ISSOCK(facts.st_mode):
                problem = f"{path} exists already, and is no socket"
                fix = f"remove {path}, or choose another endpoint"
                raise config_error("endpoint", str(endpoint), problem, fix)

    def are_bound(self) -> None:
        """Record the files that were bound."""
        self._bound = {path: facts for path in self._paths if (facts := _facts(path)) is not None}

    def missing(self) -> list[Path]:
        """Return the paths where our files are missing."""
        return [path for path in self._paths if path in self._bound and not self._is_ours(path)]

    def remove(self) -> None:
        """Remove our files."""
        for path in self._bound:
            if self._is_ours(path):
                with contextlib.suppress(OSError):
                    path.unlink()
        self._bound.clear()

    def _is_ours(self, path: Path) -> bool:
        facts, bound = _facts(path), self._bound[path]
        if facts is None or not os.path.samestat(facts, bound):
            return False
        return facts.st_mtime_ns == bound.st_mtime_ns


def _facts(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Make every file of the block 0600 or 0700. Main thread only, before other threads run: the
    umask belongs to the process."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)
