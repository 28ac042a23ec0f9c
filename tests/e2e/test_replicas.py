"""Replicas on real daemons: every token is transformers', whichever replica computes it, while a
rank of another is killed, and after the driver of all of them was. Scripted failures are in
tests/unit/client/test_data_parallel.py."""

import threading

import pytest
from msgspec.structs import replace

from rpc_schema.errors import ConfigError, FencedError
from tests.support.driving import random_cases
from tests.support.replicated_driver import Plan, ReplicaPlan, run_and_die
from tests.support.serving import generate
from tests.support.serving import worker_config as config_of
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.group.group_channel import Links
from worker_client.replicas.group import DataParallelGroup
from worker_client.scheduler import Scheduler, scheduler_limits

NUM_BLOCKS = 128
MAX_TOKENS = 24


def worker_config(model, pp=1, tp=1):
    config = config_of(model, pp, tp)
    return replace(config, parallel=replace(config.parallel, data_parallel_size=2))


@pytest.fixture(scope="module")
def cases(checkpoint):
    """Requests of each replica, and their tokens."""
    return [random_cases(checkpoint(), seed, 3, MAX_TOKENS) for seed in (40, 41)]


@pytest.fixture
def open_replicas(daemons, checkpoint):
    """Attach to the pool's daemons as two replicas, and load them anew: (group, loaded)."""
    groups = []

    def make(pp, tp):
        endpoints = daemons.endpoints(2 * pp * tp)
        config = worker_config(checkpoint().path, pp, tp)
        groups.append(DataParallelGroup(endpoints, config.parallel))
        groups[-1].attach(force=True)
        return groups[-1], groups[-1].prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True)

    yield make
    for group in groups:
        group.close()


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2)])
def test_each_replica_generates_the_model_s_tokens(open_replicas, cases, pp, tp):
    group, loaded = open_replicas(pp, tp)
    for replica, model, own in zip(group.replicas, loaded, cases, strict=True):
        assert generate(replica, model, own.requests).tokens == own.expected
    assert [status.rank for status in group.get_status()] == list(range(2 * pp * tp))
    others = dict(zip(group.replicas, reversed(cases), strict=True))
    runs = group.on_all(lambda replica: generate(replica, loaded[0], others[replica].requests))
    assert [run.tokens for run in runs] == [case.expected for case in others.values()]


def test_rank_is_killed_and_replaced_beside_a_replica_that_serves(
    open_replicas, daemons, checkpoint, cases
):
    """Replica 0 has steps in flight at the kill, and serves all the time that replica 1 has only
    one of its ranks, relinks and loads."""
    group, loaded = open_replicas(2, 1)
    config = worker_config(checkpoint().path, 2, 1)
    serving, failing = group.replicas
    drivers = [
        Driver(replica, Scheduler(scheduler_limits(model, config)))
        for replica, model in zip(group.replicas, loaded, strict=True)
    ]
    for driver, own in zip(drivers, cases, strict=True):
        for request in own.requests:
            driver.add_request(request)
        driver.step()
    assert serving.num_in_flight
    before = [(status.epoch, status.link) for status in serving.get_status()]

    daemons.kill(3)
    assert {each.req_id: each.token_ids for each in drivers[0].run()} == cases[0].expected

    with pytest.raises(WorkerDied) as caught:
        list(drivers[1].run())
    assert caught.value.rank == 3
    reports = []
    thread = threading.Thread(
        target=lambda: reports.append(failing.replace(caught.value.rank)), daemon=True
    )
    thread.start()
    daemons.restart_dead()
    rounds = 0
    while thread.is_alive() or not rounds:
        assert generate(serving, loaded[0], cases[1].requests).tokens == cases[1].expected
        rounds += 1
    assert reports[0].loaded_ranks == (3,)
    assert not drivers[0].num_failures
    assert [(status.epoch, status.link) for status in serving.get_status()] == before
    assert {each.req_id: each.token_ids for each in drivers[1].run()} == cases[1].expected


def test_next_driver_adopts_the_requests_of_every_replica(daemons, checkpoint, cases):
    """The driver of both is killed with steps in flight; the replicas have taken different numbers
    of steps."""
    config = worker_config(checkpoint().path, 1, 2)
    plan = Plan(
        daemons.endpoints(4),
        config,
        [
            ReplicaPlan({each.id: list(map(int, each.prompt)) for each in own.requests}, num_steps)
            for own, num_steps in zip(cases, (11, 4), strict=True)
        ],
        MAX_TOKENS,
        NUM_BLOCKS,
    )
    run_and_die(plan)
    with DataParallelGroup(plan.endpoints, config.parallel) as group:
        statuses = group.attach(keep_requests=True)
        assert len({status.epoch for status in statuses}) == 1
        loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
        assert all(model.was_loaded for model in loaded)
        for replica, model, own in zip(group.replicas, loaded, cases, strict=True):
            adopted = replica.adopt_requests()
            assert {each.req_id for each in adopted} == own.expected.keys()
            assert any(each.num_computed_tokens for each in adopted)
            scheduler = Scheduler(scheduler_limits(model, config))
            ended = scheduler.adopt_requests(adopted)
            outputs = [*ended, *Driver(replica, scheduler).run()]
            assert {each.req_id: each.token_ids for each in outputs} == own.expected


def test_replicas_that_hold_different_weights_read_them_again(open_replicas, checkpoint):
    group, _ = open_replicas(1, 1)
    config = worker_config(checkpoint().path)
    group.replicas[1].weights.reload(version=7)
    assert [replica.weights.version.number for replica in group.replicas] == [0, 7]
    loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
    assert [replica.weights.version.number for replica in group.replicas] == [8, 8]
    assert all(model.was_loaded for model in loaded)


def test_daemon_takes_neither_links_nor_steps_of_another_replica(open_replicas, checkpoint, cases):
    group, loaded = open_replicas(1, 1)
    first, second = group.replicas
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "next_number", second.get_status()[0].link + 1)
        with pytest.raises(ConfigError, match=r"not a link of replica 1 of 2; .* 1 modulo 2"):
            second.relink()
    second.relink()
    assert generate(second, loaded[1], cases[1].requests).tokens == cases[1].expected
    second._channel.links.numbers[1] = first.get_status()[0].link
    with pytest.raises(FencedError):
        second.execute_dummy_batch().result()
    assert generate(first, loaded[0], cases[0].requests).tokens == cases[0].expected
    group.attach()
    group.prepare(worker_config(checkpoint().path), num_gpu_blocks=NUM_BLOCKS)
    assert generate(second, loaded[1], cases[0].requests).tokens == cases[0].expected
