"""Ensures one daemon per GPU, by a lock file named by the GPU's UUID. All daemons of the host share
its directory, even if different users run them."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

from rpc_schema.errors import ConfigError
from worker_daemon.errors import config_error
from worker_daemon.server.lock_file import LockFile, LockHeldError

PATIENCE_S: Final = 1.0
"""Time to wait for the lock: a daemon that was just killed holds its GPU until the kernel has freed
its memory."""
_READ_BY_ALL: Final = 0o644
"""Other users read the pid there; locking needs no write permission."""


class GpuInUseError(ConfigError):
    """Another daemon has this GPU. The process ends with exit code 73."""


class GpuLock:
    """The flock on a GPU's file. Owned by the main thread."""

    def __init__(self, uuid: str, directory: Path) -> None:
        """Take the lock. uuid: as NVML reports it; a MIG slice has its own, so slices do not
        conflict.

        Raises:
            GpuInUseError: another process holds it; the message names that process if possible.
            ConfigError: the file cannot be created or locked, or is not a regular file.
        """
        self._path = directory / f"worker-daemon-{uuid}.lock"
        self._uuid = uuid
        try:
            self._file = LockFile(self._path, self._open, PATIENCE_S)
        except LockHeldError as error:
            raise self._in_use(error) from None
        except OSError as error:
            raise config_error(
                "gpu-lock-dir",
                str(directory),
                f"the GPU's lock {self._path} cannot be used: {error.strerror}",
                "remove the file if no daemon owns it, choose a directory that only the users of "
                "this host's daemons may write, or use --share-gpu",
            ) from error
        self._write_pid()

    def keep(self) -> None:
        """Check that the lock still keeps other daemons off the GPU; if its file was removed, make
        and lock it again. Raises GpuInUseError."""
        if self._file.is_held():
            return
        try:
            self._file.renew(0.0)
        except LockHeldError as error:
            raise self._in_use(error) from None
        except OSError:
            return  # other daemons cannot access it either: the next call tries again
        self._write_pid()

    def release(self) -> None:
        """Unlock; the process should end soon after, which frees the GPU."""
        self._file.release()

    def _write_pid(self) -> None:
        with contextlib.suppress(OSError):  # another user's file: its pid is stale
            self._file.write_pid()

    def _open(self) -> int:
        """Open the file, never through a link and never waiting for a FIFO's other end. An existing
        file is opened without O_CREAT: in a directory like /tmp Linux refuses that for another
        user's file (sysctl/fs.rst, protected_regular)."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        while True:
            with contextlib.suppress(FileNotFoundError):
                try:
                    return _regular(os.open(self._path, flags | os.O_RDWR))
                except PermissionError:
                    return _regular(os.open(self._path, flags | os.O_RDONLY))
            with contextlib.suppress(FileExistsError):
                fd = os.open(self._path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, _READ_BY_ALL)
                os.fchmod(fd, _READ_BY_ALL)
                return fd

    def _in_use(self, error: LockHeldError) -> GpuInUseError:
        problem = f"{error} has the GPU {self._uuid} ({self._path})"
        fix = (
            "stop that process, choose another device, share it on purpose by --share-gpu, or "
            "give --gpu-lock-dir with a directory that no other users may write"
        )
        return GpuInUseError(problem, field="device", value=self._uuid, fix=fix)


def _regular(fd: int) -> int:
    """Return the descriptor of a regular file. Raises OSError for any other."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a regular file")


def lock_directory(chosen: Path | None) -> Path:
    """Return the directory of the locks of all daemons of this host: the chosen one, otherwise
    /run/lock if every user may write there, otherwise /tmp.

    Raises:
        ConfigError: the chosen path is not a directory.
    """
    if chosen is not None:
        if not chosen.is_dir():
            problem = f"it cannot be used: {os.strerror(errno.ENOTDIR)}"
            fix = "make it, for all users whose daemons share this host"
            raise config_error("gpu-lock-dir", str(chosen), problem, fix)
        return chosen
    system = Path("/run/lock")
    return system if os.access(system, os.W_OK | os.X_OK) else Path("/tmp")
