"""Replicas in lockstep that share experts, on two real GPUs over NCCL, eagerly: the tokens are
transformers', with both replicas busy, one of them idle, and after a rank was killed."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace

from rpc_schema.config import GraphConfig, ParallelConfig
from rpc_schema.errors import ConfigError
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


def config_of(checkpoint, *, enforce_eager=True):
    config = worker_config(checkpoint, PARALLEL, "float32", enable_expert_parallel=True)
    return replace(config, graph=GraphConfig(enforce_eager=enforce_eager))


@contextmanager
def replicas(checkpoint):
    """Two daemons, one per GPU and replica, and their group: (daemons, group, loaded)."""
    with (
        LocalDaemons(["cuda:0", "cuda:1"], checkpoint.parent) as daemons,
        WorkerGroup(daemons.endpoints, PARALLEL) as group,
    ):
        try:
            group.attach()
            yield daemons, group, group.prepare(config_of(checkpoint))
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


@pytest.mark.parametrize("count", [1, 16], ids=["one-is-idle", "both"])
def test_tokens_equal_transformers(checkpoint, count):
    requests = make_requests(count, seed=7)
    with replicas(checkpoint) as (_, group, loaded):
        providers = [status.providers["experts"] for status in group.get_status()]
        driver = driver_of(checkpoint, group, loaded, requests)
        outputs = {output.req_id: output for output in driver.run()}
    assert providers == ["all-gather and reduce-scatter of 2 ranks, nccl"] * 2
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


def test_graphs_are_refused_by_name(checkpoint):
    with (
        LocalDaemons(["cuda:0", "cuda:1"], checkpoint.parent) as daemons,
        WorkerGroup(daemons.endpoints, PARALLEL) as group,
    ):
        group.attach()
        with pytest.raises(ConfigError) as caught:
            group.prepare(config_of(checkpoint, enforce_eager=False))
    assert caught.value.field == "graph.enforce_eager"
