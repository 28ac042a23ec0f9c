"""Liveness of a group's daemons, found by three signals that fail independently: the connection
(transport), the process if it is on this host, and heartbeats that report progress; or announced
by a daemon that shuts down. Owns the file descriptors of processes. GroupChannel.look asks it, and
GroupChannel.lose acts on a death."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from rpc_schema.expert_placement import ExpertMoveEnded
from rpc_schema.lifecycle import Heartbeat, Hung, Slow
from worker_client.errors import WorkerDied, WorkerShutsDown
from worker_client.wire.processes import Process, find_process, nobody_listens

SUSPECT_AFTER_S = 0.95
"""Silence after which a rank is suspect, nearly four heartbeats: a second is guaranteed, and
noticing takes up to 50 ms more."""

FENCE_AFTER_S = 5.0
"""Silence after which the group gives up a rank whose connection is lost."""

SILENCE_LIMIT_S = 9.9
"""Silence after which a process with a live connection counts as dead, unless its phase has
announced a longer one. Ten seconds are guaranteed."""

BLIND_AFTER_S = 0.5
"""After this long without reading events, the time does not count as silence: heartbeats may have
been lost."""

_FENCE_AFTER_CUT_S = FENCE_AFTER_S - 1.0
"""Time since the end of a connection, which itself comes after about a second of silence."""

MAX_EVENTS = 256

Signal: TypeAlias = Literal["transport", "process", "progress", "announced"]
EventKind: TypeAlias = Literal["suspect", "back", "dead", "hung", "slow", "move_failed"]
Liveness: TypeAlias = Literal["alive", "suspect", "dead"]


class LivenessEvent(NamedTuple):
    """A change of a rank's liveness. `hung`, `slow` and `move_failed` (experts that could not be
    moved to it) are the rank's own reports."""

    kind: EventKind
    rank: int
    signal: Signal
    detail: str
    at: float
    """Time of time.monotonic()."""


OnEvent: TypeAlias = Callable[[LivenessEvent], None]


@dataclass(slots=True)
class _Watched:
    """State of one daemon."""

    address: str
    """Address of the socket whose connection is watched."""
    control: str
    uid: bytes = b""
    process: Process = field(default_factory=Process)
    liveness: Liveness = "alive"
    death: LivenessEvent | None = None
    """The last one of this rank, if it is not dead that of a daemon before."""
    cut_since: float | None = None
    """Time at which its connection was lost, if it was."""
    cut_at: float | None = None
    """Time at which its connection ended for the last time, even if there is another one now."""
    heard_at: float | None = None
    """Time of its last heartbeat; None before the first."""
    allowed_s: float = SILENCE_LIMIT_S
    """Silence that its last heartbeat allows from now on."""


