"""Futures of steps in flight under every failure, in any order: which future reports what, and how
often."""

from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode, ErrorScope, WorkerError
from rpc_schema.step import ModelRunnerOutput
from worker_client.errors import LinkGivenUp, StepFailed, WorkerDied, remote_error
from worker_client.group import failure_state as fs
from worker_client.group.failure_state import Answer, FailureState, GroupRequest
from worker_client.group.outcomes import StepFuture, StepsInFlight
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.step_checks import GroupLimits

OUTPUT_RANK = 1
SLOTS = 512
DEATH = WorkerDied(0, "ipc:///there")

BROKEN = ErrorCode.COMM, ErrorScope.GROUP
FAILURES = st.sampled_from(
    [
        (ErrorCode.OUT_OF_MEMORY, ErrorScope.STEP),
        (ErrorCode.INVALID_STEP, ErrorScope.STEP),
        BROKEN,
        (ErrorCode.GAP, ErrorScope.STEP),
        (ErrorCode.FENCED, ErrorScope.GROUP),
        (ErrorCode.DEVICE, ErrorScope.WORKER),
    ]
)


class NobodyWaits:
    """Futures are settled by the rules alone."""

    def take_replies(self, future):
        """Nothing comes."""

    def wait_for(self, future, until):
        """Nothing comes."""


