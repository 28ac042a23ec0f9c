"""One daemon a GPU: a lock file named by the GPU's UUID, in a directory that all daemons of the
host share, whoever they belong to. Knows no NVML; creates no context."""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final, Protocol

from worker_daemon.errors import ConfigError

PATIENCE_S: Final = 1.0
"""A daemon that was just killed holds its GPU until the kernel has freed its memory."""
_POLL_S: Final = 0.05
_READ_BY_ALL: Final = 0o644
"""Whoever finds it taken reads the pid there; the lock itself needs no right to write."""


class GpuInUseError(ConfigError):
    """Another daemon has this GPU. The process ends with exit code 73."""


class GpuLockLike(Protocol):
    """Held from its making on. Owned by the main thread."""

    def release(self) -> None:
        """Let go; the process should end soon after, which frees the GPU."""


class NoGpuLock:
    """For the CPU, a GPU that NVML does not know, and GPUs that are shared on purpose."""

    def release(self) -> None:
        """There is nothing to let go of."""


class GpuLock:
    """The flock on a GPU's file."""

    def __init__(self, uuid: str, directory: Path) -> None:
        """Take it. uuid: as NVML gives it: of a slice (MIG) its own, so that slices are not in each
        other's way.

        Raises:
            GpuInUseError: another process holds it; the message names its pid.
            ConfigError: no file can be made or locked there.
        """
        self._path = directory / f"worker-daemon-{uuid}.lock"
        try:
            self._fd = self._lock(uuid)
        except OSError as error:
            raise ConfigError(
                f"the GPU's lock {self._path} cannot be used: {error.strerror}",
                field="gpu-lock-dir",
                value=str(directory),
                fix="name a directory that all daemons of this host may write, or --share-gpu",
            ) from error
        with contextlib.suppress(OSError):  # another user's file: its pid is an old one
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """See GpuLockLike. The file goes first: then nobody locks one that is about to vanish."""
        with contextlib.suppress(OSError):  # another user's file stays
            self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _lock(self, uuid: str) -> int:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                if time.monotonic() >= give_up:
                    raise self._in_use(uuid, holder) from None
                time.sleep(_POLL_S)
                continue
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._path.lstat()):
                    return fd
            os.close(fd)  # removed while we waited: it does not count

    def _open(self) -> int:
        """Open the file, never through a link. One that is there is opened as it is: in a directory
        like /tmp Linux refuses to open another user's for creation (sysctl/fs.rst,
        protected_regular)."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            with contextlib.suppress(FileNotFoundError):
                try:
                    return os.open(self._path, flags | os.O_RDWR)
                except PermissionError:
                    return os.open(self._path, flags | os.O_RDONLY)
            with contextlib.suppress(FileExistsError):
                fd = os.open(self._path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, _READ_BY_ALL)
                os.fchmod(fd, _READ_BY_ALL)
                return fd

    def _in_use(self, uuid: str, holder: str) -> GpuInUseError:
        return GpuInUseError(
            f"the daemon with pid {holder} has the GPU {uuid} ({self._path})",
            field="device",
            value=uuid,
            fix="stop that daemon, choose another device, or share it on purpose by --share-gpu",
        )


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
