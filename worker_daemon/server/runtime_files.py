"""The daemon's runtime files: directory, locks of the endpoint and of the GPU, socket files, also
that of metrics, epoch file and hang reports; and the limit of open files. Main thread only.

A lock file without a lock belongs to a dead daemon: the kernel unlocks it when its process ends.
Shared memory is never left behind: it has no names, and is freed with its last user.
"""

import contextlib
import fcntl
import logging
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from rpc_schema.errors import CapacityError, ConfigError
from worker_daemon.directories import claim_directory, open_own_file
from worker_daemon.errors import config_error
from worker_daemon.server.gpu_lock import GpuLock, lock_directory
from worker_daemon.server.health.hang_reports import HangReports
from worker_daemon.server.lock_file import is_at, read_pid
from worker_daemon.server.metrics.listener import MetricsListener, open_listener
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.wire.endpoints import (
    CLOSED_TO_OTHERS,
    AnyEndpoint,
    EndpointInUseError,
    EndpointLock,
    IpcEndpoint,
    SocketFiles,
    TcpEndpoint,
)
from worker_daemon.settings import ProcessSettings, endpoint_home

LEAST_FILES: Final = 64
"""Files that an idle daemon and one driver need, with a margin."""
LOW_FILES: Final = 1024
"""A hard limit of at most this is logged."""
_LOCK_SUFFIX: Final = ".lock"

FindGpu: TypeAlias = Callable[[], str]
"""Returns the UUID of the device's GPU; empty if there is none, or if it is unknown."""

logger = logging.getLogger(__name__)


class RuntimeFiles:
    """A daemon's directory, locks, socket files, epoch file and hang reports. Owned by the main
    thread."""

    def __init__(self, settings: ProcessSettings, find_gpu: FindGpu) -> None:
        """Claim all of them. Raises as daemon.serve does."""
        self.endpoint = _parse_endpoint(settings)
        self._directory = self.endpoint.path.parent
        self._state_dir = settings.state_dir or self._directory
        self._dies_with_parent = settings.exit_with_parent_fd is not None
        claim_directory(self._directory, "the endpoint", "endpoint", forbidden=CLOSED_TO_OTHERS)
        for dead in remove_stale(self._directory):
            logger.info("removed the files of a killed daemon: %s", dead)
        self._lock = EndpointLock(self.endpoint)
        self._gpu_lock: GpuLock | None = None
        self.metrics: MetricsListener | None = None
        """The socket of metrics and health, if one is wanted."""
        try:
            self.sockets = SocketFiles(self.endpoint)
            self._gpu_lock = _lock_gpu(settings, find_gpu)
            self.epochs = EpochFile(self._state_dir, self.endpoint, reset=settings.reset_epoch)
            self.metrics = open_listener(settings)
            self.hang_reports = HangReports(self.epochs.path.with_suffix(".stacks"))
        except (ConfigError, CapacityError):
            if self.metrics is not None:
                self.metrics.release()
            if self._gpu_lock is not None:
                self._gpu_lock.release()
            self._lock.release()
            _remove_if_empty(self._directory)
            raise

    def keep(self) -> None:
        """Check that all of them are still ours; called at intervals.

        Raises:
            GpuInUseError: another daemon has locked the GPU.
            EndpointInUseError: the endpoint's files were removed, or another daemon's are there.
        """
        if self._gpu_lock is not None:
            self._gpu_lock.keep()
        missing = self.sockets.missing()
        if missing:
            problem = (
                f"{missing[0]} was removed or replaced: no peer can connect to this daemon now"
            )
            fix = "keep other processes from removing files of the endpoint's directory"
            raise EndpointInUseError(problem, field="endpoint", value=str(self.endpoint), fix=fix)
        self._lock.keep()

    def leave(self) -> None:
        """Remove our files, and directories that are empty then. The epoch file stays unless the
        endpoint ends with a launcher and is still ours."""
        is_ours = self._lock.is_held()
        self.sockets.remove()
        if self.metrics is not None:
            self.metrics.release()
        self.hang_reports.close(keep=not is_ours)
        if self._dies_with_parent and is_ours:
            self.epochs.remove()
        if self._gpu_lock is not None:
            self._gpu_lock.release()
        self._lock.release()
        if self._directory in self._state_dir.parents:
            _remove_if_empty(self._state_dir)
        _remove_if_empty(self._directory)


def _lock_gpu(settings: ProcessSettings, find_gpu: FindGpu) -> GpuLock | None:
    if settings.share_gpu:
        return None
    uuid = find_gpu()
    return GpuLock(uuid, lock_directory(settings.gpu_lock_dir)) if uuid else None


def _parse_endpoint(settings: ProcessSettings) -> AnyEndpoint:
    if settings.endpoint.startswith("tcp://"):
        return TcpEndpoint.parse(settings.endpoint, endpoint_home(settings))
    return IpcEndpoint.parse(settings.endpoint)


def remove_stale(directory: Path) -> list[str]:
    """Remove the socket and lock files of dead daemons; return the names of their endpoints. Files
    that cannot be removed are left."""
    removed = []
    for lock in sorted(directory.glob(f"*{_LOCK_SUFFIX}")):
        endpoint = IpcEndpoint(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX)))
        with contextlib.suppress(OSError):
            if _remove_if_dead(lock, endpoint):
                removed.append(str(endpoint))
    return removed


def _remove_if_dead(lock: Path, endpoint: IpcEndpoint) -> bool:
    fd = open_own_file(lock, os.O_RDWR)
    try:
        # Checked before the lock is tried, which would briefly keep its owner from taking it. A
        # reused pid counts as the holder: the files then stay until a restart.
        pid = read_pid(fd)
        if pid is not None and _is_alive(pid):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(fd, lock):
            return False
        for path in endpoint.socket_paths:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
        lock.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, OverflowError):
        os.kill(pid, 0)
        return True
    return False


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; return it. Each peer takes some files.
    When none are left, libzmq refuses new peers on tcp and aborts the process on ipc.

    Raises:
        ConfigError: it is too low for a daemon.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST_FILES and hard != resource.RLIM_INFINITY:
        fix = (
            f"raise the hard limit (LimitNOFILE, ulimit -Hn) to {LEAST_FILES} at least, better "
            "65536"
        )
        raise config_error("RLIMIT_NOFILE", hard, "too few files and connections may be open", fix)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard <= LOW_FILES and hard != resource.RLIM_INFINITY:
        logger.warning(
            "no more than %d files and connections may be open: raise the hard limit (LimitNOFILE)",
            hard,
        )
    return hard