class Futures(RuleBasedStateMachine):
    """Each step admits one request. The model follows where each is: in a row, told as lost, or
    given up with all others by attach()."""

    def __init__(self):
        super().__init__()
        self.state = FailureState(2)
        self.steps = StepsInFlight(self.state, [OUTPUT_RANK])
        self.state.apply(fs.Change.ATTACH_BEGUN)
        self.state.apply(fs.Change.GROUP_ATTACHED)
        self.steps.start(SLOTS, GroupLimits(), 60.0)
        self.waiter = NobodyWaits()
        self.seq = 0
        self.sent = {}
        """Futures by seq, this epoch's."""
        self.held = []
        """Every future that a caller has got."""
        self.admitted, self.told_lost, self.given_up = set(), set(), set()
        self.ended_well = set()

    @property
    def is_usable(self):
        return self.state.answer(GroupRequest.OPERATION) is Answer.GO

    def comes_next(self, what):
        return self.is_usable and self.state.answer(GroupRequest.SEND) is what

    def reply(self, seq, code, scope):
        """A gap concerns the oldest step in flight."""
        return ErrorReply(
            epoch=1,
            seq=seq,
            rank=0,
            code=code,
            scope=scope,
            message="it failed",
            expected_seq=(self.steps.oldest_seq or seq) if code is ErrorCode.GAP else 0,
        )

    def told(self, reply):
        """A rank says so."""
        if fs.announces_end(reply):
            self.state.apply(fs.Change.END_ANNOUNCED)
        self.steps.take_error(reply, remote_error(reply, rank=0, endpoint="ipc:///there"))

    @precondition(lambda self: self.comes_next(Answer.GO) and len(self.admitted) < SLOTS)
    @rule()
    def send(self):
        self.seq += 1
        req_id = f"r{len(self.admitted)}"
        request = NewRequest(req_id, np.arange(3, dtype=np.int32), 3, 0, [1])
        output = SchedulerOutput({req_id: 2}, scheduled_new_reqs=[request])  # samples nothing
        step = self.steps.slots.encode(output, epoch=1, link=1, seq=self.seq)
        future = self.steps.expect(self.waiter, 1, self.seq, step)
        self.admitted.add(req_id)
        self.sent[self.seq] = future
        self.held.append(future)

    @precondition(lambda self: self.comes_next(Answer.FAIL))
    @rule()
    def refuse(self):
        """The unsent step fails with the unreported failure."""
        refused = StepFuture(self.waiter, 0, None, 0.0)
        self.steps.unreported_failure.settle(refused)
        self.held.append(refused)
        assert refused.settled

    @precondition(lambda self: self.comes_next(Answer.AWAIT_END))
    @rule()
    def await_end(self):
        self.state.apply(fs.Change.END_AWAITED)

    @precondition(lambda self: self.comes_next(Answer.RELINK) and not self.steps.pending)
    @rule(goes_well=st.booleans())
    def relink(self, goes_well):
        self.steps.lose_rows("the group was relinked")
        if goes_well:
            self.state.apply(fs.Change.LINK_MADE)
        else:
            refusal = remote_error(self.reply(0, *BROKEN), rank=0, endpoint="ipc:///there")
            self.steps.fail_relink(refusal)
            assert self.steps.unreported_failure.error in (refusal, self.state.cause)

    @precondition(lambda self: self.steps.pending)
    @rule()
    def end_well(self):
        future = self.steps.pending[0]
        reply = ModelRunnerOutput(epoch=1, seq=future.seq, rank=OUTPUT_RANK)
        self.steps.take_outcome(reply, [])
        assert future.value is not None and future.failure is None
        self.ended_well.add(future.seq)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), failure=FAILURES)
    def fail(self, data, failure):
        """A rank fails a step: in flight, out already, or failed before."""
        future = self.sent[data.draw(st.sampled_from(sorted(self.sent)))]
        was_pending = future in self.steps.pending
        reply = self.reply(future.seq, *failure)
        first = reply.expected_seq or future.seq
        behind = [other for other in self.steps.pending if other.seq >= first]
        self.told(reply)
        if was_pending:
            assert all(other.failure is future.failure is not None for other in behind)

    def fail_seq(self, seq, code, scope):
        """One step, for separate tests."""
        self.told(self.reply(seq, code, scope))

    @precondition(lambda self: self.steps.pending)
    @rule(is_convicted=st.booleans(), failure=FAILURES)
    def fail_upstream(self, is_convicted, failure):
        """The first rank to report is not at fault; the faulty one reports a later step, or never
        reports."""
        future, *_, last = *self.steps.pending, self.steps.pending[-1]
        if self.state.suspect is None:
            self.told(self.reply(future.seq, ErrorCode.UPSTREAM_FAILED, ErrorScope.STEP))
            assert not future.settled
        suspected = self.state.suspect.reply.seq
        if is_convicted:
            with mock.patch("time.monotonic", return_value=self.state.root_cause_deadline):
                self.steps.fail_by_upstream_timeout()
            assert last.failure.code is ErrorCode.UPSTREAM_FAILED
        else:
            self.told(self.reply(last.seq, *failure))
            assert last.failure.code is failure[0]
        assert self.state.suspect is None
        assert all(other.seq < suspected for other in self.steps.pending)

    @precondition(lambda self: self.steps.pending)
    @rule()
    def hang(self):
        future = self.steps.pending[0]
        self.steps.fail_hung(future)
        assert not self.steps.pending and not self.steps.slots.req_ids
        assert self.state.needs_relink

    @precondition(lambda self: not self.state.is_lost)
    @rule()
    def die(self):
        self.steps.die(DEATH)
        assert not self.steps.pending

    @precondition(lambda self: self.state.is_lost)
    @rule(goes_well=st.booleans())
    def replace(self, goes_well):
        self.state.apply(fs.Change.REPLACE_BEGUN)
        self.state.apply(fs.Change.DRAIN_OVER)
        self.state.apply(fs.Change.GROUP_ATTACHED)
        self.seq, self.sent = 0, {}
        if not goes_well:
            self.state.apply(fs.RankLost(DEATH))
            return
        self.steps.revive()
        failed = [future for future in self.held if isinstance(cause_of(future), WorkerDied)]
        assert not any(future.failure.ends_group for future in failed)
        assert self.state.answer(GroupRequest.STEP) is Answer.GO
        assert self.state.answer(GroupRequest.SEND) in (Answer.FAIL, Answer.GO)

    @precondition(lambda self: self.state.answer(GroupRequest.ATTACH) is Answer.GO)
    @precondition(lambda self: not self.is_usable)
    @rule()
    def attach(self):
        self.steps.abandon()
        self.state.apply(fs.Change.GROUP_ATTACHED)
        self.steps.start(SLOTS, GroupLimits(), 60.0)
        self.given_up |= self.admitted
        self.seq, self.sent = 0, {}
        assert self.comes_next(Answer.GO)

    @precondition(lambda self: any(future.failure is not None for future in self.held))
    @rule(data=st.data())
    def ask(self, data):
        """A failed future reports its failure each time it is asked."""
        failed = [future for future in self.held if future.failure is not None]
        future = data.draw(st.sampled_from(failed))
        failure = future.failure
        was_untold = self.steps.unreported_failure
        raised = [exception_of(future) for _ in range(2)]
        assert type(raised[0]) is type(raised[1])
        if isinstance(raised[0], StepFailed):
            assert raised[0].__cause__ is failure.error
            self.told_lost |= raised[0].lost_req_ids
        else:
            assert raised[0] is failure.error
            if not isinstance(raised[0], WorkerDied):
                self.given_up |= failure.lost  # nothing but attach() leads on
        if was_untold is failure:
            assert self.steps.unreported_failure is None
        else:
            assert self.steps.unreported_failure is was_untold
        if was_untold is failure and self.is_usable:
            assert self.state.answer(GroupRequest.SEND) is not Answer.FAIL

    @invariant()
    def every_future_has_one_outcome_or_is_in_flight(self):
        pending = self.steps.pending
        for future in self.held:
            outcomes = (future.value is not None, future.failure is not None, future in pending)
            assert sum(outcomes) == 1

    @invariant()
    def nothing_in_flight_where_a_rank_is_lost(self):
        assert not (self.state.is_lost and self.steps.pending)

    @invariant()
    def failed_steps_are_not_sent_again(self):
        failed = [seq for seq, future in self.sent.items() if future.failure is not None]
        assert self.state.last_given_up >= max(failed, default=0)

    @invariant()
    def no_request_gets_lost_untold(self):
        """Each has a row, or was told as lost, or will be: by a future, or by the next step."""
        to_tell = set()
        for future in self.held:
            if future.failure is not None:
                to_tell |= future.failure.lost
        if self.steps.unreported_failure is not None:
            to_tell |= self.steps.unreported_failure.lost
        rows = set(self.steps.slots.req_ids)
        assert self.admitted <= rows | self.told_lost | to_tell | self.given_up

    def teardown(self):
        """The last caller is told too."""
        while self.steps.pending:
            self.steps.fail_hung(self.steps.pending[0])
        for future in self.held:
            if future.value is None:
                exception_of(future)


