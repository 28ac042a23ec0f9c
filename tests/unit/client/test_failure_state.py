"""The failure state of a group: its table, alone and against a model of plain flags, and its
description in docs/reliability.md."""

import itertools
import math
import traceback
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import (
    BadFrameError,
    DrainingError,
    ErrorCode,
    ErrorScope,
    FencedError,
    LeaseExpiredError,
    NotAttachedError,
    WorkerDaemonError,
)
from worker_client.errors import (
    ClientError,
    DeadlineExceeded,
    LeaseNotRenewed,
    LinkGivenUp,
    WeightsNotWhole,
    WorkerDied,
    remote_error,
)
from worker_client.group import failure_state as fs
from worker_client.group.failure_state import MAX_LINK_FAILURES, Answer, GroupRequest, Ownership

FIELD_OF = {kind: name for name, kind in get_type_hints(fs.GroupState).items()}
AXES = tuple(FIELD_OF)
STATES = [fs.GroupState(*values) for values in itertools.product(*AXES)]
RELIABILITY = Path(__file__).parents[3] / "docs" / "reliability.md"


def reply(code=ErrorCode.COMM, scope=ErrorScope.STEP, seq=1):
    return ErrorReply(epoch=1, seq=seq, rank=0, code=code, scope=scope, message="it failed")


def error_of(told):
    return remote_error(told, rank=told.rank, endpoint="ipc:///here")


DEATH = WorkerDied(1, "ipc:///there")
SUSPECT = fs.Suspect(
    reply(ErrorCode.UPSTREAM_FAILED), error_of(reply(ErrorCode.UPSTREAM_FAILED)), 7.0
)
EVENTS = (
    fs.RankLost(DEATH),
    fs.OwnershipLost(error_of(reply(ErrorCode.FENCED))),
    fs.LinkGaveUp(LinkGivenUp((0,), 3, "cut")),
    fs.Change.LINK_BROKEN,
    fs.Change.LINK_MADE,
    fs.Change.END_ANNOUNCED,
    fs.Change.END_AWAITED,
    SUSPECT,
    fs.Failed(1),
    fs.DeathFailed(1),
    fs.FailureReported(1),
    fs.Change.PREPARED,
    fs.Change.ATTACH_BEGUN,
    fs.Change.GROUP_ATTACHED,
    fs.Change.REPLACE_BEGUN,
    fs.Change.RANK_REPLACED,
    fs.WeightsGone("an update is open"),
    fs.Change.WEIGHTS_FILLED,
    fs.DrainReported(frozenset([1])),
    fs.Change.DRAIN_OVER,
)


def refused(state, request):
    with pytest.raises(WorkerDaemonError) as caught:
        state.check(request, {0: "here", 1: "there"})
    return caught.value


def test_refusal_tells_how_the_group_came_there():
    state = fs.FailureState(2, clock=itertools.count(1000).__next__)
    state.apply(fs.Change.ATTACH_BEGUN)
    state.step_failed(reply(scope=ErrorScope.GROUP), error_of(reply(scope=ErrorScope.GROUP)))
    state.apply(fs.RankLost(DEATH))
    error = refused(state, GroupRequest.STEP)
    assert error is DEATH
    assert [(each.at, each.name, each.rank, each.change) for each in error.events] == [
        (1000, "ATTACH_BEGUN", None, "ownership NEW -> SERVING"),
        (1001, "LINK_BROKEN", None, "link WHOLE -> BROKEN"),
        (1002, "RankLost", 1, "ownership SERVING -> LOST"),
    ]
    refused(state, GroupRequest.LOOK)
    shown = "".join(traceback.format_exception(error))
    assert shown.count("RankLost rank 1: ownership SERVING -> LOST") == 1
    assert str(error) == "rank 1 at ipc:///there: the connection ended"


def test_refusal_carries_the_last_events_only():
    state = fs.FailureState(2)
    state.apply(fs.Change.ATTACH_BEGUN)
    for _ in range(fs.MAX_EVENTS_KEPT):
        state.report_drain(0, drains=True)
        state.report_drain(0, drains=False)
    state.report_drain(1, drains=True)
    error = refused(state, GroupRequest.STEP)
    assert isinstance(error, DrainingError)
    assert len(error.events) == fs.MAX_EVENTS_KEPT
    assert error.events[-1].change == "drain NONE -> DRAINING"
    assert {each.name for each in error.events} == {"DrainReported", "DRAIN_OVER"}


