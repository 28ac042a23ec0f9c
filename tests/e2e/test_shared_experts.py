"""Replicas in lockstep that share experts: the same tokens as transformers' in every parallel
shape, with replicas that are idle at random, steps that are refused or fail, and a killed rank."""

import contextlib
import dataclasses
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rpc_schema.config import LoraConfig
from rpc_schema.errors import ConfigError
from tests.support.checkpoints import decisive_prompts
from tests.support.chosen_experts import assert_experts
from tests.support.exhaustive import exhaustively
from tests.support.expert_counts import NearTie, expected_loads
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.forked_daemons import ForkedDaemons
from tests.support.lora_adapters import ATTENTION, adapted_requests, make_adapter
from tests.support.saving_daemons import saving_daemons
from tests.support.serving import MAX_DAEMONS, greedy_request
from tests.support.serving import worker_config as config_of
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.group.expert_loads import loads_by_layer
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.trainer.sender import WeightSender
from worker_client.worker_group import WorkerGroup

ARCHITECTURE = "Qwen2MoeForCausalLM"
FIELDS = {"num_experts": 7, "num_hidden_layers": 3, "mlp_only_layers": [1]}
NUM_BLOCKS = 128
TOKENS = 12
LENGTHS = [9, 17, 4, 1, 23, 6]
SEED = random.randrange(1 << 30)
print(f"seed {SEED}")


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(ARCHITECTURE, seed=111, **FIELDS)


@pytest.fixture(scope="module")
def case(model):
    """Prompts whose tokens' experts no rounding can change: (requests, tokens, loads)."""
    for seed in range(50):
        prompts = decisive_prompts(model, seed, LENGTHS, TOKENS)
        tokens = [model.greedy(own, TOKENS) for own in prompts]
        computed = [[*own.tolist(), *more][:-1] for own, more in zip(prompts, tokens, strict=True)]
        try:
            loads = expected_loads(model.model, computed)
        except NearTie:
            continue
        names = [f"r{index}" for index in range(len(prompts))]
        requests = [
            greedy_request(name, own, TOKENS) for name, own in zip(names, prompts, strict=True)
        ]
        return requests, dict(zip(names, tokens, strict=True)), loads
    raise AssertionError("no prompts are clear")


def worker_config(path, dp, pp, tp, **options):
    config = config_of(path, pp, tp, enable_expert_parallel=True, **options)
    parallel = replace(config.parallel, data_parallel_size=dp, data_parallel_lockstep=dp > 1)
    return replace(config, parallel=parallel)


@pytest.fixture
def open_group(daemons, model_root, model):
    """Attach to given daemons, the pool's if they suffice, or own ones, and load them anew: (group,
    scheduler)."""
    with contextlib.ExitStack() as opened:

        def make(dp, pp, tp, *, endpoints=None, path=None, **options):
            config, count = worker_config(path or model.path, dp, pp, tp, **options), dp * pp * tp
            if endpoints is None and count > MAX_DAEMONS:
                own = opened.enter_context(ForkedDaemons(["cpu"] * count, model_root))
                endpoints = own.endpoints
            endpoints = endpoints or daemons.endpoints(count)
            group = opened.enter_context(WorkerGroup(endpoints, config.parallel))
            group.attach(force=True)
            loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True)
            limits = scheduler_limits(loaded, config)
            own = [Scheduler(limits) for _ in range(dp)]
            return group, own[0] if dp == 1 else LockstepScheduler(own)

        yield make


def tokens_of(outputs):
    return {each.req_id: each.token_ids for each in outputs}


def run(group, scheduler, requests):
    driver = Driver(group, scheduler)
    for request in requests:
        driver.add_request(request)
    return tokens_of(driver.run())


SHAPES = [(dp, pp, tp) for dp in (1, 2, 3) for pp in (1, 2) for tp in (1, 2)]
OFTEN = [(2, 1, 2), (2, 2, 1), (3, 1, 1)]


