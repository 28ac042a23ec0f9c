"""New weights under captured graphs, on one GPU: out of this process's memory by CUDA IPC, by gloo
through host memory, and from disk. Tokens are those of transformers with the new weights."""

import pytest
import torch
from safetensors.torch import load_file

from rpc_schema.errors import (
    ConfigError,
    TransferError,
)
from rpc_schema.weight_transfer import IpcEngine, IpcSource
from tests.support.gpu_generation import (
    generate,
    gpu_group,
    make_checkpoint,
    make_requests,
    reference_logprobs,
)
from tests.support.waiting import wait_until
from worker_client.errors import (
    WeightsNotWhole,
)
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one model."""
    root = tmp_path_factory.mktemp("models")
    return [make_checkpoint(root / f"llama-{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def served(models):
    with gpu_group(models[0], 1, 1, "float32") as (_, group, model):
        yield group, model


@pytest.fixture
def back_to_old(served, models):
    """After the test the old weights are there again."""
    yield
    served[0].weights.reload(str(models[0]))


def tensors_of(checkpoint, device="cuda:0"):
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def assert_tokens_of(checkpoint, served, seed):
    requests = make_requests(8, seed=seed)
    outputs = generate(*served, requests)
    exact = reference_logprobs(checkpoint, torch.float32, requests, outputs)
    for request in requests:
        assert outputs[request.id].token_ids == exact[request.id].argmax(dim=-1).tolist()


def num_graphs(group):
    return int(group.get_status()[0].providers["graphs"])


MOVING = ("free", "context", "activations", "others")
"""Kinds of memory that are not the worker's alone."""


def figures_by_kind(group):
    """Return the bytes of the worker's own memory."""
    kinds = group.get_status()[0].memory_bytes
    return {name: kinds[name] for name in kinds if name not in MOVING}


def host_backup_is_whole(group):
    group.load_chain.get_supported_tasks()  # figures are those of the last operation
    kinds = figures_by_kind(group)
    return kinds["host_backup"] == kinds["weights"] + kinds["buffers"]


def test_fifty_cycles_of_sleep_and_update_leak_nothing(models):
    """As between rollouts: sleep, train, wake the weights, update them, wake the KV cache. Graphs
    stay, every byte by kind is what it was, and tokens are those of a fresh load.

    It comes first: it starts daemons of its own, and the module's would have the GPU."""
    with gpu_group(models[0], 1, 1, "float32", enable_sleep_mode=True) as (_, group, model):
        graphs, figures = num_graphs(group), []
        both = [tensors_of(checkpoint) for checkpoint in models]
        with WeightSender(group, "ipc") as sender:
            for number in range(51):
                group.memory.sleep(2)
                group.memory.wake_up(["weights"])
                sender.send(both[(number + 1) % 2])
                group.memory.wake_up(["kv_cache"])
                figures.append(figures_by_kind(group))
                if number == 0:  # host memory for the next sleep is taken beside all this
                    wait_until(lambda: host_backup_is_whole(group), "the backup is there")
        assert figures[1] == figures[-1]
        assert num_graphs(group) == graphs
        assert_tokens_of(models[1], (group, model), seed=5)
        sent = group.weights.compute_checksums()[0].checksums
    with gpu_group(models[1], 1, 1, "float32") as (_, group, _):
        assert group.weights.compute_checksums()[0].checksums == sent


@pytest.mark.parametrize("backend", ["ipc", "gloo"])
def test_update_is_seen_by_the_graphs_that_were_captured_before(
    served, models, back_to_old, backend
):
    group, _ = served
    graphs = num_graphs(group)
    assert graphs > 0
    old = group.weights.compute_checksums()[0].checksums
    tensors = tensors_of(models[1])
    with WeightSender(group, backend) as sender:
        assert sender.send(tensors, packed_bytes=16 << 20).version >= 1
        assert_tokens_of(models[1], served, seed=3)
        # The trainer has gone on, and sends once more: nothing of the first round is kept.
        for tensor in tensors.values():
            tensor.zero_()
        for name, tensor in tensors_of(models[0]).items():
            tensors[name].copy_(tensor)
        sender.send(tensors)
    assert group.weights.compute_checksums()[0].checksums == old
    assert num_graphs(group) == graphs


def test_reload_is_seen_by_the_graphs(served, models, back_to_old):
    group, _ = served
    before = group.get_status()[0].memory_bytes["weights"]
    group.weights.reload(str(models[1]))
    assert_tokens_of(models[1], served, seed=4)
    assert group.get_status()[0].memory_bytes["weights"] == before


def test_memory_that_cannot_be_mapped_is_a_typed_error(served, models, back_to_old):
    group, model = served
    tensors = tensors_of(models[1])
    with WeightSender(group, "ipc") as sender:
        name = next(iter(tensors))
        with pytest.raises(ConfigError, match="another shape"):
            sender.send({name: tensors[name][:1]}, partial=True)
    shape = tuple(tensors["model.norm.weight"].shape)
    listed = TensorList(("model.norm.weight",), ("float32",), (shape,))
    group.weights.init_transfer_engine(IpcEngine())
    group.weights.start_update(partial=True)
    with pytest.raises(ConfigError, match="no such handle"):
        group.weights.update(listed, IpcSource(handles=(), blocks=(0,), offsets=(0,)))
    with pytest.raises(TransferError, match="cuIpcOpenMemHandle"):
        group.weights.update(listed, IpcSource(handles=(bytes(64),), blocks=(0,), offsets=(0,)))
    assert group.get_status()[0].weights.state == "dirty"
    with pytest.raises(WeightsNotWhole):
        generate(group, model, make_requests(1))
