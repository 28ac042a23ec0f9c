"""The failure state of a driver's group: a product of named axes, the events that change it, and
what each state means for each request. The one owner of these facts. Pure: no socket, no clock, no
future."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, TypeVar

from rpc_schema.errors import ControlErrorReply, ErrorCode, ErrorReply, ErrorScope, WireError
from worker_client.errors import (
    ClientError,
    DrainingError,
    FencedError,
    LeaseExpiredError,
    LinkGivenUp,
    NotAttachedError,
    RemoteError,
    WeightsNotWhole,
    WorkerDied,
)
from worker_client.link_tries import LinkTries

ENDS_OWNERSHIP: Final = (
    DrainingError,
    FencedError,
    LeaseExpiredError,
    LinkGivenUp,
    NotAttachedError,
    WorkerDied,
)
"""After these the group takes no steps: another driver has the daemons, or nobody, or they cannot
reach each other."""


class Ownership(enum.Enum):
    """Ownership of the group by this driver."""

    NEW = "never attached"
    SERVING = "attached: it takes steps"
    ENDED = "fenced, the lease lost, drained in a step, or a reply could not be read"
    LINK_GIVEN_UP = "link after link has failed, though all daemons live"
    LOST = "a daemon is gone"
    REPLACING = "another daemon is taking a lost one's place"


class LinkState(enum.Enum):
    """State of the links between ranks."""

    NONE = "the group is one rank"
    WHOLE = "ranks reach each other, as far as is known"
    BROKEN = "bytes may be left between ranks, or a rank has lost its peers: no row survives"


class Ending(enum.Enum):
    """An announced end of a daemon's process."""

    NONE = "no rank has announced its end"
    ANNOUNCED = "a rank has announced its end, or may end as the link is given up; not waited for"


class FailureReport(enum.Enum):
    """State of the latest failure: reported by a future, or not yet."""

    NONE = "nothing has failed since prepare() or attach()"
    UNREPORTED = "a failure that no future has reported"
    REPORTED = "a failure that a future has reported"
    DEATH_UNREPORTED = "a daemon's death that no future has reported"
    DEATH_REPORTED = "a reported death; what it took is reported again with the next failure"


class RootCause(enum.Enum):
    """Search for the cause of a step that a rank failed as a consequence only."""

    SETTLED = "no step waits for its cause"
    AWAITED = "another rank may yet report why a step failed"


class Weights(enum.Enum):
    """Completeness of the model's weights, as far as the driver knows."""

    WHOLE = "steps can run on them"
    NOT_WHOLE = "an update is open, or has failed"


class DrainState(enum.Enum):
    """Drain, as an operator has asked for it."""

    NONE = "steps are wanted"
    DRAINING = "a rank's heartbeat says that it drains"


@dataclass(frozen=True, slots=True)
class GroupState:
    """One value an axis."""

    ownership: Ownership = Ownership.NEW
    link: LinkState = LinkState.NONE
    ending: Ending = Ending.NONE
    report: FailureReport = FailureReport.NONE
    root_cause: RootCause = RootCause.SETTLED
    weights: Weights = Weights.WHOLE
    drain: DrainState = DrainState.NONE


class Suspect(NamedTuple):
    """An UPSTREAM_FAILED whose cause another rank may still report."""

    reply: ErrorReply
    error: RemoteError
    until: float
    """When (time.monotonic) it counts as the cause itself."""


@dataclass(frozen=True, slots=True)
class RankLost:
    """A daemon is gone."""

    cause: WorkerDied


@dataclass(frozen=True, slots=True)
class OwnershipLost:
    """The daemons do not take this driver's steps any more."""

    cause: ClientError


