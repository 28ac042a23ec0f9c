"""A batch whose steps only go on decoding: the values that these steps share, and their progress.

Each of these steps carries the batch (ScheduledStep.steady). Code that keeps values from one step
to the next compares this object: the same object means the same rows, each with as many drafts.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.runner.slot_bitmap import read_bitmap

EXACT: Final = -2
"""In RowCounts.corrected: the row's counts are no bounds."""
NOT_SAMPLED: Final = -1
"""In RowCounts.corrected: none of the row's tokens can have been refused yet."""
_INT32: Final = np.dtype("<i4")


class NotedRows(NamedTuple):
    """The rows of a steady batch after what a message says of their bounds. Columns [B]."""

    ends: Int32s
    """SteadyBatch.ends, without the tokens that were refused."""
    corrections: Int32s
    """ScheduledStep.corrections of the message's step."""
    corrected: Int32s
    """SteadyBatch.corrected after it."""


@dataclass(slots=True, eq=False)
class SteadyBatch:
    """Rows that decode: in every step, each has the token that the step before has sampled, and a
    number of drafts that stays the same, 0 for a plain decode. None uses a part that may refuse
    tokens. Owned by RequestState; any other step that touches one of the rows ends the batch.

    Aligned columns [B], by ascending slot. Only the last six change. Each change replaces an array
    and writes to none: steps keep them."""

    bitmap: bytes
    """The rows as a bitmap of step messages."""
    num_scheduled_tokens: bytes
    """The column of the step messages."""
    num_drafts: bytes
    """The column of the step messages."""
    reply_bitmap: bytes
    """The rows as a bitmap of replies."""
    slots: Int64s
    rows: slice | Int64s
    """The slots as an index: a slice, which is faster, if they are contiguous."""
    generations: Int64s
    num_tokens: Int32s
    """Tokens of the step for each, its drafts included; it samples as many."""
    total_num_tokens: int
    growth: int
    """Tokens of the step for each row if all have as many; otherwise 0."""
    drafts: Int32s | None
    """Drafts of the step for each; None if no row has some."""
    num_known_tokens: Int32s
    """Tokens that came with the admission of each."""
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
    corrected: Int32s | None
    """RowCounts.corrected after the newest step, which only the batch has, like the ends. None:
    EXACT for all rows."""
    bounds: Int32s | None
    """ScheduledStep.corrections of a step without notes."""

    def read_notes(self, corrections: bytes, settled: bytes) -> NotedRows | None:
        """Return the rows after these columns of a message; None if it is no step of the batch: a
        column is not valid or names another row, a row has no sampled token left, or no count
        remains a bound."""
        if self.corrected is None:
            return None
        noted: NotedRows | None = NotedRows(self.ends, self.corrected, self.corrected)
        if corrections:
            noted = self._lower(self.corrected, corrections)
        return self._settle(noted, settled) if settled and noted is not None else noted

    def _lower(self, corrected: Int32s, raw: bytes) -> NotedRows | None:
        """Return the rows after a message's corrections."""
        by = self._read_corrections(raw)
        if by is None:
            return None
        # Every row keeps a sampled token, from which it continues.
        most = np.where(corrected < 0, 0, self.ends - self.num_known_tokens)
        if True in (by > most).tolist():
            return None
        corrected = corrected + by
        return NotedRows(self.ends - by, np.maximum(corrected, NOT_SAMPLED), corrected)

    def _settle(self, noted: NotedRows, named: bytes) -> NotedRows | None:
        """Return the rows after a message has made the counts of some exact."""
        chosen = self._read_settled(named, noted.corrected)
        if chosen is None:
            return None
        corrected = np.where(chosen, EXACT, noted.corrected)
        after = corrected
        if self.drafts is not None:  # the step makes their counts bounds again
            after = np.where(self.drafts > 0, np.maximum(corrected, 0), corrected)
        elif int(corrected.max()) == EXACT:
            return None
        return NotedRows(noted.ends, np.maximum(corrected, NOT_SAMPLED), after)

    def _read_corrections(self, raw: bytes) -> Int32s | None:
        """Return the tokens [B] by which a message lowers the rows' bounds; None as read_notes
        does."""
        if len(raw) % (2 * _INT32.itemsize):
            return None
        pairs = np.frombuffer(raw, _INT32)
        named, numbers = pairs[::2], pairs[1::2]
        places = self.slots.searchsorted(named)
        if self.slots.take(places, mode="clip").tobytes() != named.astype(np.int64).tobytes():
            return None
        by = np.zeros(self.slots.size, np.int32)
        by[places] = numbers
        # Fewer are positive if a number is not, or if a row is named twice.
        return by if np.count_nonzero(by > 0) == named.size else None

    def _read_settled(self, named: bytes, corrected: Int32s) -> Bools | None:
        """Return [B], True for the rows whose counts a message makes exact; None as read_notes
        does. corrected [B]: SteadyBatch.corrected."""
        if named == self.bitmap:
            chosen = np.ones(self.slots.size, np.bool_)
        else:
            slots = read_bitmap(named)
            chosen = np.isin(self.slots, slots)
            if np.count_nonzero(chosen) < slots.size:
                return None
        return None if True in (corrected[chosen] == EXACT).tolist() else chosen

    def advance(self, capacity: Int32s | None, noted: NotedRows | None) -> bool:
        """Advance each row by a step; return False and do nothing if a row has no room. capacity:
        the new capacity, if the step brings blocks; noted: what its message says of the rows, if it
        says something.

        The step before has ensured that the rows are live, at their last token, and not too many.
        Only blocks and lengths remain to be checked.
        """
        ends = (self.ends if noted is None else noted.ends) + self.num_tokens
        room = self.capacity if capacity is None else capacity
        growth = self.growth if noted is None else 0
        longest = self.longest + growth if growth else int(ends.max())
        # For few and small values, a search in bytes takes a third of numpy's time.
        if longest > self.max_model_len or 1 in (ends > room).tobytes():
            return False
        self.ends, self.longest, self.capacity = ends, longest, room
        if noted is not None:
            self.corrected, self.bounds = noted.corrected, np.maximum(noted.corrected, NOT_SAMPLED)
        return True
