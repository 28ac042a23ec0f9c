"""A pipeline on real GPUs, over NCCL, whose first stage lives and sends nothing: the link is
aborted and made anew, and where that hangs too, the ranks that waited end with 88 and their
successors serve."""

import msgspec
import pytest
import torch

from client.driver import Driver
from client.errors import StepFailed
from client.scheduler import Scheduler, scheduler_limits
from client.worker_group import WorkerGroup
from rpc_schema.config import ParallelConfig
from rpc_schema.exit_codes import ExitCode
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.gpu_generation import generate, make_checkpoint, make_requests, worker_config

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
STEPS_BEFORE = 8
DEADLINE_MS = 3000


@pytest.mark.parametrize("times", [1, 1000])
def test_hang_with_living_peers(tmp_path, times):
    """Once: the group goes on with the processes that it has. Again and again: with new ones."""
    checkpoint = make_checkpoint(tmp_path / "models" / "llama")
    parallel = ParallelConfig(pipeline_parallel_size=2)
    config = worker_config(checkpoint, parallel, "float32")
    scheduler_config = msgspec.structs.replace(config.scheduler, step_deadline_ms=DEADLINE_MS)
    config = msgspec.structs.replace(config, scheduler=scheduler_config)
    requests = make_requests(16, seed=6)
    devices = ["cuda:0", "cuda:1"]
    failures = []
    with (
        FaultyDaemons(2, checkpoint.parent, tmp_path, device=devices) as daemons,
        daemons.kept_alive() as processes,
        WorkerGroup(daemons.endpoints, parallel) as group,
    ):
        group.attach()
        model = group.prepare(config)
        expected = generate(group, model, requests)

        def fall_silent(_) -> None:
            if len(driver.records) == STEPS_BEFORE:
                daemons.faults[0].put(Fault("send", "skip", times=times))

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
        hung = [event for event in group.liveness_events if event.kind == "hung"]
        print("\n".join(f"{event.at:.3f} {event}" for event in group.liveness_events))
        codes = [process.poll() for process in processes]
    assert failures and hung
    print(f"exit codes of the first processes: {codes}")
    assert set(codes) <= {None, ExitCode.LINK_UNUSABLE}
    assert (ExitCode.LINK_UNUSABLE in codes) == (times > 1)
    same = sum(outputs[r.id].token_ids == expected[r.id].token_ids for r in requests)
    assert same >= len(requests) - 1, "a near-tie may turn one request, not more"
