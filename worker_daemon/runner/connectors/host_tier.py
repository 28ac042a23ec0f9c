"""The host tier: a KV connector whose other place is this rank's host memory (device/host_rows.py),
or memory of its device that is no part of the KV cache (device/device_rows.py).
What a slot holds, and whether a driver may be told, is in RequestState.host_contents.

Shapes: S blocks to store, L blocks to load, F blocks that a step fills and stores, W int32 words of
a block on this rank, R those words and the words of its checksums.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rpc_schema.config import CacheConfig, KVTierMemory
from rpc_schema.host_tier import HostTierMoves, HostTierStatus
from rpc_schema.kv_cache import KVPages, LatentPages
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.host_rows import PinProgress, TierRows
from worker_daemon.device.pinned import upload
from worker_daemon.device.transfers import CopyTimes
from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.block_contents import BlockContents, Hashes, versioned_tag
from worker_daemon.runner.connectors.checksums import (
    CHECKSUM_WORDS,
    WORD_BYTES,
    BlockParts,
    PartChecksums,
    numbers_of,
)
from worker_daemon.runner.connectors.interface import NO_BLOCKS, Loaded, StoreInStep
from worker_daemon.runner.connectors.moved_bytes import MovedBytes
from worker_daemon.runner.connectors.piece_stores import (
    NOT_LEAVING,
    PieceRows,
    PieceStores,
    WholeStore,
)
from worker_daemon.runner.connectors.pieces import pieces_of
from worker_daemon.runner.connectors.staging import (
    Arrive,
    BlockStaging,
    InPlace,
    Leave,
    Load,
    staging_rows,
)
from worker_daemon.runner.connectors.tier_index import TierIndex
from worker_daemon.runner.kv_cache import BlockPages
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import ScheduledStep

_Add: TypeAlias = Callable[[slice, Callable[[], None] | None], None]
"""Takes some of a step's slots, and what waits until their blocks are there; None: they are."""

_MOST_RUNS: Final = 16
"""Most runs of slots whose blocks are read one launch each."""
_MOVE_BUFFERS: Final = 6
"""Staging buffers that a move from another group's device memory takes at most (peer_copies.py)."""


def tier_device_bytes(
    cache: CacheConfig, pages: Sequence[KVPages | LatentPages], block_bytes: int
) -> int:
    """Return the most device memory that a tier takes beside its staging buffers: 0 for one in
    host memory. pages: of a rank's layers. block_bytes: of a block there."""
    if cache.kv_tier_memory != "device" or not cache.kv_host_memory_bytes or not pages:
        return 0
    smallest_part = min(
        each.bytes_per_token // (each.num_kv_heads if isinstance(each, KVPages) else 1)
        for each in pages
    )
    part_bytes = max(1, smallest_part * cache.block_size)
    checksums = cache.kv_host_memory_bytes * CHECKSUM_WORDS * WORD_BYTES // part_bytes
    moves = _MOVE_BUFFERS * staging_rows(block_bytes) * block_bytes
    return cache.kv_host_memory_bytes + checksums + moves


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
    num_beside: int
    """The last so many loads run beside steps."""
    are_idle: bool
    """Loads wait for no step before."""
    filled_blocks: Int32s
    """[F] that the step fills, and then stores."""
    filled_slots: Int32s
    """[F]"""
    filled_hashes: Hashes
    """[F, bytes of a hash]"""


@dataclass(slots=True, eq=False)
class TierCounts:
    """Counts of a host tier. Written on the step thread, read by any; outlives the tier, and
    holds none of its memory."""

    contents: BlockContents
    pinning: PinProgress
    size_bytes: int
    """Without checksums."""
    copies: CopyTimes
    memory: KVTierMemory = "host"
    num_stored: int = 0
    num_loaded: int = 0
    num_invalid: int = 0
    num_sent: int = 0
    """Written on the thread that sends to other groups."""
    num_received: int = 0
    num_mapped: int = 0
    num_restored: int = 0
    num_rejected: int = 0
    file_bytes: int = 0
    num_failed: int = 0
    """Written, as all below, on the threads that send to other groups and receive from them."""
    sent: MovedBytes = field(default_factory=MovedBytes)
    received: MovedBytes = field(default_factory=MovedBytes)

    def status(self) -> HostTierStatus:
        """Return the tier's state; counts of the last steps may lack."""
        block_bytes = self.size_bytes // self.contents.num_blocks
        return HostTierStatus(
            num_slots=self.contents.num_blocks,
            num_held=self.contents.num_known,
            size_bytes=self.size_bytes,
            is_pinned=self.pinning.is_done,
            num_stored=self.num_stored,
            num_loaded=self.num_loaded,
            num_invalid=self.num_invalid,
            num_sent=self.num_sent,
            num_received=self.num_received,
            num_restored=self.num_restored,
            num_rejected=self.num_rejected,
            file_bytes=self.file_bytes,
            num_failed=self.num_failed,
            stored=MovedBytes(self.num_stored * block_bytes, self.copies.out_s).status(),
            loaded=MovedBytes(self.num_loaded * block_bytes, self.copies.in_s).status(),
            sent=self.sent.status(),
            received=self.received.status(),
            memory=self.memory,
            num_mapped=self.num_mapped,
        )


