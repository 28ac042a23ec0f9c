"""Keeps the counts of each request row: its computed and known tokens, and its blocks.

In rows whose steps may refuse tokens, computed and known tokens are upper bounds. The device has
the true counts (row_tables.py), and corrections in a later message lower the bounds. Both bounds
fall by the same number, so they still decide whether a row samples.

Shapes: S rows (plus one spare row, which no request uses), G KV groups.
"""

from dataclasses import dataclass

import numpy as np

from rpc_schema.errors import InvalidStepError
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.runner.scheduled_step import BlockUpdates, OutputSize, invalid
from worker_daemon.runner.steady_batch import EXACT, NOT_SAMPLED, SteadyBatch

FREE_ROW_BLOCKS = 1 << 30
"""The block count of a row without a request. It is higher than any request's, so that one
comparison refuses both blocks for a free row and blocks beyond a request's last."""
_ONE = np.array(1, np.int32)


@dataclass(slots=True)
class RowCounts:
    """Columns, [S + 1] each except num_blocks. Owned by RequestState. A step that starts or ends
    requests is checked on a copy."""

    live: Bools
    num_computed: Int32s
    num_tokens: Int32s
    num_blocks: Int32s
    """[G * (S + 1)], for each row of the block table (scheduled_step.py), the number of places,
    including those behind a window. FREE_ROW_BLOCKS in rows without a request."""
    unsampled: Bools
    """True if the row's newest token waits for SampleTokens."""
    output_bytes: Int32s
    """Output bytes of a pooling request; 0 for a request that samples."""
    token_bytes: Int32s
    """Output bytes per prompt token; 0 if the prompt has a single output."""
    corrected: Int32s
    """Tokens by which messages have lowered the row's bounds since they became bounds, with its
    admission or its first drafts. NOT_SAMPLED: none of its tokens can have been refused yet; EXACT:
    its counts are no bounds."""
    num_pooling: int = 0
    """Number of pooling requests."""

    @classmethod
    def of_free_rows(cls, num_rows: int, num_groups: int) -> "RowCounts":
        return cls(
            np.zeros(num_rows, np.bool_),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_groups * num_rows, FREE_ROW_BLOCKS, np.int32),
            np.zeros(num_rows, np.bool_),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, EXACT, np.int32),
        )

    @property
    def blocks_by_group(self) -> Int32s:
        """[G, S + 1]: num_blocks, the same memory."""
        return self.num_blocks.reshape(-1, self.live.size)

    def capacity(self, rows: slice | Int64s, block_sizes: Int32s) -> Int32s:
        """Return the number of tokens for which each of these rows [B] has blocks, in the group
        that has the fewest. block_sizes: [G, 1], or [] if there is one group."""
        if not block_sizes.ndim:
            return self.num_blocks[rows] * block_sizes
        fewest: Int32s = (self.blocks_by_group[:, rows] * block_sizes).min(axis=0)
        return fewest

    def copy(self) -> "RowCounts":
        return RowCounts(
            self.live.copy(),
            self.num_computed.copy(),
            self.num_tokens.copy(),
            self.num_blocks.copy(),
            self.unsampled.copy(),
            self.output_bytes.copy(),
            self.token_bytes.copy(),
            self.corrected.copy(),
            self.num_pooling,
        )

    def clear(self, rows: Int64s | Bools | slice) -> None:
        self.live[rows] = False
        self.num_computed[rows] = 0
        self.num_tokens[rows] = 0
        self.blocks_by_group[:, rows] = FREE_ROW_BLOCKS
        self.unsampled[rows] = False
        self.corrected[rows] = EXACT
        if self.num_pooling:
            self.output_bytes[rows] = self.token_bytes[rows] = 0
            self.num_pooling = int(np.count_nonzero(self.output_bytes))

    def pool(self, slot: int, size: OutputSize) -> None:
        """Record that a new request pools."""
        self.output_bytes[slot] = size.total_bytes
        self.token_bytes[slot] = size.token_bytes
        self.num_pooling += 1

    def lower(self, slots: Int64s, by: Int32s) -> None:
        """Lower the bounds of rows, each named once, by tokens that were refused."""
        self.num_computed[slots] -= by
        self.num_tokens[slots] -= by
        self.corrected[slots] += by

    def settle(self, slots: Int64s) -> None:
        """Note that the counts of rows are exact, until their next drafts."""
        self.corrected[slots] = EXACT

    def begin_drafts(self, slots: Int64s) -> None:
        """Note that rows have drafts: from this step on their counts are bounds."""
        self.corrected[slots] = np.maximum(self.corrected[slots], NOT_SAMPLED)

    def write(self, batch: SteadyBatch) -> None:
        """Write the counts of a steady batch to the rows."""
        self.num_computed[batch.rows] = batch.ends
        self.num_tokens[batch.rows] = batch.ends + _ONE
        if batch.corrected is not None:
            self.corrected[batch.rows] = batch.corrected

    def append(self, updates: BlockUpdates) -> None:
        """Count the blocks that a step appends."""
        if updates.rows.size:
            self.num_blocks[updates.rows] = updates.indices + _ONE

    def remove(self, updates: BlockUpdates) -> None:
        """Undo append: a row's first index in the updates is its former count."""
        np.minimum.at(self.num_blocks, updates.rows, updates.indices)

    def check_live(self, field: str, slots: Int64s) -> None:
        """Raise InvalidStepError if a slot holds no request. The slots are not negative."""
        try:
            live = self.live[slots]
        except IndexError:
            raise self.unknown(field, int(slots.max())) from None
        if np.count_nonzero(live) < slots.size:
            slot = int(slots[int(live.argmin())])
            raise invalid(field, slot, "admit a request to the slot first")

    def check_sampled(self, slots: Int64s) -> None:
        """Raise InvalidStepError if a scheduled slot waits for SampleTokens."""
        unsampled = self.unsampled[slots]
        if unsampled.any():
            slot = int(slots[int(unsampled.argmax())])
            raise invalid("scheduled", slot, "send SampleTokens for its last step first")

    def unknown(self, field: str, slot: int) -> InvalidStepError:
        """Return the refusal of a slot that does not exist."""
        return invalid(field, slot, f"slots from 0 to {self.live.size - 2}")
