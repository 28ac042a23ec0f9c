"""The host tier: a KV connector whose other place is this rank's host memory (device/host_rows.py).
What a slot holds, and whether a driver may be told, is in RequestState.host_contents.

Shapes: S blocks to store, L blocks to load, W int32 words of a block on this rank.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rpc_schema.host_tier import HostTierMoves, HostTierStatus
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.device.host_rows import HostRows, PinProgress
from worker_daemon.device.pinned import upload
from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.block_contents import BlockContents, Hashes, versioned_tag
from worker_daemon.runner.connectors.interface import Loaded
from worker_daemon.runner.connectors.staging import BlockStaging
from worker_daemon.runner.kv_cache import BlockPages
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import ScheduledStep


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
        self._host = memory.rows.view(torch.int32)
        """int32 [slots, W]"""
        self._memory = memory
        self._state = state
        self._weights = weights
        self._staging = BlockStaging(pages)
        self._checksums = torch.zeros(len(self._host), dtype=torch.int64, device=pages.device)
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
        self._staging.begin_arrivals()
        if moves.store_slots.size:
            self._staging.store(moves.store_blocks, partial(self._leave, moves.store_slots))
            state.host_contents.store(tag, moves.store_slots, moves.store_hashes, step.seq)
            self.counts.num_stored += moves.store_slots.size
        if not moves.load_slots.size:
            return None
        arrive = partial(self._arrive, moves.load_slots)
        loaded = self._staging.load(moves.load_blocks, are_held, arrive)
        self.counts.num_loaded += moves.load_slots.size
        self._unread.append(loaded)
        self._count_known()  # on the CPU this load, too: no later step may come to count it
        return loaded

    def settle(self) -> None:
        """See KVConnector."""
        self._staging.settle()

    def _leave(self, slots: Int32s, part: slice, rows: Tensor, checksums: Tensor) -> None:
        own = slots[part]
        places = upload(own.astype(np.int64), rows.device)
        self._checksums.index_copy_(0, places, checksums)
        for row, slot, count in self._runs(own):
            target = self._host[slot : slot + count]
            target.copy_(rows[row : row + count], non_blocking=True)

    def _arrive(self, slots: Int32s, part: slice, rows: Tensor) -> Tensor:
        own = slots[part]
        for row, slot, count in self._runs(own):
            source = self._host[slot : slot + count]
            rows[row : row + count].copy_(source, non_blocking=True)
        return self._checksums[upload(own.astype(np.int64), rows.device)]

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
