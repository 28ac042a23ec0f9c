"""Published checkpoints: config.json is accepted, and a small copy of each gives the logits of the
model that transformers builds from the same file."""

import fnmatch
import json

import pytest
import torch
import transformers

from rpc_schema.errors import ConfigError
from tests.support.published import (
    PUBLISHED,
    VOCAB_SIZE,
    random_model,
    save_published,
    shrunk,
    with_factors,
)
from worker_daemon.models.config import parse_model_config, read_model_config
from worker_daemon.models.decoder import module_names

PROMPT_LEN, NUM_DECODES = 40, 3
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""The rope_scaling that the model cards of Qwen2.5 and Qwen3 give for long prompts."""
VARIANTS = {
    **PUBLISHED,
    "Qwen/Qwen2.5-7B-Instruct with YaRN": PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]
    | {"rope_scaling": YARN},
    "Qwen/Qwen3-8B with YaRN": PUBLISHED["Qwen/Qwen3-8B"]
    | {"rope_scaling": {"rope_type": YARN["type"]} | YARN},
}
FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
LEFT_IN_BFLOAT16 = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "kv_cache_scheme": "FP8",
    "producer": {"name": "modelopt", "version": "0.31.0"},
}
"""The quantization_config of Qwen/Qwen3-32B-FP8-Static-PerTensor."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_file_is_accepted(name):
    published = PUBLISHED[name]
    text = published.get("text_config", published)
    config = parse_model_config(with_factors(published, 48))
    assert config.num_hidden_layers == text["num_hidden_layers"]
    assert config.hidden_size == text["hidden_size"]
    assert config.dtype == (published.get("dtype") or published.get("torch_dtype"))
    assert config.generates
    eos = published.get("eos_token_id", list(config.eos_token_ids))
    assert list(config.eos_token_ids) == (eos if isinstance(eos, list) else [eos])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_file_that_transformers_writes_means_the_same(tmp_path, name):
    """transformers writes the fields of its own release, and fills in defaults."""
    published = with_factors(PUBLISHED[name], 48)
    (tmp_path / "config.json").write_text(json.dumps(published))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written != published
    assert parse_model_config(written) == parse_model_config(published)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_small_copy_gives_the_logits_of_transformers(tmp_path, stages_of, paged_run, name):
    config = shrunk(VARIANTS[name])
    model = random_model(config)
    save_published(model, tmp_path, config)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCAB_SIZE, (1, PROMPT_LEN + NUM_DECODES), generator=generator)
    run = paged_run(stages_of(tmp_path), [ids[0].numpy()])
    parts = [run.step([PROMPT_LEN]), *(run.step([1]) for _ in range(NUM_DECODES))]
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    ours = torch.cat(parts).float().log_softmax(-1)
    assert (ours - expected).abs().max().item() <= 2e-4


def test_fp8_checkpoints_list_what_is_not_quantized():
    """Qwen/Qwen3-32B-FP8 and Qwen/Qwen3-30B-A3B-FP8."""
    dense = parse_model_config(PUBLISHED["Qwen/Qwen3-32B"] | {"quantization_config": FP8_BLOCKS})
    assert dense.quantization.covers("model.layers.3.mlp.gate_proj")
    names = [f"model.layers.{layer}.{part}" for layer in range(48) for part in LEFT_IN_BFLOAT16]
    listed = FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", *names]}
    config = PUBLISHED["Qwen/Qwen3-30B-A3B"] | {"quantization_config": listed}
    quantization = parse_model_config(config).quantization
    assert quantization.scales == "block"
    assert not quantization.covers("model.layers.3.mlp.gate")
    assert quantization.covers("model.layers.3.mlp.experts.5.gate_proj")


def test_a_published_checkpoint_of_modelopt():
    config = PUBLISHED["Qwen/Qwen3-32B"] | {"quantization_config": MODELOPT}
    found = parse_model_config(config).quantization
    assert (found.scales, found.activations) == ("tensor", "static")
    assert found.covers("model.layers.3.mlp.up_proj") and not found.covers("lm_head")
    named = parse_model_config(
        PUBLISHED["Qwen/Qwen3-32B"]
        | {"quantization_config": {"quant_method": "modelopt"} | MODELOPT}
    )
    assert named.quantization == found


EXCLUDED = [
    *("lm_head", "model.layers.0*", "*.1.self_attn.[kq]_proj", "model.layers.2.mlp"),
    *(f"model.layers.{layer}.mlp.*_proj" for layer in range(20, 64)),
]


