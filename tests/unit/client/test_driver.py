"""Conditions under which a driver continues after failures, deaths and refused steps, or gives
up."""

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from examples.static_batches import StaticBatches
from rpc_schema.errors import ErrorCode, ErrorScope, error_of_rank
from tests.support.fake_daemon import VOCAB_SIZE, Fault
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_scheduler import expected, make_limits, random_requests
from worker_client.driver import MAX_CONSECUTIVE_FAILURES, Driver
from worker_client.errors import (
    InvalidSchedulerOutput,
    LeaseNotRenewed,
    StepFailed,
    WorkerDied,
)
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerInterface
from worker_client.scheduler_output import SchedulerOutput, StepResult

DEATHS = ["dies", "dies before it is sent"]


class ScriptedFuture:
    """A step that works, fails, or is lost with a daemon."""

    def __init__(self, fate: str) -> None:
        self.fate = fate

    def result(self, timeout_s: float | None = None) -> StepResult:
        if self.fate == "works":
            return StepResult((), ())
        if self.fate == "dies":
            self.fate = "fails"  # once the daemon is replaced
            raise WorkerDied(0, "scripted")
        raise StepFailed(rank=0, code=ErrorCode.COMM, message="scripted")


class ScriptedGroup:
    """Takes one step at a time, each of which has the next fate."""

    max_in_flight = 1

    def __init__(self, fates: list[str]) -> None:
        self.fates = deque(fates)

    def execute_model(self, output: SchedulerOutput) -> ScriptedFuture:
        fate = self.fates.popleft()
        if fate == "dies, and its successor too":
            self.fates.appendleft("dies before it is sent")
            raise WorkerDied(0, "scripted")
        if fate == "dies before it is sent":
            self.fates.appendleft("fails")
            raise WorkerDied(0, "scripted")
        return ScriptedFuture(fate)


class EndlessScheduler:
    """Has always a step to send."""

    def has_unfinished_requests(self) -> bool:
        return True

    def schedule(self) -> SchedulerOutput:
        return SchedulerOutput()

    def update_from_output(self, output, result) -> list:
        return []

    def step_failed(self, outputs, lost_req_ids) -> None:
        assert len(outputs) == 1


class Play:
    """A driver that takes step after step of a script."""

    def __init__(self, *fates: str) -> None:
        self.recovered: list[WorkerDied] = []
        self.group = ScriptedGroup(list(fates))
        self.driver = Driver(self.group, EndlessScheduler(), recover=self.recovered.append)

    def run(self) -> None:
        while self.group.fates:
            self.driver.step()


@pytest.mark.parametrize("death", DEATHS)
def test_recovery_begins_the_count_of_failures_anew(death):
    """Two hangs, then the end of the daemon that hung."""
    play = Play("fails", "fails", death, "works")
    play.run()
    assert len(play.recovered) == 1
    assert play.driver.num_failures == 3 and len(play.driver.records) == 1


def test_successor_that_dies_at_once_is_replaced_too():
    play = Play("dies, and its successor too", "works")
    play.run()
    assert len(play.recovered) == 2 and len(play.driver.records) == 1


@pytest.mark.parametrize("before", [[], ["works"], ["dies", "works"]])
def test_failures_in_a_row_are_given_up(before):
    play = Play(*before, *["fails"] * MAX_CONSECUTIVE_FAILURES, "works")
    with pytest.raises(StepFailed, match="scripted"):
        play.run()
    assert list(play.group.fates) == ["works"]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("between", [[], ["fails"]])
def test_deaths_without_end_are_given_up(death, between):
    play = Play(*[death, *between] * (MAX_CONSECUTIVE_FAILURES + 1))
    with pytest.raises(WorkerDied):
        play.run()
    assert len(play.recovered) == MAX_CONSECUTIVE_FAILURES


def test_step_that_ends_well_begins_both_counts_anew():
    failures = ["fails"] * (MAX_CONSECUTIVE_FAILURES - 1)
    deaths = ["dies"] * MAX_CONSECUTIVE_FAILURES
    play = Play(*[*failures, "works", *deaths, "works"] * 2)
    play.run()
    assert len(play.recovered) == 2 * MAX_CONSECUTIVE_FAILURES
    assert len(play.driver.records) == 4


class LookedAtGroup:
    """Has one finding for each look."""

    def __init__(self, *findings) -> None:
        self.findings = deque(findings)

    def look(self) -> None:
        found = self.findings.popleft()
        if found is not None:
            raise found