@dataclass(frozen=True, slots=True)
class LinkGaveUp:
    """Links have failed too often in a row."""

    cause: LinkGivenUp


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A step has left bytes between ranks, or a rank without its peers."""


@dataclass(frozen=True, slots=True)
class LinkMade:
    """All ranks have met on a new link, or have given up the one that they had."""


@dataclass(frozen=True, slots=True)
class EndAnnounced:
    """A rank has reported a failure that ends its process, or may end as the link is given up."""


@dataclass(frozen=True, slots=True)
class EndAwaited:
    """The announced end is being waited for, which is done once."""


@dataclass(frozen=True, slots=True)
class CauseAwaited:
    """A rank failed a step because another one did."""

    suspect: Suspect


@dataclass(frozen=True, slots=True)
class Failed:
    """Steps have failed; number: of the failure, which takes over those not yet reported.
    last_seq: the last step that it took, 0 where there was none."""

    number: int
    last_seq: int = 0


@dataclass(frozen=True, slots=True)
class DeathFailed:
    """The same, of a daemon's death."""

    number: int
    last_seq: int = 0


@dataclass(frozen=True, slots=True)
class FailureReported:
    """A future has reported the failure of this number; nothing changes where that is not the
    latest."""

    number: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """prepare() is over: the scheduler begins anew."""


@dataclass(frozen=True, slots=True)
class AttachBegun:
    """All daemons have announced an epoch to this driver: all of before is given up."""


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """Requests go under a new epoch: heartbeats of before count for nothing."""


@dataclass(frozen=True, slots=True)
class GroupAttached:
    """All daemons that are there have attached. LinkBroke follows where they must link anew."""


@dataclass(frozen=True, slots=True)
class ReplaceBegun:
    """An attempt to put another daemon in a lost one's place."""


@dataclass(frozen=True, slots=True)
class ReplaceFailed:
    """No attempt is left, or one has failed for good."""

    cause: WorkerDied


@dataclass(frozen=True, slots=True)
class RankReplaced:
    """Another daemon serves in the lost one's place. Failed follows where anything was lost."""


@dataclass(frozen=True, slots=True)
class WeightsGone:
    """The weights are being replaced, or were found not to be whole."""

    cause: str


@dataclass(frozen=True, slots=True)
class WeightsFilled:
    """All weights were written, or were found to be whole."""


