"""Keeps the bytes of steps sent to each rank as long as they may have to be sent again: until the
rank is known to have passed a step, and its outcome is known. Belongs to the group's thread."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rpc_schema.codec import Frame

MAX_KEPT_BYTES = 64 << 20
"""Bound on the bytes kept for one rank. Ranks share frames that are the same for all of them."""
MAX_KEPT_STEPS = 4096


class SentStep(NamedTuple):
    """An encoded request."""

    seq: int
    frames: Sequence[Frame]


class _Rank:
    """The steps sent to one rank, oldest first, and the rank's last report."""

    def __init__(self) -> None:
        self.steps: deque[SentStep] = deque()
        self.num_bytes = 0
        self.last_seq = 0
        self.is_busy = False

    def drop_oldest(self) -> None:
        self.num_bytes -= _size(self.steps.popleft())


class SentSteps:
    """The sent steps of one epoch."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = {rank: _Rank() for rank in ranks}
        self._first_alone = 1

    def begin_epoch(self) -> None:
        """Forget all steps."""
        self._ranks = {rank: _Rank() for rank in self._ranks}
        self._first_alone = 1

    def restart_from(self, seq: int) -> None:
        """Record that request `seq` does not depend on earlier ones: these need never be sent
        again."""
        for rank in self._ranks.values():
            rank.steps.clear()
            rank.num_bytes = 0
        self._first_alone = seq

    def keep(self, rank: int, seq: int, frames: Sequence[Frame]) -> None:
        """Keep a request that was sent to a rank; the oldest make room."""
        kept = self._ranks[rank]
        step = SentStep(seq, frames)
        kept.steps.append(step)
        kept.num_bytes += _size(step)
        while kept.num_bytes > MAX_KEPT_BYTES or len(kept.steps) > MAX_KEPT_STEPS:
            kept.drop_oldest()

    def heard(self, rank: int, last_seq: int, *, is_busy: bool, outstanding: int) -> None:
        """Record a rank's report that it is done with `last_seq`; the outcomes of requests below
        `outstanding` are known."""
        kept = self._ranks[rank]
        kept.last_seq, kept.is_busy = max(kept.last_seq, last_seq), is_busy
        while kept.steps and kept.steps[0].seq <= last_seq and kept.steps[0].seq < outstanding:
            kept.drop_oldest()

    def last_seq(self, rank: int) -> int:
        """Return the last request with which a rank is known to be done."""
        return self._ranks[rank].last_seq

    def is_busy(self, rank: int) -> bool:
        """Return True if the rank's last report says that it runs a request."""
        return self._ranks[rank].is_busy

    def since(self, rank: int, seq: int) -> list[SentStep]:
        """Return the requests sent to a rank from `seq` on; nothing if the first of them is no
        longer kept."""
        steps = [step for step in self._ranks[rank].steps if step.seq >= seq]
        return steps if steps and steps[0].seq in (seq, self._first_alone) else []


def _size(step: SentStep) -> int:
    return sum(map(len, step.frames))
