"""The host tier: a KV connector whose other place is this rank's host memory (device/host_rows.py).
What a slot holds, and whether a driver may be told, is in RequestState.host_contents.

Shapes: S blocks to store, L blocks to load, P rows of a staging buffer, W int32 words of a block on
this rank.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from rpc_schema.host_tier import HostTierMoves, HostTierStatus
from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.device.host_rows import HostRows, PinProgress
from worker_daemon.device.pinned import download, upload
from worker_daemon.device.transfers import transfer_order
from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.block_contents import BlockContents, Hashes, versioned_tag
from worker_daemon.runner.connectors.checksums import WORD_BYTES, BlockChecksums
from worker_daemon.runner.connectors.interface import Loaded
from worker_daemon.runner.kv_cache import BlockPages
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import ScheduledStep

STAGING_BYTES: Final = 16 << 20
"""Size of a staging buffer, or one block: a few blocks leave or arrive at once, in copies long
enough for the bus."""


class Moves(NamedTuple):
    """Blocks that a step moves, checked (parts/host_tier.py)."""

    tag: bytes
    store_blocks: Int32s
    """[S]"""
    store_slots: Int32s
    """[S]"""
    store_hashes: Hashes
    """[S, bytes of a hash]"""
    load_blocks: Int32s
    """[L]"""
    load_slots: Int32s
    """[L]"""
    load_hashes: Hashes
    """[L, bytes of a hash]"""


def staging_rows(block_bytes: int) -> int:
    """Return P, for blocks of this size."""
    return max(1, STAGING_BYTES // block_bytes)


def tier_device_bytes(block_bytes: int) -> int:
    """Return the most device memory that a host tier takes: for each direction a staging buffer and
    products of twice its size, and keys of twice the size of a block."""
    return 6 * staging_rows(block_bytes) * block_bytes + 2 * block_bytes


@dataclass(slots=True, eq=False)
class TierCounts:
    """Counts of a host tier. Written on the step thread, read by any; outlives the tier, and
    holds none of its memory."""

    contents: BlockContents
    pinning: PinProgress
    size_bytes: int
    num_stored: int = 0
    num_loaded: int = 0
    num_invalid: int = 0

    def status(self) -> HostTierStatus:
        """Return the tier's state; counts of the last steps may lack."""
        return HostTierStatus(
            num_slots=self.contents.num_blocks,
            num_held=self.contents.num_known,
            size_bytes=self.size_bytes,
            is_pinned=self.pinning.is_done,
            num_stored=self.num_stored,
            num_loaded=self.num_loaded,
            num_invalid=self.num_invalid,
        )


class HostTier:
    """See KVConnector. Uses the host's rows, which outlive it only as long as the KV cache."""

    def __init__(
        self, pages: BlockPages, memory: HostRows, state: RequestState, weights: WeightState
    ) -> None:
        """pages: of the KV cache. memory: a row for each slot."""
        device = pages.device
        self._pages = pages
        self._host = memory.rows.view(torch.int32)
        """int32 [slots, W]"""
        self._memory = memory
        self._state = state
        self._weights = weights
        self._order = transfer_order(device)
        num_rows, num_words = staging_rows(pages.block_bytes), pages.block_bytes // WORD_BYTES
        new = torch.empty((2, num_rows, num_words), dtype=torch.int32, device=device)
        self._outgoing, self._incoming = new
        """int32 [P, W]"""
        # Of each direction its own: they run on different streams.
        self._sums_out = BlockChecksums(num_words, num_rows, device)
        self._sums_in = self._sums_out.beside()
        self._checksums = torch.zeros(len(self._host), dtype=torch.int64, device=device)
        """[slots] of what was stored there last. On the device: the host neither makes nor compares
        them."""
        self._unread: deque[Loaded] = deque()
        """Loads whose outcomes are not counted yet."""
        self.counts = TierCounts(state.host_contents, memory.pinning, memory.size_bytes)

    def begin(self, step: ScheduledStep) -> Loaded | None:
        """See KVConnector."""
        self._count_known()
        moves: Moves | None = self._state.parts.step_value(HostTierMoves, step.step_values)
        if moves is None:
            return None
        state, tag = self._state, versioned_tag(moves.tag, self._weights.version)
        state.contents.write(moves.load_blocks, step.seq)
        are_held = state.host_contents.hold(tag, moves.load_slots, moves.load_hashes)
        self._order.begin_arrivals()
        if moves.store_slots.size:
            self._store(moves.store_blocks, moves.store_slots)
            state.host_contents.store(tag, moves.store_slots, moves.store_hashes, step.seq)
            self.counts.num_stored += moves.store_slots.size
        if not moves.load_slots.size:
            return None
        loaded = self._load(moves.load_blocks, moves.load_slots, are_held)
        self.counts.num_loaded += moves.load_slots.size
        self._unread.append(loaded)
        self._count_known()  # on the CPU this load, too: no later step may come to count it
        return loaded

    def settle(self) -> None:
        """See KVConnector."""
        self._order.settle()

    def _store(self, block_ids: Int32s, slots: Int32s) -> None:
        most = len(self._outgoing)
        for first in range(0, slots.size, most):
            own = slots[first : first + most]
            rows = self._outgoing[: own.size]
            with self._order.gathering():
                self._pages.gather(upload(block_ids[first : first + most], rows.device), rows)
            with self._order.leaving():
                places = upload(own.astype(np.int64), rows.device)
                self._checksums.index_copy_(0, places, self._sums_out.of(rows))
                for row, slot, count in self._runs(own):
                    target = self._host[slot : slot + count]
                    target.copy_(rows[row : row + count], non_blocking=True)

    def _load(self, block_ids: Int32s, slots: Int32s, are_held: Bools) -> Loaded:
        """are_held: bool [L], False for the blocks that are not in their slots."""
        most, found = len(self._incoming), []
        for first in range(0, slots.size, most):
            own = slots[first : first + most]
            rows = self._incoming[: own.size]
            with self._order.arriving():
                for row, slot, count in self._runs(own):
                    source = self._host[slot : slot + count]
                    rows[row : row + count].copy_(source, non_blocking=True)
                places = upload(own.astype(np.int64), rows.device)
                is_bad = self._sums_in.of(rows) != self._checksums[places]
                is_bad |= upload(~are_held[first : first + most], rows.device)
                self._pages.poison(rows, is_bad)
                found.append(download(is_bad))
                are_known = self._order.mark_arrival()
            with self._order.scattering():
                self._pages.scatter(rows, upload(block_ids[first : first + most], rows.device))
        # The parts are on the host when the last is: joined only then.
        return Loaded(block_ids, found, are_known)

    def _runs(self, slots: Int32s) -> Iterator[tuple[int, int, int]]:
        """Yield runs of slots that follow each other within a piece of the host's memory, each as
        one copy: place of the first, its slot, and their number."""
        pieces = slots // self._memory.rows_per_piece
        is_first = np.ones(slots.size, np.bool_)
        is_first[1:] = (np.diff(slots) != 1) | (np.diff(pieces) != 0)
        starts = np.flatnonzero(is_first)
        counts = np.diff(np.append(starts, slots.size))
        yield from zip(starts.tolist(), slots[starts].tolist(), counts.tolist(), strict=True)

    def _count_known(self) -> None:
        while self._unread and self._unread[0].is_known:
            self.counts.num_invalid += self._unread.popleft().invalid_blocks.size
