"""How far each request row is, and the last steps that brought the rows there, so that they can be
taken back. Knows of a request its counts alone.

Computed and known tokens are upper bounds in rows whose steps may refuse tokens: the device has the
true counts (row_tables.py), a later message's corrections lower these. Both fall alike, so that
whether a row samples follows from the bounds.

Shapes: S rows (plus one spare row, which no request ever has), G groups of layers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rpc_schema.kv_cache import BlockGroup
from worker_daemon.errors import InvalidStepError
from worker_daemon.runner.scheduled_step import (
    NO_UPDATES,
    BlockUpdates,
    Bools,
    Int32s,
    Int64s,
    ScheduledStep,
    invalid,
    places_behind,
)

MAX_TAKEN_BACK = 64
"""Steps that can be taken back: more than a driver may have under way."""

FREE_ROW_BLOCKS = 1 << 30
"""The block count of a row without a request: no request reaches it, so that one comparison refuses
blocks for such a row and blocks beyond a request's last."""
EXACT = -2
NOT_SAMPLED = -1
_ONE = np.array(1, np.int32)


@dataclass(slots=True)
class RowCounts:
    """Columns, [S + 1] each but for num_blocks. Owned by RequestState, which has steps that change
    which rows hold a request judged on a copy."""

    live: Bools
    num_computed: Int32s
    num_tokens: Int32s
    num_blocks: Int32s
    """[G * (S + 1)], of each row of the block table (scheduled_step.py): places, those of blocks
    that a window has left behind included. FREE_ROW_BLOCKS where no request is."""
    unsampled: Bools
    """The row's newest token waits for SampleTokens."""
    corrected: Int32s
    """Tokens by which messages have lowered the row's bounds since its admission. NOT_SAMPLED: none
    of its tokens can have been refused yet; EXACT: none ever is."""

    @classmethod
    def of_free_rows(cls, num_rows: int, num_groups: int) -> "RowCounts":
        return cls(
            np.zeros(num_rows, np.bool_),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_groups * num_rows, FREE_ROW_BLOCKS, np.int32),
            np.zeros(num_rows, np.bool_),
            np.full(num_rows, EXACT, np.int32),
        )

    @property
    def blocks_by_group(self) -> Int32s:
        """[G, S + 1]: num_blocks, the same memory."""
        return self.num_blocks.reshape(-1, self.live.size)

    def capacity(self, rows: slice | Int64s, block_sizes: Int32s) -> Int32s:
        """Return the tokens that each of these rows [B] has blocks for: in the group that has the
        fewest. block_sizes: [G, 1], or [] where there is one group."""
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
            self.corrected.copy(),
        )

    def clear(self, rows: Int64s | Bools | slice) -> None:
        self.live[rows] = False
        self.num_computed[rows] = 0
        self.num_tokens[rows] = 0
        self.blocks_by_group[:, rows] = FREE_ROW_BLOCKS
        self.unsampled[rows] = False
        self.corrected[rows] = EXACT

    def lower(self, slots: Int64s, by: Int32s) -> None:
        """Lower the bounds of rows, each named once, by tokens that were refused."""
        self.num_computed[slots] -= by
        self.num_tokens[slots] -= by
        self.corrected[slots] += by

    def append(self, updates: BlockUpdates) -> None:
        """Count a step's blocks."""
        if updates.rows.size:
            self.num_blocks[updates.rows] = updates.indices + _ONE

    def remove(self, updates: BlockUpdates) -> None:
        """Undo append: a row's first index in the updates is what it had before."""
        np.minimum.at(self.num_blocks, updates.rows, updates.indices)

    def check_live(self, field: str, slots: Int64s) -> None:
        """Raises InvalidStepError where a slot, none of them negative, holds no request."""
        try:
            live = self.live[slots]
        except IndexError:
            raise self.unknown(field, int(slots.max())) from None
        if np.count_nonzero(live) < slots.size:
            slot = int(slots[int(live.argmin())])
            raise invalid(field, slot, "admit a request to the slot first")

    def check_sampled(self, slots: Int64s) -> None:
        """Raises InvalidStepError where a scheduled slot waits for SampleTokens."""
        unsampled = self.unsampled[slots]
        if unsampled.any():
            slot = int(slots[int(unsampled.argmax())])
            raise invalid("scheduled", slot, "send SampleTokens for its last step first")

    def unknown(self, field: str, slot: int) -> InvalidStepError:
        """Return the refusal of a slot that there is not."""
        return invalid(field, slot, f"slots from 0 to {self.live.size - 2}")


