"""Output of a command: files of complete lines, replaced only by complete ones, and standard
output. Every failure to write becomes an OutputError."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import select
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker_client.errors import OutputError

_NO_ROOM: Final = "make room, or name a file on another disk"
_NOT_ALLOWED: Final = (
    "name a file that you may read and write, in a directory that you may write: a new file is "
    "made next to the old one"
)
_NO_DIRECTORY: Final = "name a file in a directory that exists"
_FIXES: Final = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: _NO_ROOM,
    errno.EISDIR: "name a file",
    errno.ENOENT: _NO_DIRECTORY,
    errno.ENOTDIR: _NO_DIRECTORY,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.EBADF: "name a descriptor that is open for writing",
    errno.EBUSY: "mount the directory it is in, or name another file",
    errno.EEXIST: "move it away, or name another file",
    errno.ETXTBSY: "wait until that run has ended, or name another file",
}
_RESULT: Final = b'{"id": '
"""Start of every line of a run."""
_CANNOT_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)
"""Errors of fsync for pipes, terminals and devices."""
_MAX_LINKS: Final = 40


@dataclass(slots=True)
class LineFile:
    """A file that grows by complete lines: after a failed write, a partial line is removed."""

    file: int
    """Its descriptor, closed by close()."""
    shown: Path
    """For error messages."""
    is_ours: bool
    """True if no other process writes to it, and it was empty; otherwise nothing is removed."""
    size: int = 0

    def write(self, lines: Iterable[str]) -> None:
        """Append lines, given without line ends, and flush them to the kernel.

        Raises:
            OutputError: not all of them fit; those before are complete.
        """
        for line in lines:
            data = f"{line}\n".encode()
            try:
                _write_all(self.file, data)
            except OSError as error:
                if self.is_ours:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self.file, self.size)
                raise output_error(self.shown, error) from error
            self.size += len(data)

    def sync(self) -> None:
        """Wait until all lines are on the disk. Raises OutputError."""
        try:
            _sync(self.file)
        except OSError as error:
            raise output_error(self.shown, error) from error

    def close(self) -> None:
        """Close it."""
        os.close(self.file)


class OutputFile:
    """The output file of one run. If there was no file, or the run continues an interrupted one,
    lines are written to it as they arrive. Otherwise they go to NAME.part next to the old file,
    until `finish` replaces the old file. The file being written is locked against other runs.
    Pipes, devices and descriptors are written directly."""

    def __init__(self, path: Path, kept: Iterable[str] = ()) -> None:
        """kept: lines of the run that is continued.

        Raises:
            OutputError: it cannot be written, or another run writes to it.
        """
        self._shown = path
        self._is_special = is_special(path)
        self._final = path if self._is_special else _target(path)
        self._live = self._final
        try:
            if self._is_special:
                self._file = LineFile(open_special(path), shown=path, is_ours=False)
                return
            with _claimed(path) as (has_old, has_part):
                self._begin(list(kept), has_old, has_part)
        except OSError as error:
            raise output_error(path, error) from error

    def _begin(self, lines: list[str], has_old: bool, has_part: bool) -> None:
        part = part_of(self._shown)
        goes_on_elsewhere = has_part if lines else has_old
        self._live = part if goes_on_elsewhere else self._final
        is_there = has_part if goes_on_elsewhere else has_old
        new = _new_beside(self._live) if is_there else self._live
        self._file = LineFile(self._create(new, has_old), shown=self._shown, is_ours=True)
        try:
            self._file.write(lines)
            self._file.sync()
            if is_there:
                new.replace(self._live)
            _sync_directory(self._live.parent)
        except BaseException:
            self._file.close()
            _remove(new)
            raise
        if has_part and not goes_on_elsewhere:
            _remove(part)

    def _create(self, path: Path, has_old: bool) -> int:
        """Return a new, locked file with the permissions of the old one."""
        try:
            file = _open_new(path, 0o600 if has_old else 0o666)
        except FileExistsError:  # appeared since it was claimed
            raise _another_run() from None
        try:
            _lock(file)
            if has_old:
                with contextlib.suppress(PermissionError):  # a file system without modes
                    os.fchmod(file, stat.S_IMODE(self._final.stat().st_mode))
        except BaseException:
            os.close(file)
            _remove(path)
            raise
        return file

    def write(self, lines: Iterable[str]) -> None:
        """Append lines. Raises OutputError, which names the file with the lines before them."""
        try:
            self._file.write(lines)
        except OutputError as error:
            if self._is_special:
                raise
            problem = f"{error.message}; the lines finished before are in {self._live}"
            fix = f"{error.fix}; with --endpoints, --adopt continues from there"
            raise OutputError(problem, field=error.field, value=error.value, fix=fix) from error

    def finish(self) -> None:
        """Sync all lines to disk under the file's name. Raises OutputError."""
        self._file.sync()
        if self._live == self._final:
            return
        try:
            self._live.replace(self._final)
            _sync_directory(self._final.parent)
        except OSError as error:
            raise output_error(self._shown, error) from error
        self._live = self._final

    def close(self) -> None:
        """Close it, finished or not."""
        self._file.close()


