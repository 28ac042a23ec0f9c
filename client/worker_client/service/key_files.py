"""Files of API keys: one key a line."""

import os
from pathlib import Path
from typing import Final

from worker_client.errors import config_error

MAX_BYTES: Final = 64 << 10
MIN_CHARACTERS: Final = 8
FORBIDDEN_MODE: Final = 0o037
"""Permissions that a file must not give: any to others, and more than reading to its group."""


def read_keys_of(field: str, given: str | None, path: Path | None) -> tuple[str, ...]:
    """Return the keys of an option and of a file; none if there is neither. Lines that are
    empty, or begin with #, are skipped. Raises ClientConfigError, which shows no key."""
    keys = [] if given is None else [given]
    if path is not None:
        keys += _lines(f"{field}_file", path)
    for key in keys:
        if len(key) < MIN_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            fix = f"use at least {MIN_CHARACTERS} printable ASCII characters, without spaces"
            raise config_error(field, f"{len(key)} characters", "it is no key", fix)
    return tuple(keys)


def _lines(field: str, path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & FORBIDDEN_MODE:
                problem = f"others may read or change it (mode {mode & 0o777:o})"
                raise config_error(field, str(path), problem, f"chmod 600 {path}")
            text = file.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or 'it is no UTF-8'}"
        raise config_error(field, str(path), problem, "name a file with one key a line") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or len(text) > MAX_BYTES:
        problem = "it has no key, or too many"
        raise config_error(field, str(path), problem, "write one key a line")
    return keys
