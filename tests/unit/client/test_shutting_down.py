"""Daemons that refuse a driver because they are shutting down, on fake ones: each is replaced like
a dead one. Real ones get SIGTERM in tests/e2e/test_rolling_upgrade.py."""

import asyncio
import contextlib
import random
import threading
import time
from collections import defaultdict

import numpy as np
import pytest

from rpc_schema.errors import DrainingError, IncompatibleError
from rpc_schema.version import PROTOCOL_VERSION
from tests.support.fake_daemon import EOS, FakeDaemon, reference_tokens
from tests.support.waiting import wait_until
from tests.unit.client.conftest import worker_config
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.errors import ReplacementFailed, WorkerDied, WorkerShutsDown
from worker_client.inputs.host_tensor import HostTensor
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.wire.control_channel import DEATH_CHECK_MS
from worker_client.worker_group import WorkerGroup

NUM_TOKENS = 12
THREE_HEARTBEATS_S = 0.8
LINGER_S = 0.4
"""Time for which a daemon that shuts down answers yet."""


class Upgrade:
    """Has fake daemons shut down, and starts their successors once they have ended."""

    def __init__(self, daemons) -> None:
        self.daemons = daemons.daemons
        self.timers: list[threading.Timer] = []
        self.gone: list[FakeDaemon] = []

    def begin(self, rank: int) -> FakeDaemon:
        leaving = self.daemons[rank]
        leaving.shut_down()
        self.gone.append(leaving)
        return leaving

    def follow(self, rank: int, version: int = PROTOCOL_VERSION) -> None:
        """End a daemon at once, and start its successor."""
        self.daemons[rank].kill()
        self.daemons[rank] = FakeDaemon(self.daemons[rank].endpoint, version=version).start()

    def run(self, rank: int) -> None:
        self.begin(rank)
        self.timers.append(threading.Timer(LINGER_S, self.follow, (rank,)))
        self.timers[-1].start()

    def finish(self) -> None:
        for timer in self.timers:
            timer.join()


@pytest.fixture
def request_of():
    """request_of(id): a request with a random prompt that no step ends early, and its tokens."""
    seed = random.randrange(1 << 32)
    print(f"{seed=}")
    rng = np.random.default_rng(seed)

    def make(name):
        expected = []
        while len(expected) < NUM_TOKENS:
            prompt = rng.integers(8, 1000, 5).astype(np.int32)
            expected = reference_tokens(prompt.tolist(), NUM_TOKENS, frozenset([EOS]))
        return GenerationRequest(name, prompt, max_tokens=NUM_TOKENS), expected

    return make


@pytest.fixture
def served(fakes, connect, request_of):
    """served(pp): (driver with two requests, what they end with, who has its daemons replaced)."""
    upgrades = []

    def make(pp: int, within_s: float = 60.0):
        daemons = fakes(pp)
        group = connect(daemons, pp)
        group.attach()
        config = worker_config(pp)
        limits = scheduler_limits(group.prepare(config), config)
        driver = Driver(
            group,
            Scheduler(limits),
            recover=lambda died: group.replace(died.rank, within_s=within_s),
        )
        expected = {}
        for name in ("a", "b"):
            request, expected[name] = request_of(name)
            driver.add_request(request)
        upgrades.append(Upgrade(daemons))
        return driver, expected, upgrades[-1]

    yield make
    for upgrade in upgrades:
        upgrade.finish()


def outputs_of(driver):
    return {output.req_id: output.token_ids for output in driver.run()}


@pytest.fixture
def outputs_with(request_of):
    """outputs_with(number, driver, expected): the outputs of all requests, and of more until so
    many steps have failed: rank 1 may serve some before rank 0 refuses a step."""

    def serve(number, driver, expected):
        outputs = outputs_of(driver)
        while driver.num_failures < number:
            name = f"more-{len(expected)}"
            request, expected[name] = request_of(name)
            driver.add_request(request)
            outputs |= outputs_of(driver)
        return outputs

    return serve


