"""Drivers that are killed or stopped: the daemons keep what is loaded, and the next driver
continues at once, regardless of what the dead one had sent."""

import os
import random
import signal

import pytest
from msgspec.structs import replace

from rpc_schema.config import WorkerConfig
from rpc_schema.lifecycle import Status
from tests.support.doomed_driver import Death, DriverNursery, Plan, read_report, start
from tests.support.driving import Cases, random_cases
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import LONG_LEASE, connect, generate, worker_config
from tests.support.stopping import stop_process
from tests.support.waiting import PATIENCE_S
from worker_client.worker_group import WorkerGroup

STEP_DEADLINE_MS = 2000
"""gloo ends a wait for a missing peer one second after this."""

NUM_POINTS = 20
LEASE_TTL_S = 2.0
"""Lease of the drivers that are to lose it."""


def plan_for(endpoints: list[str], config: WorkerConfig, cases: Cases) -> Plan:
    return Plan(
        endpoints=endpoints,
        config=config,
        prompts=[request.prompt.tolist() for request in cases.requests],
        max_tokens=cases.requests[0].max_tokens,
        force=True,
        lease_ttl_s=LONG_LEASE.ttl_s,
    )


def forever(plan: Plan) -> Plan:
    return replace(plan, forever=True, lease_ttl_s=LEASE_TTL_S)


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons for this module only."""
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.fixture
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


@pytest.fixture
def loaded_daemons(two_daemons, checkpoint):
    """loaded_daemons(pp, tp) -> the two daemons, freshly loaded, and their configuration."""

    def load(pp, tp=1):
        config = worker_config(checkpoint().path, pp, tp, step_deadline_ms=STEP_DEADLINE_MS)
        with connect(two_daemons.endpoints, config):
            return two_daemons, config

    return load


def loads(status: Status) -> list[str]:
    return [line for line in status.transitions if "(LoadModel)" in line or "(Reset)" in line]


def test_driver_killed_under_load_costs_nothing_that_is_loaded(loaded_daemons, checkpoint):
    cases = random_cases(checkpoint(), seed=40)
    daemons, config = loaded_daemons(2)
    with start(forever(plan_for(daemons.endpoints, config, cases))) as first:
        read_report(first)
        first.kill()
    daemons.check_alive()
    with WorkerGroup(daemons.endpoints, config.parallel, lease=LONG_LEASE) as group:
        before = group.get_status()
    with connect(daemons.endpoints, config, reload=False, force=False) as (group, loaded):
        after = group.get_status()
        assert loaded.was_loaded
        assert set(loaded.seconds) <= {"relink"}
        assert generate(group, loaded, cases.requests).tokens == cases.expected
    for old, new in zip(before, after, strict=True):
        assert (new.pid, new.worker_uid, new.load) == (old.pid, old.worker_uid, "READY")
        assert new.epoch > old.epoch
        assert new.memory_bytes["weights"] == old.memory_bytes["weights"] > 0
        assert loads(new) == loads(old)


def test_stopped_driver_wakes_up_fenced(loaded_daemons, checkpoint):
    cases = random_cases(checkpoint(), seed=41)
    daemons, config = loaded_daemons(2)
    with start(forever(plan_for(daemons.endpoints, config, cases))) as first:
        read_report(first)
        stop_process(first.pid)
        with connect(daemons.endpoints, config, reload=False, force=False) as (group, loaded):
            assert loaded.was_loaded
            assert generate(group, loaded, cases.requests).tokens == cases.expected
            os.kill(first.pid, signal.SIGCONT)
            assert first.wait(PATIENCE_S) != 0
            assert "FencedError" in first.stderr.read()
            assert generate(group, loaded, cases.requests).tokens == cases.expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_driver_killed_between_two_ranks(loaded_daemons, nursery, checkpoint, pp, tp):
    """Each driver proves that the one before it left nothing wrong behind, then dies too."""
    cases = random_cases(checkpoint(), seed=42, count=3, max_tokens=10)
    expected = [cases.expected[request.id] for request in cases.requests]
    daemons, config = loaded_daemons(pp, tp)
    plan = plan_for(daemons.endpoints, config, cases)
    randomness = random.Random(pp)
    must_relink = False
    for point in range(NUM_POINTS // 2 + 1):
        death = Death(randomness.randint(1, 10), [randomness.randrange(2)], bool(point % 2))
        try:
            report, exit_code = nursery.live(replace(plan, death=death))
        except AssertionError:
            daemons.check_alive()  # tells more, if it was one of them
            raise
        assert exit_code == -signal.SIGKILL
        assert report.tokens == expected, (point, death)
        assert report.was_loaded
        assert set(report.phases) <= {"relink"}
        assert "relink" in report.phases or not must_relink, (point, death)
        must_relink = death.after_receipt
    daemons.check_alive()
