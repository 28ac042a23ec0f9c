"""A batch whose steps only continue decoding: the values that these steps share, and their
progress.

Each of these steps carries the batch (ScheduledStep.steady). Code that keeps values from one step
to the next compares this object: the same object means the same rows.
"""

from dataclasses import dataclass

import numpy as np

from worker_daemon.contracts.arrays import Int32s, Int64s

_ONE = np.array(1, np.int32)


@dataclass(slots=True, eq=False)
class SteadyBatch:
    """Rows that decode one token per step, sampled by the previous step; none uses a part that may
    refuse tokens. Owned by RequestState; any other step that touches one of the rows ends the
    batch. Aligned columns [B], by ascending slot; only ends, longest and capacity change."""

    bitmap: bytes
    """The rows as a bitmap of step messages."""
    reply_bitmap: bytes
    """The rows as a bitmap of replies."""
    slots: Int64s
    rows: slice | Int64s
    """The slots as an index: a slice, which is faster, if they are contiguous."""
    generations: Int64s
    one_each: Int32s
    """One token of the step, and one sample, for each."""
    used: int
    """Bits of the parts that any row uses."""
    max_model_len: int
    ends: Int32s
    """Computed tokens of each row, including the newest step's: only the batch has them until they
    are written to the rows."""
    longest: int
    """The largest of the ends."""
    capacity: Int32s
    """Number of tokens for which each row has blocks."""

    def advance(self, capacity: Int32s | None) -> bool:
        """Advance each row by a token; return False and do nothing if a row has no room. capacity:
        the new capacity, if the step brings blocks.

        The step before has ensured that the rows are live, at their last token, and not too many.
        Only blocks and lengths remain to be checked.
        """
        ends, room = self.ends + _ONE, self.capacity if capacity is None else capacity
        # For few and small values, a search in bytes takes a third of numpy's time.
        if self.longest == self.max_model_len or 1 in (ends > room).tobytes():
            return False
        self.ends, self.longest, self.capacity = ends, self.longest + 1, room
        return True
