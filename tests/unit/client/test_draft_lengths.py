"""The choice of a step's drafts, under a clock that the test moves: as fast as the best fixed
number of drafts, never much slower than without, and back when a drafter turns good again."""

import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.drafting.payoffs import DraftingChange, log_change
from worker_client.scheduler.drafting.request_drafts import RequestDrafts
from worker_client.scheduler.drafting.step_costs import StepCosts, TimedStep
from worker_client.scheduler.request import PLAIN, Traits
from worker_client.scheduler_output import DraftOutcome
from worker_host.log_lines import event_of

MOST = 4
DEPTH = 2
"""Steps in flight."""


@dataclass
class Decoding:
    """A request that decodes without end."""

    id: str
    accuracy: float
    most_drafts: int = MOST
    num_tokens: int = 0
    drafts: RequestDrafts = field(default_factory=RequestDrafts)
    traits: Traits = PLAIN
    num_gained: int = field(default=0)
    last_step: int = -1


class Device:
    """Steps that take what a function of their rows and tokens says."""

    def __init__(self, requests, cost_ms, seed=0, drafter_ms=0.0, change_ms=0.0, wake_ms=0.0):
        """drafter_ms: what it takes to make drafts after a step; change_ms: what a step takes
        longer if the one before was of another kind; wake_ms: what the first drafts after a rest
        take more."""
        self.now_s = 0.0
        self.changes = []
        self.lengths = DraftLengths(MOST, 1, lambda: self.now_s, self.changes.append)
        self.requests, self.cost_ms, self.rng = requests, cost_ms, random.Random(seed)
        self.drafter_ms, self.made_after = drafter_ms, {-1}
        self.change_ms, self.wake_ms, self.last_kind = change_ms, wake_ms, None
        self.in_flight = deque()
        self.drafted = []
        """Drafts of each step, in all."""
        self.choices = []
        """Drafts of each step, by request."""
        self.num_gained = 0

    def run(self, num_steps, fixed=None):
        """Return the tokens per second. fixed: drafts of each request, in place of the choice."""
        began_s, before = self.now_s, self.num_gained
        for _ in range(num_steps):
            while len(self.in_flight) < DEPTH:
                if fixed is None:
                    drafts = self.lengths.choose(self.requests)
                else:
                    drafts = {request.id: fixed for request in self.requests if fixed}
                rows, number = len(self.requests), len(self.drafted)
                tokens = rows + sum(drafts.values())
                self.lengths.sent(number, rows, tokens, only_decodes=True)
                makes = self.lengths.asks if fixed is None else bool(fixed)
                self.made_after |= {number} if makes else set()
                for request in self.requests:
                    is_there = request.last_step in self.made_after or not request.traits.may_draft
                    assert request.id not in drafts or is_there
                    request.last_step = number
                kind, last_kind = (tokens, makes), self.last_kind
                further_ms = self.drafter_ms * makes + self.change_ms * (kind != last_kind)
                if makes and last_kind is not None and not last_kind[1]:
                    further_ms += self.wake_ms
                self.last_kind = kind
                self.in_flight.append((drafts, tokens, further_ms))
                self.drafted.append(tokens - rows)
                self.choices.append(tuple(sorted(drafts.items())))
            drafts, tokens, further_ms = self.in_flight.popleft()
            self.now_s += (self.cost_ms(len(self.requests), tokens) + further_ms) / 1000
            self.lengths.done()
            for request in self.requests:
                self.num_gained += 1
                if request.id in drafts:
                    self.num_gained += self.verify(request, drafts[request.id])
        return (self.num_gained - before) / (self.now_s - began_s)

    def verify(self, request, count):
        accepted = 0
        while accepted < count and self.rng.random() < request.accuracy:
            accepted += 1
        self.lengths.learn([(request, DraftOutcome(count, accepted))])
        return accepted


def decoding(count, accuracy):
    return [Decoding(f"r{index}", accuracy) for index in range(count)]


def flat(rows, tokens):
    """Verification costs 1 % a token: a small batch."""
    return 5 + 0.05 * tokens


def steep(rows, tokens):
    """Each token costs as much as half a step of one row: a batch that computes."""
    return 2 + 1.0 * tokens


def stairs(rows, tokens):
    """Sizes of graphs: a step costs as much as the next size."""
    size = next(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size >= tokens)
    return 4 + 0.1 * size


