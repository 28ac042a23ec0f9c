"""What is done about requests and replies that get lost: when a group has been silent for too long,
and what is sent again to whom. A daemon runs a repeated request once, and answers it as before.
Belongs to the group's thread."""

import time
from collections.abc import Collection, Sequence

from rpc_schema import lifecycle as lc
from rpc_schema.codec import Frame
from worker_client.sent_steps import SentSteps
from worker_client.worker_client import WorkerClient

RESEND_AFTER_S = 1.0
"""Silence for so long, then twice as long, and so on, has the outstanding requests sent again."""
MEND_AGAIN_S = 0.1
"""A rank refuses each request behind a gap: within this time after the gap was mended, those
refusals were under way."""
MAX_MENDS = 5
"""So often one gap is mended before it counts as a failure."""

IDLE = "IDLE"
"""The phase of a daemon that runs nothing."""


class Resending:
    """Of one group."""

    def __init__(self, clients: Sequence[WorkerClient], output_rank: int) -> None:
        self.knows_ranks = len(clients) == 1
        """Whether every daemon bears the number that it has in the group."""
        self.due = 0.0
        """When (time.monotonic) to call send_overdue(), unless restart() is called before."""
        self._clients = clients
        self._output_rank = output_rank
        self._sent = SentSteps(len(clients))
        self._uids: dict[bytes, int] = {}
        self._patience_s = RESEND_AFTER_S
        self._mended: dict[tuple[int, int], tuple[int, float]] = {}
        """For a rank and the seq that it missed: how often that was mended, and when last."""

    def begin_epoch(self) -> None:
        """Forget what was sent before, and who the daemons are: another may be in a place."""
        self.knows_ranks = len(self._clients) == 1
        self._sent.begin_epoch()
        self._mended.clear()
        self.restart()

    def begin_anew(self, seq: int) -> None:
        """Request `seq` stands on none before it."""
        self._sent.begin_anew(seq)
        self._mended.clear()

    def forget(self) -> None:
        """What was sent is given up: it must not run any more."""
        self._sent.begin_anew(0)

    def meet(self, ranks: Sequence[int], statuses: Sequence[lc.Status]) -> None:
        """Learn who the daemons in these places of the group are; the other places are vacant."""
        self._uids = {status.worker_uid: rank for rank, status in zip(ranks, statuses, strict=True)}
        self.knows_ranks = [status.rank for status in statuses] == list(ranks)

    def restart(self) -> None:
        """Something came: begin to wait anew."""
        self._patience_s = RESEND_AFTER_S
        self.due = time.monotonic() + self._patience_s

    def sent(self, rank: int, seq: int, frames: Sequence[Frame]) -> None:
        """A request was sent for the first time."""
        self._sent.keep(rank, seq, frames)
        if rank == 0:
            self.restart()

    def heard(self, beat: lc.Heartbeat, outstanding: int) -> None:
        """Take in how far a rank is; the outcomes below `outstanding` are known."""
        rank = self._uids.get(beat.worker_uid)
        if rank is not None:
            is_busy = beat.phase != IDLE
            self._sent.heard(rank, beat.last_seq, is_busy=is_busy, outstanding=outstanding)

    def send_overdue(self, seq: int, answered: Collection[int], *, is_step: bool) -> None:
        """Send request `seq` and those behind it again, to the ranks that may not have them, or
        whose answer is missing: of a step that is the output rank's alone, of an operation that of
        all but `answered`. A rank that runs something gets nothing: it is not silent."""
        self._patience_s *= 2
        self.due = time.monotonic() + self._patience_s
        for rank in range(len(self._clients)):
            if not self._sent.is_busy(rank) and rank not in answered:
                self.send_lost(rank, seq, is_step=is_step)

    def send_lost(self, rank: int, seq: int, *, is_step: bool) -> None:
        """Send one rank request `seq` and those behind it again, as far as they, or an answer that
        it owes, may be lost: for send_overdue(), and for a rank whose connection came back."""
        if not is_step and not self.knows_ranks:
            return
        owes_answer = not is_step or rank == self._output_rank
        first = seq if owes_answer else max(seq, self._sent.last_seq(rank) + 1)
        for step in self._sent.since(rank, first):
            self._clients[rank].send_again(step.frames)

    def mend_gap(self, rank: int, expected: int) -> bool:
        """Send a rank what it misses, from seq `expected` on; tell whether that was all that there
        is to do."""
        if rank >= len(self._clients) or not self.knows_ranks:
            return False
        if self._sent.last_seq(rank) >= expected:
            return True  # a refusal that comes late: the rank has told that it is past that
        missing = self._sent.since(rank, expected)
        times, last = self._mended.get((rank, expected), (0, 0.0))
        now = time.monotonic()
        if not missing or times >= MAX_MENDS:
            return False
        if now >= last + MEND_AGAIN_S:
            self._mended[rank, expected] = times + 1, now
            for step in missing:
                self._clients[rank].send_again(step.frames)
        return True
