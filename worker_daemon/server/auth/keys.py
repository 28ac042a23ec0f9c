"""The daemon's own key pair, and the authorized keys."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import zmq

from rpc_schema.errors import ConfigError
from rpc_schema.roles import Role
from worker_daemon.errors import config_error
from worker_host.key_files import (
    AuthorizedKey,
    KeyFileError,
    fingerprint,
    read_authorized_keys,
    read_secret_key,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """A daemon's key pair."""

    public_key: str
    secret_key: bytes = field(repr=False)


def read_identity(path: Path, *, is_credential: bool) -> Identity:
    """Read the daemon's secret file.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        key = read_secret_key(path, "key-file", group_may_read=is_credential)
    except KeyFileError as error:
        raise _config_error(error) from None
    secret = key.secret_key.encode()
    if zmq.curve_public(secret).decode() != key.public_key:
        fix = "make a new one by worker-daemon keygen"
        raise config_error("key-file", str(path), "the public and the secret key do not match", fix)
    return Identity(key.public_key, secret)


class KeyRights:
    """The keys that have rights. This class is for sockets without keys: it has none."""

    by_key: Mapping[str, AuthorizedKey] = MappingProxyType({})
    """The rights of each public key. Never changed in place: as long as it is the same object, no
    right has changed."""


class AuthorizedKeys(KeyRights):
    """The authorized keys and their roles. Reloaded by the main thread; any thread may read
    them."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it cannot be used."""
        self._path = path
        try:
            self.by_key = _read(path)
        except KeyFileError as error:
            raise _config_error(error) from None

    def role(self, public_key: str) -> Role | None:
        """Return a key's role; None if it has no rights."""
        entry = self.by_key.get(public_key)
        return None if entry is None else entry.role

    def name(self, public_key: str) -> str:
        """Return a key's name, which is for people; empty for a key without rights."""
        entry = self.by_key.get(public_key)
        return "" if entry is None else entry.name

    def reload(self) -> bool:
        """Read the file again; return True if a key lost rights. A file that cannot be read changes
        nothing."""
        before = self.by_key
        try:
            self.by_key = _read(self._path)
        except KeyFileError as error:
            logger.error("the authorized keys were not reloaded: %s", error)
            return False
        logger.info("%d authorized keys", len(self.by_key))
        lessened = [key for key, entry in before.items() if not self._covers(key, entry.role)]
        if lessened:
            logger.info("keys with fewer rights: %s", ", ".join(map(fingerprint, lessened)))
        return bool(lessened)

    def _covers(self, key: str, former: Role) -> bool:
        role = self.role(key)
        return role is not None and role.covers(former)


def _read(path: Path) -> Mapping[str, AuthorizedKey]:
    return {entry.key: entry for entry in read_authorized_keys(path, "authorized-keys")}


def _config_error(error: KeyFileError) -> ConfigError:
    return config_error(error.field, error.value, error.message, error.fix)
