"""The failure state of a driver's group: its fields, the events that change it,
and the answer of each state to each request. The only owner of these facts. Pure, without I/O."""

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import (
    DrainingError,
    DriverEvent,
    ErrorCode,
    ErrorScope,
    FencedError,
    LeaseExpiredError,
    NotAttachedError,
    WireError,
    WorkerDaemonError,
    WorkerError,
    error_of_rank,
)
from worker_client.errors import ClientError, LinkGivenUp, WeightsNotWhole, WorkerDied

ENDS_OWNERSHIP: Final = (
    FencedError,
    LeaseExpiredError,
    LinkGivenUp,
    NotAttachedError,
    WorkerDied,
)
"""Errors after which the group takes no steps: another driver has the daemons, or no driver has
them, or they cannot reach each other."""

_NO_LINK_FAILURE: Final = (ErrorCode.DRAINING, ErrorCode.GAP)
"""Codes of refusals after which the ranks must relink, though their link works."""

MAX_LINK_FAILURES: Final = 3
"""In a row: steps that break the link, and failed attempts to relink."""
MAX_EVENTS_KEPT: Final = 20
"""Events that an error carries."""
_EVENTS_TITLE: Final = "The driver's last events:"


class Ownership(enum.Enum):
    """Ownership of the group by this driver."""

    NEW = "never attached"
    SERVING = "attached: it takes steps"
    ENDED = "fenced, lease lost, or an unreadable reply"
    LINK_GIVEN_UP = "links failed too often in a row, though all daemons live"
    LOST = "a daemon is dead"
    REPLACING = "another daemon is taking a lost one's place"


class LinkState(enum.Enum):
    """State of the links between ranks."""

    NONE = "the group is one rank"
    WHOLE = "ranks reach each other, as far as is known"
    BROKEN = "bytes may be left between ranks, or a rank has lost its peers: no row survives"


class Ending(enum.Enum):
    """An announced exit of a daemon's process."""

    NONE = "no rank has announced its exit"
    ANNOUNCED = (
        "a rank has announced its exit, or may exit as the link is given up; not waited for yet"
    )


class FailureReport(enum.Enum):
    """Latest failure: reported by a future, or not yet."""

    NONE = "nothing has failed since prepare() or attach()"
    UNREPORTED = "a failure that no future has reported"
    REPORTED = "a failure that a future has reported"
    DEATH_UNREPORTED = "a daemon's death that no future has reported"
    DEATH_REPORTED = "a reported death; its losses are reported again with the next failure"


class RootCause(enum.Enum):
    """Wait for the root cause of a step that one rank failed as a consequence."""

    SETTLED = "no step waits for its cause"
    AWAITED = "another rank may still report the cause of a failed step"


class Weights(enum.Enum):
    """Completeness of the model's weights, as the driver knows it."""

    WHOLE = "complete: steps can run on them"
    NOT_WHOLE = "an update is open, or has failed"


class DrainState(enum.Enum):
    """Drain by an operator."""

    NONE = "no rank drains"
    DRAINING = "a rank reports that it drains, by a heartbeat or the refusal of a step"


@dataclass(frozen=True, slots=True)
class GroupState:
    """One value of each axis."""

    ownership: Ownership = Ownership.NEW
    link: LinkState = LinkState.NONE
    ending: Ending = Ending.NONE
    report: FailureReport = FailureReport.NONE
    root_cause: RootCause = RootCause.SETTLED
    weights: Weights = Weights.WHOLE
    drain: DrainState = DrainState.NONE


_AXES: Final = fields(GroupState)


class Suspect(NamedTuple):
    """A rank failed a step because another one did, which may still report the cause."""

    reply: ErrorReply
    error: WorkerError
    until: float
    """Time (of time.monotonic()) from which it counts as the cause itself."""


