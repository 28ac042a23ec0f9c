"""The bytes of steps that were sent to each rank, kept as long as they may have to be sent again:
until that rank is known to be past a step and its outcome is known. Belongs to the group's
thread."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from rpc_schema.codec import Frame

MAX_KEPT_BYTES = 64 << 20
"""Of one rank. Frames that are the same for all ranks are shared among them."""
MAX_KEPT_STEPS = 4096


class SentStep(NamedTuple):
    """A request as it was encoded."""

    seq: int
    frames: Sequence[Frame]


class _Rank:
    """Steps that one rank was sent, oldest first, and its last report."""

    def __init__(self) -> None:
        self.steps: deque[SentStep] = deque()
        self.num_bytes = 0
        self.last_seq = 0
        self.is_busy = False

    def drop_oldest(self) -> None:
        self.num_bytes -= _size(self.steps.popleft())


class SentSteps:
    """Of one epoch at a time."""

    def __init__(self, world_size: int) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self._first_alone = 1

    def begin_epoch(self) -> None:
        """Forget everything."""
        self._ranks = [_Rank() for _ in self._ranks]
        self._first_alone = 1

    def begin_anew(self, seq: int) -> None:
        """Request `seq` stands on none before it: those need never be sent again."""
        for rank in self._ranks:
            rank.steps.clear()
            rank.num_bytes = 0
        self._first_alone = seq

    def keep(self, rank: int, seq: int, frames: Sequence[Frame]) -> None:
        """Keep what was sent to a rank; the oldest makes room."""
        kept = self._ranks[rank]
        step = SentStep(seq, frames)
        kept.steps.append(step)
        kept.num_bytes += _size(step)
        while kept.num_bytes > MAX_KEPT_BYTES or len(kept.steps) > MAX_KEPT_STEPS:
            kept.drop_oldest()

    def heard(self, rank: int, last_seq: int, *, is_busy: bool, outstanding: int) -> None:
        """A rank says that it is done with `last_seq`; the outcomes of requests below `outstanding`
        are known."""
        kept = self._ranks[rank]
        kept.last_seq, kept.is_busy = max(kept.last_seq, last_seq), is_busy
        while kept.steps and kept.steps[0].seq <= last_seq and kept.steps[0].seq < outstanding:
            kept.drop_oldest()

    def last_seq(self, rank: int) -> int:
        """The last request that a rank is known to be done with."""
        return self._ranks[rank].last_seq

    def is_busy(self, rank: int) -> bool:
        """Return True if the rank's last report says that it runs a request."""
        return self._ranks[rank].is_busy

    def since(self, rank: int, seq: int) -> list[SentStep]:
        """Return what a rank was sent from `seq` on; nothing if the first of it is not kept any
        more."""
        steps = [step for step in self._ranks[rank].steps if step.seq >= seq]
        return steps if steps and steps[0].seq in (seq, self._first_alone) else []


def _size(step: SentStep) -> int:
    return sum(map(len, step.frames))
