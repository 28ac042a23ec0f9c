"""Reads rows of a matrix, or a rank's columns of these rows, from a file."""

from typing import Final

import numpy as np

from worker_daemon.regular_file import RegularFile

_SPAN_BYTES: Final = 1 << 20
"""Bytes to read at a time if only columns are needed; small enough for the CPU cache."""
_MIN_SINGLE_BYTES: Final = 4096
_MIN_SINGLE_RATIO: Final = 4
"""From this ratio on, a system call per row costs less than copying the bytes between rows."""


def read_rows(
    file: RegularFile, offset: int, row_bytes: int, row_stride: int, into: memoryview
) -> None:
    """Fill `into` with rows of row_bytes that start row_stride bytes apart, the first at offset.
    Raises as RegularFile.read() does."""
    num_rows = len(into) // row_bytes
    if row_bytes == row_stride or num_rows <= 1:
        file.read(offset, into)
        return
    if row_bytes >= _MIN_SINGLE_BYTES and row_stride >= _MIN_SINGLE_RATIO * row_bytes:
        for row in range(num_rows):
            part = into[row * row_bytes : (row + 1) * row_bytes]
            file.read(offset + row * row_stride, part)
        return
    at_once = max(1, _SPAN_BYTES // row_stride)
    span = np.empty(at_once * row_stride, np.uint8)
    target = np.frombuffer(into, np.uint8).reshape(num_rows, row_bytes)
    for first in range(0, num_rows, at_once):
        count = min(at_once, num_rows - first)
        used = (count - 1) * row_stride + row_bytes  # the file may end with the last row
        file.read(offset + first * row_stride, span[:used].data)
        rows = np.lib.stride_tricks.as_strided(span, (count, row_bytes), (row_stride, 1))
        np.copyto(target[first : first + count], rows)