class Change(enum.Enum):
    """Events without values."""

    LINK_BROKEN = "a step has left bytes between ranks, or a rank without its peers"
    LINK_MADE = "all ranks have joined a new link, or have given up the one that they had"
    END_ANNOUNCED = "a rank has announced its exit, or may exit as the link is given up"
    END_AWAITED = "the wait for the announced exit begins; it is done once"
    PREPARED = "prepare() has ended: the scheduler starts from an empty state"
    ATTACH_BEGUN = "all daemons have announced an epoch to this driver: failures are dropped"
    GROUP_ATTACHED = "all present daemons have attached; LINK_BROKEN follows if they must relink"
    REPLACE_BEGUN = "an attempt to put another daemon in a lost one's place"
    RANK_REPLACED = "another daemon serves in the lost one's place; Failed follows if work was lost"
    WEIGHTS_FILLED = "all weights were written, or were found to be complete"
    DRAIN_OVER = "no rank drains any more, or a new epoch makes earlier heartbeats void"


@dataclass(frozen=True, slots=True)
class RankLost:
    """A daemon is dead, or replacing it has failed permanently."""

    cause: WorkerDied


@dataclass(frozen=True, slots=True)
class OwnershipLost:
    """The daemons no longer take this driver's steps."""

    cause: WorkerDaemonError


@dataclass(frozen=True, slots=True)
class LinkGaveUp:
    """Links have failed too often in a row."""

    cause: LinkGivenUp


@dataclass(frozen=True, slots=True)
class Failed:
    """Steps have failed. number: of the failure, which takes over those not yet reported.
    last_seq: the last step that it failed, 0 if there was none."""

    number: int
    last_seq: int = 0


class DeathFailed(Failed):
    """Steps have failed by a daemon's death."""


@dataclass(frozen=True, slots=True)
class FailureReported:
    """A future has reported the failure of this number. No effect if that is not the latest."""

    number: int


@dataclass(frozen=True, slots=True)
class WeightsGone:
    """The weights are being replaced, or were found to be incomplete."""

    cause: str


@dataclass(frozen=True, slots=True)
class DrainReported:
    """Some ranks drain."""

    ranks: frozenset[int]


Event: TypeAlias = (
    Change
    | RankLost
    | OwnershipLost
    | LinkGaveUp
    | Suspect
    | Failed
    | FailureReported
    | WeightsGone
    | DrainReported
)
Kind: TypeAlias = Change | type[Event]
"""A Change is itself a kind; another event's kind is its class."""

Row: TypeAlias = Mapping[enum.Enum, enum.Enum]
"""New values of axes by present ones; values that are not named stay."""


def kind_of(event: Event) -> Kind:
    """Return the key of an event in TABLE."""
    return event if isinstance(event, Change) else type(event)


def _to(*targets: enum.Enum, but: Collection[enum.Enum] = ()) -> Row:
    """Lead from each value of the targets' axes to the target, except from those in `but`."""
    return MappingProxyType(
        {value: target for target in targets for value in type(target) if value not in but}
    )


_LINK_WHOLE: Final = _to(LinkState.WHOLE, but=[LinkState.NONE])
_NOT_IF_LOST: Final = (Ownership.LOST,)

