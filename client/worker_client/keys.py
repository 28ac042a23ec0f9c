"""The driver's key pair and the keys of the daemons that it trusts. Reads their files and sets a
socket's options; knows no message."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import zmq

from rpc_schema.key_files import (
    KeyFileError,
    SecretKey,
    read_known_daemons,
    read_secret_key,
)
from worker_client.errors import ClientConfigError, EndpointError

CREDENTIAL_PREFIX: Final = "credential:"
HANDSHAKE_MS: Final = 700
"""Less than a daemon's (worker_daemon/server/auth/security.py), so that the silence of a busy one
is not taken for its refusal."""


class Lock(Protocol):
    """How a socket makes itself known to one daemon, and knows it."""

    @property
    def has_keys(self) -> bool:
        """Whether either side proves anything."""

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the options for the next connect()."""


class NoLock:
    """No keys: for ipc endpoints whose directory only this user can open."""

    has_keys = False

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """See Lock."""


class CurveLock:
    """Our key pair, and the public key of one daemon."""

    has_keys = True

    def __init__(self, own: SecretKey, daemon_key: str) -> None:
        self._own = own
        self._daemon_key = daemon_key

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """See Lock."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret_key.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._daemon_key.encode())


OPEN: Final = NoLock()


class Keys(Protocol):
    """Which lock a daemon has."""

    def lock(self, endpoint: str) -> Lock:
        """Return it. Raises EndpointError where the endpoint cannot be used so."""


class NoKeys:
    """A driver without keys reaches ipc endpoints alone."""

    def lock(self, endpoint: str) -> Lock:
        """See Keys."""
        if endpoint.startswith("tcp://"):
            raise EndpointError(
                "tcp needs keys",
                field="endpoint",
                value=endpoint,
                fix="use --key-file and --known-daemons, a driver keys=OwnKeys(...)",
            )
        return OPEN


class OwnKeys:
    """A driver with a key: every daemon that it talks to must be among those it knows."""

    def __init__(self, own: SecretKey, known: Mapping[str, str]) -> None:
        """known: public keys by endpoint."""
        self._own = own
        self._known = known

    def lock(self, endpoint: str) -> Lock:
        """See Keys."""
        key = self._known.get(endpoint)
        if key is None:
            raise EndpointError(
                "the daemon's key is not known",
                field="endpoint",
                value=endpoint,
                fix="add it, written alike, to the file of --known-daemons",
            )
        return CurveLock(self._own, key)


NO_KEYS: Final = NoKeys()


def read_keys(key_file: str, known_daemons: Path | None) -> Keys:
    """Read a driver's two files; without either there are no keys. `credential:NAME` is a file of
    systemd's directory of credentials.

    Raises:
        ClientConfigError: one is given without the other, or cannot be used.
    """
    if not key_file and known_daemons is None:
        return NO_KEYS
    if not key_file or known_daemons is None:
        raise ClientConfigError(
            "one is useless without the other",
            field="known_daemons" if key_file else "key_file",
            value=None,
            fix="give both --key-file and --known-daemons",
        )
    try:
        own = _read_own(key_file)
        return OwnKeys(own, read_known_daemons(known_daemons, "known_daemons"))
    except KeyFileError as error:
        raise ClientConfigError(
            error.message, field=error.field, value=error.value, fix=error.fix
        ) from None


def _read_own(key_file: str) -> SecretKey:
    name = key_file.removeprefix(CREDENTIAL_PREFIX)
    is_credential = name != key_file
    path = Path(key_file)
    if is_credential:
        directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
        if not directory or name != Path(name).name:
            raise KeyFileError(
                "there is no such credential",
                field="key_file",
                value=key_file,
                fix="use LoadCredential=NAME:FILE in the systemd unit",
            )
        path = Path(directory) / name
    key = read_secret_key(path, "key_file", group_may_read=is_credential)
    if zmq.curve_public(key.secret_key.encode()).decode() != key.public_key:
        raise KeyFileError(
            "its two keys are not a pair",
            field="key_file",
            value=str(path),
            fix="make a new one by worker-daemon keygen",
        )
    return key
