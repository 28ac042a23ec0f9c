"""Directories that belong to this user alone, for what nobody else may change. Knows nothing of
what is kept there."""

import os
import stat
from pathlib import Path

from worker_daemon.errors import ConfigError


def claim_directory(directory: Path, purpose: str, field: str) -> Path:
    """Make the directory (0700), or check that it is ours and that nobody else may write there.

    purpose: what it is for, in the error's words; field: the option that names it.

    Raises:
        ConfigError: it cannot be made, is a link, or others may write there.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.lstat()
    except OSError as error:
        raise _unusable(directory, purpose, field, f"cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise _unusable(directory, purpose, field, "is no directory")
    if facts.st_uid != os.geteuid():
        raise _unusable(directory, purpose, field, f"belongs to user {facts.st_uid}")
    if stat.S_IMODE(facts.st_mode) & 0o022:
        raise _unusable(directory, purpose, field, f"has mode {stat.S_IMODE(facts.st_mode):04o}")
    return directory


def _unusable(directory: Path, purpose: str, field: str, why: str) -> ConfigError:
    return ConfigError(
        f"{directory}, for {purpose}, {why}",
        field=field,
        value=str(directory),
        fix=f"give --{field} with a directory that only this user may write",
    )
