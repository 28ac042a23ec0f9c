"""config.json in both of transformers' forms, its defaults, and every way to get it wrong."""

import ast
import json

import pytest
import torch
import transformers

from rpc_schema.config import ModelConfig
from rpc_schema.errors import CheckpointError, ConfigError
from worker_daemon.layers.norm import QKNormSpec
from worker_daemon.layers.rotary import DynamicRope, Llama3Rope, LongRope, YarnRope
from worker_daemon.models.config import parse_model_config, read_model_config
from worker_daemon.worker.resolve import resolve_model

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LONGROPE = {"rope_type": "longrope"}


def parse(**changes):
    return parse_model_config({**BASE, **changes})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "scaling",
    [
        YARN | {"beta_fats": 32, "finetuned": True},
        YARN | {"attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": False},
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
        LLAMA3 | {"low_freq_factors": 1.0, "beta_fast": 2},
        LLAMA3,
        {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64},
        {"type": "dynamic", "factor": 2.0, "alpha": 1000.0},
        {"rope_type": "default", "mrope_section": [1, 1, 2]},
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_unknown_fields_of_rotations_are_those_that_transformers_warns_of(
    tmp_path, caplog, scaling, name
):
    values = BASE | {"model_type": "llama", name: scaling | {"rope_theta": 1e4}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with caplog.at_level("WARNING"):
        transformers.AutoConfig.from_pretrained(tmp_path)
    said = [each for each in caplog.messages if "Unrecognized keys" in each]
    theirs = ast.literal_eval(said[0].rpartition(": ")[2]) if said else set()
    found = parse_model_config(values).unknown_fields
    assert set(found) == {f"{name}.{key}" for key in theirs}
    caplog.clear()
    resolve_model(ModelConfig(model=str(tmp_path)), [tmp_path])
    (ours,) = caplog.messages or [""]
    assert all(field in ours for field in found) and bool(ours) == bool(theirs)


def test_unknown_fields_of_one_layer_types_rotation_are_named():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    both = {"full_attention": rope | {"factr": 8.0}, "sliding_attention": rope | {"factor": None}}
    config = parse(architectures=["Gemma3ForCausalLM"], rope_parameters=both)
    assert config.unknown_fields == ("rope_parameters.full_attention.factr",)


def biases_and_head_norm(config):
    """Of qkv, o and the MLP; the norm of heads. Alike in all layers."""
    (switches,) = {
        (layer.attention.qkv_bias, layer.attention.o_bias, layer.mlp.mlp_bias,
         layer.attention.qk_norm)
        for layer in config.layers
    }  # fmt: skip
    return switches


def test_required_fields_and_llama_defaults():
    config = parse(num_key_value_heads=None)
    assert (config.heads.head_dim, config.heads.num_key_value_heads) == (16, 4)
    assert [layer.attention.sliding_window for layer in config.layers] == [None] * 4
    assert config.dtype is None and not config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert biases_and_head_norm(config) == (False, False, False, None)
    assert config.max_supported_len is None


@pytest.mark.parametrize(
    ("architecture", "changes", "qkv", "o", "mlp", "qk_norm"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, True, True, False, False),
        ("LlamaForCausalLM", {"mlp_bias": True}, False, False, True, False),
        ("MistralForCausalLM", {"attention_bias": True}, False, False, False, False),
        ("Qwen2ForCausalLM", {}, True, False, False, False),
        ("Qwen3ForCausalLM", {}, False, False, False, True),
        ("Qwen3ForCausalLM", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms_of_each_architecture(architecture, changes, qkv, o, mlp, qk_norm):
    config = parse(architectures=[architecture], **changes)
    assert biases_and_head_norm(config) == (qkv, o, mlp, QKNormSpec(1e-5) if qk_norm else None)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 9}),
        ("Mistral", {"sliding_window": 9, "max_position_embeddings": 10}),
        ("Mistral", {"sliding_window": 9, "max_position_embeddings": 9}),
        ("Mistral", {"sliding_window": 9, "max_position_embeddings": 8}),
        ("Qwen2", {"sliding_window": 9}),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True}),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}),
        ("Qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}),
        (
            "Qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_windows_and_head_dim_are_those_of_transformers(architecture, changes):
    hf = getattr(transformers, f"{architecture}Config")(**{**BASE, **changes})
    types = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    expected = tuple(hf.sliding_window if t == "sliding_attention" else None for t in types)
    config = parse(architectures=[f"{architecture}ForCausalLM"], **changes)
    longest = hf.max_position_embeddings
    assert [layer.attention.sliding_window for layer in config.layers] == [
        None if window is not None and window >= longest else window for window in expected
    ]
    assert config.heads.head_dim == (getattr(hf, "head_dim", None) or 16)


def test_both_rope_forms_give_the_same_rope():
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = parse(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert old.ropes == new.ropes == (Llama3Rope(rotary_dim=16, theta=5e5, **llama3),)


def test_yarn_takes_its_factor_and_length_from_where_transformers_does():
    (yarn,) = parse(
        rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32}
    ).ropes
    assert isinstance(yarn, YarnRope) and yarn.factor == 8.0
    (outer,) = parse(
        original_max_position_embeddings=128,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    ).ropes
    assert outer.original_max_position_embeddings == 128
    (absent,) = parse(rope_scaling={"rope_type": "yarn", "factor": 2.0}).ropes
    assert absent.original_max_position_embeddings == 256


def test_longrope_takes_its_extension_from_where_transformers_does():
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0, *[3] * 7]}
    named = {"rope_type": "longrope", **lists}
    inner = parse(rope_scaling={**named, "original_max_position_embeddings": 32}).ropes[0]
    assert isinstance(inner, LongRope)
    assert (inner.factor, inner.original_max_position_embeddings) == (8.0, 32)
    assert inner.long_factors == (2.0, *[3.0] * 7)
    old = {"original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", **lists}}
    assert parse(**old).ropes[0] == inner
    given = parse(rope_scaling={**named, "factor": 4.0, "attention_factor": 1.25}).ropes[0]
    assert (given.factor, given.attention_scaling) == (4.0, 1.25)


