"""Output of a command: standard output, and regular files, which only complete ones replace. Every
failure to write becomes an OutputError."""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from worker_client.errors import OutputError

STANDARD_OUTPUT: Final = Path("/dev/stdout")
"""The only path that need not be a regular file."""

_NO_ROOM: Final = "make room, or name a file on another disk"
_NOT_ALLOWED: Final = "name a file that you may replace, in a directory that you may write"
_NO_DIRECTORY: Final = "name a file in a directory that exists"
_NOT_REGULAR: Final = f"name a regular file; lines may also go to {STANDARD_OUTPUT}"
_FIXES: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _NO_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NOT_ALLOWED),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), _NO_DIRECTORY),
    **dict.fromkeys((errno.EISDIR, errno.ELOOP, errno.EINVAL), _NOT_REGULAR),
    errno.EBUSY: "mount the directory it is in, or name another file",
    errno.EEXIST: "move it away, or name another file",
    errno.ETXTBSY: "wait until that run has ended, or name another file",
}
_RESULT: Final = b'{"id": '
"""Start of every line of a run."""


class OutputFile:
    """The output of one run, in lines. A file's lines go to NAME.part, locked against other runs,
    until `finish` gives it the file's name. Lines for STANDARD_OUTPUT are printed."""

    def __init__(self, path: Path, kept: Iterable[str] = ()) -> None:
        """kept: lines of the run that is continued; they replace those in NAME.part at once.

        Raises:
            OutputError: it cannot be written, or another run writes to it.
        """
        self._path, self._part = path, part_of(path)
        self._file: int | None = None
        self.size = 0
        if path != STANDARD_OUTPUT:
            with _typed(path), _claimed(self._part), _sibling(path) as (file, new):
                _lock(file)
                self._append(file, kept)
                _publish(file, new, self._part)
                self._file = os.dup(file)  # has the same lock

    def write(self, lines: Iterable[str]) -> None:
        """Append lines, given without line ends, and flush them to the kernel.

        Raises:
            OutputError: not all of them fit; it names the file with the lines before them.
        """
        if self._file is None:
            print_text("".join(f"{line}\n" for line in lines))
            return
        try:
            self._append(self._file, lines)
        except OSError as cause:
            error = output_error(self._path, cause)
            problem = f"{error.message}; the lines finished before are in {self._part}"
            fix = f"{error.fix}; with --endpoints, --adopt continues from there"
            raise OutputError(problem, field=error.field, value=error.value, fix=fix) from cause

    def _append(self, file: int, lines: Iterable[str]) -> None:
        for line in lines:
            data = left = memoryview(f"{line}\n".encode())
            try:
                while left:
                    left = left[os.write(file, left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, self.size)  # removes a partial line
                raise
            self.size += len(data)

    def finish(self) -> None:
        """Sync all lines to disk under the file's name. Raises OutputError."""
        if self._file is not None:
            with _typed(self._path):
                _publish(self._file, self._part, self._path)

    def close(self) -> None:
        """Close it, finished or not."""
        if self._file is not None:
            os.close(self._file)


def part_of(path: Path) -> Path:
    """Return the path for the lines of an unfinished run."""
    return path.parent / f"{path.name}.part"


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write or replace a file atomically. Raises OutputError and leaves the old one unchanged."""
    with contextlib.closing(OutputFile(path)) as file:
        file.write(lines)
        file.finish()


@contextlib.contextmanager
def replacement(path: Path, field: str = "output") -> Iterator[BinaryIO]:
    """Yield a binary file that takes the path's name at the end of the block, if that succeeds.
    field: the option that names it. Raises OutputError and leaves the old file unchanged."""
    with (
        _typed(path, field),
        _sibling(path) as (file, new),
        os.fdopen(os.dup(file), "wb") as stream,
    ):
        yield stream
        stream.flush()
        _publish(file, new, path)


def check_output(path: Path) -> None:
    """Raise OutputError if an OutputFile cannot be written, as far as can be known in advance."""
    if path != STANDARD_OUTPUT:
        check_writable(path)
        with _typed(path), _claimed(part_of(path)):
            pass


def check_writable(path: Path, field: str = "output") -> None:
    """Raise OutputError if a regular file cannot be written, as far as can be known in advance, by
    writing a byte to a new file next to it. field: the option that names it."""
    with _typed(path, field), _sibling(path) as (file, _):
        os.write(file, b"\n")
        os.fsync(file)


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


@contextlib.contextmanager
def _typed(path: Path, field: str = "output") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise output_error(path, error, field) from error


def _drop_standard_output() -> None:
    """Discard the buffer's contents, so that the interpreter's exit does not fail too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def _sibling(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield a new file next to a path, with its mode. Unless it is renamed, it is removed."""
    mode = _mode_of(path)
    new = path.parent / f".worker-client-{secrets.token_hex(8)}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(new, flags, 0o666 if mode is None else 0o600)
    try:
        if mode is not None:
            with contextlib.suppress(PermissionError):  # a file system without modes
                os.fchmod(file, mode)
        yield file, new
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            new.unlink()


def _mode_of(path: Path) -> int | None:
    """Return a file's mode, None if there is none. A link is not followed: its maker would choose
    the file that is replaced."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a link, a directory, a pipe or a device")
    if status.st_dev != path.parent.stat().st_dev:
        raise OSError(errno.EBUSY, "it is a mount point, which cannot be replaced")
    return stat.S_IMODE(status.st_mode)


def _publish(file: int, path: Path, target: Path) -> None:
    os.fsync(file)
    path.replace(target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no directories
            raise
    finally:
        os.close(directory)


@contextlib.contextmanager
def _claimed(part: Path) -> Iterator[None]:
    """Hold the lock of NAME.part, made if it is missing and removed if it stays empty. Raises
    OSError if another run has it, or it is not the output of a run."""
    conflict = OSError(errno.EEXIST, f"{part} is in the way and is not the output of a run")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        while True:
            if part.is_symlink() or (part.exists() and not part.is_file()):
                raise conflict
            file = os.open(part, flags, 0o600)
            stack.callback(os.close, file)
            _lock(file)
            if _is_at(file, part):  # check that it was not replaced before it was locked
                break
        if not _RESULT.startswith(os.pread(file, len(_RESULT), 0)):
            raise conflict
        try:
            yield
        finally:
            if os.fstat(file).st_size == 0 and _is_at(file, part):
                part.unlink()


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.ETXTBSY, "another run writes to it") from None
    except OSError:  # a file system without locks
        return
