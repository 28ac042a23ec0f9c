"""The file connector: a KV connector whose other place is files (block_files.py), behind host
memory for blocks that are on their way (file_traffic.py).

Shapes: S blocks to store, L blocks to load, W int32 words of a block on this rank.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rpc_schema.kv_files import FileMoves
from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.device.pinned import download, upload
from worker_daemon.runner.block_contents import Hashes
from worker_daemon.runner.connectors.block_files import FileName
from worker_daemon.runner.connectors.checksums import WORD_BYTES, BlockChecksums
from worker_daemon.runner.connectors.file_traffic import FetchedBlock, FileBatch
from worker_daemon.runner.connectors.filed_blocks import FiledBlocks
from worker_daemon.runner.connectors.interface import NO_BLOCKS, Loaded, StoreInStep
from worker_daemon.runner.connectors.staging import BlockStaging
from worker_daemon.runner.kv_cache import BlockPages
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import ScheduledStep

_CHECKSUM_SEED: Final = 0x6B76
"""Seed of the checksums in all files; to be changed with their format."""


class FiledMoves(NamedTuple):
    """Blocks that a step moves, checked (parts/kv_files.py)."""

    tag: bytes
    store_blocks: Int32s
    """[S]"""
    store_hashes: Hashes
    """[S, bytes of a hash]"""
    load_blocks: Int32s
    """[L]"""
    load_hashes: Hashes
    """[L, bytes of a hash]"""


class FileConnector:
    """See KVConnector."""

    def __init__(self, pages: BlockPages, blocks: FiledBlocks, state: RequestState) -> None:
        """pages: of the KV cache."""
        self._blocks = blocks
        self._traffic = blocks.traffic
        self._state = state
        num_words = pages.block_bytes // WORD_BYTES
        checksums = BlockChecksums(num_words, _CHECKSUM_SEED, pages.kernels, pages.device)
        self._staging = BlockStaging(pages, checksums)
        self._unread: deque[tuple[Loaded, list[FileName], Bools]] = deque()
        """Loads whose outcomes are not counted yet, with their files, and which of them were
        fetched."""

    @property
    def counts(self) -> FiledBlocks:
        """See KVConnector."""
        return self._blocks

    def store(self, step: ScheduledStep) -> None:
        """See KVConnector."""
        self._count_known()
        moves = self._moves_of(step)
        if moves is None:
            return
        self._staging.await_departures()
        if moves.store_blocks.size:
            self._store(moves.store_blocks, self._names(moves.tag, moves.store_hashes))

    def store_in_step(self, step: ScheduledStep) -> StoreInStep | None:
        """See KVConnector: what a step fills has no token behind it yet."""
        return None

    def load(self, step: ScheduledStep) -> Loaded | None:
        """See KVConnector."""
        moves = self._moves_of(step)
        if moves is None or not moves.load_blocks.size:
            return None
        self._state.contents.write(moves.load_blocks, step.seq)
        names = self._names(moves.tag, moves.load_hashes)
        fetched = list(map(self._traffic.take, names))
        are_held = np.array([each is not None for each in fetched])
        arrive, settle = partial(_arrive, fetched), partial(_settle, fetched)
        loaded = self._staging.load(moves.load_blocks, are_held, arrive, settle)
        self._blocks.num_loaded += len(names)
        self._unread.append((loaded, names, are_held))
        self._count_known()  # on the CPU this load, too: no later step may come to count it
        return loaded

    def load_beside(self, step: ScheduledStep) -> None:
        """See KVConnector. There are none."""

    def moved_blocks(self, step: ScheduledStep) -> Int32s:
        """See KVConnector."""
        moves = self._moves_of(step)
        if moves is None:
            return NO_BLOCKS
        return np.concatenate((moves.store_blocks, moves.load_blocks))

    def settle(self) -> None:
        """See KVConnector."""
        self._staging.settle()

    def _moves_of(self, step: ScheduledStep) -> FiledMoves | None:
        moves: FiledMoves | None = self._state.parts.step_value(FileMoves, step.step_values)
        return moves

    def _names(self, tag: bytes, hashes: Hashes) -> list[FileName]:
        return self._blocks.names(tag, [row.tobytes() for row in hashes])

    def _store(self, block_ids: Int32s, names: list[FileName]) -> None:
        lacking = [i for i, name in enumerate(names) if self._traffic.lacks(name)]
        if lacking:
            own = [names[i] for i in lacking]
            self._staging.store(block_ids[lacking], partial(self._leave, own))

    def _leave(self, names: list[FileName], part: slice, rows: Tensor, checksums: Tensor) -> None:
        own = names[part]
        if not self._traffic.reserve(rows.nbytes):
            self._traffic.counts.num_dropped += len(own)
            return
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        host.copy_(rows, non_blocking=True)
        sums = download(checksums[:, 0])
        self._traffic.write(FileBatch(own, host, sums, self._staging.mark_departure()))

    def _count_known(self) -> None:
        while self._unread and self._unread[0][0].is_known:
            loaded, names, are_held = self._unread.popleft()
            are_bad = loaded.are_bad
            self._blocks.num_invalid += int(np.count_nonzero(are_bad))
            for place in np.flatnonzero(are_bad & are_held).tolist():
                self._traffic.discard(names[place])


def _arrive(fetched: Sequence[FetchedBlock | None], part: slice, rows: Tensor) -> None:
    for place, block in enumerate(fetched[part]):
        if block is not None:
            rows[place].copy_(block.row, non_blocking=True)


def _settle(fetched: Sequence[FetchedBlock | None], sums: Tensor) -> None:
    checksums = [0 if block is None else block.checksum for block in fetched]
    sums -= upload(np.array(checksums, np.int64), sums.device)[:, None]
