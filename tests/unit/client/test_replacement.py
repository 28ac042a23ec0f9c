"""Replacement of a lost rank, on fake daemons: failures during it. Real ones
are killed in tests/faults/test_relink.py."""

import threading

import numpy as np
import pytest

from rpc_schema.errors import ErrorCode, ErrorScope
from tests.support.fake_daemon import FakeDaemon, Fault, reference_tokens
from tests.support.waiting import wait_until
from tests.unit.client.conftest import worker_config
from worker_client.driver import Driver
from worker_client.errors import ReplacementFailed, WorkerDied
from worker_client.group.replacement import REPLACE_ATTEMPTS
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits

PROMPT = [3, 1, 4, 1, 5]


class Line:
    """The fake daemons that take a group's last place, one after the other."""

    def __init__(self, daemons) -> None:
        self._daemons = daemons.daemons
        self._endpoint = daemons.endpoints[-1]

    def end(self) -> None:
        self._daemons[-1].kill()

    def follow(self, *faults: Fault) -> FakeDaemon:
        """Start the next one, which fails its warm-ups so."""
        self.end()
        successor = FakeDaemon(self._endpoint)
        successor.warm_up_faults = list(faults)
        self._daemons[-1] = successor.start()
        return successor


@pytest.fixture
def lost(fakes, connect):
    """A pipeline that served and has lost its second rank: (driver, who follows it)."""
    daemons = fakes(2)
    group = connect(daemons, 2)
    group.attach()
    model = group.prepare(worker_config(2))
    limits = SchedulerLimits(4, 32, model.max_model_len, model.num_blocks, model.block_size, 2)
    driver = Driver(
        group, Scheduler(limits), recover=lambda died: group.replace(died.rank, within_s=60.0)
    )
    driver.add_request(GenerationRequest("a", np.array(PROMPT, np.int32), max_tokens=12))
    driver.step()
    line = Line(daemons)
    line.end()
    with pytest.raises(WorkerDied):
        while True:
            group.look()
    return driver, line


def serves(driver: Driver) -> bool:
    (output,) = driver.run()
    return output.token_ids == reference_tokens(PROMPT, 12, frozenset())


def test_warm_up_that_fails_is_tried_again(lost):
    driver, line = lost
    successor = line.follow(Fault(0, code=ErrorCode.INTERNAL))
    assert serves(driver)
    assert successor.operations.count("CompileOrWarmUpModel") == 2


def test_warm_up_that_goes_on_failing_is_given_up(lost):
    driver, line = lost
    successor = line.follow(*[Fault(0, code=ErrorCode.INTERNAL)] * REPLACE_ATTEMPTS)
    with pytest.raises(ReplacementFailed, match="scripted"):
        next(driver.run())
    assert successor.operations.count("CompileOrWarmUpModel") == REPLACE_ATTEMPTS


def test_new_rank_that_tells_of_its_end_is_waited_out(lost):
    """Its device is lost in the warm-up: it answers for a while yet, and is not to be loaded."""
    driver, line = lost
    fault = Fault(0, code=ErrorCode.DEVICE, scope=ErrorScope.WORKER)
    doomed = line.follow(fault)
    third = threading.Timer(0.4, line.follow)

    def fail(request, code, message, *, fault=None) -> None:
        third.start()
        FakeDaemon._error(doomed, request, code, message, fault=fault)

    doomed._error = fail
    assert serves(driver)
    third.join()
    assert doomed.operations.count("LoadModel") == 1


@pytest.mark.parametrize("looks", [True, False])
def test_cached_prefixes_go_with_a_rank_that_dies_while_the_group_is_idle(fakes, connect, looks):
    """No step fails for its death, and no request has a row; but its successor has no KV."""
    daemons = fakes(2)
    group = connect(daemons, 2)
    group.attach()
    model = group.prepare(worker_config(2))
    limits = SchedulerLimits(4, 64, model.max_model_len, model.num_blocks, model.block_size, 2)
    line, replaced = Line(daemons), []

    def recover(died: WorkerDied) -> None:
        line.follow()
        group.replace(died.rank, within_s=60.0)
        replaced.append(died.rank)

    driver = Driver(group, Scheduler(limits), recover=recover)
    prompt = np.arange(2 * model.block_size + 1, dtype=np.int32) % 9

    def cached(name: str) -> int:
        """Tokens that a request began with when it was served."""
        driver.add_request(GenerationRequest(name, prompt, max_tokens=3))
        (output,) = driver.run()
        assert output.token_ids == reference_tokens(prompt, 3, frozenset())
        first, last = daemons.daemons
        wait_until(lambda: first.last_seq == last.last_seq, "the rank that owes no outcome")
        steps = [new for each in first.executes for new in each.scheduled_new_reqs]
        return [new.num_computed_tokens for new in steps if new.req_id == name][-1]

    assert [cached(name) for name in "ab"] == [0, 2 * model.block_size]
    line.end()
    while looks and not replaced:
        driver.look()
    assert [cached(name) for name in "cd"] == [0, 2 * model.block_size]
    assert replaced == [1]
