"""Reads files that another process may have made or may change during the read: only regular files,
by position. Never maps them, because a mapped file that shrinks causes SIGBUS."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

from rpc_schema.errors import CheckpointError

MAX_TEXT_BYTES: Final = 16 << 20
"""Limit of config.json and other files that are read as a whole."""


class TruncatedError(Exception):
    """A file ends before a region that it should contain."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} ends early")
        self.path = path


class RegularFile:
    """One open file. Several threads may read it at a time; its opener closes it."""

    def __init__(self, path: Path) -> None:
        """Open the file without waiting, even for a FIFO's other end.

        Raises:
            OSError: it cannot be opened, or is not a regular file (EINVAL; also for a path with a
                null character).
        """
        self.path = path
        if "\0" in str(path):
            raise OSError(errno.EINVAL, "its name holds a null character")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        self._fd = os.open(path, flags)
        facts = os.fstat(self._fd)
        self.num_bytes = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file")

    def __enter__(self) -> "RegularFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def check_reaches(self, end: int) -> None:
        """Raise TruncatedError if the file is now shorter than `end`."""
        if os.fstat(self._fd).st_size < end:
            raise TruncatedError(self.path)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from offset on.

        Raises:
            OSError: they cannot be read.
            TruncatedError: the file ends before.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                raise TruncatedError(self.path)
            done += count


def broken_file(path: Path, problem: str, fix: str) -> CheckpointError:
    """Return the error for a file of a model's directory."""
    return CheckpointError(f"{path} {problem}", field="model", value=str(path.parent), fix=fix)


def is_plain_name(name: str, suffixes: tuple[str, ...]) -> bool:
    """Return True if a name that was read from a file is a plain file name with one of these
    endings."""
    return name.isprintable() and Path(name).name == name and name.endswith(suffixes)


def read_whole(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a small regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than that (EFBIG).
    """
    with RegularFile(path) as file:
        if file.num_bytes > max_bytes:
            raise OSError(errno.EFBIG, f"it has {file.num_bytes} bytes, more than {max_bytes}")
        content = bytearray(file.num_bytes)
        try:
            file.read(0, memoryview(content))
        except TruncatedError:
            raise OSError(errno.EIO, "it shrank while it was read") from None
        return bytes(content)
