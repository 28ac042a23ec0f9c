"""Directories that belong to this user alone, for what nobody else may change. Knows nothing of
what is kept there."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from worker_daemon.errors import ConfigError

_APPLICATION = "worker-daemon"


def state_home(state_dir: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return where a daemon keeps what outlives it: its state directory or, without one, a
    directory in the user's cache (XDG Base Directory Specification 0.8), which all daemons share.
    None: this user has no home directory."""
    if state_dir is not None:
        return state_dir
    chosen = Path(environment.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen / _APPLICATION
    try:
        return Path.home() / ".cache" / _APPLICATION
    except RuntimeError:
        return None


def claim_directory(directory: Path, purpose: str, field: str) -> Path:
    """Make the directory and what is missing above it (0700), or check that it is ours and that
    nobody else may write there.

    purpose: what it is for, in the error's words; field: the option that names it.

    Raises:
        ConfigError: it cannot be made, is a link, or others may write there.
    """
    try:
        for path in (*reversed(directory.parents), directory):
            path.mkdir(mode=0o700, exist_ok=True)
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
