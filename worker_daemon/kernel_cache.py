"""Where compiled kernels stay between two starts. What lies there is loaded and run, so nobody else
may write there. Knows no compiler and reads no environment of its own accord."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from worker_daemon.errors import ConfigError

_NAME = "kernels"
_APPLICATION = "worker-daemon"


def kernel_cache(state_dir: Path | None, environment: Mapping[str, str]) -> Path:
    """Make and check the directory: in the daemon's state directory or, without one, in the user's
    cache directory (XDG Base Directory Specification 0.8), where all daemons share it.

    Raises:
        ConfigError: it cannot be made, or others may write there.
    """
    home = _user_cache(environment) / _APPLICATION if state_dir is None else state_dir
    for directory in (home, home / _NAME):
        _claim(directory)
    return home / _NAME


def _user_cache(environment: Mapping[str, str]) -> Path:
    chosen = Path(environment.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory for compiled kernels",
            field="state-dir",
            fix="give --state-dir, or set XDG_CACHE_HOME",
        ) from None


def _claim(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.lstat()
    except OSError as error:
        raise _unusable(directory, f"cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise _unusable(directory, "is no directory")
    if facts.st_uid != os.geteuid():
        raise _unusable(directory, f"belongs to user {facts.st_uid}")
    if stat.S_IMODE(facts.st_mode) & 0o022:
        raise _unusable(directory, f"has mode {stat.S_IMODE(facts.st_mode):04o}")


def _unusable(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{directory}, for compiled kernels, {why}",
        field="state-dir",
        value=str(directory),
        fix="give --state-dir with a directory that only this user may write",
    )