@pytest.mark.parametrize("cost_ms", [flat, steep, stairs])
@pytest.mark.parametrize("rows", [1, 16])
def test_drafts_that_have_never_paid_are_left_out_without_an_event(rows, cost_ms):
    """Also those of single requests beside others whose drafts pay; and drafts that pay from the
    start on, until they fail."""
    useless = Device(decoding(rows, 0.0), cost_ms)
    useless.run(1500)
    assert sum(useless.drafted[-12:]) <= 4 * rows and useless.changes == []  # but for a probe
    requests = decoding(rows, 0.9)
    for request in requests[: rows // 4]:
        request.accuracy = 0.0
    mixed = Device(requests, flat)
    mixed.run(1500)
    assert mixed.changes == [] and sum(mixed.drafted[-100:]) > 0
    for request in requests:
        request.accuracy = 0.0
    mixed.run(1500)
    assert [(c.req_id, c.pays) for c in mixed.changes if c.req_id is None] == [(None, False)]


@pytest.mark.each_value
@pytest.mark.parametrize("cost_ms", [flat, steep, stairs])
@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_choice_is_as_fast_as_the_best_fixed_number(rows, accuracy, cost_ms):
    """Within 5 %, learning included; and within 3 % of no drafts at all."""
    steps = 1500
    fixed = [Device(decoding(rows, accuracy), cost_ms).run(steps, k) for k in range(MOST + 1)]
    chosen = Device(decoding(rows, accuracy), cost_ms).run(steps)
    assert chosen >= 0.97 * fixed[0]
    assert chosen >= 0.95 * max(fixed)


def late(rows, tokens):
    """A large model: a draft costs a fifth of a row, and any drafts at all half a millisecond."""
    return 3.5 + 0.02 * rows + 0.0125 * (tokens - rows) + 0.5 * (tokens > rows)


@pytest.mark.parametrize("rows", [64, 256])
def test_useless_drafts_cost_a_large_batch_little_from_its_first_step_on(rows):
    """Few of its requests are tried until it is known what becomes of their drafts, and few at a
    time of those that come later."""
    steps = 255
    device = Device(decoding(rows, 0.0), late, drafter_ms=0.1, change_ms=0.4)
    speed, plain = device.run(steps), Device(decoding(rows, 0.0), late).run(steps, 0)
    assert speed >= 0.985 * plain
    assert max(device.drafted) <= 16 * MOST
    rng, began_s, before = random.Random(rows), device.now_s, device.num_gained
    for number in range(4 * steps):
        device.run(1)
        place = rng.randrange(2 * rows)
        if place < rows:
            device.lengths.forget(device.requests[place])
            device.requests = [*device.requests]
            device.requests[place] = Decoding(f"new{number}", 0.0)
    assert (device.num_gained - before) / (device.now_s - began_s) >= 0.985 * plain
    assert max(device.drafted) <= 16 * MOST


def test_good_requests_among_useless_ones_are_found():
    """One of 64 has drafts that are accepted, and comes when those of all others have failed."""
    requests = decoding(64, 0.0)
    device = Device(requests, flat, drafter_ms=0.1)
    device.run(400)
    device.lengths.forget(requests[40])
    device.requests = [*requests[:40], Decoding("good", 1.0), *requests[41:]]
    device.run(1000)
    recent = Counter(req_id for step in device.choices[-200:] for req_id, _ in step)
    assert recent.most_common(1)[0][0] == "good" and recent["good"] > 150


def test_probes_cost_less_than_one_percent():
    device = Device(decoding(16, 0.0), steep)
    device.run(200)
    device.drafted.clear()
    speed = device.run(2000)
    assert sum(count > 0 for count in device.drafted) > 3
    assert speed >= 0.99 * Device(decoding(16, 0.0), steep).run(2000, 0)


@pytest.mark.parametrize("rows", [1, 64])
def test_a_device_whose_drafts_do_not_pay_makes_none(rows):
    """Making them takes a fifth of a step here, also where no request has any of them."""
    device = Device(decoding(rows, 0.0), steep_at_8, drafter_ms=2.0)
    device.run(300)
    before = len(device.made_after)
    speed = device.run(2000)
    assert speed >= 0.97 * Device(decoding(rows, 0.0), steep_at_8).run(2000, 0)
    assert len(device.made_after) - before < 200
    for request in device.requests:
        request.accuracy = 0.9
    device.run(3000)
    best = max(Device(decoding(rows, 0.9), steep_at_8, 0, 2.0).run(600, k) for k in range(MOST + 1))
    assert device.run(600) >= 0.95 * best


def test_a_drafter_that_is_slow_to_wake_rests_longer():
    """Waking takes as long as ten steps here."""
    device = Device(decoding(16, 0.0), small, drafter_ms=0.5, wake_ms=8.0)
    device.run(600)
    speed = device.run(6000)
    assert speed >= 0.992 * Device(decoding(16, 0.0), small).run(600, 0)
    for request in device.requests:
        request.accuracy = 0.95
    device.run(6000)
    best = max(Device(decoding(16, 0.95), small, 0, 0.5).run(600, k) for k in range(MOST + 1))
    assert device.run(600) >= 0.97 * best


def test_a_drafter_that_turns_bad_midway_is_left_out_until_it_is_good_again():
    requests = decoding(8, 0.8)
    device = Device(requests, steep_at_8)
    undrafted = Device(decoding(8, 0.0), steep_at_8).run(300, 0)
    fast = device.run(600)
    assert fast > 1.3 * undrafted and device.changes == []
    for request in requests:
        request.accuracy = 0.0
    device.run(200)
    device.drafted.clear()
    assert device.run(800) >= 0.97 * undrafted
    assert sum(count > 0 for count in device.drafted) < 40
    told = [(change.req_id, change.pays) for change in device.changes if change.req_id is None]
    assert told == [(None, False)] and device.changes[-1].acceptance < 0.3
    for request in requests:
        request.accuracy = 0.8
    device.run(2000)
    assert device.run(600) >= 0.95 * fast
    told = [(change.req_id, change.pays) for change in device.changes if change.req_id is None]
    assert told == [(None, False), (None, True)]


def steep_at_8(rows, tokens):
    return 8 + 0.2 * tokens


def small(rows, tokens):
    """A small model: a step with drafts takes much longer than one without, but few tokens."""
    return (0.7 if tokens == rows else 1.0) + 0.005 * tokens


@pytest.mark.each_value
@pytest.mark.parametrize("drafter_ms", [0.0, 0.5])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("rows", [1, 16])
def test_steps_that_take_longer_after_another_kind_are_not_taken_for_dear(
    rows, accuracy, drafter_ms
):
    """Otherwise probes without drafts seem as slow as steps with drafts, and useless ones stay; or
    probes with drafts seem too slow ever to pay."""
    cost = small, 0, drafter_ms, 0.7
    best = max(Device(decoding(rows, accuracy), *cost).run(600, k) for k in range(MOST + 1))
    device = Device(decoding(rows, accuracy), *cost)
    device.run(600)
    assert device.run(2000) >= 0.97 * best
    changed = 0.95 if accuracy < 0.5 else 0.0
    for request in device.requests:
        request.accuracy = changed
    device.run(6000)
    best = max(Device(decoding(rows, changed), *cost).run(600, k) for k in range(MOST + 1))
    assert device.run(2000) >= 0.97 * best


def test_the_drafts_of_a_new_request_are_tried_soon():
    """Texts of one kind after the other, as a suffix lookup finds them once it has seen them."""
    device, shares = Device([], small, change_ms=0.4), []
    for number in range(40):
        (request,) = device.requests = decoding(1, 0.95 if number >= 20 else 0.0)
        request.id = str(number)
        device.in_flight.clear()
        device.lengths.failed(DEPTH)
        before = len(device.drafted)
        device.run(256)
        device.lengths.forget(request)
        shares.append(np.mean([count > 0 for count in device.drafted[before:]]))
    assert np.mean(shares[4:20]) < 0.05
    assert np.mean(shares[24:]) > 0.7


def test_a_request_whose_drafts_fail_has_none_beside_others():
    """It is named if its drafts were right before."""
    requests = [*decoding(6, 0.9), Decoding("bad", 0.0), Decoding("worse", 0.9)]
    device = Device(requests, steep_at_8)
    device.run(1000)
    assert set(device.lengths.choose(requests)) == {*(r.id for r in requests)} - {"bad"}
    requests[-1].accuracy = 0.0
    device.run(1000)
    assert set(device.lengths.choose(requests)) == {request.id for request in requests[:6]}
    assert [(change.req_id, change.pays) for change in device.changes] == [("worse", False)]


def test_requests_of_different_acceptance_settle_on_numbers_of_their_own():
    """Nearly all steps have the same ones: but for probes, and for what luck moves."""

    def mixed():
        requests = [*decoding(14, 0.9), Decoding("bad", 0.0), Decoding("fair", 0.65)]
        return Device(requests, steep_at_8)

    device = mixed()
    device.run(600)
    device.choices.clear()
    speed = device.run(400)
    assert speed >= 0.99 * max(mixed().run(400, k) for k in range(MOST + 1))
    (usual, count), *_ = Counter(device.choices).most_common()
    usual = dict(usual)
    assert count > 200
    assert {usual[f"r{index}"] for index in range(14)} == {MOST}
    assert "bad" not in usual and 0 < usual.get("fair", 0) < MOST
    pairs = zip(device.choices, device.choices[1:], strict=False)
    assert sum(one == other for one, other in pairs) > 320


@pytest.mark.parametrize("guesses", [False, True])
def test_the_choice_is_made_anew_in_few_steps(guesses):
    """Also while the driver guesses, in each step another number."""
    requests = decoding(32, 0.7)
    for request in requests if guesses else ():
        request.traits = Traits(may_draft=False)
    device, names = Device(requests, flat), Counter()
    device.run(200)
    count = names.update
    sys.setprofile(lambda frame, event, _: event == "call" and count([frame.f_code.co_name]))
    try:
        for step in range(160):
            for request in requests if guesses else ():
                request.most_drafts = step % 3
                request.drafts.expect([0] * request.most_drafts, 0, 0, set())
            device.run(1)
    finally:
        sys.setprofile(None)
    assert names["choose"] == 160 and 0 < names["rates"] <= 30 and names["seconds"] <= 60


def test_requests_near_their_limits_have_the_drafts_that_fit():
    requests = [Decoding("a", 0.9, 0), Decoding("b", 0.9, 2), Decoding("c", 0.9, -1)]
    assert DraftLengths(MOST).choose(requests) == {"b": 2}
    assert DraftLengths(MOST).choose(requests[:1]) == {}


def test_the_same_times_give_the_same_choices():
    one, two = (Device(decoding(5, 0.6), stairs) for _ in range(2))
    one.run(700)
    two.run(700)
    assert one.drafted == two.drafted and len(set(one.drafted)) > 1


def test_a_single_late_step_changes_nothing():
    costs, late = StepCosts(), StepCosts()
    few, many = (TimedStep(4, n, True, n > 4, 0.0, False, True) for n in (4, 20))
    for table in (costs, late):
        for _ in range(10):
            table.learn(few, 0.01)
            table.learn(many, 0.02)
    late.learn(few, 0.5)
    places = [4.0, 12.0, 20.0, 40.0]
    assert late.seconds(4, np.array(places)).tolist() == costs.seconds(4, np.array(places)).tolist()
    assert costs.seconds(4, np.array(places)) == pytest.approx([0.01, 0.015, 0.02, 0.0325])
    late.learn(few, 0.5)
    assert late.seconds(4, np.array(places))[0] > 0.05
    # Rows that were never measured have the nearest curve.
    assert costs.seconds(32, np.array([12.0])) == pytest.approx([0.015])


def test_a_step_that_wakes_the_drafter_tells_nothing_of_others():
    """Otherwise it seems to take as long whatever its tokens, and drafts seem to be free."""
    costs, sizes = StepCosts(), np.array([14.0, 15.0, 16.0, 32.0, 64.0, 80.0])
    wakes = TimedStep(15, 15, True, True, 0.0, False, False, True)
    costs.learn(wakes, 0.012)
    assert costs.seconds(16, sizes).tolist() == [1.0] * len(sizes)  # nothing is known
    for num_tokens, seconds in ((16, 0.001), (64, 0.002)) * 8:
        step = TimedStep(16, num_tokens, True, num_tokens > 16, 0.0, False, True)
        costs.learn(step, seconds)
    before = costs.seconds(16, sizes).tolist()
    costs.learn(wakes, 0.012)
    assert costs.seconds(16, sizes).tolist() == before and costs.wake_s == 0.0
    costs.learn(wakes._replace(num_rows=16, num_tokens=16), 0.012)
    assert costs.seconds(16, sizes).tolist() == before
    assert costs.wake_s == pytest.approx(0.011)


def test_steps_with_prompts_and_failed_steps_teach_nothing():
    now = [0.0]
    lengths = DraftLengths(MOST, 1, lambda: now[0])
    requests = decoding(2, 0.5)
    lengths.sent(0, 2, 10, only_decodes=False)
    now[0] = 1.0
    lengths.done()
    lengths.sent(1, 2, 10, only_decodes=True)
    lengths.failed(1)
    lengths.done()
    assert lengths.choose(requests) == {"r0": MOST, "r1": MOST}


def test_changes_are_events(caplog):
    """One event name a line: that of one request is another than that of all."""
    for change in (
        DraftingChange(None, False, 0.1),
        DraftingChange(None, True, 0.8),
        DraftingChange("a", False, 0.0),
    ):
        log_change(change)
    events = [event_of(record) for record in caplog.records]
    assert events == ["drafting_stopped", "drafting_resumed", "request_drafting_stopped"]
    assert "10 % are accepted" in caplog.text and "request 'a'" in caplog.text
