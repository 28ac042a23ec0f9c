"""The fast path of a batch that only goes on decoding: what is left to check, and its rows' counts
in batch order. Refuses nothing: what it does not take is judged as any other step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.step import ExecuteModel
from worker_daemon.runner.row_counts import RowCounts
from worker_daemon.runner.scheduled_step import (
    NOTHING_BROUGHT,
    BlockUpdates,
    Bools,
    Int32s,
    ScheduledStep,
)
from worker_daemon.runner.step_columns import Batch

_ONE = np.array(1, np.int32)


@dataclass(slots=True)
class DecodeRun:
    """A batch whose rows have all sampled, each the token behind its last known one, and refuse
    none. Owned by RequestState. How far its rows are is known here alone until it is written to
    them."""

    batch: Batch
    last: ScheduledStep
    capacity: Int32s
    """[B] tokens that each row's blocks have room for."""
    block_sizes: Int32s
    """As RowCounts.capacity takes them."""
    max_model_len: int

    def is_continued_by(self, step: ExecuteModel, arrays: Sequence[Frame]) -> bool:
        """Whether a step gives one more token to each row, and does nothing else but append
        blocks."""
        return (
            step.scheduled == self.batch.bitmap
            and step.total_num_scheduled_tokens == self.batch.slots.size
            and not (step.num_scheduled_tokens or step.finished or step.scheduled_new_reqs)
            and not (arrays or step.extensions or step.defer_sampling or step.corrections)
            and step.resync is None
        )

    def advance(self, seq: int, updates: BlockUpdates, counts: RowCounts) -> ScheduledStep | None:
        """Go on by one step; None, and nothing done, where a row has no room for its token.
        counts: with the updates' blocks.

        The rows are live and at their last token, and as many as a batch holds, because the step
        before left them so: what remains to check is blocks and lengths.
        """
        last, slots, ones = self.last, self.last.slots, self.batch.one_each
        ends, longest, capacity = last.ends + _ONE, last.longest + 1, self.capacity
        if updates.rows.size:
            capacity = counts.capacity(self.batch.rows, self.block_sizes)
        if longest > self.max_model_len or _any(ends > capacity):
            return None
        # By position, in the order of the fields: names would cost as much as three of these lines.
        self.last = ScheduledStep(
            seq, slots, ones, last.ends, ends, slots.size, longest, last.samples, (), updates,
            False, NOTHING_BROUGHT,
        )  # fmt: skip
        self.capacity = capacity
        return self.last

    def write(self, counts: RowCounts) -> None:
        """Write how far the rows are."""
        counts.num_computed[self.batch.rows] = self.last.ends
        counts.num_tokens[self.batch.rows] = self.last.ends + _ONE


def _any(conditions: Bools) -> bool:
    """Whether one of them holds; for the few and the small a third of what numpy's own takes."""
    return 1 in conditions.tobytes()
