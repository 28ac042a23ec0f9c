"""When a driver goes on after failures and deaths, and when it gives up, on a scripted group."""

from collections import deque

import pytest

from client.driver import MAX_CONSECUTIVE_FAILURES, Driver
from client.errors import StepFailed, WorkerDied
from client.scheduler_output import SchedulerOutput, StepResult
from rpc_schema.errors import ErrorCode

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
