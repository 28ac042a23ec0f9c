"""`worker-daemon keygen`: makes a CURVE key pair and writes its two files. Overwrites nothing."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import zmq

from worker_daemon.errors import config_error
from worker_host.key_files import PublicKey, SecretKey, encode_key_file


class KeyFiles(NamedTuple):
    """The files of a new key pair."""

    secret: Path
    """Mode 0400."""
    public: Path
    public_key: str


def make_key_files(out: Path) -> KeyFiles:
    """Write OUT.key, which only this user may read, and OUT.pub; both or neither. A missing
    directory is made with mode 0700.

    Raises:
        ConfigError: one of them exists, or cannot be written.
    """
    secret, public = (out.with_name(f"{out.name}.{suffix}") for suffix in ("key", "pub"))
    public_key, secret_key = (part.decode() for part in zmq.curve_keypair())
    contents: dict[Path, tuple[SecretKey | PublicKey, int]] = {
        secret: (
            SecretKey(
                kind="worker-daemon secret key", public_key=public_key, secret_key=secret_key
            ),
            0o400,
        ),
        public: (PublicKey(kind="worker-daemon public key", public_key=public_key), 0o644),
    }
    written: list[Path] = []
    try:
        out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, (content, mode) in contents.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(path)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                file.write(encode_key_file(content))
                file.flush()
                os.fsync(descriptor)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise config_error(
            "out",
            str(error.filename or out),
            f"the key cannot be written: {error.strerror}",
            "name a new file, in a directory that this user may write; keys are never overwritten",
        ) from None
    return KeyFiles(secret, public, public_key)
