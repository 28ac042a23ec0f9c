"""Stores of blocks by a step that fills them: piece by piece, each as soon as its layers are
written, from the KV cache to the host tier's memory on the same device.

Shapes: F blocks, n of them, P pieces of a block.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.connectors.checksums import CHECKSUM_WORDS, BlockParts, PartChecksums
from worker_daemon.runner.connectors.pieces import AT_END, BlockPiece, last_layers, pieces_of
from worker_daemon.runner.connectors.staging import BlockStaging
from worker_daemon.runner.kv_cache import BlockPages

NOT_LEAVING: Final = 1 << 62
"""Takes the place of the number of a part: it is later than any."""


class PieceRows:
    """The slots of a host tier on the device of the KV cache, by pieces."""

    def __init__(
        self, rows: Tensor, num_words: int, parts: BlockParts, checksums: PartChecksums
    ) -> None:
        """rows: int32 [slots, words of a block and of its checksums]. num_words: of a block.
        parts: of a block, in the sections of the KV cache's pages."""
        self.pieces = pieces_of(parts)
        self._rows = rows
        self._num_words = num_words
        self._parts = parts
        self._checksums = checksums

    def put(self, piece: BlockPiece, words: Tensor, numbers: Int64s, slots: Int32s) -> None:
        """Copy a piece of blocks, int32 [n, words of it], and its checksums to slots [n]. numbers:
        those of the blocks' hashes [n]. Launches only."""
        device, kernels = words.device, self._checksums.kernels
        sums = words.new_empty((len(words), piece.num_parts), dtype=torch.int64)
        ids = upload(slots, device)
        for own in piece.sections:
            columns, parts = piece.columns(own)
            self._checksums.of_pages(own.section, words[:, columns], sums[:, parts])
            page_words = self._parts.sections[own.section].page_words
            of_slots = self._rows[:, own.words]
            pages = of_slots.view(of_slots.shape[0], -1, page_words)
            kernels.scatter(words[:, columns], ids, pages)
        sums += upload(numbers, device)[:, None]
        sums += self._checksums.page_numbers[piece.parts]
        first, end = (
            self._num_words + CHECKSUM_WORDS * part
            for part in (piece.parts.start, piece.parts.stop)
        )
        self._rows[:, first:end].index_copy_(0, ids.long(), sums.view(torch.int32))


class PieceStores:
    """Owned by a host tier, used on the step thread."""

    def __init__(
        self,
        pages: BlockPages,
        staging: BlockStaging,
        rows: PieceRows,
        layers: Sequence[Sequence[int]],
    ) -> None:
        """pages: of the KV cache. layers: see HostTier."""
        self._pages = pages
        self._staging = staging
        self._rows = rows
        ends = last_layers(layers, pages.sections[0][0].shape[1])
        if len(pages.sections) > 1:  # what a draft model keeps is written behind the layers
            ends[-1] = AT_END
        self.last_layers = ends
        """[P] the layer after which a piece, and those before it, are written."""
        if pages.device.type == "cuda":
            self._compile()

    def begin(
        self,
        blocks: Int32s,
        slots: Int32s,
        numbers: Int64s,
        piece_left: Callable[[int], None],
        ended: Callable[[], None],
    ) -> "PieceStore":
        """Return the store of blocks [F] in slots [F]. numbers: those of the blocks' hashes [F].
        piece_left: called when a piece has begun to leave, with its number. ended: when all
        have."""
        return PieceStore(self, partial(self._write, blocks, slots, numbers), piece_left, ended)

    def _write(self, blocks: Int32s, slots: Int32s, numbers: Int64s, number: int) -> None:
        """Let a piece of blocks leave."""
        piece = self._rows.pieces[number]

        def gather(ids: Tensor, rows: Tensor) -> None:
            for own in piece.sections:
                pages, _ = self._pages.sections[own.section]
                columns, _ = piece.columns(own)
                self._pages.kernels.gather(pages[:, own.pages], ids, rows[:, columns])

        def leave(part: slice, rows: Tensor) -> None:
            self._rows.put(piece, rows, numbers[part], slots[part])

        self._staging.store_words(piece.num_words, blocks, gather, leave)

    def _compile(self) -> None:
        """Run each kernel once, on the null block, to a slot that holds nothing yet."""
        nothing = np.zeros(1, np.int32)
        for number in range(len(self.last_layers)):
            self._write(nothing, nothing, np.zeros(1, np.int64), number)
        self._staging.settle()


class PieceStore:
    """See StoreInStep."""

    watches_layers = True

    def __init__(
        self,
        stores: PieceStores,
        write: Callable[[int], None],
        piece_left: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._last_layers = stores.last_layers
        self._write = write
        self._piece_left = piece_left
        self._ended = ended
        self._num_written = 0
        """Pieces that have begun to leave."""

    def layer_written(self, layer: int) -> None:
        """See StoreInStep."""
        ends = self._last_layers
        while self._num_written < len(ends) and ends[self._num_written] <= layer:
            self._write(self._num_written)
            self._piece_left(self._num_written)
            self._num_written += 1

    def end(self) -> None:
        """See StoreInStep."""
        self.layer_written(AT_END)
        self._ended()


class WholeStore:
    """See StoreInStep: all at the end."""

    watches_layers = False

    def __init__(self, store: Callable[[], None]) -> None:
        self._store = store

    def layer_written(self, layer: int) -> None:
        """See StoreInStep."""

    def end(self) -> None:
        """See StoreInStep."""
        self._store()