TABLE: Final[Mapping[Kind, Row]] = MappingProxyType(
    {
        RankLost: _to(Ownership.LOST),
        OwnershipLost: _to(Ownership.ENDED, but=_NOT_IF_LOST),
        LinkGaveUp: _to(Ownership.LINK_GIVEN_UP, but=_NOT_IF_LOST),
        Change.LINK_BROKEN: _to(LinkState.BROKEN, but=[LinkState.NONE]),
        Change.LINK_MADE: _LINK_WHOLE,
        Change.END_ANNOUNCED: _to(Ending.ANNOUNCED),
        Change.END_AWAITED: _to(Ending.NONE),
        Suspect: _to(RootCause.AWAITED),
        Failed: _to(FailureReport.UNREPORTED, RootCause.SETTLED),
        DeathFailed: _to(FailureReport.DEATH_UNREPORTED, RootCause.SETTLED),
        FailureReported: {
            FailureReport.UNREPORTED: FailureReport.REPORTED,
            FailureReport.DEATH_UNREPORTED: FailureReport.DEATH_REPORTED,
        },
        Change.PREPARED: _to(FailureReport.NONE),
        Change.ATTACH_BEGUN: _to(
            Ownership.SERVING,
            Ending.NONE,
            FailureReport.NONE,
            but=[Ownership.LOST, Ownership.REPLACING],
        ),
        Change.GROUP_ATTACHED: _LINK_WHOLE,
        Change.REPLACE_BEGUN: _to(Ownership.REPLACING),
        Change.RANK_REPLACED: {
            Ownership.REPLACING: Ownership.SERVING,
            **_LINK_WHOLE,
            **_to(Ending.NONE, FailureReport.NONE),
        },
        WeightsGone: _to(Weights.NOT_WHOLE),
        Change.WEIGHTS_FILLED: _to(Weights.WHOLE),
        DrainReported: _to(DrainState.DRAINING),
        Change.DRAIN_OVER: _to(DrainState.NONE),
    }
)
"""All transitions, once; total over states."""


def after(state: GroupState, event: Event) -> GroupState:
    """Return the state that follows `state` by an event."""
    row = TABLE[kind_of(event)]
    values: dict[str, Any] = {axis.name: getattr(state, axis.name) for axis in fields(state)}
    return GroupState(**{name: row.get(value, value) for name, value in values.items()})


class GroupRequest(enum.Enum):
    """Requests to a group. Control-only ones (status, health, shutdown) are always allowed."""

    STEP = "execute_model"
    OPERATION = "other operations of all ranks (relink, sleep, sample_tokens, ...)"
    ATTACH = "attach"
    REPLACE = "replace"
    LOOK = "look"
    SEND = "the sending of a step that may run"


class Answer(enum.Enum):
    """The outcome of a request."""

    GO = "allowed"
    CAUSE = "raises its cause"
    NOT_ATTACHED = "raises ClientError"
    DRAINING = "raises DrainingError"
    NOT_WHOLE = "raises WeightsNotWhole"
    AWAIT_END = "the announced exit is waited for first"
    RELINK = "the ranks relink first"
    FAIL = "its future fails with the failure not yet reported"


_GO, _CAUSE, _NOT_ATTACHED = Answer.GO, Answer.CAUSE, Answer.NOT_ATTACHED


def _by_ownership(*answers: Answer) -> Mapping[Ownership, Answer]:
    return MappingProxyType(dict(zip(Ownership, answers, strict=True)))


BY_OWNERSHIP: Final[Mapping[GroupRequest, Mapping[Ownership, Answer]]] = MappingProxyType(
    {
        GroupRequest.STEP: _by_ownership(_NOT_ATTACHED, _GO, _CAUSE, _CAUSE, _CAUSE, _CAUSE),
        GroupRequest.OPERATION: _by_ownership(_NOT_ATTACHED, _GO, _CAUSE, _CAUSE, _CAUSE, _GO),
        GroupRequest.ATTACH: _by_ownership(_GO, _GO, _GO, _GO, _CAUSE, _CAUSE),
        GroupRequest.REPLACE: _by_ownership(_NOT_ATTACHED, _GO, _GO, _GO, _GO, _GO),
        GroupRequest.LOOK: _by_ownership(_GO, _GO, _GO, _GO, _CAUSE, _GO),
    }
)
"""Answers by ownership alone. SEND ignores it; `answer` adds the other axes."""


def answer(state: GroupState, request: GroupRequest) -> Answer:
    """Return the answer to a request in `state`. SEND is asked for steps that were accepted, and
    again after each action that comes first; it ignores the ownership."""
    if request is GroupRequest.SEND:
        return _before_sending(state)
    by_ownership = BY_OWNERSHIP[request][state.ownership]
    if by_ownership is Answer.CAUSE:
        waits = state.ownership is Ownership.LINK_GIVEN_UP and state.ending is Ending.ANNOUNCED
        return Answer.AWAIT_END if waits else by_ownership
    if request is GroupRequest.STEP and by_ownership is Answer.GO:
        if state.drain is DrainState.DRAINING:
            return Answer.DRAINING
        if state.weights is Weights.NOT_WHOLE:
            return Answer.NOT_WHOLE
    return by_ownership


