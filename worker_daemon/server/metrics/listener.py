"""The listening socket of metrics and health: a Unix socket in a directory that only this user can
enter, or a port whose readers show a token. Opened on the main thread, before its event loop."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rpc_schema.errors import CapacityError, ConfigError
from worker_daemon.directories import claim_directory, unusable
from worker_daemon.errors import config_error
from worker_daemon.server.wire.endpoints import (
    CLOSED_TO_OTHERS,
    MAX_PATH_BYTES,
    EndpointInUseError,
    private_umask,
)
from worker_daemon.settings import ProcessSettings
from worker_host.key_files import KeyFileError, read_token

FIELD: Final = "metrics-listen"
TOKEN_FIELD: Final = "metrics-token-file"
_UNIX: Final = "unix:"
_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")
_FORMS: Final = "use unix:/DIR/NAME or, with --metrics-token-file, ADDRESS:PORT"
_BACKLOG: Final = 16
_NEEDED: Final = "prometheus_client"


class MetricsListener:
    """A bound socket, and its file if it has one. Owned by the daemon's runtime files."""

    def __init__(
        self, bound: socket.socket, shown: str, token: str | None, path: Path | None
    ) -> None:
        """token: what readers of a port must show; path: file of a Unix socket."""
        self.socket = bound
        self.shown = shown
        self.token = token
        self._path = path
        self._facts = None if path is None else path.lstat()

    def release(self) -> None:
        """Close the socket and remove its file, unless another process has replaced it."""
        self.socket.close()
        if self._path is not None and self._facts is not None:
            with contextlib.suppress(OSError):
                facts = self._path.lstat()
                # A number of an inode is reused once our socket is closed.
                is_same = facts.st_mtime_ns == self._facts.st_mtime_ns
                if is_same and os.path.samestat(facts, self._facts):
                    self._path.unlink()


def open_listener(settings: ProcessSettings) -> MetricsListener | None:
    """Open the socket that --metrics-listen names; None without one.

    Raises:
        ConfigError: the value, its token or its directory cannot be used, or prometheus-client is
            not installed.
        EndpointInUseError: another process listens there.
        StartLaterError: the host has no room for the socket now.
    """
    place = settings.metrics_listen
    if not place:
        return None
    if find_spec(_NEEDED) is None:
        problem = f"metrics need the package prometheus-client: no module {_NEEDED}"
        raise config_error(FIELD, place, problem, 'pip install "worker-daemon[worker]"')
    if place.startswith(_UNIX):
        return _open_file(place, Path(place.removeprefix(_UNIX)))
    return _open_port(place, settings.metrics_token_file, settings.metrics_token_is_credential)


def _open_file(place: str, path: Path) -> MetricsListener:
    if not path.is_absolute() or not path.name or "\0" in place:
        raise config_error(FIELD, place, "unix: needs an absolute path", _FORMS)
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        problem = f"its path has {num_bytes} bytes; the limit is {MAX_PATH_BYTES}"
        raise config_error(FIELD, place, problem, "use a shorter directory or name")
    claim_directory(path.parent, "the metrics' socket", FIELD, forbidden=CLOSED_TO_OTHERS)
    _remove_dead(place, path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with private_umask():
        _bind(bound, str(path), place)
    return MetricsListener(bound, place, None, path)


def _remove_dead(place: str, path: Path) -> None:
    """Remove the socket of a daemon that was killed."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            problem, fix = f"{path} exists already, and is no socket", "remove it, or name another"
            raise config_error(FIELD, place, problem, fix)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(path)) == 0:
                raise _in_use(place)
        path.unlink()


def _open_port(place: str, token_file: Path | None, is_credential: bool) -> MetricsListener:
    found = _PORT.fullmatch(place)
    address = None
    if found is not None:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(found[1] or found[2])
    if found is None or address is None or (address.version == 6) != bool(found[1]):
        raise config_error(FIELD, place, "it is no place to listen at", _FORMS)
    if address.is_unspecified:
        problem = "it would listen on every interface of this host"
        raise config_error(FIELD, place, problem, "name the address of one interface")
    port = int(found[3])
    if not 1 <= port <= 65535:
        raise config_error(FIELD, place, f"{port} is no port", "use a port from 1 to 65535")
    if token_file is None:
        problem = "a port needs a token: every user of the host could read what is loaded"
        raise config_error(TOKEN_FIELD, None, f"{place}: {problem}", f"give --{TOKEN_FIELD} FILE")
    try:
        token = read_token(token_file, TOKEN_FIELD, group_may_read=is_credential)
    except KeyFileError as error:
        raise config_error(error.field, error.value, error.message, error.fix) from None
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _bind(bound, (str(address), port), place)
    return MetricsListener(bound, place, token, None)


def _bind(bound: socket.socket, address: str | tuple[str, int], place: str) -> None:
    try:
        bound.bind(address)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise _refused(error, place) from None


def _refused(error: OSError, place: str) -> ConfigError | CapacityError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(place)
    fix = "use an address of this host, or a directory that this user may write"
    problem = f"{place} cannot be bound: {error.strerror}"
    return unusable(error, problem, FIELD, Path(place), fix)


def _in_use(place: str) -> EndpointInUseError:
    problem = f"another process listens at {place}"
    fix = "name another place, or stop that process"
    return EndpointInUseError(problem, field=FIELD, value=place, fix=fix)