@dataclass(frozen=True, slots=True)
class DrainHeard:
    """Some ranks drain."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class DrainOver:
    """No rank drains any more."""


Event: TypeAlias = (
    RankLost
    | OwnershipLost
    | LinkGaveUp
    | LinkBroken
    | LinkMade
    | EndAnnounced
    | EndAwaited
    | CauseAwaited
    | Failed
    | DeathFailed
    | FailureReported
    | Prepared
    | AttachBegun
    | EpochBegun
    | GroupAttached
    | ReplaceBegun
    | ReplaceFailed
    | RankReplaced
    | WeightsGone
    | WeightsFilled
    | DrainHeard
    | DrainOver
)

AxisT = TypeVar("AxisT", bound=enum.Enum)


def _to(target: AxisT, *, but: Sequence[AxisT] = ()) -> Mapping[AxisT, AxisT]:
    """From everywhere to the target, but from these."""
    return MappingProxyType({value: target for value in type(target) if value not in but})


def _as_it_is() -> Mapping[AxisT, AxisT]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Row:
    """What an event makes of the values of each axis; those that are not named stay."""

    ownership: Mapping[Ownership, Ownership] = field(default_factory=_as_it_is)
    link: Mapping[LinkState, LinkState] = field(default_factory=_as_it_is)
    ending: Mapping[Ending, Ending] = field(default_factory=_as_it_is)
    report: Mapping[FailureReport, FailureReport] = field(default_factory=_as_it_is)
    root_cause: Mapping[RootCause, RootCause] = field(default_factory=_as_it_is)
    weights: Mapping[Weights, Weights] = field(default_factory=_as_it_is)
    drain: Mapping[DrainState, DrainState] = field(default_factory=_as_it_is)


_LINK_WHOLE: Final = _to(LinkState.WHOLE, but=[LinkState.NONE])

TABLE: Final[Mapping[type[Event], Row]] = MappingProxyType(
    {
        RankLost: Row(ownership=_to(Ownership.LOST)),
        OwnershipLost: Row(ownership=_to(Ownership.ENDED, but=[Ownership.LOST])),
        LinkGaveUp: Row(ownership=_to(Ownership.LINK_GIVEN_UP, but=[Ownership.LOST])),
        LinkBroken: Row(link=_to(LinkState.BROKEN, but=[LinkState.NONE])),
        LinkMade: Row(link=_LINK_WHOLE),
        EndAnnounced: Row(ending=_to(Ending.ANNOUNCED)),
        EndAwaited: Row(ending=_to(Ending.NONE)),
        CauseAwaited: Row(root_cause=_to(RootCause.AWAITED)),
        Failed: Row(report=_to(FailureReport.UNREPORTED), root_cause=_to(RootCause.SETTLED)),
        DeathFailed: Row(
            report=_to(FailureReport.DEATH_UNREPORTED), root_cause=_to(RootCause.SETTLED)
        ),
        FailureReported: Row(
            report=MappingProxyType(
                {
                    FailureReport.UNREPORTED: FailureReport.REPORTED,
                    FailureReport.DEATH_UNREPORTED: FailureReport.DEATH_REPORTED,
                },
            )
        ),
        Prepared: Row(report=_to(FailureReport.NONE)),
        AttachBegun: Row(
            ownership=_to(Ownership.SERVING, but=[Ownership.LOST, Ownership.REPLACING]),
            ending=_to(Ending.NONE),
            report=_to(FailureReport.NONE),
        ),
        EpochBegun: Row(drain=_to(DrainState.NONE)),
        GroupAttached: Row(link=_LINK_WHOLE),
        ReplaceBegun: Row(ownership=_to(Ownership.REPLACING)),
        ReplaceFailed: Row(ownership=_to(Ownership.LOST)),
        RankReplaced: Row(
            ownership=MappingProxyType({Ownership.REPLACING: Ownership.SERVING}),
            link=_LINK_WHOLE,
            ending=_to(Ending.NONE),
            report=_to(FailureReport.NONE),
        ),
        WeightsGone: Row(weights=_to(Weights.NOT_WHOLE)),
        WeightsFilled: Row(weights=_to(Weights.WHOLE)),
        DrainHeard: Row(drain=_to(DrainState.DRAINING)),
        DrainOver: Row(drain=_to(DrainState.NONE)),
    }
)
"""The one table of what changes what; total over states."""


def after(state: GroupState, event: Event) -> GroupState:
    """Return the state that an event makes of `state`."""
    row = TABLE[type(event)]
    return GroupState(
        ownership=row.ownership.get(state.ownership, state.ownership),
        link=row.link.get(state.link, state.link),
        ending=row.ending.get(state.ending, state.ending),
        report=row.report.get(state.report, state.report),
        root_cause=row.root_cause.get(state.root_cause, state.root_cause),
        weights=row.weights.get(state.weights, state.weights),
        drain=row.drain.get(state.drain, state.drain),
    )


class GroupRequest(enum.Enum):
    """Asked of a group. Control-only requests (status, health, shutdown) ask nobody."""

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
    AWAIT_END = "the announced end is waited for first"
    RELINK = "the ranks are linked anew first"
    FAIL = "its future fails with the failure not yet reported"


def _by_ownership(
    new: Answer,
    serving: Answer,
    ended: Answer,
    given_up: Answer,
    lost: Answer,
    replacing: Answer,
) -> Mapping[Ownership, Answer]:
    answers = (new, serving, ended, given_up, lost, replacing)
    return MappingProxyType(dict(zip(Ownership, answers, strict=True)))


_GO, _CAUSE, _NOT_ATTACHED = Answer.GO, Answer.CAUSE, Answer.NOT_ATTACHED

BY_OWNERSHIP: Final[Mapping[GroupRequest, Mapping[Ownership, Answer]]] = MappingProxyType(
    {
        GroupRequest.STEP: _by_ownership(_NOT_ATTACHED, _GO, _CAUSE, _CAUSE, _CAUSE, _CAUSE),
        GroupRequest.OPERATION: _by_ownership(_NOT_ATTACHED, _GO, _CAUSE, _CAUSE, _CAUSE, _GO),
        GroupRequest.ATTACH: _by_ownership(_GO, _GO, _GO, _GO, _CAUSE, _CAUSE),
        GroupRequest.REPLACE: _by_ownership(_NOT_ATTACHED, _GO, _GO, _GO, _GO, _GO),
        GroupRequest.LOOK: _by_ownership(_GO, _GO, _GO, _GO, _CAUSE, _GO),
    }
)
"""Answers by ownership alone; SEND does not look at it, and `answer` adds the other axes."""


def answer(state: GroupState, request: GroupRequest) -> Answer:
    """Return what becomes of a request in `state`. SEND is asked of steps that were let in, again
    after each thing that comes first; it does not look at the ownership."""
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
    """Return what becomes of each request in `state`."""
    return {request: answer(state, request) for request in GroupRequest}


def _before_sending(state: GroupState) -> Answer:
    if state.report in (FailureReport.UNREPORTED, FailureReport.DEATH_UNREPORTED):
        return Answer.FAIL
    if state.ending is Ending.ANNOUNCED:
        return Answer.AWAIT_END
    return Answer.RELINK if state.link is LinkState.BROKEN else Answer.GO


def loss_of(error: ClientError) -> RankLost | LinkGaveUp | OwnershipLost:
    """Return the event that ends a group with this error."""
    match error:
        case WorkerDied():
            return RankLost(error)
        case LinkGivenUp():
            return LinkGaveUp(error)
        case _:
            return OwnershipLost(error)


def announces_end(reply: ErrorReply) -> bool:
    """Tell whether the daemon that says so ends: the same codes may be a step's alone."""
    fatal = (ErrorCode.DEVICE, ErrorCode.INTERNAL)
    return reply.code in fatal and reply.scope is ErrorScope.WORKER