# ------------------------------------------------------------------ the table


def test_every_event_has_a_row_and_an_example():
    carrying = {*get_args(fs.Event), fs.DeathFailed} - {fs.Change}
    assert set(fs.TABLE) == {*carrying, *fs.Change} == set(map(fs.kind_of, EVENTS))


def test_each_state_and_event_give_a_state_of_the_same_axes():
    assert len(STATES) == math.prod(map(len, AXES)) == len(set(STATES))
    known = set(STATES)
    assert all(fs.after(state, event) in known for state in STATES for event in EVENTS)


def test_each_state_answers_each_request():
    for state, request in itertools.product(STATES, GroupRequest):
        assert isinstance(fs.answer(state, request), Answer)
    assert set(fs.BY_OWNERSHIP) == set(GroupRequest) - {GroupRequest.SEND}
    assert all(list(row) == list(Ownership) for row in fs.BY_OWNERSHIP.values())


def test_every_axis_state_event_request_and_answer_is_documented():
    for axis in (*AXES, GroupRequest, Answer):
        texts = [value.value for value in axis]
        assert axis.__doc__ and all(len(text) > 3 for text in texts)
    for kind in {fs.Change, *fs.TABLE} - set(fs.Change):
        # Without a docstring a dataclass has its signature in that place.
        assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")
    assert all(len(change.value) > 3 for change in fs.Change)


def changes(axis):
    """(event, before, after) of all that changes one axis."""
    name = FIELD_OF[axis]
    return {
        (fs.kind_of(event), getattr(before, name), getattr(fs.after(before, event), name))
        for before, event in itertools.product(STATES, EVENTS)
        if getattr(before, name) != getattr(fs.after(before, event), name)
    }


ENDS = {
    fs.LinkState.BROKEN: {fs.Change.LINK_MADE, fs.Change.GROUP_ATTACHED, fs.Change.RANK_REPLACED},
    fs.FailureReport.UNREPORTED: {
        fs.FailureReported,
        fs.DeathFailed,
        fs.Change.PREPARED,
        fs.Change.ATTACH_BEGUN,
        fs.Change.RANK_REPLACED,
    },
    fs.FailureReport.DEATH_UNREPORTED: {
        fs.FailureReported,
        fs.Failed,
        fs.Change.PREPARED,
        fs.Change.ATTACH_BEGUN,
        fs.Change.RANK_REPLACED,
    },
    fs.Ending.ANNOUNCED: {fs.Change.END_AWAITED, fs.Change.ATTACH_BEGUN, fs.Change.RANK_REPLACED},
    fs.RootCause.AWAITED: {fs.Failed, fs.DeathFailed},
    fs.Weights.NOT_WHOLE: {fs.Change.WEIGHTS_FILLED},
    fs.DrainState.DRAINING: {fs.Change.DRAIN_OVER},
    Ownership.LOST: {fs.Change.REPLACE_BEGUN},
    Ownership.REPLACING: {
        fs.Change.RANK_REPLACED,
        fs.RankLost,
        fs.OwnershipLost,
        fs.LinkGaveUp,
    },
}


@pytest.mark.parametrize("state", ENDS, ids=str)
def test_what_ends_a_state(state):
    assert {event for event, before, _ in changes(type(state)) if before is state} == ENDS[state]


def test_steps_begin_again_by_attach_and_replace_alone():
    ways = {
        (event, before) for event, before, now in changes(Ownership) if now is Ownership.SERVING
    }
    left = (Ownership.NEW, Ownership.ENDED, Ownership.LINK_GIVEN_UP)
    assert ways == {
        *((fs.Change.ATTACH_BEGUN, seat) for seat in left),
        (fs.Change.RANK_REPLACED, Ownership.REPLACING),
    }


def test_one_rank_has_no_link_to_break():
    assert all(
        before is not fs.LinkState.NONE is not now for _, before, now in changes(fs.LinkState)
    )


def test_documented_tables_are_those_of_the_module():
    text = RELIABILITY.read_text()
    for table in (table_of_states(), table_of_answers()):
        assert table in text, f"docs/reliability.md lacks this table:\n\n{table}"


