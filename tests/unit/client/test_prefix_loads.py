"""When a request is admitted whose prefix is loaded beside steps: with the news of it, or, once it
is known how long loads take, so that its step is the first one behind the load."""

import itertools
import random
import statistics
from collections import deque

import pytest

from tests.support.serving import greedy_request
from worker_client.scheduler import Scheduler, SchedulerLimits, prefix_loads
from worker_client.scheduler.prefix_loads import LoadTimes
from worker_client.scheduler_output import StepResult
from worker_client.steps.block_moves import HostMoves

BLOCK = 4
PROMPT_BLOCKS = 12
STEP_S, LOAD_S = 0.007, 0.024


class LoadingDevice:
    """Runs two steps at a time, of which the first takes STEP_S, and loads beside them."""

    def __init__(self, load_s=LOAD_S, *, tells_when=True, **fields):
        self.now, self.load_s, self.tells_when = 0.0, load_s, tells_when
        limits = SchedulerLimits(8, 512, 64, 60, BLOCK, num_host_blocks=400, **fields)
        self.scheduler = Scheduler(limits, clock=lambda: self.now)
        self.in_flight, self.loads = deque(), deque()
        self.waits, self.longest_waits = 0.0, []
        """Seconds for which steps have waited for loads: of all, and those of more than a tenth of
        a step."""
        self.numbers = itertools.count()

    def step(self):
        """Send steps, and take the result of the oldest one; return requests that have ended."""
        while len(self.in_flight) < 2 and (output := self.scheduler.schedule()) is not None:
            for moves in output.extensions:
                if isinstance(moves, HostMoves) and moves.num_beside:
                    begun = max([self.now, *(end for end, _ in self.loads)])
                    blocks = moves.loaded.block_ids[-moves.num_beside :]
                    self.loads.append((begun + self.load_s, [*blocks]))
            self.in_flight.append(output)
        output = self.in_flight.popleft()
        used = {block for new in output.scheduled_new_reqs for block in new.block_ids}
        awaited = [end for end, blocks in self.loads if used & {*blocks}]
        wait = max([0.0, *(end - self.now for end in awaited)])
        self.waits += wait
        self.longest_waits += [wait] * (wait > STEP_S / 10)
        self.now = max([self.now, *awaited]) + STEP_S
        arrived, ago = [], 0.0
        while self.loads and self.loads[0][0] <= self.now:
            end, blocks = self.loads.popleft()
            arrived += blocks
            ago = self.now - end if self.tells_when else 0.0
        self.decode()
        ids = dict.fromkeys([*output.decode_req_ids, *output.num_scheduled_tokens])
        result = StepResult([*ids], [7] * len(ids), arrived_blocks=arrived, arrived_s_ago=ago)
        return [each.req_id for each in self.scheduler.update_from_output(output, result)]

    def decode(self):
        """Let a request decode at any time."""
        if not any(name.startswith("d") for name in self.scheduler._queues.unfinished):
            self.scheduler.add_request(greedy_request(f"d{next(self.numbers)}", [1, 2], 60))

    def run(self, prompt):
        """Return the seconds that a prompt takes beside a request that decodes."""
        req_id, began = f"r{next(self.numbers)}", self.now
        self.scheduler.add_request(greedy_request(req_id, prompt, 1))
        while req_id not in self.step():
            pass
        return self.now - began


@pytest.fixture
def prompts(monkeypatch):
    """More of them than the KV cache holds."""
    monkeypatch.setattr(prefix_loads, "LEAST_BLOCKS", 1)
    length = BLOCK * PROMPT_BLOCKS + 1
    return [[random.randrange(1 << 30) for _ in range(length)] for _ in range(6)]


def serve_all(device, prompts):
    device.decode()
    for prompt in prompts:
        device.run(prompt)
    return [device.run(prompt) for prompt in prompts]


@pytest.mark.parametrize(("load_s", "usual_s"), [(LOAD_S, 0.035), (0.0285, 0.0355)])
def test_a_prompt_is_computed_by_the_first_step_behind_its_load(prompts, load_s, usual_s):
    device = LoadingDevice(load_s)
    first, *others = serve_all(device, prompts)
    others += [device.run(prompt) for prompt in prompts]
    assert len(device.longest_waits) <= 1  # where one that decodes ends, and another begins
    assert max(others) < first - STEP_S / 2
    assert statistics.median(others) <= usual_s + 1e-9


def test_without_the_time_of_its_end_a_load_may_be_met_a_step_later(prompts):
    device = LoadingDevice(0.0285, tells_when=False)
    _, *others = serve_all(device, prompts)
    assert device.waits < STEP_S
    assert 0.036 < statistics.median(others) <= 0.042 + 1e-9


def test_a_tier_on_the_device_is_loaded_by_the_step_that_admits(prompts):
    device = LoadingDevice(has_device_tier=True)
    times = serve_all(device, prompts)
    assert not device.loads and max(times) <= 2 * STEP_S + 1e-9


def test_loads_that_take_longer_than_before_are_waited_for_once(prompts):
    """Then it is known that they do."""
    device = LoadingDevice(LOAD_S)
    serve_all(device, prompts)
    device.load_s = 3 * LOAD_S
    device.run(prompts[0])
    assert 0 < device.waits < 2 * LOAD_S
    for _ in range(2):
        for prompt in prompts:
            device.run(prompt)
    waits = device.waits
    for prompt in prompts:
        device.run(prompt)
    assert device.waits - waits < STEP_S


def test_nothing_is_expected_of_loads_that_were_never_measured():
    times = LoadTimes()
    assert times.expect(1.0, 5) is None and not times.ends_within(9, 1.0, None)
    times.note_arrival(1.0, 2.0, 10)
    expected = times.expect(3.0, 20)
    assert expected == pytest.approx(5.0)
    assert times.expect(3.0, 10) == pytest.approx(6.0)  # behind the other one
    assert not times.ends_within(9, 4.9, expected)  # nobody knows how long a step takes
    times.note_result(1.0)
    times.note_result(1.5)
    assert times.ends_within(2, 4.0, expected) and not times.ends_within(1, 4.0, expected)