def test_looks_for_dead_daemons_count_for_nothing_and_raise_nothing_else():
    play = Play()
    deaths = [WorkerDied(0, "scripted")] * (MAX_CONSECUTIVE_FAILURES + 1)
    group = play.driver.group = LookedAtGroup(None, LeaseNotRenewed("scripted"), *deaths)
    while group.findings:
        play.driver.look()
    assert play.recovered == deaths


class DrainingGroup(ScriptedGroup):
    """Takes the first of two steps, which fails, and holds the second back."""

    max_in_flight = 2

    def execute_model(self, output: SchedulerOutput) -> ScriptedFuture:
        if not self.fates:
            code, scope = ErrorCode.DRAINING, ErrorScope.GROUP
            raise error_of_rank(code, "scripted", rank=0, endpoint="scripted", scope=scope)
        return super().execute_model(output)

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        return frozenset(output.num_scheduled_tokens)


def test_step_that_was_held_back_loses_its_requests_with_the_one_that_failed():
    class TwoSteps(EndlessScheduler):
        def __init__(self) -> None:
            self.steps = [SchedulerOutput({"a": 1}), SchedulerOutput({"b": 1})]
            self.taken_back = ()

        def schedule(self) -> SchedulerOutput:
            return self.steps.pop(0)

        def step_failed(self, outputs, lost_req_ids) -> None:
            self.taken_back = ([*outputs], lost_req_ids)

    scheduler = TwoSteps()
    both = list(scheduler.steps)
    Driver(DrainingGroup(["fails"]), scheduler).step()
    assert scheduler.taken_back == (both, frozenset({"b"}))


SPOILT = {
    4: {"new_block_ids": {"nobody": [1]}},
    9: {"num_scheduled_tokens": {"nobody": 1}},
    15: {"decode_req_ids": None},
    16: {"scheduled_new_reqs": 7},
    40: {"new_block_ids": [1]},
}


def spoiling(kind: type[SchedulerInterface]) -> type[SchedulerInterface]:
    """A scheduler some of whose steps break a rule; not those that only end requests, after which
    no step may follow to free their rows."""

    class Spoiling(kind):
        num_steps = 0

        def schedule(self):
            output = super().schedule()
            if output is None or not (output.num_scheduled_tokens or output.decode_req_ids):
                return output
            self.num_steps += 1
            return replace(output, **SPOILT.get(self.num_steps, {}))

    return Spoiling


@pytest.mark.parametrize("kind", [Scheduler, StaticBatches])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("failing", [False, True])
def test_refused_step_is_told_once_and_the_next_one_runs(fakes, connect, kind, pp, failing):
    daemons = fakes(pp)
    group = connect(daemons, pp)
    group.attach()
    model = group.prepare(worker_config(pp, max_model_len=128))
    if failing:  # steps in flight before one that is refused, among others
        for daemon in daemons.daemons:
            daemon.faults = [Fault(n, code=ErrorCode.CAPACITY) for n in (3, 8, 14)]
    limits = make_limits(num_blocks=model.num_blocks, pipeline_parallel_size=pp)
    driver = Driver(group, spoiling(kind)(limits))
    requests = random_requests(random.Random(pp), 12)
    for request in requests:
        driver.add_request(request)
    tokens, refusals = {}, []
    while driver.busy:
        try:
            tokens.update((output.req_id, output.token_ids) for output in driver.step())
        except InvalidSchedulerOutput as refusal:
            refusals.append(refusal)
            assert len(refusals) <= len(SPOILT)
    assert [refusal.field for refusal in refusals]
    assert len(refusals) == len(SPOILT)
    assert (driver.num_failures > 0) == failing
    assert tokens == {request.id: expected(request) for request in requests}
    assert list(driver.run()) == []
    assert not daemons.daemons[-1].rows


def test_request_that_is_refused_at_admission_can_be_aborted(fakes, connect):
    group = connect(fakes(1))
    group.attach()
    model = group.prepare(worker_config(max_model_len=128))
    driver = Driver(group, Scheduler(make_limits(num_blocks=model.num_blocks)))
    good, bad = np.array([1, 2, 3], np.int32), np.array([1, VOCAB_SIZE, 3], np.int32)
    request = GenerationRequest("good", good, max_tokens=6, sampling=SamplingParams(seed=0))
    driver.add_request(request)
    driver.add_request(GenerationRequest("bad", bad, max_tokens=6, sampling=SamplingParams(seed=0)))
    with pytest.raises(InvalidSchedulerOutput) as refused:
        driver.step()
    assert refused.value.req_id == "bad"
    driver.abort_request("bad")
    assert [output.token_ids for output in driver.run()] == [expected(request)]