@pytest.mark.parametrize(
    ("dp", "pp", "tp"),
    [
        pytest.param(*shape, marks=() if shape in OFTEN else pytest.mark.exhaustive)
        for shape in SHAPES
    ],
)
def test_tokens_and_loads_are_the_model_s_whoever_is_idle(open_group, case, dp, pp, tp):
    """Requests come one by one, between phases in which some replicas, or all, are idle. Dummy
    batches in between count no token."""
    group, scheduler = open_group(dp, pp, tp)
    requests, expected, loads = case
    driver, chance, outputs = Driver(group, scheduler), random.Random(SEED), []
    for request in requests:
        driver.add_request(request)
        for _ in range(chance.choice([0, 1, 3, 2 * TOKENS])):
            if driver.busy:
                outputs += driver.step()
        if not driver.busy:
            group.execute_dummy_batch().result()
    outputs += driver.run()
    group.execute_dummy_batch().result()
    assert tokens_of(outputs) == expected, f"seed {SEED}"
    assert len(outputs) == len(requests)
    assert not driver.num_failures

    def are_counted():
        found = loads_by_layer(group.get_status())
        return {layer: own.tolist() for layer, own in found.items()} == loads

    wait_until(are_counted, f"the loads are {loads}")


@pytest.mark.parametrize(
    ("pp", "tp", "ranks"),
    [
        (1, 2, [2, 3]),
        exhaustively(1, 2, [1]),
        exhaustively(1, 1, [0]),
        exhaustively(2, 1, [3]),
        exhaustively(2, 1, [0, 1]),
    ],
)
def test_killed_ranks_are_replaced_and_all_serve_on(open_group, daemons, case, pp, tp, ranks):
    """One, or all of a replica. Their experts were every replica's; each request ends once, with
    its tokens."""
    group, scheduler = open_group(2, pp, tp)
    reports = []

    def recover(died):
        assert died.rank in ranks
        daemons.restart_dead()
        reports.append(group.replace(died.rank))

    driver = Driver(group, scheduler, recover=recover)
    requests, expected, _ = case
    for request in requests:
        driver.add_request(request)
    outputs = [*driver.step(), *driver.step(), *driver.step()]
    assert group.num_in_flight
    for rank in ranks:
        daemons.kill(rank)
    outputs += driver.run()
    assert tokens_of(outputs) == expected
    assert len(outputs) == len(requests)
    assert [*sorted(rank for report in reports for rank in report.loaded_ranks)] == ranks
    renamed = [dataclasses.replace(each, id=f"again-{each.id}") for each in requests]
    assert run(group, scheduler, renamed) == {f"again-{name}": e for name, e in expected.items()}


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), exhaustively(1, 1), exhaustively(1, 2)])
@pytest.mark.parametrize("refusing", [0, exhaustively(1)])
def test_replica_that_refuses_a_step_lets_the_other_compute_it(open_group, case, pp, tp, refusing):
    """It has a frame too many. The other replica's step needs its experts: nobody hangs, the link
    stays, and all requests get the same tokens as without a failure."""
    group, scheduler = open_group(2, pp, tp)
    channel, links = group._channel, {status.link for status in group.get_status()}
    send, torn = channel.send_step, []

    def sending(ids, by_replica, **options):
        frames = [list(own) for own in by_replica]
        if group.num_in_flight and not torn:
            torn.append(frames[refusing].insert(1, b"no such frame"))
        send(ids, frames, **options)

    requests, expected, _ = case
    driver = Driver(group, scheduler)
    for request in requests:
        driver.add_request(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "send_step", sending)
        outputs = list(driver.run())
    assert torn
    assert driver.num_failures == 1
    assert tokens_of(outputs) == expected
    assert {status.link for status in group.get_status()} == links


