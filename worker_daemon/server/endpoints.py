"""Where a daemon listens: parsing of ipc and tcp endpoints, their directory, lock and socket files.
Opens no socket."""

import contextlib
import fcntl
import ipaddress
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from worker_daemon.errors import ConfigError

MAX_PATH_BYTES: Final = 107
"""sockaddr_un's 108 bytes less the final zero."""

LOCK_PATIENCE_S: Final = 0.1
"""A lock that is held for no longer is one of a daemon that looks for dead ones' files."""

SOCKETS: Final = ("control", "step", "results", "events")
MAX_PORT: Final = 65535


class EndpointInUseError(ConfigError):
    """Another daemon serves this endpoint. The process ends with exit code 73."""


TCP_DIRECTORY: Final = "tcp"
_HOST_AND_PORT: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An `ipc://DIR/NAME` address: the control socket's; the other sockets' paths append to it."""

    path: Path

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Parse an endpoint.

        Raises:
            ConfigError: not ipc, not absolute, or too long for a Unix socket.
        """
        path = Path(text.removeprefix("ipc://"))
        if not text.startswith("ipc:///") or not path.name or "\0" in text:
            raise ConfigError(
                "an endpoint is ipc:// and an absolute path",
                field="endpoint",
                value=text,
                fix="use ipc:///DIR/NAME or, with keys, tcp://ADDRESS:PORT",
            )
        endpoint = cls(path)
        longest = max(len(os.fsencode(endpoint.socket_path(name))) for name in SOCKETS)
        if longest > MAX_PATH_BYTES:
            raise ConfigError(
                f"its longest socket path has {longest} bytes; the limit is {MAX_PATH_BYTES}",
                field="endpoint",
                value=text,
                fix="use a shorter directory or name",
            )
        return endpoint

    def socket_path(self, socket: str) -> Path:
        """Return the file of one of SOCKETS."""
        return (
            self.path if socket == "control" else self.path.with_name(f"{self.path.name}.{socket}")
        )

    def address(self, socket: str) -> str:
        """Return what zmq binds for one of SOCKETS."""
        return f"ipc://{self.socket_path(socket)}"

    @property
    def lock_path(self) -> Path:
        """The file whose flock says that a daemon lives here; holds its pid."""
        return self.path.with_name(f"{self.path.name}.lock")

    @property
    def socket_paths(self) -> tuple[Path, ...]:
        """The files of all sockets."""
        return tuple(self.socket_path(name) for name in SOCKETS)

    def __str__(self) -> str:
        return f"ipc://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """A `tcp://ADDRESS:PORT` address: the control socket's; the others have the next ports. What it
    needs in the file system lies in the state directory."""

    host: str
    """An address of this host; of IPv6 in brackets."""
    port: int
    path: Path
    """Stands for the endpoint in the file system: no file itself."""

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
            raise ConfigError(
                "a tcp endpoint is tcp:// and a numeric address and port",
                field="endpoint",
                value=text,
                fix="use tcp://ADDRESS:PORT with an address of this host, [...] around IPv6",
            )
        if address.is_unspecified:
            raise ConfigError(
                "it would listen on every interface of this host",
                field="endpoint",
                value=text,
                fix="name the address of one interface",
            )
        port = int(found[3])
        if not 1 <= port <= MAX_PORT - (len(SOCKETS) - 1):
            raise ConfigError(
                "the sockets take four ports from this one on",
                field="endpoint",
                value=text,
                fix=f"use a port from 1 to {MAX_PORT - (len(SOCKETS) - 1)}",
            )
        host = f"[{address}]" if address.version == 6 else str(address)
        return cls(
            host, port, state_dir / TCP_DIRECTORY / f"{str(address).replace(':', '.')}-{port}"
        )

    def address(self, socket: str) -> str:
        """Return what zmq binds for one of SOCKETS."""
        return f"tcp://{self.host}:{self.port + SOCKETS.index(socket)}"

    @property
    def lock_path(self) -> Path:
        """The file whose flock says that a daemon lives here; holds its pid."""
        return self.path.with_name(f"{self.path.name}.lock")

    @property
    def socket_paths(self) -> tuple[Path, ...]:
        """None: ports have no files."""
        return ()

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


AnyEndpoint: TypeAlias = Endpoint | TcpEndpoint


def prepare_directory(directory: Path) -> None:
    """Make `directory` (0700), or check that it is ours and closed to others.

    Raises:
        ConfigError: it cannot be made, belongs to somebody else, or is open to others.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"the endpoint's directory cannot be made: {error.strerror}",
            field="endpoint",
            value=str(directory),
            fix="choose a directory that this user may create",
        ) from error
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            f"the endpoint's directory belongs to user {facts.st_uid}",
            field="endpoint",
            value=str(directory),
            fix=f"use a directory of user {os.geteuid()}",
        )
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"the endpoint's directory has mode {mode:04o}: others could drive the daemon",
            field="endpoint",
            value=str(directory),
            fix=f"chmod 0700 {directory}",
        )


class EndpointLock:
    """The flock on an endpoint, from construction to `release`. Owned by the main thread."""

    def __init__(self, endpoint: AnyEndpoint) -> None:
        """Take the lock.

        Raises:
            EndpointInUseError: another process holds it; the message names its pid.
        """
        self._path = endpoint.lock_path
        self._fd = _lock(endpoint)
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Remove the file, then let go: in this order nobody locks a file that is about to vanish
        unnoticed."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _lock(endpoint: AnyEndpoint) -> int:
    """Open and lock the file that is at the path now: one that was removed while we waited does not
    count."""
    give_up = time.monotonic() + LOCK_PATIENCE_S
    while True:
        fd = os.open(endpoint.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if time.monotonic() < give_up:
                time.sleep(LOCK_PATIENCE_S / 5)
                continue
            raise EndpointInUseError(
                f"the daemon with pid {holder} serves this endpoint",
                field="endpoint",
                value=str(endpoint),
                fix="choose another endpoint or stop that daemon",
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), endpoint.lock_path.stat()):
                return fd
        os.close(fd)


def remove_sockets(endpoint: AnyEndpoint) -> None:
    """Remove the socket files; for the holder of the lock."""
    for path in endpoint.socket_paths:
        path.unlink(missing_ok=True)


def remove_if_empty(directory: Path) -> None:
    """Remove a directory that nobody else uses."""
    with contextlib.suppress(OSError):
        directory.rmdir()


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Make every file of the block 0600 or 0700. For the main thread before others run: a umask is
    the process's."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)