def test_modules_that_modelopt_excludes_are_those_of_its_shell_patterns(tmp_path):
    config = PUBLISHED["Qwen/Qwen3-32B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": EXCLUDED}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    found = read_model_config(tmp_path).quantization
    for module in module_names(parse_model_config(config)):
        excluded = any(
            fnmatch.fnmatchcase(module, each) or module.startswith(f"{each}.") for each in EXCLUDED
        )
        assert found.covers(module) != excluded, module


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"quantization": {"quant_algo": "NVFP4"}}, "quantization.quant_algo"),
        ({"quantization": {"quant_algo": "MIXED_PRECISION"}}, "quantization.quant_algo"),
        ({"quantization": {}}, "quantization.quant_algo"),
        ({"producer": {}}, "quantization"),
        (
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}},
            "quantization.kv_cache_quant_algo",
        ),
        (
            {"quantization": {"quant_algo": "FP8", "exclude_modules": [""]}},
            "quantization.exclude_modules",
        ),
    ],
)
def test_what_is_not_served_of_modelopts_file_is_refused_by_name(tmp_path, content, field):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-32B"]))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)
    assert caught.value.field == f"hf_quant_config.json: {field}"


def test_ignored_modules_of_a_multimodal_checkpoint_have_its_names():
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme | {"strategy": "channel"}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["language_model.model.layers.0.mlp.up_proj", "re:vision_tower.*"],
    }
    config = PUBLISHED["google/gemma-3-4b-it"] | {"quantization_config": quantization}
    found = parse_model_config(config).quantization
    assert not found.covers("model.layers.0.mlp.up_proj")
    assert found.covers("model.layers.1.mlp.up_proj")


GEMMA3 = PUBLISHED["google/gemma-3-4b-it"]
MISTRAL3 = PUBLISHED["mistralai/Mistral-Small-3.2-24B-Instruct-2506"]


def test_a_text_model_takes_the_whole_checkpoints_fields():
    config = parse_model_config(GEMMA3)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert config.tie_word_embeddings and config.vocab_size == 262_208
    bare = parse_model_config(GEMMA3 | {"architectures": ["Gemma3Model"]})
    assert bare.layers == config.layers and not bare.generates


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_early_names_of_longrope_in_phi_3(old):
    published = with_factors(PUBLISHED["microsoft/Phi-3-mini-128k-instruct"], 48)
    renamed = published | {"rope_scaling": published["rope_scaling"] | {"type": old}}
    assert parse_model_config(renamed) == parse_model_config(published)


@pytest.mark.parametrize(
    ("own", "whole", "expected"),
    [(None, None, True), (None, True, True), (False, True, True), (True, False, False)],
)
def test_the_whole_checkpoint_says_whether_the_head_is_tied(tmp_path, own, whole, expected):
    text = MISTRAL3["text_config"] | ({} if own is None else {"tie_word_embeddings": own})
    outer = {} if whole is None else {"tie_word_embeddings": whole}
    values = MISTRAL3 | outer | {"text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert transformers.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings == expected
    assert parse_model_config(values).tie_word_embeddings == expected


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (
            "Qwen/Qwen3-32B",
            {"quantization_config": MODELOPT | {"quant_algo": "NVFP4"}},
            "quantization_config.quant_algo",
        ),
        (
            "Qwen/Qwen3-32B",
            {"quantization_config": MODELOPT | {"kv_cache_scheme": "NVFP4"}},
            "quantization_config.kv_cache_scheme",
        ),
        (
            "Qwen/Qwen3-32B",
            {"quantization_config": MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
            "quantization_config.config_groups.group_0.input_activations.dynamic",
        ),
        (
            "Qwen/Qwen3-32B",
            {"quantization_config": MODELOPT | {"ignore": [f"{'a' * 1023}*"]}},
            "quantization_config.ignore",
        ),
        ("Qwen/Qwen2.5-7B-Instruct", {"is_causal": False}, "is_causal"),
        ("Qwen/Qwen2.5-7B-Instruct", {"rope_scaling": {"type": "mrope"}}, "rope_scaling.type"),
        (
            "google/gemma-3-1b-it",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ("google/gemma-3-4b-it", {"text_config": None}, "text_config"),
        ("google/gemma-3-4b-it", {"text_config": {}}, "text_config.model_type"),
        (
            "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
            {"text_config": {"model_type": "ministral3"}},
            "text_config.model_type",
        ),
        (
            "google/gemma-3-4b-it",
            {"text_config": GEMMA3["text_config"] | {"num_hidden_layers": "34"}},
            "text_config.num_hidden_layers",
        ),
        ("google/gemma-3-4b-it", {"architectures": ["Gemma3ForCausalLM"]}, "architectures"),
        ("google/gemma-3-4b-it", {"architectures": ["Gemma3TextModel"]}, "architectures"),
        ("google/gemma-3-1b-it", {"architectures": ["Gemma3Model"]}, "text_config"),
        ("THUDM/glm-4-9b-chat-hf", {"architectures": ["ChatGLMModel"]}, "architectures"),
        ("microsoft/phi-4", {"architectures": ["Phi3SmallForCausalLM"]}, "architectures"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config, changes, field):
    with pytest.raises(ConfigError) as caught:
        parse_model_config(PUBLISHED[config] | changes)
    assert caught.value.field == field
