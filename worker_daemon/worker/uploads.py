"""Tensors that a driver has uploaded, in host memory, by the hash of their content. Owns them and
limits their size.

Written by the control thread, read by the step thread, which also drops those that end with a lease
or a reset.
"""

import mmap
import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rpc_schema.errors import CapacityError, StateError
from rpc_schema.uploads import (
    CHUNK_BYTES,
    MAX_UPLOAD_BYTES,
    UploadChunk,
    UploadDtype,
    chunk_digest,
    content_hash,
    tensor_bytes,
)
from worker_daemon.errors import config_error

MAX_UPLOADS: Final = 4096
MAX_UNFINISHED: Final = 64
_PIECE_BYTES: Final = 1 << 20
_MAKE_ROOM: Final = "drop uploads that are not needed any more (DropUploads), then send it again"


@dataclass(frozen=True, slots=True)
class Upload:
    """A complete tensor, whose hash was checked."""

    dtype: UploadDtype
    array: NDArray[Any]
    """Read-only, in the upload's shape; bfloat16 as uint16. Its memory lives as long as a reference
    to it, even if the upload is dropped."""


class _Pages(mmap.mmap):
    """Private memory: untouched pages cost nothing, and all are freed at its end. Freeing a
    gigabyte takes 0.1 s under the GIL, so it is done in pieces to let other threads run."""

    def __del__(self) -> None:
        if self.closed:  # the constructor failed
            return
        for begin in range(0, len(self), _PIECE_BYTES):
            self.madvise(mmap.MADV_DONTNEED, begin, _PIECE_BYTES)