def answers(state: GroupState) -> Mapping[GroupRequest, Answer]:
    """Return the answer to each request in `state`."""
    return {request: answer(state, request) for request in GroupRequest}


def _before_sending(state: GroupState) -> Answer:
    if state.report in (FailureReport.UNREPORTED, FailureReport.DEATH_UNREPORTED):
        return Answer.FAIL
    if state.ending is Ending.ANNOUNCED:
        return Answer.AWAIT_END
    return Answer.RELINK if state.link is LinkState.BROKEN else Answer.GO


def loss_of(error: WorkerDaemonError) -> RankLost | LinkGaveUp | OwnershipLost:
    """Return the event that ends a group with this error."""
    if isinstance(error, WorkerDied):
        return RankLost(error)
    return LinkGaveUp(error) if isinstance(error, LinkGivenUp) else OwnershipLost(error)


def announces_end(reply: ErrorReply) -> bool:
    """Return True for a failure after which the daemon exits. The same codes with a narrower scope
    are a step's alone."""
    fatal = (ErrorCode.DEVICE, ErrorCode.INTERNAL, ErrorCode.SHUTTING_DOWN)
    return reply.code in fatal and reply.scope is ErrorScope.WORKER


class LinkTries:
    """Counts a group's consecutive link failures, so that the driver does not relink forever if the
    network between two ranks is cut. Owned by the FailureState."""

    def __init__(self) -> None:
        self._failures: list[tuple[int, WorkerDaemonError]] = []

    def clear(self) -> None:
        """Forget all failures."""
        self._failures.clear()

    def worked(self, seq: int) -> None:
        """Record that step `seq` succeeded, even if later steps have failed: the link worked after
        all earlier failures."""
        if self._failures:
            self._failures = [entry for entry in self._failures if entry[0] > seq]

    def failed(self, seq: int, error: WorkerDaemonError) -> LinkGivenUp | None:
        """Record a failure of the link in step `seq`, or of relinking (0). Return the error to stop
        with after MAX_LINK_FAILURES."""
        latest = max([seq, *(failed for failed, _ in self._failures)])
        self._failures.append((latest, error))
        if len(self._failures) < MAX_LINK_FAILURES:
            return None
        ranks = {
            entry.rank
            for _, entry in self._failures
            if isinstance(entry, WorkerError) and entry.rank is not None
        }
        given_up = LinkGivenUp(tuple(sorted(ranks)), len(self._failures), str(error))
        given_up.__cause__ = error
        return given_up


