"""Blocks on their way between the KV cache and the host, for any connector: through staging buffers
on the device, with a checksum made of each block that leaves and of each that arrives.

Shapes: P rows of a staging buffer, W int32 words of a block on this rank, R those words and what a
connector keeps behind them, n at most P, U checksums of a block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.device.pinned import download, upload
from worker_daemon.device.transfers import (
    BESIDE_DEPTH,
    DEPTH,
    CopyTimes,
    LoadLane,
    StoreLane,
    TransferOrder,
)
from worker_daemon.runner.connectors.checksums import WORD_BYTES
from worker_daemon.runner.connectors.interface import Loaded
from worker_daemon.runner.kv_cache import BlockPages

STAGING_BYTES: Final = 64 << 20
"""Size of a staging buffer, or one block: blocks leave or arrive together, in copies long enough
for the bus, and with few launches."""
_DEPTHS: Final = (DEPTH, DEPTH, BESIDE_DEPTH)
"""Buffers of each lane: to the host, from there before a step, and from there beside steps."""
_SUMS_BLOCKS: Final = 32
"""The checksums of the most blocks that a step moves are no larger than so many blocks."""
_ALIGNED_IDS: Final = 4
"""Block ids in 16 bytes."""

Leave: TypeAlias = Callable[[slice, Tensor, Tensor], None]
"""Starts the copies of some blocks to the host: which of them, their rows, int32 [n, R], and their
checksums, int64 [n, U], both on the device."""

Arrive: TypeAlias = Callable[[slice, Tensor], None]
"""Starts the copies of some blocks from the host: which of them, and the rows on the device that
take them, int32 [n, R]."""

Gather: TypeAlias = Callable[[Tensor, Tensor], None]
"""Copies words of blocks, int32 [n], to rows, int32 [n, words], both on the device."""

Settle: TypeAlias = Callable[[Tensor], None]
"""Makes the checksums of blocks that have arrived as they must, int64 [L, U] on the device, zero,
and those of no others."""

InPlace: TypeAlias = Sequence[tuple[slice, Tensor]]
"""Places of all blocks of a load that are on the device already, so that none has to arrive: some
of the blocks each, and their rows, int32 [n, R]. Empty: they are not there."""

Load: TypeAlias = Callable[[Int32s, Bools, Arrive, Settle, InPlace], Loaded]
"""BlockStaging.load or load_beside."""


class Checksums(Protocol):
    """Makes the checksums of a connector's blocks: BlockChecksums or PartChecksums."""

    @property
    def count(self) -> int:
        """U."""

    def of(self, rows: Tensor, sums: Tensor) -> None:
        """Write those of rows, int32 [n, W], to sums, int64 [n, U]. Never waits for the device."""

    def deliver(self, rows: Tensor, block_ids: Tensor, pages: BlockPages, sums: Tensor) -> None:
        """Copy rows that have arrived, int32 [n, R], to blocks int32 [n] of a KV cache, no two of
        them the same, and write their checksums to sums, int64 [n, U]: of a connector that keeps
        these behind the words, less those. Never waits for the device."""