def test_dynamic_rope_limits_the_supported_length():
    config = parse(rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert isinstance(*config.ropes, DynamicRope)
    assert config.max_supported_len == 256


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None}, None),
    ],
)
def test_dtype_in_both_forms(fields, dtype):
    assert parse(**fields).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": []}, "num_hidden_layers"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_attention_heads": 6}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"torch_dtype": 16}, "torch_dtype"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "quantization_config.quant_method",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.short_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
            "rope_scaling.long_factor",
        ),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "rope_scaling.short_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0]}},
            "rope_scaling.short_factor.7",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": 4}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
            "rope_scaling.truncate",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "rope_scaling.high_freq_factor",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "layer_types",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["ssm"] * 4}, "layer_types"),
    ],
)
def test_a_wrong_field_is_named(changes, field):
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*Mistral.*Qwen2.*Qwen3"):
        parse(architectures=["BloomForCausalLM"])


def test_end_tokens_of_the_generation_config_win(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 5}))
    assert read_model_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (5, 9)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_config_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 32,
}


SHARED = EXPERTS | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 80,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 32, "num_key_value_heads": 1}, EXPERTS, SHARED]
)
def test_a_token_is_multiplied_by_the_weights_of_its_experts_alone(changes):
    """Against the matrices of transformers' model; routers and gates do not count."""
    fields = BASE | changes
    (name,) = fields["architectures"]
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**fields)
    with torch.device("meta"):
        layer = getattr(transformers, name)(config).model.layers[0]
    share = changes.get("num_experts_per_tok", 1) / changes.get("num_experts", 1)
    expected = sum(
        values.numel() * (share if ".experts." in each else 1)
        for each, values in layer.named_parameters()
        if values.dim() > 1 and not each.endswith(("mlp.gate.weight", "expert_gate.weight"))
    )
    assert parse(**changes).layer_weights == expected