@pytest.mark.parametrize(
    ("pp", "rank", "where"),
    [(1, 1, "forward"), exhaustively(1, 0, "argmax_tokens"), exhaustively(2, 2, "forward")],
)
def test_step_that_fails_after_it_was_accepted_lets_the_other_compute_its_own(
    open_group, model_root, tmp_path, case, pp, rank, where
):
    """For memory, before its first exchange or after the last. Nobody hangs, the link stays, and
    all requests get the same tokens as without a failure."""
    with FaultyDaemons(2 * pp, model_root, tmp_path) as own:
        group, scheduler = open_group(2, pp, 1, endpoints=own.endpoints)
        links = {status.link for status in group.get_status()}
        driver, (requests, expected, _) = Driver(group, scheduler), case
        for request in requests:
            driver.add_request(request)
        outputs = [*driver.step(), *driver.step()]
        own.faults[rank].put(Fault(where, "memory", calls_before=2))
        outputs += driver.run()
        assert not own.faults[rank].armed
        assert driver.num_failures == 1
        assert tokens_of(outputs) == expected
        assert {status.link for status in group.get_status()} == links


def test_adapter_is_applied_to_the_rows_of_each_replica(open_group, checkpoint, case):
    """Beside base rows, whose tokens stay the same."""
    base = checkpoint(ARCHITECTURE, seed=111, **FIELDS)
    merged = make_adapter(base, "attends", seed=7, targets=ATTENTION)
    room = LoraConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=2)
    group, scheduler = open_group(2, 1, 1, lora=room)
    adapter = group.loras.add("attends")
    requests, expected = adapted_requests([(merged, adapter)], SEED, 4)
    assert run(group, scheduler, [*case[0], *requests]) == {**case[1], **expected}


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), exhaustively(1, 2), exhaustively(2, 1)])
def test_experts_of_tokens_return_and_are_replayed(open_group, model, case, pp, tp):
    """Each replica's own, though the routed rows of all are exchanged; the same tokens."""
    group, scheduler = open_group(2, pp, tp, enable_return_routed_experts=True)
    asking = [dataclasses.replace(each, routed_experts=True) for each in case[0]]
    driver = Driver(group, scheduler)
    for request in asking:
        driver.add_request(request)
    outputs = {output.req_id: output for output in driver.run()}
    assert tokens_of(outputs.values()) == case[1]
    forced = []
    for request in asking:
        tokens = [*request.prompt, *outputs[request.id].token_ids]
        assert_experts(model.model, tokens, outputs[request.id].routed_experts)
        shape = outputs[request.id].routed_experts[: len(request.prompt)].shape
        drawn = np.random.default_rng(SEED).random((*shape[:-1], FIELDS["num_experts"]))
        numbers = drawn.argsort(-1)[..., : shape[-1]].astype(np.uint16)
        forced.append(dataclasses.replace(request, id=f"f{request.id}", replay_experts=numbers))
    driver = Driver(group, scheduler)
    for request in forced:
        driver.add_request(request)
    outputs = {output.req_id: output for output in driver.run()}
    for request in forced:
        output = outputs[request.id]
        tokens = [*request.prompt, *output.token_ids]
        found, replayed = output.routed_experts, request.replay_experts
        assert_experts(model.model, tokens, found, replayed)
        assert (found[: len(replayed)] == replayed).all()


def test_next_driver_adopts_the_requests_of_replicas_that_share_experts(open_group, model, case):
    first, scheduler = open_group(2, 1, 1)
    driver = Driver(first, scheduler)
    for request in case[0]:
        driver.add_request(request)
    outputs = [output for _ in range(6) for output in driver.step()]
    config = worker_config(model.path, 2, 1, 1)
    with WorkerGroup([c.endpoint.control for c in first.clients], config.parallel) as group:
        group.attach(force=True, keep_requests=True)
        limits = scheduler_limits(group.prepare(config, num_gpu_blocks=NUM_BLOCKS), config)
        adopted = group.adopt_requests()
        assert len(adopted) + len(outputs) == len(case[0])
        assert all(each.num_computed_tokens for each in adopted)
        scheduler = LockstepScheduler([Scheduler(limits), Scheduler(limits)])
        outputs += [*scheduler.adopt_requests(adopted), *Driver(group, scheduler).run()]
        assert tokens_of(outputs) == case[1]