@pytest.mark.parametrize(("pp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_rank_that_shuts_down_is_replaced_without_waiting_for_its_end(
    served, outputs_with, pp, rank
):
    driver, expected, upgrade = served(pp)
    told = defaultdict(list)
    driver._on_result = lambda result: [
        told[req_id].append(token)
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True)
    ]
    driver.step()
    upgrade.run(rank)
    assert outputs_with(1, driver, expected) == expected
    upgrade.finish()
    assert driver.num_failures == 1
    dead = [each for each in driver.group.watch.events if each.kind == "dead"]
    assert [(each.rank, each.signal) for each in dead] == [(rank, "announced")]
    (gone,) = upgrade.gone
    assert gone.operations.count("CommitAttach") == 1, "it was not taken for its successor"
    assert {name: told[name][: len(tokens)] for name, tokens in expected.items()} == expected


def test_ranks_are_replaced_one_after_the_other(served, outputs_with):
    driver, expected, upgrade = served(2)
    driver.step()
    upgrade.run(0)
    assert outputs_with(1, driver, expected) == expected
    expected.clear()
    upgrade.run(1)
    assert outputs_with(2, driver, expected) == expected
    assert driver.num_failures == 2


def test_successor_that_came_unnoticed_takes_the_place_too(served):
    """The driver was held up: it has seen neither the shutdown nor the end."""
    driver, expected, upgrade = served(2)
    driver.step()
    upgrade.follow(0)
    assert outputs_of(driver) == expected
    assert driver.num_failures == 1
    (dead,) = [each for each in driver.group.watch.events if each.kind == "dead"]
    assert (dead.rank, "another daemon answers" in dead.detail) == (0, True)


def test_ranks_that_shut_down_together_are_replaced_together(served):
    """The survivor refuses to be attached."""
    driver, expected, upgrade = served(2)
    driver.step()
    upgrade.run(0)
    upgrade.run(1)
    assert outputs_of(driver) == expected
    upgrade.finish()


def test_successor_of_another_protocol_that_came_unnoticed_is_refused(served):
    driver, expected, upgrade = served(2)
    driver.step()
    upgrade.follow(0, PROTOCOL_VERSION + 1)
    with pytest.raises(IncompatibleError, match="rank 0 at "):
        outputs_of(driver)
    upgrade.follow(0)
    assert outputs_of(driver) == expected


def test_drained_daemon_that_ends_is_replaced(served):
    """As in a Pod: an operator's drain, then SIGTERM, while a driver waits for the drain's end."""
    driver, expected, upgrade = served(2)
    ended = driver.step()
    upgrade.daemons[1].gate.draining = True
    wait_until(lambda: is_held(driver, ended), "the drain")
    upgrade.follow(1)
    wait_until(lambda: not is_held(driver, ended), "the successor")
    ended += driver.run()
    assert {output.req_id: output.token_ids for output in ended} == expected


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
def test_driver_goes_on_once_a_drain_that_its_step_has_met_is_undone(served, pp, tells):
    """Held up for longer than the notice, it had not heard of the drain before. Heartbeats from
    before it, which come after the refusal, do not end it."""
    driver, expected, upgrade = served(pp)
    draining = upgrade.daemons[-1]
    ended = driver.step()
    draining.tells_drain, draining.gate.draining = tells, True
    wait_until(lambda: is_held(driver, ended), "the drain")
    until = time.monotonic() + THREE_HEARTBEATS_S
    while time.monotonic() < until:
        assert is_held(driver, ended)
    draining.gate.draining = False
    wait_until(lambda: not is_held(driver, ended), "its end")
    ended += driver.run()
    assert {output.req_id: output.token_ids for output in ended} == expected
    assert driver.num_failures == 1, "no other step was refused"


def is_held(driver, ended) -> bool:
    """Return True if a drain keeps the driver from its next step."""
    try:
        ended += driver.step()
    except DrainingError:
        return True
    return False


@pytest.fixture
def opened(fakes):
    """(opens a driver of two daemons that replaces them, who has these replaced)."""
    daemons, config = fakes(2), worker_config(2)

    @contextlib.contextmanager
    def open_driver():
        with WorkerGroup(daemons.endpoints, config.parallel) as group:
            group.attach()
            limits = scheduler_limits(group.prepare(config), config)
            yield Driver(group, Scheduler(limits), recover=lambda died: group.replace(died.rank))

    return open_driver, Upgrade(daemons)