class FailureState:
    """One group's state, with the values that go with it. Belongs to the group's thread."""

    def __init__(self, world_size: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[DriverEvent] = deque(maxlen=MAX_EVENTS_KEPT)
        self.state = GroupState(link=LinkState.WHOLE if world_size > 1 else LinkState.NONE)
        self._answers = answers(self.state)
        self.takes_steps_at_once = False
        """True if a step is allowed and may be sent without another action before it."""
        self.cause: WorkerDaemonError | None = None
        """The error because of which the group takes no more steps; None if it takes steps."""
        self.suspect: Suspect | None = None
        """Set while a cause is awaited."""
        self.weights_cause = ""
        """Reason for which the weights are incomplete."""
        self.last_given_up = 0
        """Last step that has failed: neither it nor earlier ones may be sent again."""
        self._draining: frozenset[int] = frozenset()
        self._refused: frozenset[int] = frozenset()
        """Those of them that have refused a step before a heartbeat of theirs told of the drain."""
        self._latest = 0
        """Number of the latest failure."""
        self._tries = LinkTries()

    @property
    def needs_relink(self) -> bool:
        """True if the ranks must relink before the next step."""
        return self.state.link is LinkState.BROKEN

    @property
    def is_lost(self) -> bool:
        """True if a daemon is dead and no other one is taking its place."""
        return self.state.ownership is Ownership.LOST

    @property
    def is_end_announced(self) -> bool:
        """True while an announced exit has not been waited for."""
        return self.state.ending is Ending.ANNOUNCED

    @property
    def has_failure(self) -> bool:
        """True if there is a latest failure, reported or not."""
        return self.state.report is not FailureReport.NONE

    @property
    def is_unreported(self) -> bool:
        """True if no future has reported the latest failure."""
        return self._answers[GroupRequest.SEND] is Answer.FAIL

    @property
    def is_open(self) -> bool:
        """True if the latest failure, or what it failed, is still to be reported."""
        return self.has_failure and self.state.report is not FailureReport.REPORTED

    @property
    def root_cause_deadline(self) -> float:
        """Time (time.monotonic()) from which the suspect counts as the cause; inf without one."""
        return math.inf if self.suspect is None else self.suspect.until

    def answer(self, request: GroupRequest) -> Answer:
        """Return the answer to a request now."""
        return self._answers[request]

    def check(
        self, request: GroupRequest, endpoints: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """Raise the error of a request that is refused now, with the last events. endpoints: by
        rank, for the message of DrainingError."""
        if self._answers[request] is Answer.GO:
            return
        error = self._refusal(request, endpoints)
        error.events = tuple(self._events)
        notes = getattr(error, "__notes__", [])  # a cause is raised many times
        notes[:] = [note for note in notes if not note.startswith(_EVENTS_TITLE)]
        error.add_note("\n  ".join([_EVENTS_TITLE, *map(str, self._events)]))
        raise error

    def _refusal(self, request: GroupRequest, endpoints: Mapping[int, str]) -> WorkerDaemonError:
        found = self._answers[request]
        if self.cause is not None and found in (Answer.CAUSE, Answer.AWAIT_END):
            return self.cause
        if found is Answer.NOT_ATTACHED:
            return ClientError("the group is not attached: call attach() and prepare() first")
        if found is Answer.DRAINING:
            return _draining_error(self._draining, endpoints)
        if found is Answer.NOT_WHOLE:
            return WeightsNotWhole(self.weights_cause)
        story = "; ".join(map(str, self._events))
        raise AssertionError(f"{request} is {found} in {self.state}, after: {story}")

    def apply(self, event: Event) -> None:
        """Apply an event."""
        if isinstance(event, FailureReported) and event.number != self._latest:
            return
        before, self.state = self.state, after(self.state, event)
        change = _change(before, self.state)
        self._events.append(DriverEvent(self._clock(), _name(event), _rank_of(event), change))
        self._answers = answers(self.state)
        before_step = GroupRequest.OPERATION, GroupRequest.STEP, GroupRequest.SEND
        self.takes_steps_at_once = all(self._answers[each] is _GO for each in before_step)
        self._keep_cause(before.ownership, event)
        self._keep_values(event)

    def worked(self, seq: int) -> None:
        """Record that step `seq` succeeded: the link worked after all earlier failures."""
        self._tries.worked(seq)

    def step_failed(self, reply: ErrorReply, error: WorkerError) -> WorkerDaemonError:
        """Apply a rank's failure of a step, with `error` for its reply. Return the error that the
        step fails with: this one, or LinkGivenUp."""
        breaks = reply.scope is ErrorScope.GROUP or reply.code in (ErrorCode.COMM, ErrorCode.GAP)
        if breaks:
            self.apply(Change.LINK_BROKEN)
        self._note_drain(error)
        if isinstance(error, ENDS_OWNERSHIP):
            self.apply(loss_of(error))
        elif (
            breaks and self.state.link is not LinkState.NONE and reply.code not in _NO_LINK_FAILURE
        ):
            return self._link_failed(reply.seq, error)
        return error

    def relink_failed(self, error: WorkerDaemonError) -> WorkerDaemonError:
        """Apply a failure to relink. Return the error that the next step fails with."""
        self._note_drain(error)
        if isinstance(error, ENDS_OWNERSHIP):
            self.apply(loss_of(error))
        elif isinstance(error, DrainingError):
            return error
        elif not isinstance(error, WireError) or error.is_reported:  # an unreadable reply proves
            return self._link_failed(0, error)  # nothing about the link
        return error

    def _note_drain(self, error: WorkerDaemonError) -> None:
        """Send no step until the rank that refuses them reports that its drain is over."""
        rank = error.rank if isinstance(error, DrainingError) else None
        if rank is not None and rank not in self._draining:
            self.report_drain(rank, drains=True)
            self._refused |= {rank}

    def is_doubtful(self, rank: int, *, drains: bool) -> bool:
        """Return True if the drain flag of a rank's heartbeat may be from before a refusal, which
        has overtaken it."""
        return not drains and rank in self._refused

    def report_drain(self, rank: int, *, drains: bool) -> None:
        """Apply the drain flag of a rank's heartbeat, once it is not doubtful."""
        self._refused -= {rank}
        if drains != (rank in self._draining):
            ranks = self._draining ^ {rank}
            self.apply(DrainReported(ranks) if ranks else Change.DRAIN_OVER)

    def _link_failed(self, seq: int, error: WorkerDaemonError) -> WorkerDaemonError:
        given_up = self._tries.failed(seq, error)
        if given_up is None:
            return error
        self.apply(LinkGaveUp(given_up))
        self.apply(Change.END_ANNOUNCED)  # ranks that hang on one link after the other exit
        return given_up

    def _keep_cause(self, before: Ownership, event: Event) -> None:
        if before not in TABLE[kind_of(event)]:
            return
        if isinstance(event, RankLost | OwnershipLost | LinkGaveUp):
            self.cause = event.cause
        elif event in (Change.ATTACH_BEGUN, Change.RANK_REPLACED):
            self.cause = None

    def _keep_values(self, event: Event) -> None:
        match event:
            case Suspect():
                self.suspect = self.suspect or event
            case Failed():
                self.suspect = None
                self._latest = event.number
                self.last_given_up = max(self.last_given_up, event.last_seq)
            case Change.ATTACH_BEGUN:
                self._tries.clear()
                self.last_given_up = 0
            case Change.GROUP_ATTACHED:
                self.last_given_up = 0
            case Change.RANK_REPLACED:
                self._tries.clear()
            case WeightsGone():
                self.weights_cause = event.cause
            case Change.WEIGHTS_FILLED:
                self.weights_cause = ""
            case DrainReported():
                self._draining = event.ranks
            case Change.DRAIN_OVER:
                self._draining = self._refused = frozenset()
            case _:
                pass


def _name(event: Event) -> str:
    return event.name if isinstance(event, Change) else type(event).__name__


def _rank_of(event: Event) -> int | None:
    if isinstance(event, Suspect):
        return event.reply.rank
    if isinstance(event, RankLost):
        return event.cause.rank
    cause = event.cause if isinstance(event, OwnershipLost) else None
    return cause.rank if isinstance(cause, WorkerError) else None


def _change(before: GroupState, now: GroupState) -> str:
    pairs = [(axis.name, getattr(before, axis.name), getattr(now, axis.name)) for axis in _AXES]
    return ", ".join(f"{name} {old.name} -> {new.name}" for name, old, new in pairs if old != new)


def _draining_error(ranks: frozenset[int], endpoints: Mapping[int, str]) -> WorkerError:
    rank = min(ranks)
    problem = (
        f"ranks {sorted(ranks)} drain: no step was sent, what is loaded stays; fix: continue "
        "elsewhere, or here after worker-client drain --undo"
    )
    return error_of_rank(
        ErrorCode.DRAINING, problem, rank=rank, endpoint=endpoints[rank], scope=ErrorScope.GROUP
    )