class Watch:
    """Judges the daemons of a group. Belongs to one thread, which calls look() as often as it can,
    and listened() each time that it has read their events."""

    def __init__(
        self,
        addresses: Sequence[str],
        controls: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[str], Process] = find_process,
        first_rank: int = 0,
    ) -> None:
        """addresses: of the sockets whose connections are watched; controls: the endpoints to name
        in errors; both in rank order. find: returns the process behind an address. first_rank:
        global rank of the first daemon."""
        self.on_event: OnEvent | None = None
        self.events: deque[LivenessEvent] = deque(maxlen=MAX_EVENTS)
        """The newest events."""
        self.returned: set[int] = set()
        """Ranks whose connection came back, until the owner removes them."""
        self._clock = clock
        self._find = find
        daemons = enumerate(zip(addresses, controls, strict=True), first_rank)
        self._ranks = {rank: _Watched(*daemon) for rank, daemon in daemons}
        self._listened_at = clock()

    def close(self) -> None:
        """Close the descriptors."""
        for entry in self._ranks.values():
            entry.process.close()

    @property
    def liveness(self) -> list[Liveness]:
        """Liveness of each rank, in rank order."""
        return [entry.liveness for entry in self._ranks.values()]

    def is_dead(self, rank: int) -> bool:
        """Return True for a dead rank."""
        return self._ranks[rank].liveness == "dead"

    def answers(self, rank: int) -> bool:
        """Return True for a rank whose control socket may answer: one that is not dead, or has
        announced its end and is still there."""
        entry = self._ranks[rank]
        if entry.liveness != "dead" or entry.death is None:
            return True
        is_there = entry.cut_since is None and not entry.process.has_ended()
        return entry.death.signal == "announced" and is_there

    def cut_at(self, rank: int) -> float | None:
        """Return the time of time.monotonic at which its connection ended last; None: never."""
        return self._ranks[rank].cut_at

    def pid(self, rank: int) -> int:
        """Return its process id on this host; 0 if unknown."""
        return self._ranks[rank].process.pid

    def expect(self, rank: int, address: str, control: str) -> None:
        """Watch another daemon in this rank's place, without regard to the old one."""
        before = self._ranks[rank]
        before.process.close()
        self._ranks[rank] = _Watched(address, control, death=before.death)
        self.returned.discard(rank)

    def met(self, rank: int, uid: bytes) -> None:
        """Record that the daemon of this rank has answered, and its uid."""
        entry = self._ranks[rank]
        if entry.uid != uid:
            entry.process.close()
            entry.process = self._find(entry.address)
            entry.uid = uid
            entry.heard_at = None

    def disconnected(self, rank: int) -> None:
        """Record the end of a rank's connection. Before it was met its ControlChannel handles
        that."""
        entry = self._ranks[rank]
        if not entry.uid:
            return
        entry.cut_at = self._clock()
        if entry.cut_since is None:
            entry.cut_since = entry.cut_at
        # On tcp the next attempt to connect shows it: a probe there is noticed and logged.
        if not entry.address.startswith("tcp://") and nobody_listens(entry.address):
            self._die(rank, "transport", "the connection ended" + entry.process.cause_of_end())
        elif entry.liveness == "alive":
            self._suspect(rank, "transport", "it does not answer, though it has not ended")

    def refused(self, rank: int) -> None:
        """Record that a new connection could not be made: no process listens any more, or the
        network between us is down."""
        entry = self._ranks[rank]
        if entry.cut_since is not None and nobody_listens(entry.address):
            self._die(rank, "transport", "the connection ended, and another was refused")

    def connected(self, rank: int) -> None:
        """Record that a rank has answered on a new connection."""
        if self._ranks[rank].cut_since is not None:
            self._ranks[rank].cut_since = None
            self.returned.add(rank)
        entry = self._ranks[rank]
        if entry.uid and not entry.process.pid:
            entry.process = self._find(entry.address)
        self._come_back(rank)

    def begin_steps(self) -> None:
        """Withdraw announced silences: no operation is running any more."""
        for entry in self._ranks.values():
            entry.allowed_s = SILENCE_LIMIT_S

    def heard(self, beat: Heartbeat, *, operating: bool) -> None:
        """Record a heartbeat. operating: an operation is running, which may have announced a long
        silence; heartbeats of an earlier one may arrive late."""
        rank = self.rank_of(beat.worker_uid)
        if rank is None:
            return
        entry = self._ranks[rank]
        entry.heard_at = self._clock()
        entry.allowed_s = SILENCE_LIMIT_S
        if operating:
            left_s = (beat.phase_limit_ms - beat.phase_ms) / 1000
            entry.allowed_s = max(SILENCE_LIMIT_S, left_s)
        self._come_back(rank)

    def report(self, event: Hung | Slow) -> None:
        """Record a daemon's report on itself."""
        rank = self.rank_of(event.worker_uid)
        if rank is None:
            return
        if isinstance(event, Hung):
            detail = f"{event.phase} has lasted {event.phase_ms} ms; stacks: {event.stacks}"
            self._tell("hung", rank, "progress", detail)
        else:
            detail = f"{event.phase} has lasted {event.phase_ms} ms, usually {event.usual_ms} ms"
            self._tell("slow", rank, "progress", detail)

    def report_move(self, event: ExpertMoveEnded) -> None:
        """Record the end of a move of experts, if it has failed."""
        rank = self.rank_of(event.worker_uid)
        if rank is not None and event.fault and not event.is_dropped:
            self._tell("move_failed", rank, "progress", f"layer {event.layer}: {event.fault}")

    def listened(self) -> None:
        """Judge silence, after all events that are here have been read: a heartbeat that waits to
        be read does not count as silence."""
        now = self._clock()
        blind_s = now - self._listened_at
        if blind_s > BLIND_AFTER_S:
            for entry in self._ranks.values():
                if entry.heard_at is not None:
                    entry.heard_at = min(now, entry.heard_at + blind_s)
        self._listened_at = now
        for rank, entry in self._ranks.items():
            if entry.heard_at is not None and entry.cut_since is None and entry.liveness != "dead":
                self._assess_silence(rank, entry, now - entry.heard_at)

    def look(self) -> None:
        """Check for exited processes and for connections that stay lost.

        Raises:
            WorkerDied: one of them is dead, now or since the last call; names the first.
        """
        now = self._clock()
        for rank, entry in self._ranks.items():
            if entry.liveness != "dead":
                self._assess(rank, entry, now)
        for rank, entry in self._ranks.items():
            if entry.liveness == "dead":
                raise self.death_of(rank)

    def mark_dead(self, rank: int) -> None:
        """Record that this rank is known to be dead, or is not to be waited for."""
        if self._ranks[rank].liveness != "dead":
            self._die(rank, "transport", "it was given up")

    def shuts_down(self, rank: int) -> None:
        """Record that this rank has refused a request because it is shutting down."""
        self._die(rank, "announced", "it is shutting down")

    def answers_as(self, rank: int, uid: bytes | None) -> None:
        """Record the uid of the daemon that answers in this rank's place now; None: it speaks
        another protocol. If it is not the one that was met, that one has ended."""
        if self._ranks[rank].uid not in (b"", uid):
            self._die(rank, "transport", "it has ended, and another daemon answers in its place")

    def death_of(self, rank: int) -> WorkerDied:
        """Return the error for a dead rank."""
        control, death = self._ranks[rank].control, self._ranks[rank].death
        if death is None:
            return WorkerDied(rank, control)
        if death.signal == "announced":
            return WorkerShutsDown(rank, control)
        return WorkerDied(rank, control, f"{death.detail} (signal: {death.signal})")

    def _assess(self, rank: int, entry: _Watched, now: float) -> None:
        if entry.process.has_ended():
            ended = f"process {entry.process.pid} has ended"
            self._die(rank, "process", ended + entry.process.cause_of_end())
        elif entry.cut_since is not None and now - entry.cut_since >= _FENCE_AFTER_CUT_S:
            self._die(rank, "transport", f"it has not answered for {FENCE_AFTER_S:g} s: fenced")

    def _assess_silence(self, rank: int, entry: _Watched, silent_s: float) -> None:
        if silent_s >= entry.allowed_s:
            self._die(rank, "progress", f"it has reported no progress for {silent_s:.1f} s")
        elif entry.allowed_s > SILENCE_LIMIT_S or entry.liveness != "alive":
            return  # it has announced silence, or is suspect already
        elif silent_s >= SUSPECT_AFTER_S:
            self._suspect(rank, "progress", f"no heartbeat for {silent_s:.1f} s")

    def rank_of(self, uid: bytes) -> int | None:
        """Return the rank of the daemon that was met with this uid, whatever number it reports: a
        daemon learns its rank only when it is loaded."""
        return next((rank for rank, entry in self._ranks.items() if entry.uid == uid), None)

    def _suspect(self, rank: int, signal: Signal, detail: str) -> None:
        self._ranks[rank].liveness = "suspect"
        self._tell("suspect", rank, signal, detail)

    def _come_back(self, rank: int) -> None:
        entry = self._ranks[rank]
        if entry.liveness != "suspect" or entry.cut_since is not None:
            return
        entry.liveness = "alive"
        self._tell("back", rank, "transport", "it answers again")

    def _die(self, rank: int, signal: Signal, detail: str) -> None:
        entry = self._ranks[rank]
        if entry.liveness != "dead":
            entry.liveness = "dead"
            entry.death = LivenessEvent("dead", rank, signal, detail, self._clock())
            self._report(entry.death)

    def _tell(self, kind: EventKind, rank: int, signal: Signal, detail: str) -> None:
        self._report(LivenessEvent(kind, rank, signal, detail, self._clock()))

    def _report(self, event: LivenessEvent) -> None:
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)
