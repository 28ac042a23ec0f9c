"""Replicas on real daemons, each alone or all in lockstep: every token is transformers', whichever
replica computes it, while a rank of another is killed, and after the driver of all of them was.
Scripted failures are in tests/unit/client/test_data_parallel.py and test_lockstep.py."""

import contextlib
import dataclasses
import random
import threading

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from examples.lora_adapter import write_adapter
from rpc_schema.codec import decode_step, encode_step
from rpc_schema.config import LoraConfig
from rpc_schema.errors import ConfigError, FencedError, WorkerError
from tests.support.driving import random_cases
from tests.support.forked_daemons import ForkedDaemons
from tests.support.replicated_driver import Plan, ReplicaPlan, run_and_die
from tests.support.serving import MAX_DAEMONS, generate
from tests.support.serving import worker_config as config_of
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.errors import StepFailed, WorkerDied
from worker_client.group.group_channel import Links
from worker_client.launcher import serve_command
from worker_client.replicas.group import DataParallelGroup
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import LockstepOutput, SchedulerOutput
from worker_client.trainer.sender import WeightSender
from worker_client.worker_group import WorkerGroup

NUM_BLOCKS = 128
MAX_TOKENS = 24


def worker_config(model, pp=1, tp=1, *, lockstep=False):
    config = config_of(model, pp, tp)
    parallel = replace(config.parallel, data_parallel_size=2, data_parallel_lockstep=lockstep)
    return replace(config, parallel=parallel)


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


@pytest.mark.parametrize("lacking", ["model", "kv_files"])
def test_replica_that_lacks_what_the_model_needs_is_named(checkpoint, tmp_path, cases, lacking):
    """Nothing is left half-loaded, and the next driver is served."""
    path = checkpoint().path
    config, own = worker_config(path), config_of(path)
    root = tmp_path if lacking == "model" else path.parent
    if lacking == "kv_files":
        config = replace(
            config, cache=replace(config.cache, kv_files=True, kv_host_memory_bytes=1 << 20)
        )
    with_files = serve_command("--model-root", str(path.parent), "--kv-file-dir", str(tmp_path))
    with (
        ForkedDaemons(["cpu"], path.parent, command=with_files) as one,
        ForkedDaemons(["cpu"], root) as other,
    ):
        endpoints = one.endpoints + other.endpoints
        with DataParallelGroup(endpoints, config.parallel) as group:
            group.attach()
            with pytest.raises(WorkerError, match=r"fix|root") as caught:
                group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
            assert caught.value.rank == 1 and endpoints[1] in str(caught.value)
            assert group.get_status()[1].load == "CREATED"
        with WorkerGroup(one.endpoints, own.parallel) as group:
            group.attach(wait_for_lease_s=0.0)
            loaded = group.prepare(own, num_gpu_blocks=NUM_BLOCKS, reload=True)
            assert generate(group, loaded, cases[0].requests).tokens == cases[0].expected


def test_adapter_that_one_replica_lacks_is_in_none(checkpoint, tmp_path, cases):
    path = checkpoint().path
    write_adapter(path, tmp_path / "lent", rank=4, seed=1)
    config = replace(worker_config(path), lora=LoraConfig(max_loras=1))
    with (
        ForkedDaemons(["cpu"], path.parent, lora_root=tmp_path) as one,
        ForkedDaemons(["cpu"], path.parent) as other,
        DataParallelGroup(one.endpoints + other.endpoints, config.parallel) as group,
    ):
        group.attach()
        loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
        with pytest.raises(WorkerError, match="lora-root") as caught:
            group.loras.add("lent")
        assert caught.value.rank == 1
        for replica, model, own in zip(group.replicas, loaded, cases, strict=True):
            assert not replica.loras.known
            assert not any(reply.adapters for reply in replica.loras.list_by_rank())
            assert generate(replica, model, own.requests).tokens == own.expected


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


@pytest.fixture
def open_lockstep(daemons, checkpoint, model_root):
    """Attach to daemons, the pool's if they suffice, as two replicas in lockstep, and load them
    anew: (group, scheduler)."""
    with contextlib.ExitStack() as opened:

        def make(pp, tp):
            config, count = worker_config(checkpoint().path, pp, tp, lockstep=True), 2 * pp * tp
            if count > MAX_DAEMONS:
                own = opened.enter_context(ForkedDaemons(["cpu"] * count, model_root))
                endpoints = own.endpoints
            else:
                endpoints = daemons.endpoints(count)
            group = opened.enter_context(WorkerGroup(endpoints, config.parallel))
            group.attach(force=True)
            loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True)
            limits = scheduler_limits(loaded, config)
            return group, LockstepScheduler([Scheduler(limits), Scheduler(limits)])

        yield make


def every_request(cases):
    """The requests of both cases, and their tokens, under ids of their own."""
    requests, expected = [], {}
    for number, own in enumerate(cases):
        for request in own.requests:
            name = f"{number}-{request.id}"
            requests.append(dataclasses.replace(request, id=name))
            expected[name] = own.expected[request.id]
    return requests, expected


