"""The files of keys and tokens of drivers and daemons: their formats, and functions that read them
after checking that no other user could read or change them."""

import os
import stat
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from rpc_schema.roles import Role

MAX_FILE_BYTES: Final = 1 << 20
FINGERPRINT_CHARS: Final = 8
MIN_TOKEN_CHARS: Final = 16
MAX_TOKEN_CHARS: Final = 512

Z85Key = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")]
"""32 bytes in Z85 (ZeroMQ RFC 32)."""
FileT = TypeVar("FileT")


class SecretKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret file: one key pair of one daemon or driver."""

    kind: Literal["worker-daemon secret key"]
    public_key: Z85Key
    secret_key: Z85Key

    def __repr__(self) -> str:
        return f"SecretKey({fingerprint(self.public_key)})"


class PublicKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public file, for the other side."""

    kind: Literal["worker-daemon public key"]
    public_key: Z85Key


class AuthorizedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of a daemon's authorized keys."""

    key: Z85Key
    role: Role
    name: Annotated[str, Meta(max_length=128)]
    """For people; never used in a decision."""


class KeyFileError(Exception):
    """A key file cannot be used. `field` names the option, `fix` says what to do. The error never
    contains a key."""

    def __init__(self, field: str, value: str, message: str, fix: str) -> None:
        super().__init__(f"{message}; field {field} = {value!r}; fix: {fix}")
        self.message = message
        self.field = field
        self.value = value
        self.fix = fix


def fingerprint(public_key: str) -> str:
    """Return the part of a key that logs may contain."""
    return public_key[:FINGERPRINT_CHARS]


def read_secret_key(path: Path, field: str, *, group_may_read: bool = False) -> SecretKey:
    """Read a secret file. group_may_read: for systemd's credentials, whose directory is closed to
    others, and whose access lists appear as group permissions.

    Raises:
        KeyFileError: it is missing, malformed or owned by another user, or others may read or write
            it.
    """
    allowed = 0o440 if group_may_read else 0o400
    data = _read(path, field, forbidden=0o777 & ~allowed & ~0o200, private=True)
    return _decode(data, SecretKey, path, field, "make one by worker-daemon keygen")


def read_authorized_keys(path: Path, field: str) -> tuple[AuthorizedKey, ...]:
    """Read a daemon's authorized keys: [{"key": ..., "role": ..., "name": ...}, ...].

    Raises:
        KeyFileError: it is missing or malformed, names a key twice, or others may write it.
    """
    data = _read(path, field, forbidden=0o022, private=False)
    fix = 'write [{"key": "...", "role": "driver", "name": "..."}]'
    entries = _decode(data, tuple[AuthorizedKey, ...], path, field, fix)
    if len({entry.key for entry in entries}) != len(entries):
        raise KeyFileError(field, str(path), "a key is named twice", "keep one")
    return entries


def read_known_daemons(path: Path, field: str) -> dict[str, str]:
    """Read a driver's known daemons: {"ENDPOINT": "PUBLIC KEY", ...}.

    Raises:
        KeyFileError: it is missing or malformed, or others may write it.
    """
    data = _read(path, field, forbidden=0o022, private=False)
    return _decode(data, dict[str, Z85Key], path, field, 'write {"ENDPOINT": "PUBLIC KEY"}')


def read_token(path: Path, field: str, *, group_may_read: bool = False) -> str:
    """Read a file that holds one bearer token, perhaps with a newline after it. group_may_read: see
    read_secret_key.

    Raises:
        KeyFileError: as read_secret_key, or it is not one word of MIN_TOKEN_CHARS to
            MAX_TOKEN_CHARS printable ASCII characters.
    """
    allowed = 0o440 if group_may_read else 0o400
    data = _read(path, field, forbidden=0o777 & ~allowed & ~0o200, private=True)
    token = data.rstrip(b"\r\n")
    is_long_enough = MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS
    if not is_long_enough or not all(0x21 <= byte <= 0x7E for byte in token):
        problem = (
            f"the file does not hold one word of {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} characters"
        )
        fix = f"make one: (umask 077; openssl rand -hex 32 > {_shown(path)})"
        raise KeyFileError(field, _shown(path), problem, fix)
    return token.decode("ascii")


def encode_key_file(content: SecretKey | PublicKey) -> bytes:
    """Return a key file's bytes."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _read(path: Path, field: str, *, forbidden: int, private: bool) -> bytes:
    shown = _shown(path)
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # do not wait for a FIFO's other end
        with os.fdopen(os.open(path, flags), "rb") as file:
            facts = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        fix = "name a file that this user may read; never pass the key itself"
        raise KeyFileError(field, shown, problem, fix) from None
    if not stat.S_ISREG(facts.st_mode) or len(data) > MAX_FILE_BYTES:
        raise KeyFileError(field, shown, "it is not a key file", "name a JSON file")
    if facts.st_uid not in (os.geteuid(), 0):
        fix = f"give it to user {os.geteuid()} or to root"
        raise KeyFileError(field, shown, f"the file belongs to user {facts.st_uid}", fix)
    mode = stat.S_IMODE(facts.st_mode)
    if mode & forbidden:
        problem = f"the file has mode {mode:04o}: others may {'read' if private else 'change'} it"
        fix = f"chmod {'0400' if private else 'go-w'} {shown}" + (
            ", and make a new key if somebody may have read it" if private else ""
        )
        raise KeyFileError(field, shown, problem, fix)
    return data


def _decode(data: bytes, kind: type[FileT], path: Path, field: str, fix: str) -> FileT:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The message contains only the expected type and its place, nothing of a secret file.
        raise KeyFileError(field, _shown(path), f"the file is malformed: {error}", fix) from None


def _shown(path: Path) -> str:
    """Return the part of a path that an error may contain: the key itself may have been given as
    the path."""
    text = str(path)
    return text if path.exists() or len(path.name) != 40 else "(40 characters)"