def test_experts_sleep_and_wake(open_group, model, case):
    """Level 1 keeps the weights, so the same tokens follow, computed anew."""
    group, scheduler = open_group(2, 1, 1, enable_sleep_mode=True)
    before = [reply.checksums for reply in group.weights.compute_checksums()]
    assert run(group, scheduler, case[0]) == case[1]
    group.memory.sleep(1)
    group.memory.wake_up()
    assert [reply.checksums for reply in group.weights.compute_checksums()] == before
    again = [dataclasses.replace(each, id=f"again-{each.id}") for each in case[0]]
    config = worker_config(model.path, 2, 1, 1, enable_sleep_mode=True)
    limits = scheduler_limits(group.prepare(config, num_gpu_blocks=NUM_BLOCKS), config)
    anew = LockstepScheduler([Scheduler(limits), Scheduler(limits)])
    assert run(group, anew, again) == {f"again-{name}": own for name, own in case[1].items()}


def test_updates_and_adapters_of_ranks_with_different_experts(
    open_group, checkpoint, model_root, case, model
):
    """A trainer sends whole tensors; each rank takes its own experts. A reload reads them again."""
    new = checkpoint(ARCHITECTURE, seed=112, **FIELDS)
    prompts = decisive_prompts(new, 3, LENGTHS, TOKENS)
    requests = [greedy_request(f"n{i}", own, TOKENS) for i, own in enumerate(prompts)]
    room = LoraConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=2)
    group, scheduler = open_group(2, 1, 2, lora=room)
    before = [reply.checksums for reply in group.weights.compute_checksums()]
    held = [{name for name in sums if ".experts." in name} for sums in before]
    assert [len(names) for names in held] == [2 * count * 3 for count in (2, 2, 2, 1)]
    assert not set.intersection(*held)
    with WeightSender(group, "gloo", timeout_s=20.0) as sender:
        sender.send(dict(new.model.state_dict()))
        with pytest.raises(ConfigError, match=r"format.*checkpoint"):
            sender.send({"any": torch.zeros(1)}, format="kernel", partial=True)
    assert run(group, scheduler, requests) == {
        request.id: new.greedy(own, TOKENS) for request, own in zip(requests, prompts, strict=True)
    }
    group.weights.reload(str(model.path))
    assert [reply.checksums for reply in group.weights.compute_checksums()] == before
    assert run(group, scheduler, case[0]) == case[1]


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), exhaustively(2, 1), exhaustively(1, 2)])
def test_saved_set_has_the_experts_of_all_replicas(open_group, model_root, tmp_path, case, pp, tp):
    """Each rank reads back what it held, and the same tokens follow. Groups of another shape are
    refused by name."""
    roots = [tmp_path / "saves"] * (2 * pp * tp)
    with saving_daemons(model_root, *roots) as own:
        group, _ = open_group(2, pp, tp, endpoints=own.endpoints)
        before = [reply.checksums for reply in group.weights.compute_checksums()]
        replies = group.weights.save_sharded_state("shared")
        assert [reply.rank for reply in replies] == [*range(2 * pp * tp)]
        read = {"path": roots[0] / "shared", "load_format": "sharded_state"}
        group, scheduler = open_group(2, pp, tp, endpoints=own.endpoints, **read)
        assert [reply.checksums for reply in group.weights.compute_checksums()] == before
        assert run(group, scheduler, case[0]) == case[1]
        with pytest.raises(ConfigError, match=r"replicas_sharing_experts.*load it with 2"):
            open_group(1, pp, tp, endpoints=own.endpoints[: pp * tp], **read)