def table_of_states():
    rows = [
        f"| {FIELD_OF[axis]} | `{state.name}` | {state.value} |" for axis in AXES for state in axis
    ]
    return "\n".join(["| axis | state | meaning |", "|---|---|---|", *rows])


def table_of_answers():
    asked = list(fs.BY_OWNERSHIP)
    rows = [
        f"| `{ownership.name}` | "
        + " | ".join(fs.BY_OWNERSHIP[r][ownership].value for r in asked)
        + " |"
        for ownership in Ownership
    ]
    heads = " | ".join(request.value for request in asked)
    return "\n".join([f"| ownership | {heads} |", "|---" * (len(asked) + 1) + "|", *rows])


# ------------------------------------------------------------------ single values


def test_events_of_errors():
    given_up, died = LinkGivenUp((0, 1), 3, "cut"), DEATH
    assert fs.loss_of(given_up) == fs.LinkGaveUp(given_up)
    assert fs.loss_of(died) == fs.RankLost(died)
    other = LeaseNotRenewed(OSError("disk"))
    assert fs.loss_of(other) == fs.OwnershipLost(other)


@pytest.mark.parametrize("scope", ErrorScope)
@pytest.mark.parametrize("code", ErrorCode)
def test_end_is_announced_by_three_codes_of_a_whole_worker(code, scope):
    fatal = (ErrorCode.DEVICE, ErrorCode.INTERNAL, ErrorCode.SHUTTING_DOWN)
    announces = code in fatal and scope is ErrorScope.WORKER
    assert fs.announces_end(reply(code, scope)) is announces


def test_drain_names_all_ranks_and_the_first_one_s_endpoint():
    state = serving(2)
    state.report_drain(1, drains=True)
    state.report_drain(0, drains=True)
    with pytest.raises(DrainingError, match=r"rank 0 at here: DRAINING: ranks \[0, 1\] drain"):
        state.check(GroupRequest.STEP, {0: "here", 1: "there"})
    state.report_drain(0, drains=False)
    with pytest.raises(DrainingError, match="rank 1 at there"):
        state.check(GroupRequest.STEP, {0: "here", 1: "there"})
    state.report_drain(1, drains=False)
    state.check(GroupRequest.STEP, {0: "here", 1: "there"})


def serving(world_size):
    state = fs.FailureState(world_size)
    state.apply(fs.Change.ATTACH_BEGUN)
    state.apply(fs.Change.GROUP_ATTACHED)
    return state


def test_first_suspect_is_kept_until_the_step_has_failed():
    state = serving(2)
    assert state.root_cause_deadline == math.inf
    state.apply(SUSPECT)
    state.apply(SUSPECT._replace(until=9.0))
    assert state.suspect == SUSPECT and state.root_cause_deadline == 7.0
    state.apply(fs.Failed(1, 5))
    assert state.suspect is None and state.last_given_up == 5


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
@settings(max_examples=200)
def test_cause_is_there_exactly_where_ownership_is_refused(events):
    state = fs.FailureState(2)
    for event in events:
        state.apply(event)
        ownership = state.state.ownership
        if ownership in (Ownership.NEW, Ownership.SERVING):
            assert state.cause is None
        elif ownership is not Ownership.REPLACING:
            assert state.cause is not None
            for request in GroupRequest:
                if state.answer(request) is Answer.CAUSE:
                    with pytest.raises(type(state.cause)) as raised:
                        state.check(request)
                    assert raised.value is state.cause


@given(st.lists(st.sampled_from(EVENTS), max_size=30), st.integers(1, 3))
@settings(max_examples=200)
def test_steps_are_sent_at_once_exactly_where_every_question_allows_it(events, world_size):
    state = fs.FailureState(world_size)
    asked = GroupRequest.OPERATION, GroupRequest.STEP, GroupRequest.SEND
    for event in events:
        state.apply(event)
        allowed = all(state.answer(request) is Answer.GO for request in asked)
        assert state.takes_steps_at_once == allowed


def failed_links(count, world_size=2):
    state = serving(world_size)
    for _ in range(count):
        state.relink_failed(error_of(reply()))
    return state


def test_third_failed_link_is_given_up_and_an_end_expected():
    state = failed_links(MAX_LINK_FAILURES - 1)
    assert state.answer(GroupRequest.OPERATION) is Answer.GO
    state.relink_failed(error_of(reply()))
    assert state.answer(GroupRequest.OPERATION) is Answer.AWAIT_END
    state.apply(fs.Change.END_AWAITED)
    assert state.answer(GroupRequest.OPERATION) is Answer.CAUSE
    with pytest.raises(LinkGivenUp, match="3 times in a row"):
        state.check(GroupRequest.STEP)