class _Entry:
    """An upload, begun or complete. Only the control thread changes it."""

    __slots__ = ("_digests", "_memory", "_num_missing", "dtype", "num_bytes", "shape", "whole")

    def __init__(self, chunk: UploadChunk, num_bytes: int) -> None:
        self.dtype = chunk.dtype
        self.shape = chunk.shape
        self.num_bytes = num_bytes
        self.whole: Upload | None = None
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self._num_missing = -(-num_bytes // CHUNK_BYTES)
        self._digests: list[bytes] = [b""] * self._num_missing

    def take(self, chunk: UploadChunk) -> bool:
        """Write a chunk; return True if none is missing. Raises ConfigError if it differs from an
        earlier chunk at its offset."""
        digest, index = chunk_digest(chunk.data), chunk.offset // CHUNK_BYTES
        if not self._digests[index]:
            end = chunk.offset + len(chunk.data)
            self._memory[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
            self._digests[index] = digest
            self._num_missing -= 1
        elif self._digests[index] != digest:
            raise config_error(
                "offset",
                chunk.offset,
                "an earlier chunk at this offset had other bytes",
                "name each content by its own hash; if the earlier chunk is wrong, drop the "
                "upload (DropUploads)",
            )
        return not self._num_missing

    def hash(self) -> bytes:
        """Return the hash of a complete upload."""
        return content_hash(self.dtype, self.shape, self._digests)

    def finish(self) -> None:
        """Publish the upload: its hash was checked."""
        kind = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).newbyteorder("<")
        array = self._memory.view(kind).reshape(self.shape)
        array.setflags(write=False)
        self.whole = Upload(self.dtype, array)


class Uploads:
    """Owned by the daemon. Any thread may call its methods; `put` is for one thread alone."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: limit on all uploads together, in whole pages; unfinished ones count in
        full."""
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Host memory that uploads have allocated, or may still touch."""
        return self._num_bytes

    def get(self, content_hash: bytes) -> Upload | None:
        """Return a complete upload; None if no upload has that hash."""
        with self._lock:
            entry = self._entries.get(content_hash)
            return None if entry is None else entry.whole

    def read(self, content_hash: bytes, offset: int) -> tuple[Upload, bytes]:
        """Return a complete upload, and its chunk at an offset.

        Raises:
            ConfigError: no complete upload has that hash, or it has no chunk there.
        """
        upload, name = self.get(content_hash), content_hash.hex()
        if upload is None:
            fix = "read one that requests name"
            raise config_error("content_hash", name, "no complete upload has this hash", fix)
        _check_offset(offset, upload.array.nbytes)
        raw = upload.array.reshape(-1).view(np.uint8)
        return upload, raw[offset : offset + CHUNK_BYTES].tobytes()

    def put(self, chunk: UploadChunk) -> bool:
        """Write a chunk, and begin its upload if needed; return True if the upload is complete.

        Raises:
            ConfigError: it is not a chunk of that tensor, differs from an earlier one, or completes
                a tensor of another hash, which is dropped.
            CapacityError: there is no room for the tensor.
            StateError: a reset dropped the upload meanwhile.
        """
        num_bytes = _check_place(chunk)
        with self._lock:
            entry = self._entries.get(chunk.content_hash)
            if entry is None:
                entry = self._begin(chunk, num_bytes)
        _check_same_tensor(entry, chunk)
        if not entry.take(chunk):
            return False
        if entry.whole is None:
            self._finish(chunk.content_hash, entry)
        return True

    def drop(self, content_hashes: Iterable[bytes]) -> None:
        """Drop these uploads, if they exist."""
        with self._lock:
            dropped = [self._entries.pop(name, None) for name in content_hashes]
            self._num_bytes -= sum(_pages(entry.num_bytes) for entry in dropped if entry)

    def drop_all(self) -> None:
        """Drop all uploads."""
        with self._lock:
            dropped, self._entries = self._entries, {}
            self._num_bytes = 0
        dropped.clear()  # frees their memory here, outside the lock

    def keep_only(self, content_hashes: Container[bytes]) -> None:
        """Drop all uploads except the complete ones with these hashes."""
        with self._lock:
            dropped = [
                name
                for name, entry in self._entries.items()
                if entry.whole is None or name not in content_hashes
            ]
        self.drop(dropped)

    def _begin(self, chunk: UploadChunk, num_bytes: int) -> _Entry:
        needed = _pages(num_bytes)
        if self._num_bytes + needed > self.max_bytes:
            raise _no_room(
                "shape",
                chunk.shape,
                f"the tensor needs {needed} bytes of host memory; of the {self.max_bytes} for "
                f"uploads {self._num_bytes} are taken",
                ", or start the daemon with a larger --upload-memory-bytes",
            )
        num_unfinished = sum(entry.whole is None for entry in self._entries.values())
        for number, limit, what in (
            (len(self._entries), MAX_UPLOADS, "uploads are there"),
            (num_unfinished, MAX_UNFINISHED, "uploads are unfinished"),
        ):
            if number >= limit:
                name = chunk.content_hash.hex()
                raise _no_room("content_hash", name, f"{limit} {what} already")
        try:
            entry = _Entry(chunk, num_bytes)
        except (OSError, MemoryError) as error:
            problem = f"the host has no {needed} bytes for the tensor: {error}"
            raise _no_room("shape", chunk.shape, problem) from None
        self._entries[chunk.content_hash] = entry
        self._num_bytes += needed
        return entry

    def _finish(self, name: bytes, entry: _Entry) -> None:
        if entry.hash() != name:
            self.drop([name])
            problem = "the tensor has another hash: the upload is dropped"
            fix = "hash dtype, shape and bytes as rpc_schema/uploads.py does, and send all again"
            raise config_error("content_hash", name.hex(), problem, fix)
        with self._lock:
            if self._entries.get(name) is not entry:
                raise StateError("a reset dropped the upload", fix="send all of it again")
            entry.finish()


def _no_room(field: str, value: object, problem: str, or_else: str = "") -> CapacityError:
    return CapacityError(problem, field=field, value=value, fix=f"{_MAKE_ROOM}{or_else}")


def _check_place(chunk: UploadChunk) -> int:
    """Return the tensor's size. Raises ConfigError if it is too large, or the chunk is not part of
    it."""
    num_bytes = tensor_bytes(chunk.dtype, chunk.shape)
    if num_bytes > MAX_UPLOAD_BYTES:
        fix = f"upload parts of at most {MAX_UPLOAD_BYTES} bytes"
        raise config_error("shape", chunk.shape, f"the tensor has {num_bytes} bytes", fix)
    _check_offset(chunk.offset, num_bytes)
    expected = min(CHUNK_BYTES, num_bytes - chunk.offset)
    if len(chunk.data) != expected:
        raise config_error(
            "data",
            f"{len(chunk.data)} bytes",
            f"the chunk at offset {chunk.offset} of a tensor of {num_bytes} bytes has another size",
            f"send {expected} bytes",
        )
    return num_bytes


def _check_offset(offset: int, num_bytes: int) -> None:
    if offset % CHUNK_BYTES or offset >= num_bytes:
        problem = f"a tensor of {num_bytes} bytes has no chunk at this offset"
        fix = f"use multiples of {CHUNK_BYTES} below {num_bytes}"
        raise config_error("offset", offset, problem, fix)


def _check_same_tensor(entry: _Entry, chunk: UploadChunk) -> None:
    for field, there, value in (
        ("dtype", entry.dtype, chunk.dtype),
        ("shape", entry.shape, chunk.shape),
    ):
        if there != value:
            fix = f"send {there}, or drop the upload (DropUploads) if that is wrong"
            raise config_error(field, value, f"the upload of this hash began with {there}", fix)


def _pages(num_bytes: int) -> int:
    """Return num_bytes rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
