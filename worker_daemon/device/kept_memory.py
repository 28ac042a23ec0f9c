"""Host memory that outlives the process: a file on a tmpfs, in a directory of this daemon alone.

It is mapped, so nobody else may shorten it: the directory has mode 0700 and the file 0600, both are
this user's, and neither is reached by a link. Its bytes are not trusted (runner/connectors/).
"""

import mmap
import os
import stat
import threading
from pathlib import Path
from typing import Final

from rpc_schema.errors import CapacityError
from worker_daemon.directories import claim_directory, lock_directory, open_own_file, unusable
from worker_daemon.errors import config_error

FIELD: Final = "kv-host-dir"
_CONTENT: Final = "host tier"
_FILE: Final = "blocks"
_OTHERS: Final = 0o077
"""Permission bits of others."""
_STEP_BYTES: Final = 64 << 20
"""Memory that is taken at once."""
_MOUNTS: Final = Path("/proc/self/mountinfo")


class KeptMapping:
    """The file, mapped: some bytes at its start, its head, then the body. Owned by the worker;
    unmapped with the last reference to `memory`. close() neither removes nor shortens the file."""

    def __init__(self, fd: int, head_bytes: int, num_bytes: int) -> None:
        """Maps the file, of num_bytes, and takes over fd. memory_is_there() must have returned
        before the body is written to."""
        self.memory = mmap.mmap(fd, num_bytes)
        """The file's bytes, shared."""
        self.head_bytes = head_bytes
        self._fd = fd
        self._num_bytes = num_bytes
        self._error: OSError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._take, name="kept-memory", daemon=True)
        self._thread.start()

    @property
    def is_there(self) -> bool:
        """True once the file has all its memory. Any thread may ask."""
        return not self._thread.is_alive() and self._error is None

    def wait_until_there(self) -> None:
        """Wait until the file has all its memory: then no access can fail for lack of it.

        Raises:
            CapacityError: the file system or the host has too little.
        """
        self._thread.join()
        if self._error is not None:
            raise _lacking(self._num_bytes, self._error.strerror or "no memory") from self._error

    def read(self, offset: int, into: memoryview) -> None:
        """Copy bytes of the file by position: memory that it lacks reads as zeros, and is not taken
        for it."""
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                into[done:] = bytes(len(into) - done)
                return
            done += count

    def close(self) -> None:
        """Stop taking memory. Idempotent."""
        self._stopping.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> None:
        if _allocated_bytes(self._fd) >= self._num_bytes:
            return
        for first in range(0, self._num_bytes, _STEP_BYTES):
            if self._stopping.is_set():
                return
            try:
                os.posix_fallocate(self._fd, first, min(_STEP_BYTES, self._num_bytes - first))
            except OSError as error:
                self._error = error
                return


class KeptMemory:
    """Owned by the worker, for the daemon's life: so is the directory's lock."""

    def __init__(self, directory: Path) -> None:
        """Claims the directory until close() or the end of the process.

        Raises:
            ConfigError: it cannot be made, is not on a tmpfs, other users can read or change it or
                its file, or another daemon has it.
            StartLaterError: there is no room for a lock now.
        """
        self._directory = claim_directory(directory, f"the {_CONTENT}", FIELD, forbidden=_OTHERS)
        self._path = self._directory / _FILE
        kind = _file_system(self._directory.stat().st_dev)
        if kind != "tmpfs":
            problem = f"{directory} is on {kind or 'an unknown file system'}, not on a tmpfs"
            fix = "name a directory below /dev/shm, or on another tmpfs"
            raise config_error(FIELD, str(directory), problem, fix)
        self._lock_fd = lock_directory(self._directory, _CONTENT, FIELD)
        try:
            self._check_file()
        except BaseException:
            self.close()
            raise

    @property
    def held_bytes(self) -> int:
        """Memory that the file of this or an earlier daemon has."""
        try:
            return self._path.lstat().st_blocks * 512
        except OSError:
            return 0

    def check_room(self, num_bytes: int) -> None:
        """Check that a file of this size has room.

        Raises:
            CapacityError: the file system has too little.
        """
        facts = os.statvfs(self._directory)
        room = facts.f_bavail * facts.f_frsize + self.held_bytes
        if facts.f_blocks and num_bytes > room:  # 0: it has no bound of its own
            raise _lacking(num_bytes, f"{self._directory} has {room} to give")

    def open(self, head_bytes: int, num_bytes: int) -> KeptMapping:
        """Map the file, made or lengthened to num_bytes, of which head_bytes have their memory when
        this returns. A longer one is replaced by an empty one, since it may be mapped still.

        Raises:
            ConfigError: it is not this user's alone.
            CapacityError: the file system has too little room.
        """
        self._check_file()
        try:
            if self._path.exists() and self._path.stat().st_size > num_bytes:
                self._path.unlink()
            self.check_room(num_bytes)
            fd = open_own_file(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            os.ftruncate(fd, num_bytes)
            os.posix_fallocate(fd, 0, head_bytes)
            return KeptMapping(fd, head_bytes, num_bytes)
        except OSError as error:
            os.close(fd)
            raise _lacking(num_bytes, error.strerror or "no memory") from error

    def remove(self) -> None:
        """Remove the file, if there is one; mappings of it stay as they are."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the directory to others. The file stays. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _check_file(self) -> None:
        """Raises ConfigError: others may read the file, or have it open, or it is none."""
        try:
            facts = self._path.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unusable(error) from error
        mode, problem = stat.S_IMODE(facts.st_mode), ""
        if not stat.S_ISREG(facts.st_mode):
            problem = "is not a regular file"
        elif facts.st_uid != os.geteuid():
            problem = f"belongs to user {facts.st_uid}"
        elif mode & _OTHERS:
            problem = f"has mode {mode:04o}: others may have it open"
        elif facts.st_nlink != 1:
            problem = "has other names"
        if problem:
            fix = "remove it, and find out who made it"
            raise config_error(FIELD, str(self._directory), f"{self._path} {problem}", fix)

    def _unusable(self, error: OSError) -> Exception:
        what = f"{self._path} cannot be opened: {error.strerror}"
        return unusable(error, what, FIELD, self._directory)


def _allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _lacking(num_bytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"the host tier's file takes {num_bytes} bytes: {why}",
        field=FIELD,
        value=num_bytes,
        fix="a smaller kv_host_memory_bytes, or a larger tmpfs (mount -o remount,size=)",
    )


def _file_system(device: int) -> str:
    """Return the type of the file system with this device number; empty if it is not mounted
    here."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""