@pytest.mark.parametrize(
    "events",
    [
        (fs.Change.ATTACH_BEGUN, fs.Change.GROUP_ATTACHED),
        (
            fs.RankLost(DEATH),
            fs.Change.REPLACE_BEGUN,
            fs.Change.GROUP_ATTACHED,
            fs.Change.RANK_REPLACED,
        ),
    ],
    ids=["attached", "replaced"],
)
def test_failed_links_are_counted_anew_once_all_begins_anew(events):
    state = failed_links(MAX_LINK_FAILURES - 1)
    for event in events:
        state.apply(event)
    for _ in range(MAX_LINK_FAILURES - 1):
        state.relink_failed(error_of(reply()))
    assert state.answer(GroupRequest.OPERATION) is Answer.GO


def test_one_rank_alone_never_gives_a_link_up():
    state = serving(1)
    for seq in range(1, 2 * MAX_LINK_FAILURES):
        told = reply(ErrorCode.COMM, ErrorScope.GROUP, seq)
        error = error_of(told)
        assert state.step_failed(told, error) is error
    assert state.answer(GroupRequest.SEND) is state.answer(GroupRequest.STEP) is Answer.GO


# ------------------------------------------------------------------ against plain flags

SEQS = st.integers(1, 20)
ENDS_OWNERSHIP = st.sampled_from(
    [ErrorCode.FENCED, ErrorCode.LEASE_EXPIRED, ErrorCode.NOT_ATTACHED]
)


