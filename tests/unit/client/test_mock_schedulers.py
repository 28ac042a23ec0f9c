"""Independent schedulers work: the mock ones serve fake daemons, with failures."""

import random

import pytest

from rpc_schema.errors import ErrorCode
from tests.support.fake_daemon import EOS, VOCAB_SIZE, Fault, reference_tokens
from tests.support.mock_schedulers import TRACES, RandomScheduler, TraceScheduler, trace_requests
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_scheduler import expected, random_requests
from worker_client.driver import Driver
from worker_client.scheduler import SchedulerLimits


def start(fakes, connect, pp):
    daemons = fakes(pp)
    group = connect(daemons, pp)
    group.attach()
    model = group.prepare(worker_config(pp, max_model_len=128))
    limits = SchedulerLimits(8, 32, 128, model.num_blocks, 4, pp, (EOS,))
    return daemons, group, limits


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("failing", [False, True])
def test_random_scheduler(fakes, connect, pp, failing):
    daemons, group, limits = start(fakes, connect, pp)
    if failing:
        for daemon in daemons.daemons:
            daemon.faults = [Fault(n, code=ErrorCode.CAPACITY) for n in (3, 20, 21, 60)]
    scheduler = RandomScheduler(limits, seed=pp)
    driver = Driver(group, scheduler)
    requests = random_requests(random.Random(pp), 20)
    for request in requests:
        driver.add_request(request)
    outputs = {output.req_id: output.token_ids for output in driver.run()}
    assert outputs == {request.id: expected(request) for request in requests}
    assert scheduler.num_preemptions > 0
    assert (driver.num_failures > 0) == failing


def test_trace_scheduler(fakes, connect):
    _, group, limits = start(fakes, connect, 2)
    trace = TRACES / "chunks_and_preemption.json"
    driver = Driver(group, TraceScheduler(limits, trace))
    requests = trace_requests(trace, VOCAB_SIZE)
    for request in requests:
        driver.add_request(request)
    outputs = {output.req_id: output.token_ids for output in driver.run()}
    for request in requests:
        prompt = request.prompt.tolist()
        assert outputs[request.id] == reference_tokens(prompt, request.max_tokens, frozenset())
