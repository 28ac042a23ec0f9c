"""Replicas in lockstep that share experts, on two real GPUs, with CUDA graphs and eagerly: the
tokens are transformers', with both replicas busy, one of them idle, and after a rank was killed."""

import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rpc_schema.config import GraphConfig, ParallelConfig
from tests.support.gpu_generation import (
    make_checkpoint_of_experts,
    make_requests,
    reference_logprobs,
    worker_config,
)
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
PARALLEL = ParallelConfig(data_parallel_size=2, data_parallel_lockstep=True)
STEPS_BEFORE = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint_of_experts(tmp_path_factory.mktemp("models") / "moe")


def config_of(checkpoint, *, enforce_eager=False, **options):
    config = worker_config(checkpoint, PARALLEL, "float32", enable_expert_parallel=True, **options)
    return replace(config, graph=GraphConfig(enforce_eager=enforce_eager))


@contextmanager
def replicas(checkpoint, **options):
    """Two daemons, one per GPU and replica, and their group: (daemons, group, loaded)."""
    with (
        LocalDaemons(["cuda:0", "cuda:1"], checkpoint.parent) as daemons,
        WorkerGroup(daemons.endpoints, PARALLEL) as group,
    ):
        try:
            group.attach()
            yield daemons, group, group.prepare(config_of(checkpoint, **options))
        except BaseException:
            for rank in range(2):
                print(f"--- log of rank {rank}\n{daemons.log_tail(rank)}")
            raise


def driver_of(checkpoint, group, loaded, requests, **options):
    limits = scheduler_limits(loaded, config_of(checkpoint))
    driver = Driver(group, LockstepScheduler([Scheduler(limits), Scheduler(limits)]), **options)
    for request in requests:
        driver.add_request(request)
    return driver


def assert_tokens(checkpoint, requests, outputs):
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    same = sum(outputs[r.id].token_ids == exact[r.id].argmax(dim=-1).tolist() for r in requests)
    assert same >= len(requests) - 1, "a near tie in the routing may change one request, not more"


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("count", [1, 16], ids=["one-is-idle", "both"])
def test_tokens_equal_transformers(checkpoint, count, enforce_eager):
    requests = make_requests(count, seed=7)
    with replicas(checkpoint, enforce_eager=enforce_eager) as (_, group, loaded):
        found = [status.providers for status in group.get_status()]
        assert [int(each["graphs"]) > 0 for each in found] == [not enforce_eager] * 2
        providers = [each["experts"] for each in found]
        driver = driver_of(checkpoint, group, loaded, requests)
        outputs = {output.req_id: output for output in driver.run()}
    ways = "peer memory for few tokens, nccl"
    assert providers == [f"all-gather and reduce-scatter of 2 ranks, {ways}"] * 2
    assert not driver.num_failures
    assert_tokens(checkpoint, requests, outputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_replaced_and_both_serve_on(checkpoint, rank):
    """Its experts were every replica's: the survivor's wait for them is aborted."""
    requests = make_requests(16, seed=8)
    with replicas(checkpoint) as (daemons, group, loaded):
        reports, killed = [], []

        def kill(_) -> None:
            if len(driver.records) == STEPS_BEFORE and not killed:
                killed.append(rank)
                os.kill(daemons.pids[rank], signal.SIGKILL)

        def recover(died) -> None:
            daemons.restart_dead()
            reports.append(group.replace(died.rank))

        driver = driver_of(checkpoint, group, loaded, requests, on_result=kill, recover=recover)
        outputs = {output.req_id: output for output in driver.run()}
    assert killed == [rank]
    assert [report.loaded_ranks for report in reports] == [(rank,)]
    print(f"rank {rank}: {reports[0].seconds}")
    assert_tokens(checkpoint, requests, outputs)


def test_replica_that_refuses_a_step_exchanges_with_the_graph_of_the_other(checkpoint):
    """It has a frame too many. It makes the exchanges one by one, the other replays them."""
    requests, torn = make_requests(16, seed=9), []
    with replicas(checkpoint) as (_, group, loaded):
        links, channel = {status.link for status in group.get_status()}, group._channel
        send = channel.send_step

        def sending(ids, by_replica, **options):
            frames = [list(own) for own in by_replica]
            if len(driver.records) == STEPS_BEFORE and not torn:
                torn.append(frames[0].insert(1, b"no such frame"))
            send(ids, frames, **options)

        driver = driver_of(checkpoint, group, loaded, requests)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "send_step", sending)
            outputs = {output.req_id: output for output in driver.run()}
        assert {status.link for status in group.get_status()} == links
    assert torn
    assert driver.num_failures == 1
    assert_tokens(checkpoint, requests, outputs)


def test_experts_move_under_graphs(checkpoint):
    """Their tokens find them at the addresses that the graphs read."""
    requests, drawn = make_requests(16, seed=10), np.random.default_rng(10)
    with replicas(checkpoint, enable_eplb=True, num_redundant_experts=8) as (_, group, loaded):
        driver = driver_of(checkpoint, group, loaded, requests)
        outputs = [output for _ in range(STEPS_BEFORE) for output in driver.step()]
        driver.pause()
        while driver.num_in_flight:
            outputs += driver.step()
        loads = {layer: (drawn.pareto(1.0, 32) * 1000).astype(np.int64) + 1 for layer in range(4)}
        report = group.experts.rebalance(loads)
        driver.resume()
        outputs += driver.run()
    assert report.num_moved
    assert not driver.num_failures
    assert_tokens(checkpoint, requests, {output.req_id: output for output in outputs})
