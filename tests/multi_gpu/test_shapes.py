"""Every parallel shape on real GPUs over NCCL gives the tokens of one GPU; a link can be left and
rebuilt."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rpc_schema.config import ParallelConfig
from tests.support.gpu_generation import (
    generate,
    gpu_group,
    make_checkpoint,
    make_checkpoint_of_experts,
    make_requests,
    reference_logprobs,
    worker_config,
)
from worker_client.worker_group import WorkerGroup

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(400)]
SHAPES = [(2, 1), (1, 2), (2, 2), (4, 1)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama")


def needs(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_float32_greedy_tokens_equal_transformers(checkpoint, pp, tp):
    needs(pp * tp)
    requests = make_requests(16, seed=1)
    with gpu_group(checkpoint, pp, tp, "float32") as (_, group, model):
        outputs = generate(group, model, requests)
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    for request in requests:
        assert outputs[request.id].token_ids == exact[request.id].argmax(dim=-1).tolist()


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_tokens_of_experts_equal_transformers(tmp_path, pp, tp, expert_parallel):
    needs(pp * tp)
    checkpoint, requests = make_checkpoint_of_experts(tmp_path / "moe"), make_requests(16, seed=5)
    options = {"enable_expert_parallel": expert_parallel}
    with gpu_group(checkpoint, pp, tp, "float32", **options) as (_, group, model):
        outputs = generate(group, model, requests)
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    same = sum(outputs[r.id].token_ids == exact[r.id].argmax(dim=-1).tolist() for r in requests)
    assert same >= len(requests) - 1, "a near tie in the routing may change one request, not more"


def test_fp8_is_as_exact_over_two_gpus_as_on_one(checkpoint):
    needs(2)
    requests = make_requests(16, seed=6, logprobs=0)
    errors = []
    for tp in (1, 2):
        with gpu_group(checkpoint, 1, tp, "bfloat16", quantization="fp8") as (_, group, model):
            outputs = generate(group, model, requests)
        exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
        differences = [
            abs(float(reported.logprobs[0] - row[token]))
            for request in requests
            for token, reported, row in zip(
                outputs[request.id].token_ids,
                outputs[request.id].logprobs,
                exact[request.id],
                strict=True,
            )
        ]
        errors.append(sum(differences) / len(differences))
    assert 0 < errors[1] < 1.3 * errors[0]
    assert errors[0] < 0.6


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_seeded_sampling_does_not_depend_on_the_shape(checkpoint, pp, tp):
    needs(pp * tp)
    requests = make_requests(16, seed=2, temperature=0.8, top_k=50, top_p=0.95)
    with gpu_group(checkpoint, 1, 1, "float32") as (_, group, model):
        single = generate(group, model, requests)
    with gpu_group(checkpoint, pp, tp, "float32") as (_, group, model):
        outputs = generate(group, model, requests)
    same = sum(outputs[r.id].token_ids == single[r.id].token_ids for r in requests)
    assert same >= len(requests) - 1, "a near-tie may turn one request, not more"


DYING_DRIVER = """
import os, signal, sys, time
from pathlib import Path
from worker_client.wire.worker_client import WorkerClient
from worker_client.worker_group import WorkerGroup
from rpc_schema.codec import decode_step
from rpc_schema.config import ParallelConfig
from rpc_schema.step import ExecuteModel
from tests.support.gpu_generation import generate, make_requests, worker_config
endpoints, checkpoint = sys.argv[1].split(","), Path(sys.argv[2])
pp, tp, last = map(int, sys.argv[3:6])
parallel = ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp)
group = WorkerGroup(endpoints, parallel)
group.attach()
model = group.prepare(worker_config(checkpoint, parallel, "bfloat16"))
send = WorkerClient.send
sent = 0
def send_some(client, frames):
    global sent
    sent += isinstance(decode_step(frames), ExecuteModel)
    if sent > last:
        time.sleep(0.1)  # let the sends before this one arrive
        os.kill(os.getpid(), signal.SIGKILL)
    send(client, frames)
WorkerClient.send = send_some
generate(group, model, make_requests(16, seed=3))
"""


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_new_driver_goes_on_after_a_step_reached_only_some_ranks(checkpoint, pp, tp):
    """The driver dies between its two sends of a step; NCCL work hangs until the link is left."""
    needs(pp * tp)
    requests = make_requests(16, seed=4)
    with gpu_group(checkpoint, pp, tp, "bfloat16") as (daemons, group, model):
        expected = generate(group, model, requests)
        group.detach()
        for last in (5, 12, 31):
            words = [",".join(daemons.endpoints), str(checkpoint), str(pp), str(tp), str(last)]
            died = subprocess.run(
                [sys.executable, "-c", DYING_DRIVER, *words], check=False, cwd=Path.cwd()
            )
            assert died.returncode == -signal.SIGKILL
            parallel = ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp)
            began = time.monotonic()
            with WorkerGroup(daemons.endpoints, parallel) as successor:
                successor.attach()
                loaded = successor.prepare(worker_config(checkpoint, parallel, "bfloat16"))
                attached = time.monotonic() - began
                assert loaded.was_loaded
                outputs = generate(successor, loaded, requests)
                print(f"pp={pp} tp={tp} after {last} sends: serving again in {attached:.2f} s")
            for request in requests:
                assert outputs[request.id].token_ids == expected[request.id].token_ids
