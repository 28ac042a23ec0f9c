"""Records the tokens that each row has sampled, and the steps known to have succeeded, as results
reach the host. A driver that adopts another one's requests receives them.

The thread that takes a result writes the history; the step thread reads it.
"""

import mmap
import threading
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from worker_daemon.contracts.arrays import Int32s, Int64s

MAX_CONFIRMED = 256
"""Number of successful steps to remember: more than are ever in flight."""

_MAP_NORESERVE: Final = 0x4000
"""Linux's value; Python defines the name only on some builds."""
_UNRESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
"""Almost none of this memory is ever touched."""

FOLD_AT: Final = 128
"""Number of results between two writes to the table."""


class Sampled(NamedTuple):
    """A step's result: the rows that it has sampled. Aligned columns [R]."""

    slots: Int64s
    generations: Int64s
    positions: Int32s
    """Positions of the sampled tokens."""
    are_bounds: bool = False
    """True if tokens of these rows may have been refused: positions are then upper bounds, except
    that of a row's first sampled token."""


ALL_GAIN_ONE: Final = b""
"""Value of `gained` when each row of a step has gained one token."""


class Result(NamedTuple):
    """A step that succeeded on every participating rank."""

    epoch: int
    seq: int
    sampled: Sampled | None = None
    """None if it sampled nothing."""
    token_ids: bytes = b""
    """int32 little-endian: the tokens of each row, concatenated."""
    gained: bytes = ALL_GAIN_ONE
    """uint8 [R], the number of tokens that each row gained, or ALL_GAIN_ONE."""


class TokenHistory:
    """A rank's record of results. This class is for ranks that get none, which count every step
    that they ran as successful."""

    def __init__(self) -> None:
        self.unrecorded: deque[Result] = deque()
        """Results that are not in the record yet. The thread that takes results appends them, in
        step order, and calls fold() once there are FOLD_AT: a step costs an append."""

    def fold(self) -> None:
        """Move the results into the record. Any thread may call it."""
        self.unrecorded.clear()

    def has_confirmed(self, epoch: int, seq: int) -> bool:
        """Return True if the step succeeded, as far as this rank can know."""
        return True

    def known_to(self, slot: int, generation: int, default: int) -> int:
        """Return the number of a row's known tokens, including those of its admission; `default` if
        it has sampled none."""
        return default

    def between(self, slot: int, first: int, last: int) -> Int32s:
        """Return the row's sampled tokens at positions first to last - 1."""
        return np.zeros(0, np.int32)


class SampledTokens(TokenHistory):
    """The output rank's history: a table by slot and position, whose memory is allocated as tokens
    are sampled."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        super().__init__()
        width = max_model_len + 1
        memory = mmap.mmap(-1, 4 * num_rows * width, flags=_UNRESERVED)
        self._tokens: Int32s = np.frombuffer(memory, np.int32).reshape(num_rows, width)
        self._known_to = np.zeros(num_rows, np.int64)
        self._generations = np.full(num_rows, -1, np.int64)
        self._confirmed: deque[tuple[int, int]] = deque(maxlen=MAX_CONFIRMED)
        self._lock = threading.Lock()

    def fold(self) -> None:
        """See TokenHistory."""
        with self._lock:
            self._fold()

    def has_confirmed(self, epoch: int, seq: int) -> bool:
        """See TokenHistory."""
        with self._lock:
            self._fold()
            return (epoch, seq) in self._confirmed

    def known_to(self, slot: int, generation: int, default: int) -> int:
        """See TokenHistory."""
        with self._lock:
            self._fold()
            current = self._generations[slot] == generation
            return int(self._known_to[slot]) if current else default

    def between(self, slot: int, first: int, last: int) -> Int32s:
        """See TokenHistory."""
        with self._lock:
            self._fold()
            return self._tokens[slot, first:last].copy()

    def _fold(self) -> None:
        exact: list[tuple[Sampled, bytes]] = []
        while self.unrecorded:
            epoch, seq, sampled, token_ids, gained = self.unrecorded.popleft()
            self._confirmed.append((epoch, seq))
            if sampled is None:
                continue
            if not sampled.are_bounds:
                exact.append((sampled, token_ids))
                continue
            self._place(exact)
            exact.clear()
            self._append(sampled, token_ids, gained)
        self._place(exact)

    def _append(self, sampled: Sampled, token_ids: bytes, gained: bytes) -> None:
        """Append a result to its rows' earlier tokens."""
        slots = sampled.slots
        is_current = self._generations[slots] == sampled.generations
        firsts = np.where(is_current, self._known_to[slots], sampled.positions)
        counts = np.frombuffer(gained, np.uint8).astype(np.int64) if gained else np.ones_like(slots)
        before = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(firsts - before, counts)
        self._tokens[np.repeat(slots, counts), positions] = np.frombuffer(token_ids, "<i4")
        self._generations[slots] = sampled.generations
        self._known_to[slots] = firsts + counts

    def _place(self, results: list[tuple[Sampled, bytes]]) -> None:
        """Write results at their positions. If two name the same place, the later one stays:
        results arrive in step order, so a slot's current request wins."""
        if not results:
            return
        columns, raw = zip(*results, strict=True)
        slots = np.concatenate([sampled.slots for sampled in columns])
        generations = np.concatenate([sampled.generations for sampled in columns])
        positions = np.concatenate([sampled.positions for sampled in columns])
        self._tokens[slots, positions] = np.frombuffer(b"".join(raw), "<i4")
        self._generations[slots] = generations
        self._known_to[slots] = positions + 1
