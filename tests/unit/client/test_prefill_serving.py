"""The group that computes prompts begins to send blocks before their steps have ended, and says
which are right only then."""

import random
from collections import deque
from types import SimpleNamespace

import pytest

from rpc_schema.identity import ContentIdentity
from tests.support.flat_requests import flat_request
from tests.unit.client.test_outgoing_contents import LIMITS, ModelledRank
from worker_client.driver_parts.remote_prefill import (
    FirstToken,
    LinkLeft,
    MoveConfirmed,
    MoveToReceive,
    PromptOver,
    SlotsWanted,
    first_token_sampling,
)
from worker_client.group.kv_transfers import MovesReport
from worker_client.group.weights_state import WeightsVersion
from worker_client.replicas.prefill_serving import PrefillServing
from worker_client.scheduler import Scheduler
from worker_client.scheduler_output import StepResult

OTHER_WEIGHTS = WeightsVersion(1, ContentIdentity(content=b"other"))


class ModelledDriver:
    """A driver with two steps in flight; group.transfers is itself."""

    def __init__(self):
        self.scheduler, self.rank, self.flying = Scheduler(LIMITS), ModelledRank(), deque()
        self.group = SimpleNamespace(transfers=self)
        self.must_fail, self.num_moves = False, 0
        self.num_looks = 0
        """Looks for a step's end that find it running."""
        self.num_begun = []
        """Moves before each result."""
        self.add_request = self.scheduler.add_request
        self.abort_request = self.scheduler.abort_request

    @property
    def busy(self):
        return bool(self.flying) or self.scheduler.has_unfinished_requests()

    def step(self):
        while len(self.flying) < 2 and (output := self.scheduler.schedule()) is not None:
            self.flying.append((output, *self.rank.run(output)))
        assert not self.part.work_in_flight()
        looks = iter([False] * self.num_looks)
        self.part.complete(SimpleNamespace(future=SimpleNamespace(done=lambda: next(looks, True))))
        self.num_begun.append(self.num_moves)
        if self.must_fail:
            self.part.steps_failed()
            outputs = [output for output, *_ in self.flying]
            self.flying.clear()
            self.scheduler.step_failed(outputs, frozenset(self.rank.rows))
            self.rank.rows.clear()
            self.must_fail = False
            return []
        output, sampled, _ = self.flying.popleft()
        return self.scheduler.update_from_output(output, StepResult(sampled, [7] * len(sampled)))

    def add_part(self, part):
        self.part = part

    def look(self):
        pass

    def open(self, link, *, sends):
        assert sends

    def move(self, link, move):
        self.num_moves = move.number

    def poll(self, link):
        return MovesReport(True, "", self.num_moves, frozenset())

    def close(self):
        pass


class Sending:
    """A prompt whose slots are granted, and what is told of it."""

    def __init__(self, count, granted_at=None):
        """granted_at: number of waits for a command, in a step, after which the grant comes; None:
        it comes at once."""
        self.driver, self.told, self.link = ModelledDriver(), [], SimpleNamespace(number=5)
        self.waits_left = granted_at
        self.serving = PrefillServing(self.driver, self.told.append, self._take_grant)
        self.serving.open_link(self.link)
        tokens = [random.randrange(9) for _ in range(count)]
        other, request = Scheduler(LIMITS), flat_request("r", tokens, max_tokens=3)
        other.add_request(request)
        self.names = other.exchange.lacking("r")
        sampling = first_token_sampling(request)
        self.serving.compute(1, request, self.names, sampling)
        assert isinstance(self.told.pop(0), SlotsWanted)
        if granted_at is None:
            self.serving.grant(self.link, 1, self.names)

    def _take_grant(self, serving, wait_s):
        assert self.waits_left is not None and serving is self.serving and wait_s > 0
        self.waits_left -= 1
        if not self.waits_left:
            serving.grant(self.link, 1, self.names)

    def kinds(self, kind):
        return [each for each in self.told if isinstance(each, kind)]


def test_moves_begin_with_the_steps_that_store_and_are_confirmed_when_they_are_right():
    sending = Sending(30)
    num_ahead = num_before = 0
    for _ in range(20):
        sending.serving.proceed()
        begun, right = sending.kinds(MoveToReceive), sending.kinds(MoveConfirmed)
        assert [each.move for each in right] == [each.move for each in begun][: len(right)]
        num_ahead += sending.driver.num_begun[-1] > num_before
        num_before = len(right)
    assert num_ahead > 0
    assert [name for each in begun for name in each.names] == sending.names
    assert len(right) == len(begun)
    assert isinstance(sending.told[-1], PromptOver)
    assert sending.driver.scheduler.exchange.num_slots == 0


def test_ends_are_told_again_after_a_step_that_failed():
    """Daemons may have missed them, and no other prompt need follow."""
    sending = Sending(11)
    driver, told = sending.driver, []
    run = driver.rank.run
    driver.rank.run = lambda output: (told.append(output.finished_req_ids), run(output))[1]
    while not (told and told[-1]):
        driver.must_fail = not driver.busy and bool(told)
        sending.serving.proceed()
    assert not driver.busy and not driver.must_fail, "the step that told them has failed"
    told.clear()
    assert sending.serving.wait_s == 0
    while sending.serving.wait_s == 0:
        sending.serving.proceed()
    assert len(told) == 1


@pytest.mark.parametrize("num_looks", [2, 9])
def test_blocks_move_in_the_step_that_fills_them_even_if_slots_come_late(num_looks):
    """Unless that step has ended before."""
    sending = Sending(11, granted_at=4)
    sending.driver.num_looks = num_looks
    sending.serving.proceed()
    is_in_time = num_looks > 4
    assert bool(sending.kinds(MoveToReceive)) == is_in_time
    assert sending.driver.num_begun == [int(is_in_time)]
    assert sending.waits_left == (0 if is_in_time else 2)
    sending.driver.num_looks = 9
    for _ in range(9):
        sending.serving.proceed()
        if sending.waits_left:
            sending._take_grant(sending.serving, 1.0)
    assert isinstance(sending.told[-1], PromptOver)
    assert sending.driver.scheduler.exchange.num_slots == 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_steps_that_fail_confirm_nothing_and_end_the_link(num_steps):
    sending = Sending(52)
    for _ in range(num_steps):
        sending.serving.proceed()
    num_right = len(sending.kinds(MoveConfirmed))
    sending.driver.must_fail = True
    sending.serving.proceed()
    assert len(sending.kinds(MoveToReceive)) > num_right
    assert len(sending.kinds(MoveConfirmed)) == num_right
    assert sending.kinds(LinkLeft) == [LinkLeft(5)]
    sending.serving.drop(1)
    assert sending.driver.scheduler.exchange.num_slots == 0


def test_the_first_token_is_told_when_it_is_there_unless_weights_have_changed():
    for is_changed in (False, True):
        sending = Sending(30)
        if is_changed:
            sending.driver.scheduler.use_weights(OTHER_WEIGHTS)
        for _ in range(20):
            sending.serving.proceed()
        wanted = FirstToken(1, sending.driver.scheduler.weights_key, 7)
        assert sending.kinds(FirstToken) == ([] if is_changed else [wanted])
        if not is_changed:
            last = sending.kinds(MoveConfirmed)[-1]
            assert sending.told.index(wanted) < sending.told.index(last)