class FailureState:
    """One group's state, with the values that go with it. Belongs to the group's thread."""

    __slots__ = (
        "_answers",
        "_draining",
        "_latest",
        "_tries",
        "cause",
        "last_given_up",
        "state",
        "suspect",
        "weights_cause",
    )

    def __init__(self, world_size: int) -> None:
        self.state = GroupState(link=LinkState.WHOLE if world_size > 1 else LinkState.NONE)
        self._answers = answers(self.state)
        self.cause: ClientError | None = None
        """Why the group takes no steps any more; None where it does."""
        self.suspect: Suspect | None = None
        """While a cause is awaited."""
        self.weights_cause = ""
        """Why the weights are not whole."""
        self.last_given_up = 0
        """The last step that has failed: neither it nor those before it may be sent again."""
        self._draining: frozenset[int] = frozenset()
        self._latest = 0
        """The number of the latest failure."""
        self._tries = LinkTries()

    @property
    def needs_relink(self) -> bool:
        """Whether the ranks must be linked anew before the next step."""
        return self.state.link is LinkState.BROKEN

    @property
    def is_lost(self) -> bool:
        """Whether a daemon is gone and no other one is taking its place."""
        return self.state.ownership is Ownership.LOST

    @property
    def is_end_announced(self) -> bool:
        """Whether a rank's end is to be waited for."""
        return self.state.ending is Ending.ANNOUNCED

    @property
    def has_failure(self) -> bool:
        """Whether there is a latest failure, reported or not."""
        return self.state.report is not FailureReport.NONE

    @property
    def is_unreported(self) -> bool:
        """Whether no future has reported the latest failure."""
        return self._answers[GroupRequest.SEND] is Answer.FAIL

    @property
    def is_open(self) -> bool:
        """Whether somebody has yet to hear of the latest failure, or of what it took with it."""
        return self.has_failure and self.state.report is not FailureReport.REPORTED

    @property
    def verdict_due(self) -> float:
        """When (time.monotonic) the suspect counts as the cause; inf where there is none."""
        return math.inf if self.suspect is None else self.suspect.until

    def answer(self, request: GroupRequest) -> Answer:
        """Return what becomes of a request now."""
        return self._answers[request]

    def check(self, request: GroupRequest, endpoints: Sequence[str] = ()) -> None:
        """Raise the error of a request that is refused now. endpoints: by rank, to name for
        DrainingError."""
        found = self._answers[request]
        if found is Answer.GO:
            return
        if self.cause is not None and found in (Answer.CAUSE, Answer.AWAIT_END):
            raise self.cause
        if found is Answer.NOT_ATTACHED:
            raise ClientError("the group is not attached: call attach() and prepare() first")
        if found is Answer.DRAINING:
            raise _draining_error(self._draining, endpoints)
        if found is Answer.NOT_WHOLE:
            raise WeightsNotWhole(self.weights_cause)
        raise AssertionError(f"{request} is {found} in {self.state}")

    def apply(self, event: Event) -> None:
        """Take an event in."""
        if isinstance(event, FailureReported) and event.number != self._latest:
            return
        before, self.state = self.state, after(self.state, event)
        self._answers = answers(self.state)
        self._keep_cause(before.ownership, event)
        self._keep_values(event)

    def worked(self, seq: int) -> None:
        """Step `seq` has ended well: the link did work after all that failed before it."""
        self._tries.worked(seq)

    def step_failed(self, reply: ErrorReply, error: RemoteError) -> ClientError:
        """Take in that a rank has failed a step, with `error` for its reply; return the error that
        the step fails with: this one, or that the link is given up."""
        breaks = reply.scope is ErrorScope.GROUP or reply.code in (ErrorCode.COMM, ErrorCode.GAP)
        if breaks:
            self.apply(LinkBroken())
        if isinstance(error, ENDS_OWNERSHIP):
            self.apply(loss_of(error))
        elif breaks and self.state.link is not LinkState.NONE and reply.code is not ErrorCode.GAP:
            return self._link_failed(reply.seq, error)
        return error

    def relink_failed(self, error: ClientError | WireError) -> ClientError | WireError:
        """Take in that no new link could be had; return the error that the next step fails with."""
        if isinstance(error, ENDS_OWNERSHIP):
            self.apply(loss_of(error))
        elif isinstance(error, ClientError):
            return self._link_failed(0, error)
        return error

    def heard_drain(self, rank: int, *, drains: bool) -> None:
        """Take in what a rank's heartbeat says."""
        if drains != (rank in self._draining):
            ranks = self._draining ^ {rank}
            self.apply(DrainHeard(ranks) if ranks else DrainOver())

    def _link_failed(self, seq: int, error: ClientError) -> ClientError:
        given_up = self._tries.failed(seq, error)
        if given_up is None:
            return error
        self.apply(LinkGaveUp(given_up))
        self.apply(EndAnnounced())  # ranks that hang on one link after the other end themselves
        return given_up

    def _keep_cause(self, before: Ownership, event: Event) -> None:
        if before not in TABLE[type(event)].ownership:
            return
        match event:
            case RankLost() | OwnershipLost() | LinkGaveUp() | ReplaceFailed():
                self.cause = event.cause
            case AttachBegun() | RankReplaced():
                self.cause = None
            case _:
                pass

    def _keep_values(self, event: Event) -> None:
        match event:
            case CauseAwaited():
                self.suspect = self.suspect or event.suspect
            case Failed() | DeathFailed():
                self.suspect = None
                self._latest = event.number
                self.last_given_up = max(self.last_given_up, event.last_seq)
            case AttachBegun():
                self._tries.clear()
                self.last_given_up = 0
            case GroupAttached():
                self.last_given_up = 0
            case RankReplaced():
                self._tries.clear()
            case WeightsGone():
                self.weights_cause = event.cause
            case WeightsFilled():
                self.weights_cause = ""
            case DrainHeard():
                self._draining = event.ranks
            case DrainOver() | EpochBegun():
                self._draining = frozenset()
            case _:
                pass


def _draining_error(ranks: frozenset[int], endpoints: Sequence[str]) -> DrainingError:
    rank = min(ranks)
    reply = ControlErrorReply(
        call=0,
        code=ErrorCode.DRAINING,
        scope=ErrorScope.GROUP,
        message=(
            f"ranks {sorted(ranks)} drain: no step was sent, what is loaded stays; fix: "
            "go on elsewhere, or here after worker-client drain --undo"
        ),
    )
    return DrainingError(reply, rank=rank, endpoint=endpoints[rank])
