"""GPT-OSS in MXFP4 through a daemon's whole life: sleep, saved sets, updates from a trainer that
has it unquantized, reloads, FP8, and adapters."""

import pytest
import torch

from rpc_schema.config import LoraConfig
from rpc_schema.errors import (
    CheckpointError,
)
from tests.support.checkpoints import Checkpoint, decisive_prompts
from tests.support.lora_adapters import config_of, write_adapter
from tests.support.quantized_mxfp4 import to_mxfp4
from tests.support.saving_daemons import saving_daemons
from tests.support.serving import assert_greedy, connect, generate, greedy_request, worker_config
from worker_client.trainer.sender import WeightSender

TOKENS = 8
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def make(checkpoint):
    """make(seed) -> Checkpoint in MXFP4, in two files."""

    def made(seed):
        plain = checkpoint("GptOssForCausalLM", seed=seed, num_hidden_layers=2)
        return Checkpoint(plain.path, to_mxfp4(plain.path, seed, num_files=2))

    return made


def requests_for(model):
    prompts = decisive_prompts(model, 63, [9, 30, 4], TOKENS)
    return [greedy_request(f"r{index}", prompt, TOKENS) for index, prompt in enumerate(prompts)]


def checksums(group):
    return [reply.checksums for reply in group.weights.compute_checksums()]


def test_sleep_updates_and_saved_sets(make, model_root, tmp_path_factory):
    """The ranks' parts of the experts cut blocks."""
    old, new = make(61), make(62)
    old_requests, new_requests = requests_for(old), requests_for(new)
    root = tmp_path_factory.mktemp("gpt-oss-saves") / "made"
    with saving_daemons(model_root, root, root) as pair:
        config = worker_config(old.path, 1, 2, enable_sleep_mode=True)
        with connect(pair.endpoints, config) as (group, loaded):
            before = checksums(group)
            group.memory.sleep(1)
            group.memory.wake_up()
            assert_greedy(generate(group, loaded, old_requests), old, old_requests)
            group.weights.save_sharded_state("old")
            with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
                sender.send(dict(new.model.state_dict()), packed_bytes=40_000)
            updated = checksums(group)
            assert_greedy(generate(group, loaded, new_requests), new, new_requests)
            group.weights.reload(str(old.path))
            assert checksums(group) == before
            group.memory.sleep(2)
            group.memory.wake_up(["weights"])
            group.weights.reload(str(new.path))
            group.memory.wake_up(["kv_cache"])
            assert checksums(group) == updated
            assert_greedy(generate(group, loaded, new_requests), new, new_requests)
        saved = worker_config(root / "old", 1, 2, load_format="sharded_state")
        with connect(pair.endpoints, saved) as (group, loaded):
            assert checksums(group) == before
            assert_greedy(generate(group, loaded, old_requests), old, old_requests)


def test_experts_in_fp8_with_adapters_of_attention(serve, make):
    model = make(68)
    directory = model.path.parent
    tensors = {}
    for module in ("self_attn.q_proj", "mlp.experts"):
        prefix = f"base_model.model.model.layers.0.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(2, 64)
        tensors[f"{prefix}.lora_B.weight"] = torch.zeros(64, 2)
    attention = {name: each for name, each in tensors.items() if "q_proj" in name}
    write_adapter(directory / "mxfp4-experts", config_of(2, 4.0, ["q_proj"]), tensors)
    write_adapter(directory / "mxfp4-attention", config_of(2, 4.0, ["q_proj"]), attention)
    room = LoraConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=2)
    requests = requests_for(model)
    with serve(model.path, lora=room) as (group, loaded):
        with pytest.raises(CheckpointError, match=r"mlp.experts.lora_A.*not supported"):
            group.loras.add("mxfp4-experts")
        group.loras.add("mxfp4-attention")
        assert_greedy(generate(group, loaded, requests), model, requests)
    with serve(model.path, quantization="fp8") as (group, loaded):
        name = "model.layers.0.mlp.experts.5.gate_up_proj"
        (sums,) = checksums(group)
        assert f"{name}.weight_scale" in sums
        group.weights.reload()
        assert checksums(group) == [sums]
        tokens = generate(group, loaded, requests).tokens
        assert [len(each) for each in tokens.values()] == [TOKENS] * len(requests)
