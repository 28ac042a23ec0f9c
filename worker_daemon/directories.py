"""Directories that belong only to this user, and the files in them. Only this module claims
directories and opens files there."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rpc_schema.errors import ConfigError
from worker_daemon.errors import StartLaterError, config_error
from worker_host.safe_paths import WRITABLE_BY_OTHERS, why_unsafe

_APPLICATION = "worker-daemon"
_TRANSIENT: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)
)
"""System errors after which the same start may succeed later."""


def state_home(state_dir: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the files that outlive a daemon: its state directory or, without one,
    a directory in the user's cache (XDG Base Directory Specification 0.8), which all daemons share.
    None if this user has no home directory."""
    if state_dir is not None:
        return state_dir
    chosen = Path(environment.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen / _APPLICATION
    try:
        return Path.home() / ".cache" / _APPLICATION
    except RuntimeError:
        return None


def claim_directory(
    directory: Path, purpose: str, field: str, *, forbidden: int = WRITABLE_BY_OTHERS
) -> Path:
    """Make the directory and its missing parents (0700), or check that it is ours and that no other
    user can change its files.

    purpose: of the directory, for errors; field: the option that names it; forbidden: permission
    bits that it must not have.

    Raises:
        ConfigError: it cannot be made, is a link, or other users can change its files.
        StartLaterError: there is no room for it now.
    """
    try:
        for path in (*reversed(directory.parents), directory):
            path.mkdir(mode=0o700, exist_ok=True)
        owner = directory.lstat().st_uid
        why = why_unsafe(directory, forbidden=forbidden)
    except OSError as error:
        what = f"{directory}, for {purpose}, cannot be made: {error.strerror}"
        raise unusable(error, what, field, directory) from error
    if owner != os.geteuid():  # not even root's: we could not protect it
        why = f"belongs to user {owner}"
    if why:
        fix = _fix(directory, why, field, forbidden)
        raise config_error(field, str(directory), f"{directory}, for {purpose}, {why}", fix)
    return directory


def _fix(directory: Path, why: str, field: str, forbidden: int) -> str:
    other = f"give {_shown(field)} with a directory that only user {os.geteuid()} may write"
    if not why.startswith("has mode"):
        return other
    mode = 0o777 & ~forbidden & ~0o022
    return f"chmod {mode:04o} {directory} if no other user has put files there, or {other}"


def unusable(
    error: OSError, message: str, field: str, place: Path, fix: str = ""
) -> ConfigError | StartLaterError:
    """Return the error for a file or directory that the system refuses: StartLaterError if the same
    start may succeed later, otherwise ConfigError."""
    if error.errno in _TRANSIENT:
        return StartLaterError(
            message,
            field=field,
            value=str(place),
            fix="make room (disk, inodes, memory, open files), then start again",
        )
    return config_error(
        field,
        str(place),
        message,
        fix or f"give {_shown(field)} with a directory that user {os.geteuid()} may write",
    )


def _shown(field: str) -> str:
    """Return the name of an option, or of an environment variable."""
    return field if field.isupper() else f"--{field}"


def open_own_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file in a claimed directory; return its descriptor. Follows no link and never
    waits for the other end of a FIFO.

    Raises:
        OSError: as open(2); EPERM if it is not a regular file, or another user's.
    """
    always = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags | always, mode)
    facts = os.fstat(fd)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, "it is not a regular file of this user", str(path))


def lock_directory(directory: Path, content: str, field: str) -> int:
    """Return a descriptor that locks a claimed directory until it is closed, or the process ends.

    content: what daemons keep there, for errors; field: the option that names it.

    Raises:
        ConfigError: another daemon has it.
        StartLaterError: there is no room for a lock now.
    """
    path = directory / "lock"
    try:
        fd = open_own_file(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        what = f"{path} cannot be opened: {error.strerror}"
        raise unusable(error, what, field, directory) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        problem = f"another daemon keeps its {content} in {directory}"
        raise config_error(field, str(directory), problem, "give each daemon its own") from error
    return fd


def replace_own_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically; it is on disk when this returns. For one writer at a
    time.

    Raises:
        OSError: it cannot be written; an existing file stays as it was.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.unlink(missing_ok=True)  # left by a killed process
    fd = open_own_file(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
