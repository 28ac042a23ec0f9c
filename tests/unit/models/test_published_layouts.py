"""Weights in the layout of published checkpoints: names, shards, tensors that no model reads, and
the ways in and out of a loaded model by these names."""

import json
import os
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rpc_schema.errors import ConfigError
from rpc_schema.weight_transfer import DiskSource, UpdateWeights
from tests.support.published import (
    PUBLISHED,
    VOCAB_SIZE,
    random_model,
    save_published,
    shrunk,
)
from tests.support.quantized_stages import build
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.lora.adapter_files import AdapterFormat
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import checkpoint_names, whole_model
from worker_daemon.models.saved_set import GroupShape, load_saved, read_saved_set
from worker_daemon.models.saving import RankWeights, Saver, SaveRequest
from worker_daemon.models.weight_places import checkpoint_places
from worker_daemon.models.weights import load_weights
from worker_daemon.worker.weight_transfer.engines import DiskReader, Expected, TensorFiles

GEMMA3 = "google/gemma-3-4b-it"
PUBLISHED_NAMES = {
    "mistralai/Mixtral-8x7B-v0.1": [
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.block_sparse_moe.experts.7.w1.weight",
        "model.layers.0.block_sparse_moe.experts.7.w2.weight",
        "model.layers.0.block_sparse_moe.experts.7.w3.weight",
    ],
    "Qwen/Qwen1.5-MoE-A2.7B": [
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.11.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
    ],
    "Qwen/Qwen3-30B-A3B": [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.11.down_proj.weight",
    ],
    "microsoft/Phi-3-mini-4k-instruct": [
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
    ],
    "THUDM/glm-4-9b-chat-hf": [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate_up_proj.weight",
        "lm_head.weight",
    ],
    "THUDM/GLM-4-9B-0414": [
        "model.layers.0.post_self_attn_layernorm.weight",
        "model.layers.0.post_mlp_layernorm.weight",
    ],
    "allenai/OLMo-2-0425-1B": [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
    ],
    "google/gemma-2-9b": ["model.layers.0.pre_feedforward_layernorm.weight"],
    GEMMA3: [
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.6.self_attn.k_norm.weight",
        "multi_modal_projector.mm_input_projection_weight",
    ],
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": [
        "language_model.lm_head.weight",
        "language_model.model.norm.weight",
        "multi_modal_projector.linear_1.weight",
        "vision_tower.patch_conv.weight",
    ],
}
"""By model, some of the names in its published files."""


def old_buffers(tensors):
    """Checkpoints of 2023 store the frequencies of rotations."""
    frequencies = torch.rand(8)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(2)}
    return tensors | {name: values.clone() for name, values in buffers.items()}


def stored_head(tensors):
    """Some trainers store the head although it is the embedding."""
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def bare_names(tensors):
    """Embedding models are stored without the head and the prefix of what has it."""
    return {name.removeprefix("model."): values for name, values in tensors.items()}


