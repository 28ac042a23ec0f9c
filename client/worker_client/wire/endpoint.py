"""A daemon's endpoint: the addresses of its sockets, and their keys."""

import contextlib
import ipaddress
import os
from pathlib import Path
from typing import Final, NamedTuple

from worker_client.errors import EndpointError, config_error
from worker_client.wire.ipc_owner import SCHEME, check_owner
from worker_client.wire.keys import NO_KEYS, Keys, Lock

MAX_SOCKET_PATH_BYTES: Final = 107
MAX_PORT: Final = 65535


class Endpoint(NamedTuple):
    """The four addresses of a daemon, and the keys of its sockets."""

    control: str
    step: str
    results: str
    events: str
    lock: Lock | None = None


def parse_endpoint(text: str, keys: Keys = NO_KEYS) -> Endpoint:
    """Return the addresses of the daemon at `ipc://DIR/NAME` or `tcp://HOST:PORT`.

    Raises:
        EndpointError: another scheme, a relative path, a path too long for a Unix socket, no port,
            a daemon whose key is not known, or (UntrustedEndpointError) one without a key where
            another user's process may listen.
    """
    lock = keys.lock(text)
    if text.startswith("tcp://"):
        return _parse_tcp(text, lock)
    path = text.removeprefix("ipc://")
    if path == text or not Path(path).is_absolute() or path.endswith("/"):
        fix = "use ipc:///DIRECTORY/NAME or, with keys, tcp://HOST:PORT"
        raise EndpointError("not an endpoint", text, fix)
    if len(os.fsencode(path + ".results")) > MAX_SOCKET_PATH_BYTES:
        problem = f"the socket's path is longer than {MAX_SOCKET_PATH_BYTES} bytes with its suffix"
        raise EndpointError(problem, text, "use a directory with a shorter path")
    check_keyless_owner(text, lock)
    return Endpoint(text, f"{text}.step", f"{text}.results", f"{text}.events", lock)


def named_daemons(endpoints: str | None) -> tuple[str, ...]:
    """Return the endpoints of "EP,EP,...". Raises ClientConfigError if there are none."""
    names = split_endpoints(endpoints or "")
    if not names:
        raise config_error("endpoints", endpoints, "no daemon is named", "give EP,EP,...")
    return names


def split_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of "EP,EP,...", of which there may be none."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_tcp(text: str, lock: Lock | None) -> Endpoint:
    host, colon, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal()
    if not colon or not is_number or not _is_host(host.removeprefix("tcp://")):
        fix = "use tcp://HOST:PORT, an IPv6 address in brackets: tcp://[ADDRESS]:PORT"
        raise EndpointError("not an endpoint", text, fix)
    first = int(port)
    if not 1 <= first <= MAX_PORT - 3:
        problem = "the sockets use four ports from this one on"
        raise EndpointError(problem, text, f"use a port from 1 to {MAX_PORT - 3}")
    step, results, events = (f"{host}:{first + offset}" for offset in (1, 2, 3))
    return Endpoint(text, step, results, events, lock)


def _is_host(text: str) -> bool:
    """Return True for an IPv6 address in brackets, or text without colons: a name or an IPv4
    address."""
    if text.startswith("[") and text.endswith("]"):
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(text[1:-1])
            return True
    return bool(text) and not set(text) & set(":[]/")


def new_driver_id() -> bytes:
    """Return 16 random bytes for a driver's id, or for the routing id of its results socket. The
    first is not 0: ZeroMQ reserves routing ids that begin with 0."""
    random = os.urandom(16)
    return bytes([random[0] | 1]) + random[1:]


def check_keyless_owner(address: str, lock: Lock | None) -> None:
    """Check the owner of an ipc address, unless the daemon proves its identity by a key. Raises
    UntrustedEndpointError: see check_owner."""
    if lock is None and address.startswith(SCHEME):
        check_owner(address)
