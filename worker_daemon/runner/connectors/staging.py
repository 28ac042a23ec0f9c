"""Blocks on their way between the KV cache and the host, for any connector: through two staging
buffers on the device, with a checksum made of each block that leaves and of each that arrives.

Shapes: P rows of a staging buffer, W int32 words of a block on this rank, R those words and what a
connector keeps behind them, n at most P, U checksums of a block.
"""

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.device.pinned import download, upload
from worker_daemon.device.transfers import CopyTimes, transfer_order
from worker_daemon.runner.connectors.checksums import WORD_BYTES
from worker_daemon.runner.connectors.interface import Loaded
from worker_daemon.runner.kv_cache import BlockPages

STAGING_BYTES: Final = 16 << 20
"""Size of a staging buffer, or one block: a few blocks leave or arrive at once, in copies long
enough for the bus."""

Leave: TypeAlias = Callable[[slice, Tensor, Tensor], None]
"""Starts the copies of some blocks to the host: which of them, their rows, int32 [n, R], and their
checksums, int64 [n] or [n, U], both on the device."""

Arrive: TypeAlias = Callable[[slice, Tensor], Tensor]
"""Starts the copies of some blocks from the host: which of them, and the rows on the device that
take them, int32 [n, R]. Returns the checksums that they must have, on the device."""


class Checksums(Protocol):
    """Makes the checksums of a connector's blocks: BlockChecksums or PartChecksums."""

    def beside(self) -> "Checksums":
        """Return one with the same keys, for another stream."""

    def of(self, rows: Tensor) -> Tensor:
        """Return int64 [n] or [n, U] for int32 rows [n, W]."""


MakeChecksums: TypeAlias = Callable[[int, torch.device], Checksums]
"""Makes them, for so many rows at once on a device."""


def staging_rows(block_bytes: int) -> int:
    """Return P, for blocks of this size."""
    return max(1, STAGING_BYTES // block_bytes)


def staging_device_bytes(block_bytes: int) -> int:
    """Return the most device memory that a connector takes: for each direction a staging buffer and
    products of twice its size, and keys of twice the size of a block."""
    return 6 * staging_rows(block_bytes) * block_bytes + 2 * block_bytes


class BlockStaging:
    """Owned by a connector, used on the step thread. Only launches, but on the CPU, where all is
    done when a call returns."""

    def __init__(
        self, pages: BlockPages, make_checksums: MakeChecksums, tail_words: int = 0
    ) -> None:
        """pages: of the KV cache. tail_words: R - W."""
        device = pages.device
        self._pages = pages
        self._order = transfer_order(device)
        num_rows = staging_rows(pages.block_bytes)
        self._num_words = pages.block_bytes // WORD_BYTES
        shape = (2, num_rows, self._num_words + tail_words)
        self._outgoing, self._incoming = torch.empty(shape, dtype=torch.int32, device=device)
        """int32 [P, R]"""
        # Of each direction its own: they run on different streams.
        self._sums_out = make_checksums(num_rows, device)
        self._sums_in = self._sums_out.beside()

    def begin_arrivals(self) -> None:
        """Let the loads of a step see what has left before: call it before its stores."""
        self._order.begin_arrivals()

    def store(self, block_ids: Int32s, leave: Leave) -> None:
        """Let blocks [S] leave, as the steps launched so far have left them."""
        most = len(self._outgoing)
        for first in range(0, block_ids.size, most):
            part = slice(first, min(first + most, block_ids.size))
            rows = self._outgoing[: part.stop - first]
            with self._order.gathering():
                blocks = rows[:, : self._num_words]
                self._pages.gather(upload(block_ids[part], rows.device), blocks)
            with self._order.leaving():
                leave(part, rows, self._sums_out.of(blocks))

    @property
    def times(self) -> CopyTimes:
        """Times of the copies between the buffers and the host."""
        return self._order.times

    @property
    def have_left(self) -> Callable[[], bool]:
        """Returns True if what was stored so far is on the host: for any thread. It holds none of
        the buffers."""
        return self._order.have_left

    def mark_departure(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until what left so far is on the host. For
        a Leave."""
        return self._order.mark_departure()

    def load(self, block_ids: Int32s, are_held: Bools, arrive: Arrive) -> Loaded:
        """Let blocks [L] arrive, and fill those with NaN that do not have their checksum. are_held:
        bool [L], False for blocks that are not there at all."""
        most, found = len(self._incoming), []
        for first in range(0, block_ids.size, most):
            part = slice(first, min(first + most, block_ids.size))
            rows = self._incoming[: part.stop - first]
            with self._order.arriving():
                expected = arrive(part, rows)
                blocks = rows[:, : self._num_words]
                is_bad = (self._sums_in.of(blocks) != expected).view(len(rows), -1).any(dim=1)
                is_bad |= upload(~are_held[part], rows.device)
                self._pages.poison(blocks, is_bad)
                found.append(download(is_bad))
                are_known = self._order.mark_arrival()
            with self._order.scattering():
                self._pages.scatter(blocks, upload(block_ids[part], rows.device))
        # The parts are on the host when the last is: joined only then.
        return Loaded(block_ids, found, are_known)

    def settle(self) -> None:
        """Wait for all copies."""
        self._order.settle()