def staging_rows(block_bytes: int) -> int:
    """Return P, for blocks of this size."""
    return max(1, min(STAGING_BYTES // block_bytes, MAX_MOVED_BLOCKS))


def staging_device_bytes(block_bytes: int) -> int:
    """Return the most device memory that a connector takes: staging buffers, checksums, and keys of
    twice the size of a block."""
    return (sum(_DEPTHS) * staging_rows(block_bytes) + _SUMS_BLOCKS + 2) * block_bytes


class BlockStaging:
    """Owned by a connector, used on the step thread. Only launches, but on the CPU, where all is
    done when a call returns."""

    def __init__(self, pages: BlockPages, checksums: Checksums, tail_words: int = 0) -> None:
        """pages: of the KV cache. tail_words: R - W."""
        device = pages.device
        self._pages = pages
        self._order = TransferOrder(device)
        self._num_words = pages.block_bytes // WORD_BYTES
        shape = staging_rows(pages.block_bytes), self._num_words + tail_words
        self._outgoing, self._incoming, self._incoming_beside = (
            torch.empty((depth, *shape), dtype=torch.int32, device=device) for depth in _DEPTHS
        )
        """int32 [buffers, P, R]"""
        self._next_outgoing = 0
        """The buffer that was filled the longest ago."""
        self._checksums = checksums
        if device.type == "cuda":
            self._compile()

    @property
    def part_rows(self) -> int:
        """P: blocks move in parts of so many, the last one of fewer."""
        return self._outgoing.shape[1]

    def await_departures(self) -> None:
        """Let the loads of a step wait until all that is leaving has left: call it before the
        step's stores, which none of its loads sees."""
        self._order.loads.see_stores()
        self._order.loads_beside.see_stores()

    def store(self, block_ids: Int32s, leave: Leave) -> None:
        """Let blocks [S] leave, as the steps launched so far have left them."""
        stores, ids = self._order.stores, upload(block_ids, self._pages.device)
        parts = self._parts(block_ids.size, self._outgoing, self._next_outgoing)
        for buffer, part, rows in parts:
            self._next_outgoing = (buffer + 1) % len(self._outgoing)
            with stores.gathering(buffer):
                blocks = rows[:, : self._num_words]
                self._pages.gather(ids[part], blocks)
            with stores.leaving(buffer):
                sums = rows.new_empty((len(rows), self._checksums.count), dtype=torch.int64)
                self._checksums.of(blocks, sums)
                leave(part, rows, sums)

    def store_words(
        self,
        width: int,
        block_ids: Int32s,
        gather: Gather,
        leave: Callable[[slice, Tensor], None],
    ) -> None:
        """Let so many words of blocks [S] leave, as the work launched so far has left them. leave:
        starts their copies to where they go: which of the blocks, and their rows on the device,
        int32 [n, width]."""
        stores, ids = self._order.stores, upload(block_ids, self._pages.device)
        most = self._outgoing[0].numel() // width
        most -= most % _ALIGNED_IDS if most > _ALIGNED_IDS else 0
        for first in range(0, block_ids.size, most):
            buffer = self._next_outgoing
            self._next_outgoing = (buffer + 1) % len(self._outgoing)
            part = slice(first, min(first + most, block_ids.size))
            count = part.stop - part.start
            rows = self._outgoing[buffer].view(-1)[: count * width].view(count, width)
            with stores.gathering(buffer):
                gather(ids[part], rows)
            with stores.leaving(buffer):
                leave(part, rows)

    @property
    def times(self) -> CopyTimes:
        """Times of the copies between the buffers and the host."""
        return self._order.times

    @property
    def departures(self) -> StoreLane:
        """The way out, which numbers what leaves. It holds none of the buffers."""
        return self._order.stores

    def mark_departure(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until what left so far is on the host. For
        a Leave."""
        return self._order.stores.mark()

    def load(
        self,
        block_ids: Int32s,
        are_held: Bools,
        arrive: Arrive,
        settle: Settle,
        in_place: InPlace = (),
        *,
        waits: bool = True,
    ) -> Loaded:
        """Let blocks [L] arrive before the steps that are launched later, and fill those with NaN
        that do not have their checksum. are_held: bool [L], False for blocks that are not there at
        all. waits: for the steps that were launched before."""
        lane, buffers = self._order.loads, self._incoming
        loaded = self._load(
            lane, buffers, block_ids, are_held, arrive, settle, in_place, waits=waits
        )
        loaded.end.await_in_steps()
        return loaded

    def load_beside(
        self,
        block_ids: Int32s,
        are_held: Bools,
        arrive: Arrive,
        settle: Settle,
        in_place: InPlace = (),
        *,
        waits: bool = True,
    ) -> Loaded:
        """Let blocks [L] arrive beside steps: as load(), but a step that reads or writes them has
        to wait for the arrival first."""
        lane, buffers = self._order.loads_beside, self._incoming_beside
        return self._load(lane, buffers, block_ids, are_held, arrive, settle, in_place, waits=waits)

    def settle(self) -> None:
        """Wait for all copies."""
        self._order.settle()

    def _load(
        self,
        lane: LoadLane,
        buffers: Tensor,
        block_ids: Int32s,
        are_held: Bools,
        arrive: Arrive,
        settle: Settle,
        in_place: InPlace,
        *,
        waits: bool = True,
    ) -> Loaded:
        device = buffers.device
        with lane.beginning():
            ids, held = upload(block_ids, device), upload(are_held, device)
            sums = torch.empty(
                (block_ids.size, self._checksums.count), dtype=torch.int64, device=device
            )
        if in_place:
            with lane.through(0):
                if waits:
                    lane.await_steps(0)
                for part, rows in in_place:
                    # A kernel is compiled again for a pointer that is aligned to less.
                    own = ids[part].clone() if part.start % _ALIGNED_IDS else ids[part]
                    self._checksums.deliver(rows, own, self._pages, sums[part])
        parts = [] if in_place else [*self._parts(block_ids.size, buffers)]
        depth = len(buffers)
        for buffer in range(min(depth, len(parts))):
            with lane.through(buffer):
                for number, (_, part, rows) in enumerate(parts[buffer::depth]):
                    arrive(part, rows)
                    if waits and not number:
                        lane.await_steps(buffer)
                    self._checksums.deliver(rows, ids[part], self._pages, sums[part])
        with lane.ending():
            settle(sums)
            are_bad = sums.any(dim=1) | ~held
            self._pages.poison(ids, are_bad)
            found = download(are_bad)
        return Loaded(block_ids, [found], lane.end())

    def _parts(
        self, count: int, buffers: Tensor, begin: int = 0
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield the parts of so many blocks, each with the number of its buffer and its rows.
        begin: the first buffer."""
        most = buffers.shape[1]
        for number, first in enumerate(range(0, count, most)):
            part, buffer = slice(first, min(first + most, count)), (begin + number) % len(buffers)
            yield buffer, part, buffers[buffer, : part.stop - first]

    def _compile(self) -> None:
        """Run each kernel once, on the null block, and leave it as it is."""
        rows = self._incoming[0, :1]
        blocks, ids = rows[:, : self._num_words], rows.new_zeros(1)
        self._pages.gather(ids, blocks)
        sums = rows.new_empty((1, self._checksums.count), dtype=torch.int64)
        self._checksums.of(blocks, sums)
        self._checksums.deliver(rows, ids, self._pages, sums)
        self._pages.poison(ids, sums.zero_().any(dim=1))