@pytest.mark.parametrize(
    ("pp", "tp"),
    [
        pytest.param(1, 1, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, marks=pytest.mark.exhaustive),
        (1, 2),
        pytest.param(2, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_in_lockstep_generate_the_model_s_tokens(open_lockstep, cases, pp, tp):
    """Requests come one by one, between phases in which a replica, or both, are idle."""
    group, scheduler = open_lockstep(pp, tp)
    driver = Driver(group, scheduler)
    requests, expected = every_request(cases)
    chance, outputs = random.Random(pp * 2 + tp), []
    for request in requests:
        driver.add_request(request)
        for _ in range(chance.choice([0, 1, 3, 2 * MAX_TOKENS])):
            if driver.busy:
                outputs += driver.step()
    outputs += driver.run()
    assert sorted(each.req_id for each in outputs) == sorted(expected)
    assert {each.req_id: each.token_ids for each in outputs} == expected
    assert [status.rank for status in group.get_status()] == list(range(2 * pp * tp))

    def are_in_step():  # those that answer no steps may be behind
        return len({(status.link, status.last_seq) for status in group.get_status()}) == 1

    wait_until(are_in_step, "the ranks are in step")
    assert not driver.num_failures


@pytest.mark.parametrize(
    ("pp", "tp", "rank"), [(2, 1, 3), pytest.param(1, 2, 0, marks=pytest.mark.exhaustive)]
)
def test_rank_of_replicas_in_lockstep_is_killed_and_replaced(
    open_lockstep, daemons, cases, pp, tp, rank
):
    """Steps are in flight on both replicas; each request ends once, with its tokens."""
    group, scheduler = open_lockstep(pp, tp)
    reports = []

    def recover(died):
        assert died.rank == rank
        daemons.restart_dead()
        reports.append(group.replace(died.rank))

    driver = Driver(group, scheduler, recover=recover)
    requests, expected = every_request(cases)
    for request in requests:
        driver.add_request(request)
    outputs = [*driver.step(), *driver.step(), *driver.step()]
    assert group.num_in_flight
    daemons.kill(rank)
    outputs += driver.run()
    assert sorted(each.req_id for each in outputs) == sorted(expected)
    assert {each.req_id: each.token_ids for each in outputs} == expected
    assert [report.loaded_ranks for report in reports] == [(rank,)]
    assert len({status.link for status in group.get_status()}) == 1


def test_next_driver_adopts_the_requests_of_replicas_in_lockstep(open_lockstep, checkpoint, cases):
    first, scheduler = open_lockstep(1, 1)
    driver = Driver(first, scheduler)
    requests, expected = every_request(cases)
    for request in requests:
        driver.add_request(request)
    for _ in range(6):
        driver.step()
    config = worker_config(checkpoint().path, lockstep=True)
    endpoints = [client.endpoint.control for client in first.clients]
    with WorkerGroup(endpoints, config.parallel) as group:
        group.attach(force=True, keep_requests=True)
        limits = scheduler_limits(group.prepare(config, num_gpu_blocks=NUM_BLOCKS), config)
        adopted = group.adopt_requests()
        assert {each.req_id for each in adopted} == expected.keys()
        assert [each.dp_rank for each in adopted] == [0] * 3 + [1] * 3
        assert all(each.num_computed_tokens for each in adopted)
        scheduler = LockstepScheduler([Scheduler(limits), Scheduler(limits)])
        outputs = [*scheduler.adopt_requests(adopted), *Driver(group, scheduler).run()]
        assert {each.req_id: each.token_ids for each in outputs} == expected


def test_update_is_one_operation_of_replicas_in_lockstep(open_lockstep, checkpoint):
    """A trainer sends each tensor to all replicas' ranks, which then have one version."""
    new = checkpoint(seed=91)
    own = random_cases(new, 42, 4, MAX_TOKENS)
    group, scheduler = open_lockstep(1, 1)
    with WeightSender(group, "gloo", timeout_s=20.0) as sender:
        report = sender.send(dict(new.model.state_dict()))
    weights = [status.weights for status in group.get_status()]
    assert [each.version for each in weights] == [report.version] * 2
    assert weights[0].identity == weights[1].identity
    driver = Driver(group, scheduler)
    for request in own.requests:
        driver.add_request(request)
    assert {each.req_id: each.token_ids for each in driver.run()} == own.expected


@pytest.mark.exhaustive
def test_counts_of_replicas_that_are_wrong_refuse_the_step(open_lockstep, cases):
    """A daemon checks its own replica's, and that there are those of all; nothing is applied."""
    group, scheduler = open_lockstep(1, 1)
    channel, idle = group._channel, LockstepOutput.of([SchedulerOutput(), SchedulerOutput()])
    send = channel.send_step

    def sending(counts):
        def changed(ids, by_replica, **options):
            messages = [msgspec.structs.replace(decode_step(each), **counts) for each in by_replica]
            send(ids, [encode_step(message) for message in messages], **options)

        return changed

    for counts, problem in (
        (b"", "0 bytes"),
        (bytes(8), "8 bytes"),
        (counts_of((1, 0), (1, 0)), r"\[1, 0\]"),
        (counts_of((0, 0), (0, -1)), "-1"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "send_step", sending({"replica_counts": counts}))
            with pytest.raises(StepFailed, match=f"replica_counts.*{problem}"):
                group.execute_model(idle).result()
    driver = Driver(group, scheduler)
    for request in cases[0].requests:
        driver.add_request(request)
    assert {each.req_id: each.token_ids for each in driver.run()} == cases[0].expected


def counts_of(*replicas):
    return np.array(replicas, "<i4").tobytes()
