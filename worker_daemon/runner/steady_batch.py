"""The batch whose steps only go on decoding: what they have in common, and how far they are.

Each step that belongs to such a batch carries it (ScheduledStep.steady). Whoever prepares a step
keys what it keeps from one step to the next by this object: the same object, the same rows.
"""

from dataclasses import dataclass

import numpy as np

from worker_daemon.contracts.arrays import Bools, Int32s, Int64s

_ONE = np.array(1, np.int32)


@dataclass(slots=True, eq=False)
class SteadyBatch:
    """Rows that decode one token a step, the one that the step before sampled, and refuse none.
    Owned by RequestState, which ends it with any other step of one of its rows. Aligned columns
    [B], by ascending slot; all but ends, longest and capacity stay as they are."""

    bitmap: bytes
    """The rows as messages name them."""
    reply_bitmap: bytes
    """The same as replies name them."""
    slots: Int64s
    rows: slice | Int64s
    """The fastest index of the slots."""
    generations: Int64s
    one_each: Int32s
    all_sample: Bools
    used: int
    """Bits of the parts that some row uses."""
    max_model_len: int
    ends: Int32s
    """Computed tokens of each row, with the newest step's: known here alone until it is written to
    the rows."""
    longest: int
    """The largest of the ends."""
    capacity: Int32s
    """Tokens that each row's blocks have room for."""

    def advance(self, capacity: Int32s | None) -> bool:
        """Go on by a token for each row; return False, and do nothing, where one has no room.
        capacity: a new one, where the step brings blocks.

        The rows are live and at their last token, and as many as a batch holds, because the step
        before left them so: what remains to check is blocks and lengths.
        """
        ends, room = self.ends + _ONE, self.capacity if capacity is None else capacity
        # For the few and the small a search in bytes takes a third of numpy's own.
        if self.longest == self.max_model_len or 1 in (ends > room).tobytes():
            return False
        self.ends, self.longest, self.capacity = ends, self.longest + 1, room
        return True