def part_of(path: Path) -> Path:
    """Return the path for the lines of an unfinished run that will replace the file."""
    target = _target(path)
    return target.parent / f"{target.name}.part"


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write or replace a file atomically. Raises OutputError and leaves the old one unchanged."""
    with contextlib.closing(OutputFile(path)) as file:
        file.write(lines)
        file.finish()


def write_bytes(path: Path, data: bytes) -> None:
    """Write or replace a file atomically. Raises OutputError and leaves the old one unchanged."""
    target = path if is_special(path) else _target(path)
    new = target if is_special(path) else _new_beside(target)
    try:
        file = open_special(path) if is_special(path) else _open_new(new, 0o666)
        try:
            _write_all(file, data)
            _sync(file)
        finally:
            os.close(file)
        if new != target:
            new.replace(target)
            _sync_directory(target.parent)
    except OSError as error:
        if new != target:
            _remove(new)
        raise output_error(path, error) from error


def check_output(path: Path) -> None:
    """Raise OutputError if an OutputFile cannot be written, as far as can be known in advance."""
    check_writable(path)
    if not is_special(path):
        try:
            with _claimed(path):
                pass
        except OSError as error:
            raise output_error(path, error) from error


def check_writable(path: Path, field: str = "output") -> None:
    """Raise OutputError if a file cannot be written, as far as can be known in advance, by writing
    a byte to a new file next to it. The file itself is not changed. field: the option that names
    it."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if is_special(path):
            _check_special(path)
        else:
            _try_beside(_target(path))
    except OSError as error:
        raise output_error(path, error, field) from error


def _try_beside(path: Path) -> None:
    if path.exists() and _mount_id(path) != _mount_id(path.parent):
        raise OSError(errno.EBUSY, "it is a mount point, which cannot be replaced")
    new = _new_beside(path)
    file = _open_new(new, 0o600)
    try:
        os.write(file, b"\n")
        _sync(file)
    finally:
        os.close(file)
        _remove(new)


def print_text(text: str) -> None:
    """Write to standard output and flush; characters that its encoding lacks are escaped. Raises
    OutputError for a full disk, and BrokenPipeError if the reader has closed the pipe."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_standard_output()
        raise
    except OSError as error:
        _drop_standard_output()
        raise output_error(Path("standard output"), error) from error


def output_error(path: Path, error: OSError, field: str = "output") -> OutputError:
    """Return the typed error for a failure to write."""
    fix = _FIXES.get(error.errno or 0, "name another file")
    problem = f"it cannot be written: {error.strerror}"
    return OutputError(problem, field=field, value=str(path), fix=fix)


def _drop_standard_output() -> None:
    """Discard the buffer's contents, so that the interpreter's exit does not fail too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def is_special(path: Path) -> bool:
    """Return True for a path of a pipe, a device or a descriptor, which cannot be replaced."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def open_special(path: Path) -> int:
    """Open a special path for writing; a descriptor of this process is duplicated and shares its
    position."""
    match _descriptor(path):
        case (pid, number) if pid == os.getpid():
            return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _check_special(path: Path) -> None:
    match _descriptor(path):
        case (pid, number) if pid == os.getpid():
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        case _ if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _descriptor(path: Path) -> tuple[int, int] | None:
    """Return the process and number of the descriptor that a path such as /dev/stdout names."""
    for _ in range(_MAX_LINKS):
        parent = Path(os.path.realpath(path.parent))
        found = re.fullmatch(r"/proc/(\d+)(?:/task/\d+)?/fd/(\d+)", str(parent / path.name))
        if found is not None:
            return int(found[1]), int(found[2])
        if not path.is_symlink():
            return None
        path = parent / path.readlink()
    return None


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[tuple[bool, bool]]:
    """Hold the locks of the old file and of NAME.part; yield which of the two exist. A file that
    appears in the meantime belongs to another run. Raises OSError if another run has one, or
    NAME.part is not the output of a run."""
    with contextlib.ExitStack() as stack:
        old, part = _claim(_target(path), stack), part_of(path)
        left = _claim(part, stack)
        if left is not None:
            _check_left_by_run(left, part)
        yield old is not None, left is not None


def _claim(path: Path, stack: contextlib.ExitStack) -> int | None:
    """Return a file, locked until the stack is closed; None if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _in_the_way(path) if error.errno == errno.ELOOP else error from None
        stack.callback(os.close, file)
        _lock(file)
        if _is_at(file, path):  # check that it was not replaced before it was locked
            return file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _another_run() from None
    except OSError:  # a file system without locks
        return


def _another_run() -> OSError:
    return OSError(errno.ETXTBSY, "another run writes to it")


def _in_the_way(path: Path) -> OSError:
    return OSError(errno.EEXIST, f"{path} is in the way and is not the output of a run")


def _check_left_by_run(file: int, path: Path) -> None:
    is_file = stat.S_ISREG(os.fstat(file).st_mode)
    start = os.pread(file, len(_RESULT), 0) if is_file else b""
    if not is_file or not _RESULT.startswith(start):
        raise _in_the_way(path)


def _mount_id(path: Path) -> str:
    """Return the id of a path's mount. Unlike st_dev, this distinguishes mounts of one file
    system."""
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{file}").read_text().splitlines()
    finally:
        os.close(file)
    return next((line for line in lines if line.startswith("mnt_id:")), "")


def _open_new(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _new_beside(path: Path) -> Path:
    """Return an unused name in the same directory."""
    return path.parent / f".worker-client-{secrets.token_hex(8)}.new"


def _target(path: Path) -> Path:
    """Return the target if the path is a link, so that the link stays."""
    return Path(os.path.realpath(path))


def _write_all(file: int, data: bytes) -> None:
    """Write all data; wait if the descriptor is non-blocking."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(file, select.POLLOUT)
            poll.poll()


def _sync(file: int) -> None:
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(directory)
    finally:
        os.close(directory)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
