"""Where compiled kernels stay between two starts. What lies there is loaded and run, so nobody else
may write there. Knows no compiler and reads no environment of its own accord."""

from collections.abc import Mapping
from pathlib import Path

from worker_daemon.directories import claim_directory, state_home
from worker_daemon.errors import ConfigError

_NAME = "kernels"


def kernel_cache(state_dir: Path | None, environment: Mapping[str, str]) -> Path:
    """Make and check the directory: in the daemon's state directory or, without one, in the user's
    cache directory (XDG Base Directory Specification 0.8), where all daemons share it.

    Raises:
        ConfigError: it cannot be made, or others may write there.
    """
    home = state_home(state_dir, environment)
    if home is None:
        raise ConfigError(
            "this user has no home directory for compiled kernels",
            field="state-dir",
            fix="give --state-dir, or set XDG_CACHE_HOME",
        )
    for directory in (home, home / _NAME):
        claim_directory(directory, "compiled kernels", "state-dir")
    return home / _NAME
