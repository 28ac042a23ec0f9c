"""A rank that is killed on real GPUs, over NCCL: the survivor keeps what it has, another daemon
takes the place, and the tokens do not change."""

import os
import signal
import time

import pytest
import torch

from tests.support.gpu_generation import (
    generate,
    gpu_group,
    make_checkpoint,
    make_requests,
    worker_config,
)
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.scheduler import Scheduler, scheduler_limits

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
STEPS_BEFORE = 8
FREE_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_replaced_under_load(checkpoint, pp, tp, rank):
    requests = make_requests(16, seed=5)
    with gpu_group(checkpoint, pp, tp, "float32") as (daemons, group, model):
        expected = generate(group, model, requests)
        survivor = group.clients[1 - rank]
        before = survivor.get_status()
        at = {}

        def kill(_) -> None:
            if len(driver.records) == STEPS_BEFORE and not at:
                at["killed"] = time.monotonic()
                os.kill(daemons.pids[rank], signal.SIGKILL)

        def recover(died: WorkerDied) -> None:
            at["noticed"] = time.monotonic()
            daemons.restart_dead()
            while (free := survivor.get_status()).phase != "IDLE" or free.link_state != "broken":
                assert time.monotonic() - at["noticed"] < FREE_WITHIN_S, free.phase
                time.sleep(0.01)
            at["free"] = time.monotonic()
            replaced = group.replace(died.rank)
            at["replaced"] = time.monotonic()
            assert replaced.loaded_ranks == (rank,)
            print(f"pp={pp} tp={tp} rank {rank}: {died.detail}; {replaced.seconds}")

        config = worker_config(checkpoint, group.parallel, "float32")
        scheduler = Scheduler(scheduler_limits(model, config))
        driver = Driver(group, scheduler, kill, recover=recover)
        for request in requests:
            driver.add_request(request)
        outputs = {output.req_id: output for output in driver.run()}
        after = survivor.get_status()
        again = generate(group, model, requests)
    assert "replaced" in at
    moments = {name: round(moment - at["killed"], 3) for name, moment in at.items()}
    print(f"pp={pp} tp={tp} rank {rank}: {moments}")
    same = sum(outputs[r.id].token_ids == expected[r.id].token_ids for r in requests)
    assert same >= len(requests) - 1, "a near-tie may turn one request, not more"
    for request in requests:
        assert again[request.id].token_ids == expected[request.id].token_ids
    assert (after.worker_uid, after.pid) == (before.worker_uid, before.pid)
    assert after.memory_bytes["weights"] == before.memory_bytes["weights"]
    assert after.providers["graphs"] == before.providers["graphs"] != "0"
    loads = [sum("(LoadModel)" in line for line in s.transitions) for s in (before, after)]
    assert loads[0] == loads[1]
