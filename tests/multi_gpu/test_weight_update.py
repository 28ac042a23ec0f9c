"""New weights over NCCL from a trainer on a separate GPU, and the state after its death."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import (
    TransferError,
)
from rpc_schema.weight_transfer import BroadcastEngine, BroadcastSource
from tests.support.gpu_generation import (
    generate,
    gpu_group,
    make_checkpoint,
    make_requests,
    reference_logprobs,
)
from worker_client.errors import (
    WeightsNotWhole,
)
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
LIFETIME = 20
"""Broadcasts of a trainer that dies."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one model."""
    root = tmp_path_factory.mktemp("models")
    return [make_checkpoint(root / f"llama-{seed}", seed) for seed in (0, 1)]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    """Where NCCL meets: the daemons listen there alone."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


def needs(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


def assert_tokens_of(checkpoint, group, model, seed):
    requests = make_requests(8, seed=seed)
    outputs = generate(group, model, requests)
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    for request in requests:
        assert outputs[request.id].token_ids == exact[request.id].argmax(dim=-1).tolist()


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_update_over_nccl_equals_a_fresh_load(models, pp, tp):
    trainer = pp * tp
    needs(trainer + 1)
    device = f"cuda:{trainer}"
    with gpu_group(models[0], pp, tp, "float32") as (_, group, model):
        old = [reply.checksums for reply in group.weights.compute_checksums()]
        with WeightSender(group, "nccl", device=device) as sender:
            for packed_bytes, checkpoint in [(8 << 20, models[1]), (0, models[0])]:
                tensors = {
                    name: tensor.to(device)
                    for name, tensor in load_file(checkpoint / "model.safetensors").items()
                }
                sender.send(tensors, packed_bytes=packed_bytes)
                assert_tokens_of(checkpoint, group, model, seed=5)
        assert [reply.checksums for reply in group.weights.compute_checksums()] == old


def test_killed_trainer_is_a_typed_error_and_the_worker_serves_on(models):
    needs(2)
    file = models[1] / "model.safetensors"
    tensors, words = load_file(file), ["nccl", 1, file, LIFETIME, 1]
    listed = TensorList(
        tuple(tensors),
        ("float32",) * len(tensors),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )
    with gpu_group(models[0], 1, 1, "float32") as (_, group, model):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.dying_trainer", *map(str, words)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            port, secret = process.stdout.readline().split()
            place = RendezvousAddress(
                host="127.0.0.1", port=int(port), secret=bytes.fromhex(secret)
            )
            engine = BroadcastEngine(
                backend="nccl",
                place=place,
                world_size=2,
            )
            group.weights.init_transfer_engine(engine, timeout_s=30)
            group.weights.start_update()
            process.stdin.write("send\n")
            process.stdin.flush()
            with pytest.raises(TransferError):
                group.weights.update(listed, BroadcastSource(round=1))
        finally:
            process.kill()
            process.communicate()
        status = group.get_status()[0]
        assert (status.weights.state, status.link_state) == ("dirty", "up")
        assert 0 < status.weights.num_dirty <= LIFETIME
        with pytest.raises(WeightsNotWhole):
            generate(group, model, make_requests(1))
        group.weights.reload()
        assert_tokens_of(models[0], group, model, seed=6)
        with WeightSender(group, "nccl", device="cuda:1") as sender:
            sender.send({name: tensor.to("cuda:1") for name, tensor in tensors.items()})
        assert_tokens_of(models[1], group, model, seed=7)