class Histories(RuleBasedStateMachine):
    """A group's life against a model: one plain flag a fact, and the questions asked of them in the
    order in which a group asks. Failures are numbered; the model knows which one is to be told."""

    def __init__(self):
        super().__init__()
        self.has_link = True
        self.owner = fs.FailureState(2)
        self.is_attached = False
        self.dead = None
        self.is_replacing = False
        self.needs_relink = False
        self.has_doomed = False
        self.to_tell = None
        """Number of the failure that no future has reported."""
        self.newest = 0
        self.weights = ""
        self.draining = set()
        self.suspect = None
        self.last_given_up = 0
        self.bad_links = []
        """Seqs of the failures of links that count, 0 for a new link that could not be had."""

    @initialize(world_size=st.integers(1, 3))
    def connect(self, world_size):
        self.has_link = world_size > 1
        self.owner = fs.FailureState(world_size)

    # what happens

    @property
    def is_lost(self):
        return isinstance(self.dead, WorkerDied)

    def fail(self, last_seq=0, *, of_death=False):
        self.newest += 1
        kind = fs.DeathFailed if of_death else fs.Failed
        self.owner.apply(kind(self.newest, last_seq))
        self.to_tell, self.suspect = self.newest, None
        self.last_given_up = max(self.last_given_up, last_seq)

    def link_fails(self, seq):
        """Tell whether that was once too often."""
        self.bad_links.append(max([seq, *self.bad_links]))
        if len(self.bad_links) >= MAX_LINK_FAILURES:
            self.has_doomed = True
            return True
        return False

    @property
    def takes_steps(self):
        return self.is_attached and self.dead is None and not self.is_replacing

    @precondition(lambda self: not self.is_lost)
    @rule()
    def rank_dies(self):
        self.dead, self.is_replacing = DEATH, False
        self.owner.apply(fs.RankLost(DEATH))
        self.fail(of_death=True)

    @precondition(lambda self: self.is_attached and not self.is_lost)
    @rule(code=ENDS_OWNERSHIP)
    def lease_is_lost(self, code):
        self.dead, self.is_replacing = error_of(reply(code)), False
        self.owner.apply(fs.loss_of(self.dead))
        self.fail()

    @precondition(lambda self: self.takes_steps)
    @rule(code=st.sampled_from(ErrorCode), scope=st.sampled_from(ErrorScope), seq=SEQS)
    def step_fails(self, code, scope, seq):
        told = reply(code, scope, seq)
        error = error_of(told)
        cause = self.owner.step_failed(told, error)
        breaks = scope is ErrorScope.GROUP or code in (ErrorCode.COMM, ErrorCode.GAP)
        breaks = breaks and self.has_link
        self.needs_relink = self.needs_relink or breaks
        gives_up = False
        if code is ErrorCode.DRAINING:
            self.draining.add(error.rank)
        ends_ownership = isinstance(error, FencedError | LeaseExpiredError | NotAttachedError)
        if ends_ownership:
            self.dead = error
        elif breaks and code not in (ErrorCode.GAP, ErrorCode.DRAINING):
            gives_up = self.link_fails(seq)
        if gives_up:
            assert isinstance(cause, LinkGivenUp)
            self.dead = cause
        else:
            assert cause is error
        self.fail(seq)

    @precondition(lambda self: self.takes_steps)
    @rule(seq=SEQS)
    def step_hangs(self, seq):
        self.owner.apply(fs.Change.LINK_BROKEN)
        self.needs_relink = self.has_link
        self.fail(seq)

    @precondition(lambda self: self.takes_steps)
    @rule(seqs=st.lists(SEQS, min_size=1, max_size=3))
    def link_fails_in_steps(self, seqs):
        """Often enough in a row for the link to be given up now and then."""
        for seq in seqs:
            if self.takes_steps:
                self.step_fails(ErrorCode.COMM, ErrorScope.GROUP, seq)

    @precondition(lambda self: self.takes_steps)
    @rule(seq=SEQS)
    def step_ends_well(self, seq):
        self.owner.worked(seq)
        self.bad_links = [failed for failed in self.bad_links if failed > seq]

    @precondition(lambda self: self.takes_steps)
    @rule(until=st.floats(0, 100))
    def upstream_fails(self, until):
        suspect = SUSPECT._replace(until=until)
        self.owner.apply(suspect)
        self.suspect = self.suspect or suspect

    @precondition(lambda self: self.takes_steps)
    @rule()
    def rows_are_lost(self):
        self.fail()

    @rule()
    def rank_announces_its_end(self):
        self.owner.apply(fs.Change.END_ANNOUNCED)
        self.has_doomed = True

    # what a group does

    @rule()
    def end_is_awaited(self):
        self.owner.apply(fs.Change.END_AWAITED)
        self.has_doomed = False

    @precondition(lambda self: self.newest)
    @rule(data=st.data())
    def future_tells(self, data):
        number = data.draw(st.integers(1, self.newest))
        was_to_tell = self.to_tell
        self.owner.apply(fs.FailureReported(number))
        if number == was_to_tell:
            self.to_tell = None

    @precondition(lambda self: self.takes_steps and self.needs_relink)
    @rule(
        goes_well=st.booleans(),
        error=st.sampled_from(["comm", "fenced", "wire", "deadline", "draining"]),
    )
    def relink(self, goes_well, error):
        if goes_well:
            self.owner.apply(fs.Change.LINK_MADE)
            self.needs_relink = False
            return
        raised = {
            "comm": error_of(reply()),
            "fenced": error_of(reply(ErrorCode.FENCED)),
            "wire": BadFrameError("not a reply"),
            "deadline": DeadlineExceeded("Relink", 1.0),
            "draining": error_of(reply(ErrorCode.DRAINING)),
        }[error]
        if error == "draining":
            self.draining.add(0)
        cause = self.owner.relink_failed(raised)
        if error == "fenced":
            self.dead = raised
        elif error not in ("wire", "draining") and self.link_fails(0):
            self.dead = cause
        assert cause is raised or isinstance(cause, LinkGivenUp)
        self.fail()

    @precondition(lambda self: not self.is_lost and not self.is_replacing)
    @rule(must_relink=st.booleans())
    def attach(self, must_relink):
        self.fail()
        for event in (fs.Change.ATTACH_BEGUN, fs.Change.DRAIN_OVER, fs.Change.GROUP_ATTACHED):
            self.owner.apply(event)
        if must_relink and self.has_link:
            self.owner.apply(fs.Change.LINK_BROKEN)
        self.is_attached, self.dead, self.has_doomed = True, None, False
        self.needs_relink = must_relink and self.has_link
        self.to_tell, self.last_given_up = None, 0
        self.bad_links, self.draining = [], set()

    @precondition(lambda self: self.takes_steps)
    @rule()
    def prepare(self):
        self.owner.apply(fs.Change.PREPARED)
        self.to_tell = None

    @precondition(lambda self: self.is_attached and self.dead is not None)
    @rule()
    def replacement_begins(self):
        if not self.is_lost:
            self.rank_dies()
        self.owner.apply(fs.Change.REPLACE_BEGUN)
        self.dead, self.is_replacing = None, True
        self.owner.apply(fs.Change.DRAIN_OVER)
        self.owner.apply(fs.Change.GROUP_ATTACHED)
        self.needs_relink, self.last_given_up, self.draining = False, 0, set()

    @precondition(lambda self: self.is_replacing)
    @rule()
    def replacement_fails(self):
        self.owner.apply(fs.RankLost(DEATH))
        self.dead, self.is_replacing = DEATH, False

    @precondition(lambda self: self.is_replacing)
    @rule(lost=st.booleans())
    def replacement_succeeds(self, lost):
        self.owner.apply(fs.Change.RANK_REPLACED)
        self.is_replacing = self.needs_relink = self.has_doomed = False
        self.bad_links, self.to_tell = [], None
        if lost:
            self.fail()

    @rule(cause=st.sampled_from(["", "an update is open"]))
    def weights(self, cause):
        self.owner.apply(fs.WeightsGone(cause) if cause else fs.Change.WEIGHTS_FILLED)
        self.weights = cause

    @precondition(lambda self: self.is_attached)
    @rule(rank=st.integers(0, 1), drains=st.booleans())
    def heartbeat(self, rank, drains):
        self.owner.report_drain(rank, drains=drains)
        (self.draining.add if drains else self.draining.discard)(rank)

    # what must hold

    def refusal(self, request):
        """The kind of error that a request is refused with, or None."""
        if request in (GroupRequest.ATTACH, GroupRequest.LOOK):
            return WorkerDied if self.is_lost else None
        if self.dead is not None:
            return type(self.dead)
        if not self.is_attached:
            return ClientError
        if request is GroupRequest.STEP and self.draining:
            return DrainingError
        if request is GroupRequest.STEP and self.weights:
            return WeightsNotWhole
        return None

    @invariant()
    def requests_are_refused_as_by_the_flags(self):
        asked = [GroupRequest.OPERATION, GroupRequest.LOOK]
        if not self.is_replacing:  # nobody can ask more meanwhile
            asked += [GroupRequest.STEP, GroupRequest.ATTACH]
        for request in asked:
            expected = self.refusal(request)
            try:
                self.owner.check(request, {0: "here", 1: "there"})
                raised = None
            except WorkerDaemonError as error:
                raised = type(error)
            assert raised is expected, (request, self.owner.state)

    @invariant()
    def dead_group_takes_no_step(self):
        if not self.takes_steps:
            assert self.owner.answer(GroupRequest.STEP) is not Answer.GO

    @invariant()
    def end_is_awaited_before_a_given_up_link_is_told(self):
        awaits = isinstance(self.dead, LinkGivenUp) and self.has_doomed
        assert (self.owner.answer(GroupRequest.OPERATION) is Answer.AWAIT_END) is awaits

    @invariant()
    def what_comes_before_a_step_is_what_the_flags_say(self):
        expected = Answer.RELINK if self.needs_relink else Answer.GO
        if self.has_doomed:
            expected = Answer.AWAIT_END
        if self.to_tell is not None:
            expected = Answer.FAIL
        assert self.owner.answer(GroupRequest.SEND) is expected

    @invariant()
    def values_are_those_of_the_flags(self):
        owner = self.owner
        assert (owner.cause if not self.is_replacing else None) is self.dead
        assert owner.needs_relink is self.needs_relink
        assert owner.is_end_announced is self.has_doomed
        assert owner.is_unreported is (self.to_tell is not None)
        assert owner.is_lost is self.is_lost
        assert owner.suspect == self.suspect
        assert owner.weights_cause == self.weights
        assert owner.last_given_up == self.last_given_up
        assert (owner.state.root_cause is fs.RootCause.AWAITED) is (self.suspect is not None)
        assert (owner.state.weights is fs.Weights.NOT_WHOLE) is bool(self.weights)
        assert (owner.state.drain is fs.DrainState.DRAINING) is bool(self.draining)
        states = [getattr(owner.state, field.name) for field in fields(owner.state)]
        assert [type(state) for state in states] == list(AXES)


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestHistories = Histories.TestCase
