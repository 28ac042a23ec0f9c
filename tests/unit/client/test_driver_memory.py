"""A driver keeps nothing of requests that have ended, of steps that are done, and of weights that
were replaced."""

import random
from dataclasses import replace

from rpc_schema.identity import ContentIdentity
from tests.support.fake_daemon import Fault
from tests.support.live_objects import grown, reachable
from tests.support.waiting import wait_until
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_drafting_scheduler import DraftingGroup
from tests.unit.client.test_drafting_scheduler import make_limits as drafting_limits
from tests.unit.client.test_scheduler import make_limits, random_requests
from worker_client.driver import Driver
from worker_client.group.loras import GroupAdapter
from worker_client.group.sent_steps import SentStep
from worker_client.group.weights_state import WeightsVersion
from worker_client.requests import with_adapter
from worker_client.scheduler import Scheduler

NUM_REQUESTS = 120
NUM_WAVES = 4
"""The first one fills what is bounded, such as the prefix cache."""
FEW = 150
"""Objects by which the last waves may differ, such as the latest events: less than one for each of
their requests, or of their steps."""
IDENTITY = ContentIdentity(content=bytes(32))


def fresh_rng():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


def wave(rng, number):
    """Requests whose ids no wave before has had."""
    made = random_requests(rng, NUM_REQUESTS)
    return [replace(request, id=f"w{number}-{request.id}") for request in made]


def test_a_driver_does_not_grow_with_its_requests_steps_and_failures(fakes, connect):
    rng, daemons = fresh_rng(), fakes(2)
    group = connect(daemons, 2)
    group.attach()
    group.prepare(worker_config(2, max_model_len=128), num_gpu_blocks=64)
    scheduler = Scheduler(make_limits(pipeline_parallel_size=2))
    driver, last = Driver(group, scheduler, max_history=16), daemons.daemons[-1]
    counts = []
    for number in range(NUM_WAVES):
        last.faults = [Fault(last.num_executes + rng.randrange(100)) for _ in range(2)]
        requests, num_ended = wave(rng, number), 0
        for request in requests:
            driver.add_request(request)
        while driver.busy:
            num_ended += len(driver.step())
            if rng.random() < 0.02:
                driver.abort_request(rng.choice(requests).id)
        assert num_ended > NUM_REQUESTS / 2

        def are_known_to_be_done():
            group.look()
            return reachable(group)[SentStep] <= 2

        wait_until(are_known_to_be_done, "heartbeats say that no step is to be sent again")
        counts.append(reachable(driver, group, scheduler))
    assert last.num_executes > 4 * FEW
    assert not grown(counts[1:], FEW)


def test_a_scheduler_does_not_grow_with_drafts_and_updates():
    rng, counts = fresh_rng(), []
    group = DraftingGroup(rng, 0.7, drafting_limits(num_blocks=60, pipeline_parallel_size=2))
    for number in range(NUM_WAVES):
        adapter = GroupAdapter("a", 1, 1 + number, IDENTITY)
        for place, request in enumerate(wave(rng, number)):
            used = with_adapter(request, adapter.extension) if place % 4 == 0 else request
            group.scheduler.add_request(used)
        for step in range(10):
            group.send()
            while group.in_flight:
                group.take()
            group.scheduler.use_weights(WeightsVersion(10 * number + step, IDENTITY))
            adapter = adapter._replace(weights_version=1 + step)
            group.scheduler.use_adapter(adapter, rng.choice(["keep", "drop"]), 0)
        group.run(fails=0.01, aborts=0.02)
        assert len(group.outputs) > NUM_REQUESTS / 2
        group.outputs.clear()
        counts.append(reachable(group.scheduler, group.table))
    assert not grown(counts[1:], FEW)
    assert counts[-1][GroupAdapter] == 1