def later_names(tensors):
    """transformers 4.52 to 4.57 stored the names that the model has in memory."""
    prefixes = {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    found = {}
    for name, values in tensors.items():
        old = next(prefix for prefix in prefixes if name.startswith(prefix))
        found[prefixes[old] + name.removeprefix(old)] = values
    return found


def text_alone(tensors):
    """A checkpoint from which the vision tower was removed."""
    return {name: values for name, values in tensors.items() if name.startswith("language_model.")}


EDITS = [
    ("meta-llama/Llama-2-7b-chat-hf", old_buffers),
    ("meta-llama/Llama-3.2-1B-Instruct", stored_head),
    ("Qwen/Qwen3-Embedding-0.6B", bare_names),
    (GEMMA3, later_names),
    (GEMMA3, text_alone),
]


def saved(path, name, seed=0, **options):
    config = shrunk(PUBLISHED[name])
    model = random_model(config, seed)
    save_published(model, path, config, **options)
    return model


def assert_same_results(model, path, stages_of, paged_run):
    ids = torch.randint(1, VOCAB_SIZE, (1, 30), generator=torch.Generator().manual_seed(3))
    (ours,) = paged_run(stages_of(path), [ids[0].numpy()]).prefill()
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    assert (ours.log_softmax(-1) - expected).abs().max().item() <= 2e-4


def load(path, stage):
    names = checkpoint_names(read_model_config(path))
    return load_weights(stage.parameters(), path, names, lambda progress: None)


def assert_same_weights(stage, other):
    expected = other.checkpoint_views()
    for name, values in stage.checkpoint_views().items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_shards_with_the_published_names(tmp_path, stages_of, paged_run, name):
    model = saved(tmp_path, name, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    stored = [key for shard in shards for key in load_file(shard)]
    assert set(PUBLISHED_NAMES[name]) <= set(stored)
    assert_same_results(model, tmp_path, stages_of, paged_run)


@pytest.mark.parametrize(("name", "edit"), EDITS)
def test_other_layouts(tmp_path, stages_of, paged_run, name, edit):
    model = saved(tmp_path, name)
    path = tmp_path / "model.safetensors"
    save_file(edit(load_file(path)), path)
    assert_same_results(model, tmp_path, stages_of, paged_run)


def test_tensors_of_a_vision_tower_are_reported_and_not_loaded(tmp_path):
    saved(tmp_path, GEMMA3)
    report = load(tmp_path, build(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    others = {name for name in stored if not name.startswith("language_model.")}
    assert others and set(report.ignored_tensors) == others


@pytest.mark.parametrize("name", [GEMMA3, "mistralai/Mixtral-8x7B-v0.1"])
@pytest.mark.parametrize("names_them", [True, False])
def test_an_update_from_files_by_the_published_names(tmp_path, name, names_them):
    for seed in (1, 2):
        saved(tmp_path / f"{seed}", name, seed=seed)
    stage, fresh = build(tmp_path / "1"), build(tmp_path / "2")
    load(tmp_path / "1", stage)
    load(tmp_path / "2", fresh)
    places = checkpoint_places(stage, read_model_config(tmp_path / "1"))
    stored = load_file(tmp_path / "2" / "model.safetensors")
    others = ("vision_tower.", "multi_modal_projector.")
    names = [name for name in stored if not name.startswith(others)] if names_them else []
    reader = DiskReader(torch.device("cpu"))
    source = DiskSource(model=str(tmp_path / "2"))
    message = UpdateWeights(seq=1, epoch=1, link=1, names=tuple(names), source=source)
    manifest = reader.describe(message, None, Expected(places, TensorFiles([tmp_path])))
    places.check(manifest)

    def place(rows):
        for each in rows:
            places.fill(manifest.names[each.tensor], each.first_row, each.values)

    reader.receive(manifest, source, place)
    places.check_complete(manifest.names)
    assert_same_weights(stage, fresh)


def test_a_tensor_of_the_vision_tower_in_an_update_is_refused_by_name(tmp_path):
    saved(tmp_path, GEMMA3)
    places = checkpoint_places(build(tmp_path), read_model_config(tmp_path))
    reader = DiskReader(torch.device("cpu"))
    stored = load_file(tmp_path / "model.safetensors")
    name = min(name for name in stored if name.startswith("vision_tower."))
    source = DiskSource(model=str(tmp_path))
    message = UpdateWeights(seq=1, epoch=1, link=1, names=(name,), source=source)
    with pytest.raises(ConfigError, match=re.escape(name)) as caught:
        places.check(reader.describe(message, None, Expected(places, TensorFiles([tmp_path]))))
    assert caught.value.field == "names"


def test_a_saved_set_of_the_text_model_is_loaded_again(tmp_path):
    saved(tmp_path / "model", GEMMA3)
    config, stage = read_model_config(tmp_path / "model"), build(tmp_path / "model")
    load(tmp_path / "model", stage)
    (tmp_path / "saved").mkdir(mode=0o700)
    saver, shape = Saver(tmp_path / "saved"), GroupShape(1, 1, (7,), "float32")
    request = SaveRequest(os.urandom(16).hex(), "set", "r{rank}-p{part}.safetensors", 20_000)
    weights = RankWeights(0, shape, config, {}, stage.checkpoint_views(), 0)
    saver.write(request, weights, lambda: None)
    saver.finish(request.save, keep=True)
    found = read_saved_set(tmp_path / "saved" / "set")
    found.check(shape, config)
    again = build(tmp_path / "model")
    load_saved([*again.parameters()], found, 0, lambda progress: None, verify=True)
    assert_same_weights(again, stage)


def test_an_adapter_of_the_whole_model_is_read(tmp_path):
    """PEFT names its matrices by the places of the layers in transformers' model."""
    model = saved(tmp_path / "model", GEMMA3)
    targets = r".*language_model.*\.(q_proj|down_proj)"
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".language_model.layers.0." in name for name in stored)
    layout = AdapterLayout(1, 2)
    whole_model(read_model_config(tmp_path / "model"), SingleRank(), torch.float32, layout)
    files = AdapterFormat(layout, layout.shapes, torch.float32, pinned=False)
    plain = files.read(tmp_path / "adapter")
    assert {each.rank for each in plain.modules.values()} == {2}
    # Patterns and targets have the same names as tensors.
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    module = "language_model.layers.0.self_attn.q_proj"
    config["target_modules"] = [module, "down_proj", "q_proj"]
    config["alpha_pattern"] = {module: 3 * config["lora_alpha"]}
    path.write_text(json.dumps(config))
    assert not torch.equal(files.read(tmp_path / "adapter").weights, plain.weights)
