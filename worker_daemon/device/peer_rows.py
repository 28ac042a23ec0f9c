"""Rows of a GPU's memory that belong to another process of this host, mapped here until closed.

If that process ends or frees them, the driver keeps the memory until the last mapping is closed: a
copy then reads bytes of no account, and does not fail. So does one that its owner overtakes.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rpc_schema.errors import TransferError
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.device.ipc_driver import IpcDriver


class MappedRows(Protocol):
    """Rows of another process. Belongs to one thread, whose device is current."""

    def copy(self, sources: Int32s, target: Tensor, targets: Int32s, columns: slice) -> None:
        """Start to copy bytes of rows, [n] sources, to the same ones of rows of target, uint8
        [rows, bytes of a row], on the current stream. Raises TransferError."""

    def close(self) -> None:
        """Unmap them. No copy is in progress. Idempotent."""


class PeerRows:
    """See MappedRows."""

    def __init__(
        self, handle: bytes, num_rows: int, row_bytes: int, *, device: torch.device
    ) -> None:
        """Raises TransferError: the memory cannot be mapped here, or is smaller."""
        self._driver = IpcDriver()
        self._device = device
        self._row_bytes = row_bytes
        self._address, size = self._driver.open(handle)
        if size < num_rows * row_bytes:
            self.close()
            raise TransferError(f"{num_rows} rows of {row_bytes} bytes are more than {size} bytes")

    def copy(self, sources: Int32s, target: Tensor, targets: Int32s, columns: slice) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        pitch, width = self._row_bytes, columns.stop - columns.start
        assert target.is_contiguous() and target.shape[1] == pitch
        for source, place, count in runs_of(sources, targets):
            to = target.data_ptr() + place * pitch + columns.start
            address = self._address + source * pitch + columns.start
            if width == pitch or count == 1:
                self._driver.copy(to, address, count * width, stream)
            else:
                self._driver.copy_columns(to, address, pitch, width, count, stream)

    def close(self) -> None:
        if self._address:
            address, self._address = self._address, 0
            self._driver.close(address)


def runs_of(sources: Int32s, targets: Int32s) -> list[tuple[int, int, int]]:
    """Return the runs of rows, [n] each, that follow each other on both sides: first source, first
    target, and their number."""
    order = np.argsort(targets)
    own, other = targets[order], sources[order]
    starts = np.flatnonzero(np.append(True, (np.diff(own) != 1) | (np.diff(other) != 1)))
    counts = np.diff(np.append(starts, own.size))
    columns = other[starts].tolist(), own[starts].tolist(), counts.tolist()
    return list(zip(*columns, strict=True))
