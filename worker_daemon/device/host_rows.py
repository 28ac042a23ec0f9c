"""Host memory for rows that a device copies from and to: page-locked in the background, a piece
after the other, and usable from the start. Copies from and to a piece that is not locked yet are
as right, but hold up the thread that starts them."""

import logging
import mmap
import threading
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from rpc_schema.errors import CapacityError
from worker_daemon.device.kept_memory import KeptMapping
from worker_daemon.device.pinned import page_lock, page_unlock

PIECE_BYTES: Final = 256 << 20
"""Memory that is locked at once: a tenth of a second, so that close() need not wait for long."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class PinProgress:
    """Number of rows that are page-locked; holds no memory. Any thread may read it."""

    num_rows: int
    num_pinned: int = 0

    @property
    def is_done(self) -> bool:
        """True once all are; False on the CPU."""
        return self.num_pinned == self.num_rows


class TierRows(Protocol):
    """A row for each slot of a host tier. Owned by the worker, and used on the step thread."""

    rows: Tensor
    """uint8 [num_rows, row_bytes], zeros at first, unless they were kept."""
    rows_per_piece: int
    """One copy must not cross pieces of so many."""
    pinning: PinProgress

    @property
    def handle(self) -> bytes:
        """Names the memory to other processes of this host, for PeerRows; empty: none can map
        it."""

    def pin_ahead(self) -> None:
        """Start to page-lock what copies need locked, or go on with it."""

    def stop_pinning(self) -> None:
        """Stop that for now."""

    def close(self) -> None:
        """Unlock the rows, whose memory ends with the last reference to them. Idempotent."""


class HostRows:
    """See TierRows: in host memory, whose pages another thread locks."""

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        device: torch.device,
        kept: KeptMapping | None = None,
    ) -> None:
        """Maps the memory, and touches none of it. kept: the rows are its body, which holds what
        was left there, and stays the caller's.

        Raises:
            CapacityError: so much memory cannot be mapped.
        """
        self.size_bytes = num_rows * row_bytes
        memory = _private(self.size_bytes) if kept is None else kept.memory
        offset = 0 if kept is None else kept.head_bytes
        own = torch.frombuffer(memory, dtype=torch.uint8, count=self.size_bytes, offset=offset)
        self.rows: Tensor = own.view(num_rows, row_bytes)
        """uint8 [num_rows, row_bytes], zeros at first, unless they were kept."""
        self.rows_per_piece = max(1, PIECE_BYTES // row_bytes)
        """One copy must not cross pieces: CUDA copies within one locked range."""
        self.handle: Final = b""
        self._device = device
        self.pinning = PinProgress(num_rows)
        self._locked: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def pin_ahead(self) -> None:
        """Start to page-lock the rows on a GPU, or go on with it. If the host refuses, they stay as
        they are. Not while graphs are captured: CUDA would give up the capture."""
        if self._device.type == "cuda" and self._thread is None:
            self._thread = threading.Thread(target=self._pin, name="host-tier", daemon=True)
            self._thread.start()

    def stop_pinning(self) -> None:
        """Stop pin_ahead(), once the piece is locked at which it is. Idempotent."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._stopping.clear()
            self._thread = None

    def close(self) -> None:
        """Unlock the rows. Idempotent. The memory is unmapped with the last reference to rows."""
        self.stop_pinning()
        while self._locked:
            page_unlock(self._locked.pop())

    def _pin(self) -> None:
        torch.cuda.set_device(self._device)  # the current device is per thread
        for piece in torch.split(self.rows, self.rows_per_piece)[len(self._locked) :]:
            if self._stopping.is_set():
                return
            try:
                page_lock(piece)
            except CapacityError as error:
                _LOG.warning("the host tier stays slow: %s", error)
                return
            self._locked.append(piece)
            self.pinning.num_pinned += len(piece)


def _private(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        problem = f"{num_bytes} bytes of host memory cannot be mapped"
        raise CapacityError(problem, fix="a smaller kv_host_memory_bytes") from error