def test_asyncio_program_reads_on(opened, request_of):
    open_driver, upgrade = opened

    async def main() -> list[int]:
        async with AsyncDriver(open_driver) as driver:
            tokens = []
            async for progress in driver.generate(asked):
                tokens += progress.token_ids
                if not upgrade.gone:
                    upgrade.run(1)
            return tokens

    asked, expected = request_of("a")
    assert asyncio.run(main()) == expected
    upgrade.finish()


def test_idle_asyncio_program_outlives_the_drain_of_one_rank_and_the_end_of_another(
    opened, request_of
):
    open_driver, upgrade = opened
    staying, leaving = upgrade.daemons

    def tries_again():
        return staying.operations.count("PrepareAttach") > 2

    async def main() -> list[int]:
        async with AsyncDriver(open_driver) as driver:
            staying.gate.draining = True
            leaving.kill()
            await asyncio.to_thread(wait_until, tries_again, "it tries again")
            upgrade.follow(1)
            staying.gate.draining = False
            return [token async for each in driver.generate(asked) for token in each.token_ids]

    asked, expected = request_of("a")
    assert asyncio.run(main()) == expected


def test_driver_that_waits_attaches_to_the_successor(fakes, connect):
    daemons = fakes(2)
    upgrade = Upgrade(daemons)
    upgrade.begin(1)
    with pytest.raises(WorkerShutsDown, match=r"rank 1 at .*attach\(wait_s=SECONDS\)"):
        connect(daemons, 2).attach()
    upgrade.run(1)
    group = connect(daemons, 2)
    group.attach(wait_s=60.0)
    assert [status.worker_uid for status in group.get_status()] == [d.uid for d in daemons.daemons]
    upgrade.finish()


def test_without_a_successor_the_driver_ends_at_the_deadline_and_may_go_on_later(served):
    driver, expected, upgrade = served(2, within_s=0.5)
    driver.step()
    upgrade.begin(1)
    began = time.monotonic()
    with pytest.raises(ReplacementFailed, match="rank 1 is not replaced; fix: ") as failed:
        outputs_of(driver)
    assert 0.5 <= time.monotonic() - began < 10.0
    assert failed.value.rank == 1 and "one that is DRAINING" in str(failed.value)
    upgrade.follow(1)
    assert outputs_of(driver) == expected


def test_driver_that_does_not_recover_is_told_the_rank_and_the_fix(served):
    driver, _, upgrade = served(2)
    driver.recover = _raise
    driver.step()
    leaving = upgrade.begin(1)
    with pytest.raises(WorkerShutsDown, match=f"rank 1 at {leaving.endpoint}: .*; fix: ") as told:
        outputs_of(driver)
    assert told.value.rank == 1


def _raise(died: WorkerDied) -> None:
    raise died


OPERATIONS = {
    "sleep": lambda group: group.memory.sleep(),
    "relink": lambda group: group.relink(),
    "profile": lambda group: group.profiling.start(),
    "adapter": lambda group: group.loras.add("one"),
    "reload": lambda group: group.weights.reload(),
    "update": lambda group: group.weights.start_update(),
    "upload": lambda group: group.uploads.put(
        [HostTensor.from_array(np.zeros((1, 4), np.float32))]
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_that_meets_the_shutdown_names_rank_and_fix_and_the_driver_serves_on(
    served, name
):
    driver, expected, upgrade = served(2)
    driver.step()
    leaving = upgrade.begin(0)
    with pytest.raises(WorkerShutsDown, match=f"rank 0 at {leaving.endpoint}: .*; fix: "):
        OPERATIONS[name](driver.group)
    assert driver.group.clients[0].get_status().serving == "DRAINING", "control answers"
    upgrade.run(0)
    assert outputs_of(driver) == expected


def test_rank_that_shuts_down_answers_control_requests_until_its_end(served):
    driver, _, upgrade = served(2)
    driver.step()
    leaving = upgrade.begin(0)
    with pytest.raises(WorkerShutsDown):
        driver.group.relink()
    answer = leaving._control_reply

    def answer_late(request):
        time.sleep(5 * DEATH_CHECK_MS / 1000)
        return answer(request)

    leaving._control_reply = answer_late
    assert driver.group.clients[0].get_status().serving == "DRAINING"
    leaving.kill()
    with pytest.raises(WorkerDied, match="rank 0 at "):
        driver.group.clients[0].get_status()
