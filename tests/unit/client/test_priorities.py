"""Priorities and deadlines of the reference scheduler, under random load against a simple model,
and the policy that replaces them."""

import math
import random
from collections import deque

import numpy as np
import pytest

from tests.support.exhaustive import seeds
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_adopted_requests import served
from tests.unit.client.test_scheduler import make_limits
from worker_client.driver import Driver
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult

ALL_TOKENS = SamplingParams(ignore_eos=True)


def request(name, length=4, max_tokens=4, **fields):
    prompt = np.arange(length, dtype=np.int32) + int.from_bytes(name.encode()) % 900
    return GenerationRequest(name, prompt, max_tokens, ALL_TOKENS, **fields)


def random_request(rng, number):
    return request(
        f"r{number}",
        length=rng.randrange(1, 40),
        max_tokens=rng.randrange(1, 30),
        priority=rng.choice((-1, 0, 0, 0, 3)),
        deadline=rng.choice((None, None, 1e6 + rng.randrange(3))),
    )


class Queue:
    """What the cookbook (docs) makes a reader expect: a waiting line, and the requests that run."""

    def __init__(self):
        self.waiting = {}
        """(priority, deadline, arrival) by name."""
        self.running = {}
        """(priority, deadline, admission) by name."""
        self.num_admitted = 0

    def add(self, added):
        deadline = math.inf if added.deadline is None else added.deadline
        self.waiting[added.id] = (added.priority, deadline, int(added.id[1:]))

    def see(self, output):
        """Check who is preempted and who is admitted."""
        lost = {name: self.running.pop(name) for name in output.preempted_req_ids}
        assert all(mine > other for mine in lost.values() for other in self.running.values())
        for name, (priority, deadline, _) in lost.items():
            self.waiting[name] = (priority, deadline, int(name[1:]))
        for new in output.scheduled_new_reqs:
            assert new.req_id == min(self.waiting, key=self.waiting.get)
            priority, deadline, _ = self.waiting.pop(new.req_id)
            self.running[new.req_id] = (priority, deadline, self.num_admitted)
            self.num_admitted += 1

    def end(self, name):
        """Forget a request."""
        self.running.pop(name, None)
        self.waiting.pop(name, None)


@pytest.mark.parametrize("seed", seeds(8, of=80))
def test_the_most_urgent_are_admitted_first_and_preempted_last(seed):
    rng = random.Random(seed)
    num_stages = rng.choice((1, 1, 2))
    limits = make_limits(
        num_blocks=rng.choice((19, 24, 40)),
        max_num_seqs=rng.choice((3, 8)),
        pipeline_parallel_size=num_stages,
        enable_prefix_caching=rng.random() < 0.5,
    )
    scheduler, queue = Scheduler(limits, clock=lambda: 0.0), Queue()
    wanted, in_flight, done, num_added = {}, deque(), {}, 0
    while num_added < 30 or scheduler.has_unfinished_requests():
        for _ in range(rng.choice((0, 0, 1, 4)) if num_added < 30 else 0):
            added = random_request(rng, num_added)
            num_added += 1
            scheduler.add_request(added)
            queue.add(added)
            wanted[added.id] = added.max_tokens
        while len(in_flight) <= num_stages and (output := scheduler.schedule()) is not None:
            queue.see(output)
            in_flight.append((output, sampled(scheduler, output)))
        if in_flight:
            for ended in scheduler.update_from_output(*in_flight.popleft()):
                done[ended.req_id] = len(ended.token_ids)
                queue.end(ended.req_id)
    assert done == wanted
    assert scheduler.num_free_blocks == limits.num_blocks - 1


def sampled(scheduler, output):
    """Return the result of a step: a token for each request that it has computed to its end."""
    find = scheduler._queues.unfinished
    latest = scheduler._steps.next - 1
    ready = [name for name in output.num_scheduled_tokens if find[name].last_step == latest]
    names = [*output.decode_req_ids, *ready]
    return StepResult(names, [5] * len(names))


def run(scheduler, clock=None):
    """Run alone; return names in the order in which they are admitted, and the outputs."""
    admitted, outputs = [], {}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        admitted += [new.req_id for new in output.scheduled_new_reqs]
        result = sampled(scheduler, output)
        if clock is not None:
            clock.now += 1
        outputs |= {each.req_id: each for each in scheduler.update_from_output(output, result)}
    return admitted, outputs


ONE_AT_A_TIME = make_limits(max_num_seqs=1)


def test_a_lower_priority_is_earlier_then_the_deadline_then_the_arrival():
    scheduler = Scheduler(ONE_AT_A_TIME, clock=lambda: 0.0)
    for name, fields in (
        ("plain", {}),
        ("later", {"deadline": 9.0}),
        ("sooner", {"deadline": 8.0}),
        ("last", {"priority": 1, "deadline": 1.0}),
        ("urgent", {"priority": -1}),
        ("plain too", {}),
    ):
        scheduler.add_request(request(name, **fields))
    admitted, _ = run(scheduler)
    assert admitted == ["urgent", "sooner", "later", "plain", "plain too", "last"]


def test_a_policy_is_one_function():
    scheduler = Scheduler(ONE_AT_A_TIME, urgency=lambda each: each.limit)
    for name, max_tokens in (("long", 9), ("short", 1), ("middle", 5)):
        scheduler.add_request(request(name, max_tokens=max_tokens, priority=-max_tokens))
    assert run(scheduler)[0] == ["short", "middle", "long"]


