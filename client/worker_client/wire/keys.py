"""The driver's key pair and the public keys of the daemons that it trusts: their files, and the
options of a socket."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from worker_client.errors import EndpointError, config_error
from worker_host.key_files import KeyFileError, SecretKey, read_known_daemons, read_secret_key

CREDENTIAL_PREFIX: Final = "credential:"
HANDSHAKE_MS: Final = 700
"""Handshake timeout, shorter than a daemon's (worker_daemon/server/auth/security.py), so that the
silence of a busy one does not look like a refusal."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The keys of a connection to one daemon: our pair, and the daemon's public key."""

    own: SecretKey
    daemon_key: str

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the options for the next connect()."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret_key.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.daemon_key.encode())


@dataclass(frozen=True, slots=True)
class Keys:
    """A driver's key pair, and the public keys of the daemons that it trusts."""

    own: SecretKey | None = None
    """None: the driver reaches only ipc endpoints whose directory other users cannot open."""
    known: Mapping[str, str] = field(default_factory=dict)
    """Public keys by endpoint. With a pair, every daemon must be among them."""

    def lock(self, endpoint: str) -> Lock | None:
        """Return the keys for a daemon; None without keys.

        Raises:
            EndpointError: the endpoint needs keys, or its daemon's key is unknown.
        """
        if self.own is None:
            if endpoint.startswith("tcp://"):
                fix = "use --key-file and --known-daemons, a driver keys=Keys(...)"
                raise EndpointError("tcp needs keys", endpoint, fix)
            return None
        key = self.known.get(endpoint)
        if key is None:
            fix = "add it, spelled the same, to the file of --known-daemons"
            raise EndpointError("the daemon's key is unknown", endpoint, fix)
        return Lock(self.own, key)


NO_KEYS: Final = Keys()


def read_keys(key_file: str | None, known_daemons: Path | None) -> Keys:
    """Read a driver's two files; without either there are no keys. `credential:NAME` is a file in
    systemd's directory of credentials.

    Raises:
        ClientConfigError: one is given without the other, or cannot be used.
    """
    if key_file is None and known_daemons is None:
        return NO_KEYS
    if key_file == "":
        fix = "name the file, or leave out both --key-file and --known-daemons"
        raise config_error("key_file", key_file, "it is empty", fix)
    if key_file is None or known_daemons is None:
        problem = "one is useless without the other"
        fix = "give both --key-file and --known-daemons"
        missing = "key_file" if key_file is None else "known_daemons"
        raise config_error(missing, None, problem, fix)
    try:
        own = _read_own(key_file)
        return Keys(own, read_known_daemons(known_daemons, "known_daemons"))
    except KeyFileError as error:
        raise config_error(error.field, error.value, error.message, error.fix) from None


def _read_own(key_file: str) -> SecretKey:
    name = key_file.removeprefix(CREDENTIAL_PREFIX)
    is_credential = name != key_file
    path = Path(key_file)
    if is_credential:
        directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
        if not directory or name != Path(name).name:
            fix = "use LoadCredential=NAME:FILE in the systemd unit"
            raise KeyFileError("key_file", key_file, "there is no such credential", fix)
        path = Path(directory) / name
    key = read_secret_key(path, "key_file", group_may_read=is_credential)
    if zmq.curve_public(key.secret_key.encode()).decode() != key.public_key:
        fix = "make a new one by worker-daemon keygen"
        raise KeyFileError("key_file", str(path), "its two keys are not a pair", fix)
    return key
