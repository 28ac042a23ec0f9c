"""Recovers lost requests and replies: detects that a group has been silent for too long, and sends
requests again. A daemon runs a repeated request once, and answers it as before. Belongs to the
group's thread."""

import time
from collections.abc import Collection, Sequence

from rpc_schema import lifecycle as lc
from rpc_schema.codec import Frame
from worker_client.group.sent_steps import SentSteps
from worker_client.wire.worker_client import WorkerClient

RESEND_AFTER_S = 1.0
"""Silence after which outstanding requests are sent again; then twice as long, and so on."""
MEND_AGAIN_S = 0.1
"""Time after closing a gap in which further refusals count as late: a rank refuses each request
after the gap."""
MAX_MENDS = 5
"""Attempts to close one gap before it counts as a failure."""

IDLE = "IDLE"
"""Phase of a daemon that runs nothing."""


class Resending:
    """State of one group."""

    def __init__(
        self, clients: Sequence[WorkerClient], output_ranks: Collection[int], first_rank: int = 0
    ) -> None:
        """clients: by rank, from first_rank on; another client may take a rank's place.
        output_ranks: those that answer steps."""
        self.knows_ranks = len(clients) == 1
        """True if every daemon has the rank number of its place in the group."""
        self.due = 0.0
        """Time (time.monotonic) to call send_overdue(), unless restart() is called before."""
        self._clients = clients
        self._output_ranks = output_ranks
        self._ranks = range(first_rank, first_rank + len(clients))
        self._sent = SentSteps(self._ranks)
        self._uids: dict[bytes, int] = {}
        self._patience_s = RESEND_AFTER_S
        self._mended: dict[tuple[int, int], tuple[int, float]] = {}
        """By rank and missed seq: number of attempts to close the gap, and the time of the last."""

    def begin_epoch(self) -> None:
        """Forget the requests sent before and the daemons' identities: a daemon may have been
        replaced."""
        self.knows_ranks = len(self._clients) == 1
        self._sent.begin_epoch()
        self._mended.clear()
        self.restart()

    def restart_from(self, seq: int) -> None:
        """Begin with request `seq`, which does not depend on earlier ones."""
        self._sent.restart_from(seq)
        self._mended.clear()

    def forget(self) -> None:
        """Forget what was sent: it must not run any more."""
        self._sent.restart_from(0)

    def meet(self, ranks: Sequence[int], statuses: Sequence[lc.Status]) -> None:
        """Record the identities of the daemons in these places of the group; the other places are
        vacant."""
        self._uids = {status.worker_uid: rank for rank, status in zip(ranks, statuses, strict=True)}
        self.knows_ranks = [status.rank for status in statuses] == list(ranks)

    def restart(self) -> None:
        """Restart the wait: something has arrived."""
        self._patience_s = RESEND_AFTER_S
        self.due = time.monotonic() + self._patience_s

    def sent(self, rank: int, seq: int, frames: Sequence[Frame]) -> None:
        """Record a request that was sent for the first time."""
        self._sent.keep(rank, seq, frames)
        if rank == self._ranks[0]:
            self.restart()

    def heard(self, beat: lc.Heartbeat, outstanding: int) -> None:
        """Record a rank's progress; the outcomes below `outstanding` are known."""
        rank = self._uids.get(beat.worker_uid)
        if rank is not None:
            is_busy = beat.phase != IDLE
            self._sent.heard(rank, beat.last_seq, is_busy=is_busy, outstanding=outstanding)

    def send_overdue(self, seq: int, answered: Collection[int], *, is_step: bool) -> None:
        """Send request `seq` and the later ones again, to the ranks that may not have them, or
        whose reply is missing: for a step the output ranks' alone, for an operation those of all
        but `answered`. A rank that runs something is skipped: it is not silent."""
        self._patience_s *= 2
        self.due = time.monotonic() + self._patience_s
        for rank in self._ranks:
            if not self._sent.is_busy(rank) and rank not in answered:
                self.send_lost(rank, seq, is_step=is_step)

    def send_lost(self, rank: int, seq: int, *, is_step: bool) -> None:
        """Send one rank request `seq` and the later ones again, as far as they, or a reply that it
        owes, may be lost: for send_overdue(), and for a rank whose connection came back."""
        if not is_step and not self.knows_ranks:
            return
        owes_answer = not is_step or rank in self._output_ranks
        first = seq if owes_answer else max(seq, self._sent.last_seq(rank) + 1)
        for step in self._sent.since(rank, first):
            self._clients[rank - self._ranks[0]].send_again(step.frames)

    def mend_gap(self, rank: int, expected: int) -> bool:
        """Send a rank the requests that it misses, from seq `expected` on. Return True if no
        further action is needed."""
        if rank not in self._ranks or not self.knows_ranks:
            return False
        if self._sent.last_seq(rank) >= expected:
            return True  # a late refusal: the rank has reported that it is past that
        missing = self._sent.since(rank, expected)
        times, last = self._mended.get((rank, expected), (0, 0.0))
        now = time.monotonic()
        if not missing or times >= MAX_MENDS:
            return False
        if now >= last + MEND_AGAIN_S:
            self._mended[rank, expected] = times + 1, now
            for step in missing:
                self._clients[rank - self._ranks[0]].send_again(step.frames)
        return True
