"""One daemon a GPU: a lock file named by the GPU's UUID, in a directory that all daemons of the
host share, whoever they belong to. Knows no NVML; creates no context."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from pathlib import Path
from typing import Final, Protocol

from worker_daemon.errors import ConfigError
from worker_daemon.server.lock_holder import describe_holder

PATIENCE_S: Final = 1.0
"""A daemon that was just killed holds its GPU until the kernel has freed its memory."""
_POLL_S: Final = 0.05
_READ_BY_ALL: Final = 0o644
"""Whoever finds it taken reads the pid there; the lock itself needs no right to write."""

logger = logging.getLogger(__name__)


class GpuInUseError(ConfigError):
    """Another daemon has this GPU. The process ends with exit code 73."""


class GpuLockLike(Protocol):
    """Held from its making on. Owned by the main thread."""

    def keep(self) -> None:
        """Make sure that it still keeps other daemons off the GPU. Raises GpuInUseError."""

    def release(self) -> None:
        """Let go; the process should end soon after, which frees the GPU."""


class NoGpuLock:
    """For the CPU, a GPU that NVML does not know, and GPUs that are shared on purpose."""

    def keep(self) -> None:
        """There is nothing to keep."""

    def release(self) -> None:
        """There is nothing to let go of."""


class GpuLock:
    """The flock on a GPU's file."""

    def __init__(self, uuid: str, directory: Path) -> None:
        """Take it. uuid: as NVML gives it: of a slice (MIG) its own, so that slices are not in each
        other's way.

        Raises:
            GpuInUseError: another process holds it; the message names it if it can be told.
            ConfigError: no file can be made or locked there, or what is there is no regular file.
        """
        self._path = directory / f"worker-daemon-{uuid}.lock"
        self._uuid = uuid
        try:
            self._fd = self._lock(PATIENCE_S)
        except OSError as error:
            raise ConfigError(
                f"the GPU's lock {self._path} cannot be used: {error.strerror}",
                field="gpu-lock-dir",
                value=str(directory),
                fix="remove the file if it is no daemon's, name a directory that only the users of "
                "this host's daemons may write, or --share-gpu",
            ) from error
        self._write_pid()

    def keep(self) -> None:
        """See GpuLockLike. A file that was removed is made again, and locked."""
        try:
            if self._is_there(self._fd):
                return
            renewed = self._lock(0.0)
        except OSError:
            return  # out of reach, for other daemons too: the next call tries again
        os.close(self._fd)
        self._fd = renewed
        self._write_pid()
        logger.warning("%s was removed, and is there again", self._path)

    def release(self) -> None:
        """See GpuLockLike. The file goes first: then nobody locks one that is about to vanish."""
        with contextlib.suppress(OSError):  # another user's file stays
            if self._is_there(self._fd):
                self._path.unlink()
        os.close(self._fd)

    def _write_pid(self) -> None:
        with contextlib.suppress(OSError):  # another user's file: its pid is an old one
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _is_there(self, fd: int) -> bool:
        """Tell whether the path leads to this file. Raises OSError where that cannot be told."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), self._path.lstat())
        return False

    def _lock(self, patience_s: float) -> int:
        give_up = time.monotonic() + patience_s
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(fd):
                    return fd
            except BlockingIOError:
                holder = describe_holder(fd)
                os.close(fd)
                if time.monotonic() >= give_up:
                    raise self._in_use(holder) from None
                time.sleep(_POLL_S)
                continue
            except OSError:
                os.close(fd)
                raise
            os.close(fd)  # removed while we waited: it does not count

    def _open(self) -> int:
        """Open the file, never through a link and never waiting for a FIFO's other end. One that
        is there is opened as it is: in a directory like /tmp Linux refuses to open another user's
        for creation (sysctl/fs.rst, protected_regular)."""
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

    def _in_use(self, holder: str) -> GpuInUseError:
        return GpuInUseError(
            f"{holder} has the GPU {self._uuid} ({self._path})",
            field="device",
            value=self._uuid,
            fix="stop that process, choose another device, share it on purpose by --share-gpu, or "
            "give --gpu-lock-dir with a directory that no other users may write",
        )


def _regular(fd: int) -> int:
    """Return the descriptor, of a regular file. Raises OSError."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file")


def lock_directory(chosen: Path | None) -> Path:
    """Return where the locks of all daemons of this host lie: /run/lock where everybody may write
    there, else /tmp, unless another directory was chosen.

    Raises:
        ConfigError: the chosen one is no directory.
    """
    if chosen is not None:
        if not chosen.is_dir():
            raise ConfigError(
                f"it cannot be used: {os.strerror(errno.ENOTDIR)}",
                field="gpu-lock-dir",
                value=str(chosen),
                fix="make it, for all users whose daemons share this host",
            )
        return chosen
    system = Path("/run/lock")
    return system if os.access(system, os.W_OK | os.X_OK) else Path("/tmp")