class ReceivedBlocks(NamedTuple):
    """Slots that have been filled from another group."""

    tag: bytes
    version: int
    """Version of the weights that this rank had then."""
    slots: Int32s
    """[n]"""
    hashes: Hashes
    """[n, bytes of a hash]"""


class KeptSlots(NamedTuple):
    """Slots that outlive the daemon."""

    entries: TierIndex
    has_confirmed: Callable[[int, int], bool]
    """Returns True if the step of an epoch and seq is known to have succeeded: for any thread."""


class HostTier:
    """See KVConnector. Uses the host's rows, which outlive it only as long as the KV cache."""

    def __init__(
        self,
        pages: BlockPages,
        memory: TierRows,
        state: RequestState,
        weights: WeightState,
        parts: BlockParts,
        kept: KeptSlots | None = None,
        place: KVTierMemory = "host",
        layers: Sequence[Sequence[int]] = (),
    ) -> None:
        """pages: of the KV cache. memory: a row for each slot: a block, and its checksums. parts:
        of a block. kept: begin with what an earlier daemon has left in memory, and leave that to
        the next one; None: memory ends with the daemon. place: of the memory, for its status.
        layers: by KV group, the number of the layer that has each page; empty: they are not known,
        and blocks are stored in steps once all is written."""
        self._host = memory.rows.view(torch.int32)
        """int32 [slots, R]"""
        self._memory = memory
        self._state = state
        self._weights = weights
        self._parts = parts
        self._device = pages.device
        counts = [own.shape[1] for own, _ in pages.sections]
        divided = parts.divided(counts)
        self._checksums = PartChecksums(divided, pages.kernels, pages.device)
        self._staging = BlockStaging(pages, self._checksums, parts.checksum_words)
        self._pieces: PieceStores | None = None
        if self._host.device == pages.device:  # else whole blocks are copied, as neighbors
            own = PieceRows(self._host, parts.num_words, divided, self._checksums)
            self._pieces = PieceStores(pages, self._staging, own, layers)
        num_pieces = len(pieces_of(divided))
        self._departures: Int64s = np.zeros((num_pieces, len(self._host)), np.int64)
        """By piece and slot, the number of the part with which that of its block leaves or has
        left; NOT_LEAVING: a step has still to write it."""
        self.arrivals: deque[ReceivedBlocks] = deque()
        """Filled by the thread that receives from other groups (peers.py)."""
        self._unread: deque[Loaded] = deque()
        """Loads whose outcomes are not counted yet."""
        size_bytes = len(self._host) * pages.block_bytes
        self.counts = TierCounts(
            state.host_contents, memory.pinning, size_bytes, self._staging.times, place
        )
        self._kept = kept
        if kept is not None:
            kept.entries.restore(state.host_contents)
            self.counts.num_restored = kept.entries.num_restored
            self.counts.num_rejected = kept.entries.num_rejected
            self.counts.file_bytes = kept.entries.file_bytes

    def store(self, step: ScheduledStep) -> None:
        """See KVConnector."""
        self._count_known()
        self._take_arrivals(step.seq)
        moves = self._moves_of(step)
        if moves is None:
            return
        if self.pieces_left(moves.load_slots) < len(self._departures):
            self._staging.await_departures()
        if moves.store_slots.size:
            tag = versioned_tag(moves.tag, self._weights.version)
            self._store(
                tag, moves.store_blocks, moves.store_slots, moves.store_hashes, seq=step.seq
            )

    def store_in_step(self, step: ScheduledStep) -> StoreInStep | None:
        """See KVConnector. Where pieces can leave, others may know of them before the step has
        ended: they are stored as of this step, and not kept if it fails."""
        moves = self._moves_of(step)
        if moves is None or not moves.filled_slots.size:
            return None
        tag, seq = versioned_tag(moves.tag, self._weights.version), step.seq
        blocks, slots, hashes = moves.filled_blocks, moves.filled_slots, moves.filled_hashes
        if self._pieces is None:
            return WholeStore(partial(self._store, tag, blocks, slots, hashes, seq=seq))
        add = self._adding(tag, slots, hashes, seq)
        self._departures[:, slots] = NOT_LEAVING  # before others can find them
        self._state.host_contents.store(tag, slots, hashes, seq)

        def piece_left(piece: int) -> None:
            self._departures[piece, slots] = self._staging.departures.num_leaving

        def ended() -> None:
            if add is not None:
                add(slice(None), self._staging.mark_departure())
            self._state.draft_gaps.store(blocks, slots)
            self.counts.num_stored += slots.size

        return self._pieces.begin(blocks, slots, numbers_of(hashes), piece_left, ended)

    def load(self, step: ScheduledStep) -> Loaded | None:
        """See KVConnector."""
        moves = self._moves_of(step)
        if moves is None:
            return None
        end = moves.load_slots.size - moves.num_beside
        load = partial(self._staging.load, waits=not moves.are_idle)
        return self._load(moves, slice(end), step.seq, load)

    def load_beside(self, step: ScheduledStep) -> Loaded | None:
        """See KVConnector."""
        moves = self._moves_of(step)
        if moves is None:
            return None
        first = moves.load_slots.size - moves.num_beside
        load = partial(self._staging.load_beside, waits=not moves.are_idle)
        return self._load(moves, slice(first, None), step.seq, load)

    def moved_blocks(self, step: ScheduledStep) -> Int32s:
        """See KVConnector."""
        moves = self._moves_of(step)
        if moves is None:
            return NO_BLOCKS
        return np.concatenate((moves.store_blocks, moves.filled_blocks, moves.load_blocks))

    def _store(
        self, tag: bytes, blocks: Int32s, slots: Int32s, hashes: Hashes, *, seq: int
    ) -> None:
        """Store blocks [n], as the work launched so far leaves them. tag: of a version of the
        weights."""
        leave = self._leaving(slots, hashes, self._adding(tag, slots, hashes, seq))
        self._staging.store(blocks, leave)
        self._state.host_contents.store(tag, slots, hashes, seq)
        self._state.draft_gaps.store(blocks, slots)
        self.counts.num_stored += slots.size

    def _load(self, moves: Moves, part: slice, seq: int, load: Load) -> Loaded | None:
        """Load in the order of the slots: those of neighbors are one copy."""
        if not moves.load_slots[part].size:
            return None
        order = np.argsort(moves.load_slots[part])
        blocks, slots = moves.load_blocks[part][order], moves.load_slots[part][order]
        hashes = moves.load_hashes[part][order]
        self._state.contents.write(blocks, seq)
        self._state.draft_gaps.load(blocks, slots)
        tag = versioned_tag(moves.tag, self._weights.version)
        are_held = self._state.host_contents.hold(tag, slots, hashes)
        ways = self._arriving(slots), partial(self._settle, hashes), self._in_place(slots)
        loaded = load(blocks, are_held, *ways)
        self.counts.num_loaded += slots.size
        self._unread.append(loaded)
        self._count_known()  # on the CPU this load, too: no later step may come to count it
        return loaded

    def settle(self) -> None:
        """See KVConnector."""
        self._staging.settle()

    @property
    def pieces_left(self) -> Callable[[Int32s], int]:
        """Returns how many pieces, the first ones, of what was stored to these slots so far are
        there: for any thread. It holds none of the tier's memory."""
        departures, numbers = self._staging.departures, self._departures

        def pieces_left(slots: Int32s) -> int:
            num_left = departures.num_left()
            return int(np.count_nonzero(numbers[:, slots].max(axis=1, initial=0) <= num_left))

        return pieces_left

    def _moves_of(self, step: ScheduledStep) -> Moves | None:
        moves: Moves | None = self._state.parts.step_value(HostTierMoves, step.step_values)
        return moves

    def _take_arrivals(self, seq: int) -> None:
        """Note what has come from other groups before the step of this seq."""
        while self.arrivals:
            tag, version, slots, hashes = self.arrivals.popleft()
            self._departures[:, slots] = 0
            self._state.draft_gaps.receive(slots)
            if version == self._weights.version:
                tag = versioned_tag(tag, version)
                # As of the step before: the failure of this one is none of theirs.
                add = self._adding(tag, slots, hashes, seq)
                self._state.host_contents.store(tag, slots, hashes, seq - 1)
                if add is not None:
                    add(slice(None), None)

    def _adding(self, tag: bytes, slots: Int32s, hashes: Hashes, seq: int) -> _Add | None:
        """Let slots [n], whose bytes are about to change in the step of this seq, be in no index.
        Return what adds some of them to the one that outlives the daemon, if there is one."""
        if self._kept is None:
            return None
        entries, has_confirmed = self._kept
        entries.replace(slots)
        has_succeeded = partial(has_confirmed, self._state.newest_epoch, seq)

        def add(part: slice, has_left: Callable[[], None] | None) -> None:
            entries.add(tag, slots[part], hashes[part], has_left, has_succeeded)

        return add

    def _leaving(self, slots: Int32s, hashes: Hashes, add: _Add | None) -> Leave:
        """Return what copies blocks to slots."""
        runs, numbers = self._runs(slots), numbers_of(hashes)

        def leave(part: slice, rows: Tensor, sums: Tensor) -> None:
            sums += upload(numbers[part], self._device)[:, None]
            sums += self._checksums.page_numbers
            rows[:, self._parts.num_words :].copy_(sums.view(torch.int32))
            self._departures[:, slots[part]] = self._staging.departures.num_leaving
            for row, slot, count in runs[part.start]:
                target = self._host[slot : slot + count]
                target.copy_(rows[row : row + count], non_blocking=True)
            if add is not None:
                add(part, self._staging.mark_departure())

        return leave

    def _arriving(self, slots: Int32s) -> Arrive:
        """Return what copies blocks from slots."""
        runs: Mapping[int, list[tuple[int, int, int]]] | None = None

        def arrive(part: slice, rows: Tensor) -> None:
            nonlocal runs
            runs = runs or self._runs(slots)
            for row, slot, count in runs[part.start]:
                source = self._host[slot : slot + count]
                rows[row : row + count].copy_(source, non_blocking=True)

        return arrive

    def _in_place(self, slots: Int32s) -> InPlace:
        """Return the blocks of these slots, ascending, where they are, by runs of neighbors; none
        if they are in host memory, or in so many runs that copies of parts are faster."""
        if self.counts.memory != "device":
            return ()
        starts = np.flatnonzero(np.append(True, np.diff(slots) != 1))
        if starts.size > max(_MOST_RUNS, slots.size // self._staging.part_rows):
            return ()
        ends = np.append(starts[1:], slots.size).tolist()
        runs = zip(starts.tolist(), ends, slots[starts].tolist(), strict=True)
        return [
            (slice(first, end), self._host[slot : slot + end - first]) for first, end, slot in runs
        ]

    def _settle(self, hashes: Hashes, sums: Tensor) -> None:
        """sums: of words, less what the slots hold, which has two numbers besides."""
        sums += upload(numbers_of(hashes), self._device)[:, None]
        sums += self._checksums.page_numbers

    def _runs(self, slots: Int32s) -> Mapping[int, list[tuple[int, int, int]]]:
        """Return, by the first place of each part, runs of slots that follow each other within a
        piece of the host's memory, each as one copy: place of the first in the part, its slot, and
        their number."""
        places, most = np.arange(slots.size), self._staging.part_rows
        pieces = slots // self._memory.rows_per_piece
        is_first = places % most == 0
        is_first[1:] |= (np.diff(slots) != 1) | (np.diff(pieces) != 0)
        starts = np.flatnonzero(is_first)
        counts = np.diff(np.append(starts, slots.size))
        found: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        columns = starts.tolist(), slots[starts].tolist(), counts.tolist()
        for start, slot, count in zip(*columns, strict=True):
            found[start // most * most].append((start % most, slot, count))
        return found

    def _count_known(self) -> None:
        while self._unread and self._unread[0].is_known:
            self.counts.num_invalid += self._unread.popleft().invalid_blocks.size
