"""Models with experts through a daemon's whole life: sleep, saved sets, weight updates under
separate and stacked names, adapters; whole experts on ranks that hold different numbers of them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rpc_schema.config import LoraConfig
from rpc_schema.errors import (
    CheckpointError,
    ConfigError,
)
from tests.support.checkpoints import decisive_prompts
from tests.support.lora_adapters import config_of, write_adapter
from tests.support.saving_daemons import saving_daemons
from tests.support.serving import assert_greedy, connect, generate, greedy_request, worker_config
from worker_client.trainer.sender import WeightSender

ARCHITECTURE = "Qwen2MoeForCausalLM"
FIELDS = {"num_experts": 5, "num_hidden_layers": 2, "mlp_only_layers": [], "norm_topk_prob": True}
DIVIDED = {"enable_expert_parallel": True}
TOKENS = 8
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def old(checkpoint):
    return checkpoint(ARCHITECTURE, seed=91, **FIELDS)


@pytest.fixture(scope="module")
def new(checkpoint):
    return checkpoint(ARCHITECTURE, seed=92, **FIELDS)


@pytest.fixture(scope="module")
def old_requests(old):
    return requests_for(old)


@pytest.fixture(scope="module")
def new_requests(new):
    return requests_for(new)


def requests_for(model):
    prompts = decisive_prompts(model, 93, [9, 17, 4], TOKENS)
    return [greedy_request(f"r{index}", prompt, TOKENS) for index, prompt in enumerate(prompts)]


def checksums(group):
    return [reply.checksums for reply in group.weights.compute_checksums()]


@pytest.fixture(scope="module")
def save_root(tmp_path_factory):
    return tmp_path_factory.mktemp("expert-saves") / "made"


@pytest.fixture(scope="module")
def pair(model_root, save_root):
    """Two daemons with one save root."""
    with saving_daemons(model_root, save_root, save_root) as daemons:
        yield daemons


def test_sleep_updates_and_saved_sets(pair, save_root, old, new, old_requests, new_requests):
    config = worker_config(old.path, 1, 2, enable_sleep_mode=True, **DIVIDED)
    with connect(pair.endpoints, config) as (group, loaded):
        before = checksums(group)
        names = [{name for name in sums if ".experts." in name} for sums in before]
        assert [len(held) for held in names] == [2 * 3 * 3, 2 * 2 * 3]  # layers, experts, matrices
        assert not names[0] & names[1]
        group.memory.sleep(1)
        group.memory.wake_up()
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)
        group.weights.save_sharded_state("old")

        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            stacked = dict(new.model.state_dict())
            assert any(name.endswith("experts.gate_up_proj") for name in stacked)
            sender.send(stacked, packed_bytes=40_000)
            updated = checksums(group)
            assert_greedy(generate(group, loaded, new_requests), new, new_requests)
            sender.send(load_file(old.path / "model.safetensors"))
            assert checksums(group) == before
        group.weights.reload(str(new.path))
        assert checksums(group) == updated
        group.memory.sleep(2)
        group.memory.wake_up(["weights"])
        group.weights.reload(str(old.path))
        group.memory.wake_up(["kv_cache"])
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)

    saved = worker_config(save_root / "old", 1, 2, load_format="sharded_state", **DIVIDED)
    with connect(pair.endpoints, saved) as (group, loaded):
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)
    split = worker_config(save_root / "old", 1, 2, load_format="sharded_state")
    with (
        pytest.raises(ConfigError, match="enable_expert_parallel"),
        connect(pair.endpoints, split),
    ):
        pass


def test_kernel_names_of_ranks_with_different_experts(pair, old, old_requests):
    """A name for all ranks would not fit; each rank's own does."""
    with connect(pair.endpoints, worker_config(old.path, 1, 2, **DIVIDED)) as (group, loaded):
        name = "model.layers.1.mlp.experts.down_proj.weight"
        before = checksums(group)
        rows = [torch.randn(count * 64, 48) for count in (3, 2)]
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            with pytest.raises(ConfigError, match="no such tensor"):
                sender.send({name: rows[0]}, format="kernel", partial=True)
            named = {f"{name}@tp{rank}": part for rank, part in enumerate(rows)}
            sender.send(named, format="kernel", partial=True)
        assert all(a != b for a, b in zip(checksums(group), before, strict=True))
        group.weights.reload(str(old.path))
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)


def test_adapters_of_experts_are_refused_by_name(serve, old, old_requests):
    directory = old.path.parent
    tensors = {}
    for module, shape in (("self_attn.q_proj", (64, 64)), ("mlp.experts.1.up_proj", (48, 64))):
        prefix = f"base_model.model.model.layers.0.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(2, shape[1])
        tensors[f"{prefix}.lora_B.weight"] = torch.zeros(shape[0], 2)
    attention = {name: each for name, each in tensors.items() if "q_proj" in name}
    write_adapter(directory / "experts", config_of(2, 4.0, ["q_proj", "up_proj"]), tensors)
    write_adapter(directory / "attention", config_of(2, 4.0, ["q_proj"]), attention)
    room = LoraConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=2)
    with serve(old.path, lora=room) as (group, loaded):
        with pytest.raises(CheckpointError, match=r"experts.1.up_proj.*not supported"):
            group.loras.add("experts")
        group.loras.add("attention")
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)


def test_experts_that_are_missing_are_named(serve, checkpoint, tmp_path):
    broken = checkpoint(ARCHITECTURE, seed=94, **FIELDS)
    path = broken.path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 6}))
    with pytest.raises(CheckpointError, match=r"experts\.5"), serve(broken.path):
        pass