def test_a_policy_chooses_who_is_preempted():
    """Both need more blocks than there are: the one that came first goes on, or the short one."""
    for policy, victim in ((lambda _: 0, "b"), (lambda each: each.limit, "a")):
        limits = make_limits(num_blocks=9, max_model_len=32, enable_prefix_caching=False)
        scheduler = Scheduler(limits, urgency=policy)
        scheduler.add_request(request("a", length=12, max_tokens=16))
        scheduler.add_request(request("b", length=12, max_tokens=12))
        preempted = []
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            preempted += output.preempted_req_ids
            scheduler.update_from_output(output, sampled(scheduler, output))
        assert preempted and {*preempted} == {victim}


def test_a_policy_with_arrivals_starves_nobody():
    """As in docs/scheduler-cookbook.md: a level counts as much as 5 arrivals."""
    scheduler = Scheduler(ONE_AT_A_TIME, urgency=lambda each: 5 * each.priority + each.arrival)
    scheduler.add_request(request("low", priority=2))
    for number in range(20):
        scheduler.add_request(request(f"urgent {number}"))
    admitted, _ = run(scheduler)
    assert admitted.index("low") == 9
    scheduler = Scheduler(ONE_AT_A_TIME)
    scheduler.add_request(request("low", priority=2))
    for number in range(20):
        scheduler.add_request(request(f"urgent {number}"))
    assert run(scheduler)[0][-1] == "low"


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_a_request_ends_at_its_deadline_waiting_or_running():
    clock = Clock()
    scheduler = Scheduler(ONE_AT_A_TIME, clock=clock)
    for name, fields in (
        ("runs", {"deadline": 102.5}),
        ("waits", {"deadline": 102.6}),
        ("cut", {"deadline": 103.5}),
        ("in time", {"max_tokens": 2, "deadline": 110.0}),
        ("without", {}),
    ):
        scheduler.add_request(request(name, **fields))
    admitted, outputs = run(scheduler, clock)
    assert admitted == ["runs", "cut", "in time", "without"]
    assert all("deadline has passed" in outputs[name].error for name in ("runs", "waits", "cut"))
    assert {name: (each.finish_reason, len(each.token_ids)) for name, each in outputs.items()} == {
        "runs": ("error", 3),
        "waits": ("error", 0),
        "cut": ("error", 1),
        "in time": ("length", 2),
        "without": ("length", 4),
    }
    assert scheduler.num_free_blocks == ONE_AT_A_TIME.num_blocks - 1


def test_late_requests_end_though_nothing_runs():
    """No step computes anything for them: an empty one brings their outputs."""
    scheduler = Scheduler(make_limits(), clock=Clock())
    for name in "abc":
        scheduler.add_request(request(name, deadline=100.0))
    scheduler.hold_request("b")
    output = scheduler.schedule()
    assert not (output.num_scheduled_tokens or output.decode_req_ids or output.scheduled_new_reqs)
    assert scheduler.has_unfinished_requests()
    scheduler.abort_request("c")
    ended = scheduler.update_from_output(output, StepResult([], []))
    assert [(each.req_id, each.finish_reason, each.token_ids) for each in ended] == [
        ("a", "error", []),
        ("b", "error", []),
    ]
    assert not scheduler.has_unfinished_requests() and scheduler.schedule() is None


def test_tokens_in_flight_of_a_late_request_are_ignored():
    clock = Clock()
    scheduler = Scheduler(make_limits(), clock=clock)
    scheduler.add_request(request("a", deadline=101.0))
    first = scheduler.schedule()
    result = sampled(scheduler, first)
    second = scheduler.schedule()
    clock.now = 102.0
    (ended,) = scheduler.update_from_output(first, result)
    assert (ended.finish_reason, ended.token_ids) == ("error", [5])
    assert scheduler.update_from_output(second, StepResult(["a"], [6])) == []
    assert scheduler.schedule().finished_req_ids == ["a"]


def test_a_driver_returns_late_requests(fakes, connect):
    config = worker_config(max_model_len=128)
    group = connect(fakes(1))
    group.attach()
    driver = Driver(group, Scheduler(scheduler_limits(group.prepare(config), config)))
    driver.add_request(request("late", deadline=0.0))
    (late,) = driver.run()
    assert (late.req_id, late.finish_reason) == ("late", "error")
    driver.add_request(request("late", deadline=0.0))
    driver.add_request(request("good"))
    assert {each.req_id: each.finish_reason for each in driver.run()} == {
        "late": "error",
        "good": "length",
    }
    assert not driver.busy


def test_priority_and_deadline_survive_a_driver(monkeypatch):
    """The next driver may run on a host whose monotonic clock has another zero."""
    limits = make_limits(max_num_seqs=1)
    given = (
        ("low", {"priority": 5}),
        ("late", {"deadline": 1e9 + 50}),
        ("urgent", {"priority": -5}),
    )
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: 1e9 + 40)
        patch.setattr("time.time", lambda: 2e9 + 40)
        left = [served(limits, request(name, **fields), [1]) for name, fields in given]
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    monkeypatch.setattr("time.time", lambda: 2e9 + 45)  # 5 s later
    clock = Clock()
    clock.now = 7.0
    scheduler = Scheduler(limits, clock=clock)
    scheduler.adopt_requests(left)
    scheduler.add_request(request("new", priority=1))
    (first,) = scheduler.schedule().scheduled_new_reqs
    assert first.req_id == "urgent"
    found = scheduler._queues.unfinished
    assert [each.id for each in scheduler._queues.waiting] == ["late", "new", "low"]
    assert found["late"].deadline == pytest.approx(12.0) and found["low"].deadline == math.inf
    assert (found["low"].priority, found["urgent"].priority) == (5, -5)