class StepRecord:
    """Steps since the last full resynchronisation. Owned by RequestState."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self._groups = groups
        self.failed_seq: int | None = None
        """Of the first step that failed since."""
        self._num_before = 0
        """Steps accepted before that one; meaningless without a failure."""
        self._num_accepted = 0
        """Over all epochs."""
        self._steps: deque[tuple[int, ScheduledStep]] = deque(maxlen=MAX_TAKEN_BACK)
        """The newest, with their epochs."""

    def add(self, epoch: int, step: ScheduledStep) -> None:
        """Note a step that was accepted."""
        self._num_accepted += 1
        self._steps.append((epoch, step))

    def fail(self, seq: int) -> None:
        """Note a failure, unless one stands: of the newest step, or of what is behind it."""
        if self.failed_seq is None:
            self.failed_seq = seq
            is_newest = bool(self._steps) and self._steps[-1][1].seq == seq
            self._num_before = self._num_accepted - is_newest

    def restart(self) -> None:
        """Forget all steps, and the failure."""
        self.failed_seq = None
        self._steps.clear()

    def take_back(
        self, counts: RowCounts, has_ended_well: Callable[[int, int], bool]
    ) -> BlockUpdates:
        """Forget all steps, but not the failure; undo those from the first one on that failed or is
        not known to have ended well (by epoch and seq). See RequestState.take_back."""
        steps = list(self._steps)
        self._steps.clear()
        most = len(steps)
        if self.failed_seq is not None:
            most -= self._num_accepted - self._num_before
        good = 0
        while good < most and has_ended_well(steps[good][0], steps[good][1].seq):
            good += 1
        undone = [step for _, step in steps[good:]]
        released_to = counts.num_computed.copy()
        if undone:
            released_to[undone[-1].slots] = undone[-1].starts
        # Steps before these may be forgotten: who knows then where the rows were?
        all_unknown = good == 0 and len(steps) == MAX_TAKEN_BACK
        unknown = np.full(counts.live.size, all_unknown)
        for step in reversed(undone):
            counts.num_computed[step.slots] = step.starts
            counts.remove(step.block_updates)
            unknown[_admitted(step)] = True
        counts.num_computed[unknown] = 0
        counts.blocks_by_group[:, unknown] = 0
        kept = NO_UPDATES
        # Behind a step that was refused, and so is not among these, nothing is sure.
        is_first = bool(undone) and (self.failed_seq is None or undone[0].seq <= self.failed_seq)
        if is_first and not all_unknown:
            kept = self._admit_again(undone, counts)
        self._drop_overwritten(counts, released_to)
        counts.clear(~counts.live)
        return kept

    def _drop_overwritten(self, counts: RowCounts, released_to: Int32s) -> None:
        """Vouch for nothing of rows that see blocks again which their windows had left behind
        before the last step: these may have gone to other rows, which have written to them.
        released_to [S + 1]: where each row was then."""
        for group in self._groups:
            released, seen = (places_behind(at, group) for at in (released_to, counts.num_computed))
            lost = released > seen
            counts.num_computed[lost] = 0
            counts.blocks_by_group[:, lost] = 0

    def _admit_again(self, undone: Sequence[ScheduledStep], counts: RowCounts) -> BlockUpdates:
        """Give the rows that the first undone step admitted the KV that they came with: good steps
        have computed it, or an earlier driver's. What later ones admitted may rest on KV that was
        never computed. Return those rows' blocks."""
        computed = np.zeros(counts.live.size, np.int32)
        computed[_admitted(undone[0])] = [r.num_computed_tokens for r in undone[0].new_requests]
        for later in undone[1:]:
            computed[_admitted(later)] = 0
        num_blocks = np.stack([-(-computed // group.block_size) for group in self._groups])
        rows, indices, block_ids = undone[0].block_updates
        theirs = np.flatnonzero(indices < num_blocks.reshape(-1)[rows])
        kept = BlockUpdates(rows[theirs], indices[theirs], block_ids[theirs])
        num_kept = np.bincount(kept.rows, minlength=num_blocks.size).reshape(num_blocks.shape)
        warm = np.flatnonzero((num_kept == num_blocks).all(axis=0) & (computed > 0))
        counts.num_computed[warm] = computed[warm]
        counts.blocks_by_group[:, warm] = num_blocks[:, warm]
        return kept


def _admitted(step: ScheduledStep) -> Int64s:
    return np.array([request.slot for request in step.new_requests], np.int64)
