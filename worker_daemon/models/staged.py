"""Reads regions of files into tensors of a device: reader threads fill a few page-locked buffers in
file order while copies of the full ones run.

Only the calling thread uses the device; the readers only read.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from worker_daemon.device.pinned import PinnedBuffer, open_uploads
from worker_daemon.models.row_reader import read_rows
from worker_daemon.regular_file import RegularFile

BUFFER_BYTES = 8 << 20
"""Large enough for disk throughput, small enough to page-lock quickly."""
MAX_READERS = 12
_SPARE_BUFFERS = 2
"""In addition to one buffer per reader: their copies may still be running."""
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows of equal length in a file, and the tensor that they fill."""

    offset: int
    """Offset of the first row from the start of the file."""
    row_bytes: int
    row_stride: int
    """Bytes from the start of one row to the next."""
    dtype: torch.dtype
    """Dtype of the bytes in the file."""
    target: Tensor
    """[rows] or [rows, columns], on the device, of any floating-point dtype."""

    @property
    def num_rows(self) -> int:
        return self.target.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return self.num_rows * self.row_bytes

    def rows(self, start: int, stop: int) -> "Extent":
        """Return a part of the rows."""
        offset = self.offset + start * self.row_stride
        return replace(self, offset=offset, target=self.target[start:stop])


class _Placed(NamedTuple):
    """An extent and its place in a buffer."""

    extent: Extent
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.extent.num_bytes


class _Chunk(NamedTuple):
    """The content of one buffer at a time, all from one file."""

    file: RegularFile
    parts: tuple[_Placed, ...]


def read_staged(
    files: Mapping[Path, Sequence[Extent]],
    device: torch.device,
    advance: Callable[[int], None],
    *,
    num_readers: int = MAX_READERS,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Fill the targets of all extents; on return the device has them.

    advance is called on the calling thread with the number of target bytes submitted to the device.

    Raises:
        OSError: a file cannot be read.
        TruncatedError: a file ends too early.
        CapacityError: no buffers can be allocated.
    """
    longest = max((e.row_bytes for extents in files.values() for e in extents), default=0)
    size = max(buffer_bytes, longest)
    with ExitStack() as stack:
        uploads = open_uploads(device)
        buffers = []
        for _ in range(num_readers + _SPARE_BUFFERS):
            buffers.append(PinnedBuffer(size, device))
            stack.callback(buffers[-1].release)
        stack.callback(uploads.settle)
        opened = stack.enter_context(ExitStack())
        pool = stack.enter_context(ThreadPoolExecutor(num_readers, thread_name_prefix="load"))
        free = deque((buffer, _ready) for buffer in buffers)
        filling: deque[tuple[Future[None], PinnedBuffer, _Chunk]] = deque()

        def take_oldest() -> None:
            future, buffer, chunk = filling.popleft()
            future.result()
            for part in chunk.parts:
                uploads.copy(_as_tensor(buffer, part), part.extent.target)
            free.append((buffer, uploads.mark()))
            advance(sum(_target_bytes(part.extent) for part in chunk.parts))

        for chunk in _chunks(files, size, opened):
            if len(filling) == num_readers:
                take_oldest()
            buffer, wait_until_copied = free.popleft()
            wait_until_copied()
            filling.append((pool.submit(_fill, buffer, chunk), buffer, chunk))
        while filling:
            take_oldest()


def _chunks(
    files: Mapping[Path, Sequence[Extent]], size: int, opened: ExitStack
) -> Iterator[_Chunk]:
    """Yield one chunk per buffer, in file order; `opened` closes the files."""
    for path, extents in sorted(files.items()):
        file = opened.enter_context(RegularFile(path))
        for parts in _packed(_split(extents, size), size):
            yield _Chunk(file, parts)


def _split(extents: Iterable[Extent], size: int) -> Iterator[Extent]:
    """Yield extents by offset, cut between rows so that each fits a buffer."""
    for extent in sorted(extents, key=lambda extent: extent.offset):
        step = max(1, size // extent.row_bytes)
        for start in range(0, extent.num_rows, step):
            yield extent.rows(start, min(start + step, extent.num_rows))


def _packed(extents: Iterable[Extent], size: int) -> Iterator[tuple[_Placed, ...]]:
    parts: list[_Placed] = []
    for extent in extents:
        start = -(-parts[-1].stop // _ALIGNMENT) * _ALIGNMENT if parts else 0
        if start + extent.num_bytes > size:
            yield tuple(parts)
            parts, start = [], 0
        parts.append(_Placed(extent, start))
    if parts:
        yield tuple(parts)


def _fill(buffer: PinnedBuffer, chunk: _Chunk) -> None:
    for part in chunk.parts:
        extent = part.extent
        into = buffer.view[part.start : part.stop]
        read_rows(chunk.file, extent.offset, extent.row_bytes, extent.row_stride, into)


def _as_tensor(buffer: PinnedBuffer, part: _Placed) -> Tensor:
    values = buffer.bytes[part.start : part.stop].view(part.extent.dtype)
    return values.view(part.extent.target.shape)


def _target_bytes(extent: Extent) -> int:
    return extent.target.numel() * extent.target.element_size()


def _ready() -> None:
    return None
