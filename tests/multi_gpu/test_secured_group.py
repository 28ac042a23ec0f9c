"""Two GPUs on tcp endpoints with keys: NCCL keeps to the interface that was named."""

import pytest
import torch

from rpc_schema.config import ParallelConfig
from tests.support.gpu_generation import (
    generate,
    make_checkpoint,
    make_requests,
    reference_logprobs,
    worker_config,
)
from tests.support.secured import KeyRing, RealDaemons
from worker_client.worker_group import WorkerGroup

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_secured_group_generates_and_listens_on_lo_alone(tmp_path, pp, tp):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    checkpoint = make_checkpoint(tmp_path / "models" / "llama")
    ring = KeyRing(tmp_path / "keys")
    parallel = ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp)
    requests = make_requests(8, seed=4)
    daemons = RealDaemons(tmp_path, ring, ["cuda:0", "cuda:1"], checkpoint.parent)
    try:
        with WorkerGroup(daemons.endpoints, parallel, ring.keys("driver")) as group:
            group.attach()
            model = group.prepare(worker_config(checkpoint, parallel, "float32"))
            outputs = generate(group, model, requests)
            for rank in range(2):
                addresses, _ = daemons.listening(rank)
                assert addresses == {"127.0.0.1"}
    finally:
        daemons.stop()
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    for request in requests:
        assert outputs[request.id].token_ids == exact[request.id].argmax(dim=-1).tolist()
