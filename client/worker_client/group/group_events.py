"""Reads what a group's daemons publish: heartbeats, reports on themselves, observers' wishes."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rpc_schema import lifecycle as lc
from rpc_schema.codec import EventMessage
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.expert_placement import ExpertMoveEnded
from rpc_schema.trace import DriverStepsWanted, PutDriverSteps
from worker_client.group.failure_state import FailureState
from worker_client.group.group_daemons import GroupDaemons
from worker_client.group.resending import Resending
from worker_client.tracing.clocks import measure
from worker_client.tracing.step_times import StepHistory

EVENTS_INTERVAL_S = 0.25
"""Interval at which heartbeats and other events are read; daemons send at the same rate."""

OBSERVER_TIMEOUT_S = 0.5
"""Limit on requests on behalf of an observer."""

DRAIN_TIMEOUT_S = 0.5
"""Limit on asking a rank whether its drain is over."""

MAX_EVENTS_KEPT = 1024


class RankProgress(NamedTuple):
    """Phase of a rank while an operation runs."""

    operation: str
    rank: int
    phase: str
    phase_ms: int


class ChannelActivity(NamedTuple):
    """State of a group's channel, for the events that come meanwhile."""

    epoch: int
    first_open_seq: int
    """First request without a known outcome, or the next one."""
    operation: str | None
    """That which all ranks do; None while there are only steps."""


class GroupEvents:
    """Owned by the group's channel, and belongs to its thread. An event reaches the watch as soon
    as it is read; what else follows from it comes later, since that may send requests."""

    def __init__(
        self,
        daemons: GroupDaemons,
        state: FailureState,
        resending: Resending,
        times: StepHistory,
        sending: Callable[[], ChannelActivity],
    ) -> None:
        """state: gets the ranks' drains. resending: gets their progress. times: of the steps, for
        observers."""
        self.on_progress: Callable[[RankProgress], None] | None = None
        self.on_move_end: Callable[[int, ExpertMoveEnded], None] | None = None
        """Told the rank and the end of a move of experts; must not call the group."""
        self._daemons = daemons
        self._state = state
        self._resending = resending
        self._times = times
        self._sending = sending
        self._due = 0.0
        """Time of time.monotonic() from which the socket is read again."""
        self._heard: deque[EventMessage] = deque(maxlen=MAX_EVENTS_KEPT)
        """Events still to be handled; the watch has them already."""

    @property
    def is_quiet(self) -> bool:
        """True if read() would do nothing."""
        return not self._heard and time.monotonic() < self._due

    def read(self) -> None:
        """Process the daemons' events at the rate at which they come: their queue must not fill
        up."""
        self.listen()
        while self._heard:
            self._take(self._heard.popleft(), self._sending())

    def read_now(self) -> None:
        """Process the events that are here."""
        self._due = 0.0
        self.read()

    def listen(self) -> None:
        """Pass events to the watch at the rate at which they come. Does nothing else, so that it
        may be called while a reply is waited for."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVENTS_INTERVAL_S
        watch, is_operating = self._daemons.watch, self._sending().operation is not None
        for event in self._daemons.events.receive_all():
            if isinstance(event, lc.Heartbeat):
                watch.heard(event, operating=is_operating)
            elif isinstance(event, lc.Hung | lc.Slow):
                watch.report(event)
            elif isinstance(event, ExpertMoveEnded):
                watch.report_move(event)
                rank = watch.rank_of(event.worker_uid)
                if rank is not None and self.on_move_end is not None:
                    self.on_move_end(rank, event)
            self._heard.append(event)
        watch.listened()

    def _take(self, event: EventMessage, sending: ChannelActivity) -> None:
        if isinstance(event, DriverStepsWanted):
            self._answer_observer(event, sending.epoch)
        elif isinstance(event, lc.Heartbeat):
            rank = self._daemons.watch.rank_of(event.worker_uid)
            if rank is None:
                return
            if event.epoch == sending.epoch:
                self._take_drain(rank, drains=event.drains)
                self._resending.heard(event, sending.first_open_seq)
            if sending.operation is not None and self.on_progress is not None:
                self.on_progress(RankProgress(sending.operation, rank, event.phase, event.phase_ms))

    def _take_drain(self, rank: int, *, drains: bool) -> None:
        """Apply the drain flag of a rank's heartbeat. Events and replies have sockets of their own:
        if a refusal may have overtaken it, the rank is asked."""
        if self._state.is_doubtful(rank, drains=drains):
            try:
                status = self._daemons.client(rank).get_status(DRAIN_TIMEOUT_S)
            except WorkerDaemonError:
                return  # the next heartbeat asks again
            if status.serving != "SERVING":
                return
        self._state.report_drain(rank, drains=drains)

    def _answer_observer(self, event: DriverStepsWanted, epoch: int) -> None:
        """Send this driver's steps to an observer that asks through a daemon. If that fails, the
        trace lacks them."""
        if event.rank not in self._daemons.ranks:
            return
        client = self._daemons.client(event.rank)
        with contextlib.suppress(WorkerDaemonError):
            clock = measure(lambda: client.read_clock(OBSERVER_TIMEOUT_S))
            steps = self._times.between(event.begin_ns, event.end_ns, clock)
            answer = partial(PutDriverSteps, epoch=epoch, trace=event.trace, steps=steps)
            client.ask(answer, OBSERVER_TIMEOUT_S)
