"""A pipeline on real GPUs, over NCCL, whose first stage lives and does not send: where nothing more
comes the link is aborted and made anew, and where that hangs too, the ranks that waited end with 88
and their successors serve. A stage that is only slow, before the group serves, is waited for."""

import msgspec
import pytest
import torch

from rpc_schema.config import ParallelConfig
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.gpu_generation import generate, make_checkpoint, make_requests, worker_config
from worker_client.driver import Driver
from worker_client.errors import StepFailed
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup
from worker_host.exit_codes import ExitCode

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
PP = 2
STEPS_BEFORE = 8
DEADLINE_MS = 3000
SKIPPED = {"lost": 1, "hang": PP + 1, "relapse": 1000}
"""Sends that are left out. NCCL's messages have no tags: the next one comes in the place of one
that is lost, and its trailer tells. Only where all in flight are lost does the last stage wait."""


@pytest.mark.parametrize("case", SKIPPED)
def test_sends_that_are_left_out(tmp_path, case):
    """The group continues, with the same processes, and after a relapse with new ones."""
    checkpoint = make_checkpoint(tmp_path / "models" / "llama")
    parallel = ParallelConfig(pipeline_parallel_size=PP)
    config = worker_config(checkpoint, parallel, "float32")
    scheduler_config = msgspec.structs.replace(config.scheduler, step_deadline_ms=DEADLINE_MS)
    config = msgspec.structs.replace(config, scheduler=scheduler_config)
    requests = make_requests(16, seed=6)
    devices = [f"cuda:{rank}" for rank in range(PP)]
    failures = []
    with (
        FaultyDaemons(PP, checkpoint.parent, tmp_path, device=devices) as daemons,
        daemons.kept_alive() as processes,
        WorkerGroup(daemons.endpoints, parallel) as group,
    ):
        group.attach()
        model = group.prepare(config)
        expected = generate(group, model, requests)

        def fall_silent(_) -> None:
            if len(driver.records) == STEPS_BEFORE:
                daemons.faults[0].put(Fault("send", "skip", times=SKIPPED[case]))

        def recover(died) -> None:
            daemons.faults[0].path.unlink(missing_ok=True)
            print(f"rank {died.rank}: {died.detail}; {group.replace(died.rank).seconds}")

        scheduler = Scheduler(scheduler_limits(model, config))
        step_failed = scheduler.step_failed

        def hear(outputs, lost_req_ids) -> None:
            failures.append(len(outputs))
            step_failed(outputs, lost_req_ids)

        scheduler.step_failed = hear
        driver = Driver(group, scheduler, fall_silent, recover=recover)
        for request in requests:
            driver.add_request(request)
        try:
            outputs = {output.req_id: output for output in driver.run()}
        except StepFailed as error:
            error.add_note(daemons.log_tail(0) + daemons.log_tail(1))
            raise
        hung = [event for event in group.watch.events if event.kind == "hung"]
        print("\n".join(f"{event.at:.3f} {event}" for event in group.watch.events))
        codes = [process.poll() for process in processes]
    assert failures
    assert bool(hung) == (case != "lost")
    print(f"exit codes of the first processes: {codes}")
    assert set(codes) <= {None, ExitCode.LINK_UNUSABLE}
    assert (ExitCode.LINK_UNUSABLE in codes) == (case == "relapse")
    same = sum(outputs[r.id].token_ids == expected[r.id].token_ids for r in requests)
    assert same >= len(requests) - 1, "a near-tie may turn one request, not more"


@pytest.mark.parametrize("rank", range(PP))
def test_rank_that_warms_up_for_longer_than_a_step_may_take(tmp_path, rank):
    """As one that compiles its kernels does on a new host, where its neighbour has them."""
    checkpoint = make_checkpoint(tmp_path / "models" / "llama")
    parallel = ParallelConfig(pipeline_parallel_size=PP)
    config = worker_config(checkpoint, parallel, "float32")
    scheduler_config = msgspec.structs.replace(config.scheduler, step_deadline_ms=DEADLINE_MS)
    config = msgspec.structs.replace(config, scheduler=scheduler_config)
    devices = [f"cuda:{rank}" for rank in range(PP)]
    with (
        FaultyDaemons(PP, checkpoint.parent, tmp_path, device=devices) as daemons,
        WorkerGroup(daemons.endpoints, parallel) as group,
    ):
        group.attach()
        daemons.faults[rank].put(Fault("forward", "hang", seconds=3 * DEADLINE_MS / 1000))
        model = group.prepare(config)
        assert not daemons.faults[rank].armed
        outputs = generate(group, model, make_requests(4, seed=7))
    assert all(len(output.token_ids) == 64 for output in outputs.values())
