"""Reads and writes a daemon's files of KV blocks in the background: no step waits for a disk."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from worker_daemon.runner.connectors.block_files import (
    BadBlockFileError,
    BlockFiles,
    FileName,
    ReadProgress,
)
from worker_daemon.runner.connectors.moved_bytes import MovedBytes

MOST_QUEUED_BYTES: Final = 512 << 20
"""Bound on blocks in host memory that wait to be written; beyond it they are not kept."""
MOST_FETCHED_BYTES: Final = 2 << 30
"""Bound on blocks in host memory that were read for a step."""
STALE_S: Final = 30.0
"""Time after which blocks that no step has loaded make room for others."""
_READERS: Final = 4

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class TrafficCounts:
    """Counts of blocks since the daemon's start. Any thread may read them."""

    num_written: int = 0
    num_dropped: int = 0
    """Not written: too many were waiting."""
    num_failed: int = 0
    """Not written: the file system refused."""
    num_bad_files: int = 0
    """Files that could not be read, or were not what they should be; they are removed."""
    written: MovedBytes = field(default_factory=MovedBytes)
    read: MovedBytes = field(default_factory=MovedBytes)


class FileBatch(NamedTuple):
    """Blocks on their way to files."""

    names: Sequence[FileName]
    rows: Tensor
    """int32 [n, W] on the host."""
    checksums: Tensor
    """int64 [n] on the host."""
    wait: Callable[[], None]
    """Returns once rows and checksums are there."""


class FetchedBlock(NamedTuple):
    """A block that was read, and is not checked yet."""

    row: Tensor
    """int32 [W] on the host, page-locked for a GPU."""
    checksum: int


@dataclass(slots=True)
class _Fetch:
    """A block that is being read, or has been."""

    num_bytes: int
    asked: float
    """time.monotonic() when it was last asked for."""
    block: FetchedBlock | None = None


class FileTraffic:
    """Owned by the worker, for the daemon's life. The step thread writes and takes, the control
    thread fetches; its own threads read and write files."""

    def __init__(self, files: BlockFiles) -> None:
        self.files = files
        self.counts = TrafficCounts()
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self._readers = ThreadPoolExecutor(_READERS, "kv-reader")
        self._changing = threading.Lock()
        self._queued: set[FileName] = set()
        """Blocks that wait to be written."""
        self._queued_bytes = 0
        self._fetches: OrderedDict[FileName, _Fetch] = OrderedDict()
        """Those that were asked for least recently come first."""
        self._fetched_bytes = 0
        self._is_refused = False
        """The last write has failed."""
        self._has_scanned = threading.Event()
        self._writer.submit(self._scan)

    def close(self) -> None:
        """Stop. Blocks that wait to be written are dropped. Idempotent."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self.files.close()

    # Step thread.

    def lacks(self, name: FileName) -> bool:
        """Return True if a block is in no file, and not on its way to one."""
        return name not in self.files and name not in self._queued

    def reserve(self, num_bytes: int) -> bool:
        """Return True if so many bytes may be given to write(), which must follow."""
        with self._changing:
            if self._queued_bytes + num_bytes > MOST_QUEUED_BYTES:
                return False
            self._queued_bytes += num_bytes
            return True

    def write(self, batch: FileBatch) -> None:
        """Write blocks later, for which there is a reserve()."""
        with self._changing:
            self._queued.update(batch.names)
        self._writer.submit(self._write, batch)

    def take(self, name: FileName) -> FetchedBlock | None:
        """Return a block that was fetched, and forget it; None if it is not there."""
        with self._changing:
            fetch = self._fetches.get(name)
            if fetch is None or fetch.block is None:
                return None
            self._forget(name)
            return fetch.block

    def discard(self, name: FileName) -> None:
        """Remove a file whose block did not match its checksum, later."""
        self._writer.submit(self.files.remove, name)

    # Control thread.

    def fetch(self, names: Sequence[FileName], num_bytes: int, *, page_locks: bool) -> ReadProgress:
        """Begin to read the leading ones of these blocks, up to the first that is in no file, as
        far as there is room, and tell how far that has come. A block is to be taken soon: see
        STALE_S. num_bytes: of each. page_locks: for a GPU."""
        if not self._has_scanned.is_set():
            return ReadProgress(0, is_done=False)
        fetches, now = [], time.monotonic()
        with self._changing:
            for name in names:
                fetch = self._fetches.get(name)
                if fetch is None:
                    if name not in self.files or not self._has_room(num_bytes, now):
                        break
                    fetch = self._fetches[name] = _Fetch(num_bytes, now)
                    self._fetched_bytes += num_bytes
                    self._readers.submit(self._read, name, num_bytes, page_locks)
                fetch.asked = now
                self._fetches.move_to_end(name)
                fetches.append(fetch)
            are_ready = [fetch.block is not None for fetch in fetches]
        num_ready = are_ready.index(False) if False in are_ready else len(are_ready)
        return ReadProgress(num_ready, all(are_ready))

    def _has_room(self, num_bytes: int, now: float) -> bool:
        """Return True if one more block may be read, if others that nobody has taken make room."""
        while self._fetched_bytes + num_bytes > MOST_FETCHED_BYTES:
            name, oldest = next(iter(self._fetches.items()), (None, None))
            if name is None or oldest is None or oldest.block is None:
                return False
            if now - oldest.asked < STALE_S:
                return False
            self._forget(name)
        return True

    def _forget(self, name: FileName) -> None:
        self._fetched_bytes -= self._fetches.pop(name).num_bytes

    # Own threads.

    def _scan(self) -> None:
        try:
            self.files.scan()
        except OSError as error:
            _LOG.warning("files of KV blocks are not used: %s", error)
        finally:
            self._has_scanned.set()

    def _write(self, batch: FileBatch) -> None:
        try:
            batch.wait()
            rows = batch.rows.view(torch.uint8).numpy()
            for name, row, checksum in zip(
                batch.names, rows, batch.checksums.tolist(), strict=True
            ):
                self._write_one(name, row.data, checksum)
        finally:
            with self._changing:
                self._queued.difference_update(batch.names)
                self._queued_bytes -= batch.rows.nbytes

    def _write_one(self, name: FileName, block: memoryview, checksum: int) -> None:
        began = time.perf_counter()
        try:
            self.files.write(name, block, checksum)
        except OSError as error:
            self.counts.num_failed += 1
            if not self._is_refused:
                _LOG.warning("a KV block was not written, nor may others be: %s", error)
            self._is_refused = True
        else:
            self.counts.num_written += 1
            self.counts.written.add(len(block), time.perf_counter() - began)
            self._is_refused = False

    def _read(self, name: FileName, num_bytes: int, page_locks: bool) -> None:
        block: FetchedBlock | None = None
        began = time.perf_counter()
        try:
            row = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=page_locks)
            checksum = self.files.read(name, row.numpy().data)
            block = FetchedBlock(row.view(torch.int32), checksum)
        except (OSError, BadBlockFileError) as error:
            if not isinstance(error, FileNotFoundError):
                with self._changing:
                    self.counts.num_bad_files += 1
                _LOG.warning("a file of a KV block is removed: %s", error)
            with suppress(OSError):
                self.files.remove(name)
        finally:
            with self._changing:
                if block is not None:
                    self.counts.read.add(num_bytes, time.perf_counter() - began)
                fetch = self._fetches.get(name)
                if fetch is not None:
                    fetch.block = block
                if block is None and fetch is not None:
                    self._forget(name)