def cause_of(future):
    return None if future.failure is None else future.failure.error


def exception_of(future):
    """The error of a future that has failed; no step may hang, and none end otherwise."""
    try:
        future.result(0.0)
    except (StepFailed, WorkerDied, WorkerError, LinkGivenUp) as error:
        return error
    raise AssertionError("it has not failed")


Futures.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestFutures = Futures.TestCase


# ------------------------------------------------------------------ what takes several to show


def in_service():
    """Three requests, a step each, of which the first has ended well."""
    run = Futures()
    for _ in range(3):
        run.send()
    run.end_well()
    return run


def test_failure_that_was_told_is_not_told_again_by_the_next_one():
    run = in_service()
    run.fail_seq(3, ErrorCode.INVALID_STEP, ErrorScope.STEP)
    assert exception_of(run.held[2]).lost_req_ids == {"r2"}
    run.fail_seq(2, ErrorCode.INVALID_STEP, ErrorScope.STEP)
    assert exception_of(run.held[1]).lost_req_ids == {"r1"}
    assert run.steps.slots.req_ids == ["r0"]


def test_failure_that_was_not_told_is_told_with_the_next_one():
    run = in_service()
    run.fail_seq(3, ErrorCode.INVALID_STEP, ErrorScope.STEP)
    run.fail_seq(2, ErrorCode.OUT_OF_MEMORY, ErrorScope.STEP)
    for future in run.held[1:]:
        failed = exception_of(future)
        assert failed.lost_req_ids == {"r1", "r2"} and failed.code is ErrorCode.OUT_OF_MEMORY


def test_gap_fails_the_steps_from_the_missing_one_on():
    run = in_service()
    run.fail_seq(3, ErrorCode.GAP, ErrorScope.STEP)
    assert not run.steps.pending and run.state.needs_relink
    assert exception_of(run.held[1]).code is ErrorCode.GAP


def test_death_that_was_told_names_its_losses_once_replaced():
    """Also those of rows between steps, and though the attempt lost its lease in between."""
    run = in_service()
    run.die()
    assert exception_of(run.held[1]) is DEATH
    run.state.apply(fs.Change.REPLACE_BEGUN)
    reply = run.reply(0, ErrorCode.LEASE_EXPIRED, ErrorScope.GROUP)
    run.steps.die(remote_error(reply, rank=0, endpoint="ipc:///there"))
    run.state.apply(fs.RankLost(DEATH))
    run.replace(goes_well=True)
    for future in run.held[1:]:
        assert exception_of(future).lost_req_ids == {"r0", "r1", "r2"}
    assert run.steps.unreported_failure is None


def test_rows_between_steps_are_told_by_the_next_step_once_replaced():
    run = in_service()
    run.end_well()
    run.end_well()
    run.die()
    run.replace(goes_well=True)
    run.refuse()
    assert exception_of(run.held[-1]).lost_req_ids == {"r0", "r1", "r2"}
