"""The gate of step requests: checks only their (epoch, link, seq). Pure: no socket, no
torch, no reply bytes."""

import enum
from typing import Final

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import StepHead, StepMessage
from rpc_schema.errors import (
    DrainingError,
    FencedError,
    GapError,
    LeaseExpiredError,
    NotAttachedError,
    ProtocolError,
    StaleError,
)

REPLAYABLE: Final = 64
"""Replies that may be asked for again; also the size of the reply ring."""


_LINKING: Final = (lc.InitDevice, lc.Relink)


class GateResult(enum.Enum):
    """Decision of the gate on a request."""

    RUN = "run"
    REPLAY = "replay"
    """Accepted before: its reply is sent again if it is still kept."""
    STALE = "stale"
    GAP = "gap"
    FENCED = "fenced"
    NOT_ATTACHED = "not attached"
    EXPIRED = "expired"
    """Its driver's lease has expired."""
    DRAINING = "draining"
    """An operator drains the daemon."""


class StepGate:
    """The last accepted (epoch, link, seq). Owned by the step thread; `accept` advances it."""

    __slots__ = ("attached", "draining", "driver", "epoch", "expired", "last_seq", "link")

    def __init__(self) -> None:
        self.epoch = 0
        self.driver = ""
        """Name of the driver of the epoch, for messages; empty: unknown."""
        self.link = 0
        self.last_seq = 0
        self.attached = False
        self.expired = False
        self.draining = False
        """While True no new request runs; seqs and the lease stay as they are."""

    def attach(self, epoch: int, driver: str = "") -> None:
        """Begin `epoch` of a driver with this name: seqs start again with 1; the link stays."""
        assert epoch > self.epoch
        self.epoch, self.driver = epoch, driver
        self.last_seq = 0
        self.attached = True
        self.expired = False

    def detach(self, epoch: int) -> None:
        """End `epoch`, if it is still the current one."""
        if epoch == self.epoch:
            self.attached = False

    def expire(self, epoch: int) -> None:
        """Record that the lease of `epoch` has expired: if it is still the current one, no new
        request runs."""
        if epoch == self.epoch:
            self.expired = True

    def check(self, message: StepMessage | StepHead) -> GateResult:
        """Decide what happens to a request. Only one that gets RUN may be passed to `accept`.

        The next seq runs. Relink, Reset and an ExecuteModel with a resynchronization close a gap:
        their seq only needs to be new. InitDevice and Relink name a link above the current one in
        `rendezvous`; all others name the current one. A repeated seq is replayed regardless of its
        link, even after the lease has expired: a replay changes nothing. A request with a readable
        head but an unreadable body is checked by its head; it closes no gap.
        """
        if message.epoch != self.epoch or not self.attached:
            return GateResult.FENCED if message.epoch < self.epoch else GateResult.NOT_ATTACHED
        seq = message.seq
        if seq <= self.last_seq:
            return (
                GateResult.REPLAY if seq > max(0, self.last_seq - REPLAYABLE) else GateResult.STALE
            )
        if self.expired:
            return GateResult.EXPIRED
        return GateResult.DRAINING if self.draining else self._check_new(message)

    def _check_new(self, message: StepMessage | StepHead) -> GateResult:
        if message.link != self.link and not isinstance(message, _LINKING):
            return GateResult.FENCED
        if message.seq != self.last_seq + 1 and not closes_gap(message):
            return GateResult.GAP
        if isinstance(message, _LINKING) and not (
            message.link <= self.link < message.rendezvous.link
        ):
            return GateResult.FENCED
        return GateResult.RUN

    def accept(self, message: StepMessage | StepHead) -> None:
        """Accept a request that may run: its seq is used up, regardless of the outcome."""
        self.last_seq = message.seq

    def begin_link(self, message: lc.InitDevice | lc.Relink) -> None:
        """Move to a new link. Even a failed attempt uses up its generation, so that ranks agree on
        it."""
        self.link = message.rendezvous.link

    def refusal(self, result: GateResult, message: StepMessage | StepHead) -> ProtocolError:
        """Return the error for a request that does not run."""
        if result is GateResult.GAP:
            return GapError(self.last_seq + 1, message.seq)
        if result is GateResult.NOT_ATTACHED:
            problem = f"epoch {message.epoch} is not attached; the last one granted is {self.epoch}"
            return NotAttachedError(problem, fix="attach")
        if result is GateResult.EXPIRED:
            problem = f"the lease of epoch {self.epoch} has expired"
            return LeaseExpiredError(problem, fix="attach again")
        if result is GateResult.DRAINING:
            return drained()
        if result is GateResult.FENCED:
            return self._fenced(message)
        return self._stale(message.seq)

    def _fenced(self, message: StepMessage | StepHead) -> FencedError:
        """Return the error for an epoch that another driver has ended, or a link that is not the
        current one."""
        if message.epoch < self.epoch:
            taker = self.driver or "another driver"
            problem = f"epoch {message.epoch} is fenced: {taker} has attached as epoch {self.epoch}"
            return FencedError(problem, fix="attach")
        problem = (
            f"epoch {message.epoch} with link {message.link} is fenced; "
            f"epoch {self.epoch} with link {self.link} holds"
        )
        return FencedError(problem, fix="relink the group")

    def _stale(self, seq: int) -> StaleError:
        """Return the error for a seq whose reply is no longer kept."""
        problem = f"the reply to seq {seq} is no longer kept; the last accepted is {self.last_seq}"
        return StaleError(problem)


def drained() -> DrainingError:
    """Return the error for a driver of a draining daemon."""
    problem = "the daemon is draining: it takes no steps and no drivers, and keeps its model"
    fix = "use another daemon, or this one after worker-client drain --undo"
    return DrainingError(problem, fix=fix)


def closes_gap(message: StepMessage | StepHead) -> bool:
    """Return True if a request does not depend on the steps before it."""
    if isinstance(message, step.ExecuteModel):
        return message.resync is not None
    return isinstance(message, lc.Relink | lc.Reset)
