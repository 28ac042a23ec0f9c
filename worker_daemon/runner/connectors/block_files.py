"""Files of KV blocks in a directory of this daemon alone: named by what they hold, replaced as a
whole, read by position, bounded in bytes; the least recently used ones go first.

They survive the process, as files do in the host's page cache. Nothing is flushed to the disk:
after a crash of the host a file may be short or hold other bytes, and is then a bad one.
"""

import errno
import os
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from worker_daemon.directories import claim_directory, lock_directory, open_own_file

FIELD: Final = "kv-file-dir"
IDENTITY_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<4sIQq{IDENTITY_BYTES}sB64s19x")
"""Magic, format, bytes of the block, its checksum, identity, and the length and bytes of its
hash."""
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
"""128, the last four of which are the CRC-32 of those before."""
_MAGIC: Final = b"wdkv"
_FORMAT: Final = 1
_DRAFT: Final = ".tmp"
"""Ending of a file that is being written."""


class FileName(NamedTuple):
    """Name of a file: the identity and the hash of its block."""

    identity: bytes
    """16 bytes: the weights, the layout, the rank's shard, and the way in which hashes are made."""
    block_hash: bytes
    """At most 64 bytes."""


class BadBlockFileError(Exception):
    """A file is not a whole block of this name."""


class ReadProgress(NamedTuple):
    """Progress of a fetch."""

    num_ready: int
    """Leading blocks that are in host memory."""
    is_done: bool
    """True if no more of them are being read."""


class BlockFiles:
    """The files of one directory. Any thread may call it; one at a time writes."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Claims the directory until close() or the end of the process; scan() finds its files.
        most_bytes: of all files together.

        Raises:
            ConfigError: it cannot be made, other users can change its files, or another daemon has
                it.
            StartLaterError: there is no room for it now.
        """
        self.most_bytes = most_bytes
        self._directory = claim_directory(directory, "KV blocks", FIELD)
        self._lock_fd = lock_directory(self._directory, "KV blocks", FIELD)
        self._changing = threading.Lock()
        self._sizes: OrderedDict[FileName, int] = OrderedDict()
        """Size of each file in bytes, the least recently used first."""
        self.size_bytes = 0

    def close(self) -> None:
        """Leave the directory to others. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._sizes)

    def __contains__(self, name: FileName) -> bool:
        """Return True if there is a file of this name, good or bad."""
        return name in self._sizes

    def scan(self) -> None:
        """Find the files that earlier daemons have left, in the order of their last use, and remove
        what they were writing when they ended, and what is beyond the bound. Other files stay.

        Raises:
            OSError: a directory cannot be read; the files there are not known.
        """
        found = sorted(_find(self._directory))
        with self._changing:
            for _, size, name in found:
                if name not in self._sizes:
                    self._sizes[name] = size
                    self.size_bytes += size
        self._shrink(0)

    def write(self, name: FileName, block: memoryview, checksum: int) -> None:
        """Write a block, unless there is a file of its name: others see all of it or nothing.
        checksum: an int64.

        Raises:
            OSError: it could not be written, or is larger than all files may be. Nothing of it is
                left.
        """
        if name in self._sizes:
            return
        size = HEADER_BYTES + len(block)
        if size > self.most_bytes:
            raise OSError(errno.EFBIG, f"a block is larger than the bound of {self.most_bytes}")
        self._shrink(size)
        path = self._path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(path.name + _DRAFT)
        draft.unlink(missing_ok=True)
        fd = open_own_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                _write_all(fd, _header(name, len(block), checksum), block)
            finally:
                os.close(fd)
            draft.replace(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        with self._changing:
            self._sizes[name] = size
            self.size_bytes += size

    def read(self, name: FileName, into: memoryview) -> int:
        """Fill `into` with a block; return the checksum with which it was written: its caller is to
        compare it. The file becomes the last to be removed.

        Raises:
            OSError: it cannot be read, or is not a regular file of this user.
            BadBlockFileError: it is not a whole block of this name and size.
        """
        fd = open_own_file(self._path(name), os.O_RDONLY)
        try:
            header = bytearray(HEADER_BYTES)
            _read_all(fd, 0, memoryview(header))
            checksum = _checksum_in(header, name, len(into))
            _read_all(fd, HEADER_BYTES, into)
            with suppress(OSError):  # the order after a restart is a little wrong then
                os.utime(fd)
        finally:
            os.close(fd)
        with self._changing:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return checksum

    def remove(self, name: FileName) -> None:
        """Remove a file, if it is there."""
        with self._changing:
            self.size_bytes -= self._sizes.pop(name, 0)
        self._unlink(name)

    def _shrink(self, size: int) -> None:
        """Remove files until `size` more bytes fit."""
        while True:
            with self._changing:
                if not self._sizes or self.size_bytes + size <= self.most_bytes:
                    return
                name, freed = self._sizes.popitem(last=False)
                self.size_bytes -= freed
            self._unlink(name)

    def _unlink(self, name: FileName) -> None:
        path = self._path(name)
        with suppress(OSError):
            path.unlink()
        for directory in list(path.parents)[:2]:
            try:
                directory.rmdir()
            except OSError:  # it has other files
                return

    def _path(self, name: FileName) -> Path:
        text = name.block_hash.hex()
        return self._directory / name.identity.hex() / text[:2] / text


def _find(directory: Path) -> Iterator[tuple[int, int, FileName]]:
    """Yield the files below a directory: time of last use, size and name. Remove drafts."""
    for outer in _directories(directory):
        identity = _unhex(outer.name)
        if len(identity) != IDENTITY_BYTES:
            continue
        for inner in _directories(Path(outer.path)):
            with os.scandir(inner.path) as entries:
                for entry in entries:
                    facts = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    if entry.name.endswith(_DRAFT):
                        Path(entry.path).unlink(missing_ok=True)
                    elif (block_hash := _unhex(entry.name)) and inner.name == entry.name[:2]:
                        yield facts.st_mtime_ns, facts.st_size, FileName(identity, block_hash)


def _directories(directory: Path) -> list["os.DirEntry[str]"]:
    with os.scandir(directory) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def _unhex(text: str) -> bytes:
    """Return the bytes that a name was made from; none if it was not."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return b""
    return raw if raw.hex() == text else b""


def _header(name: FileName, num_bytes: int, checksum: int) -> bytes:
    own = name.block_hash
    header = _HEADER.pack(_MAGIC, _FORMAT, num_bytes, checksum, name.identity, len(own), own)
    return header + _CRC.pack(zlib.crc32(header))


def _checksum_in(header: bytearray, name: FileName, num_bytes: int) -> int:
    """Return the checksum of a block. Raises BadBlockFileError: the header is not that of `name`,
    or not whole."""
    checksum: int = _HEADER.unpack_from(header)[3]
    if _header(name, num_bytes, checksum) != header:
        raise BadBlockFileError("its header is that of another block, or was changed")
    return checksum


def _write_all(fd: int, *parts: bytes | memoryview) -> None:
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(fd, left) :]


def _read_all(fd: int, offset: int, into: memoryview) -> None:
    """Fill `into` from an offset on. Raises BadBlockFileError: the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise BadBlockFileError("it ends early")
        done += count
