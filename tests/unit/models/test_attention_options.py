"""Attention that families other than Llama's have, against transformers: rotations that differ
between layers, take a part of each head or pair adjacent elements, and scores that are scaled
differently, capped, or share their softmax with sinks."""

import json
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral import modeling_mistral

from worker_daemon.errors import ConfigError
from worker_daemon.layers.rotary import DefaultRope, LinearRope
from worker_daemon.models import registry
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    layer_type_ropes,
    model_rope,
    num_layers,
    sliding_window,
)

LENGTHS = (1, 5, 40, 13)
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
BASE = {**SIZES, "architectures": ["LlamaForCausalLM"]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SOFTCAP, SCALE = 1.5, 0.4


@pytest.fixture
def describe_by(monkeypatch):
    """(architecture, function of Fields -> DecoderConfig): use this description for it."""

    def register(architecture, describe):
        families = {**registry.FAMILIES, architecture: describe}
        monkeypatch.setattr(registry, "FAMILIES", families)

    return register


@pytest.fixture
def check(random_sequences, stages_of, paged_run, reference_logprobs, on_tensor_parallel_ranks):
    """(checkpoint, pp_size, tp_size): compare one step of prompts, and chunks, with
    transformers."""

    def run(made, pp_size=1, tp_size=1):
        sequences = random_sequences(LENGTHS, seed=32)
        expected = reference_logprobs(made.hf_model, sequences)

        def on_rank(tp):
            stages = stages_of(made.path, pp_size, tp)
            whole = paged_run(stages, sequences).prefill()
            chunked, pieces = paged_run(stages, sequences), [[] for _ in sequences]
            while any(done < len(s) for done, s in zip(chunked.done, sequences, strict=True)):
                left = [len(s) - done for s, done in zip(sequences, chunked.done, strict=True)]
                counts = [min(11, count) for count in left]
                logits = chunked.step(counts, num_padding=2).split(counts)
                for rows, new in zip(pieces, logits, strict=True):
                    rows.append(new)
            return whole, [torch.cat(rows) for rows in pieces]

        for outcomes in on_tensor_parallel_ranks(tp_size, on_rank):
            for ours in outcomes:
                for logits, reference in zip(ours, expected, strict=True):
                    assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)

    return run


def save_split(made):
    """Save a checkpoint again, with its merged matrices split into those that Llama has."""
    config, tensors = made.hf_model.config, {}
    head_dim = made.hf_model.model.layers[0].self_attn.head_dim
    q, kv = (n * head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    for name, tensor in made.hf_model.state_dict().items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", tensor.split([q, kv, kv]), strict=True):
                tensors[name.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                tensors[name.replace("gate_up_proj", f"{part}_proj")] = rows.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, made.path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("is_outside", [False, True])
@pytest.mark.parametrize(
    ("architecture", "interleaved", "overrides"),
    [
        ("Phi3ForCausalLM", False, {"pad_token_id": 0, "num_attention_heads": 3}),
        ("GlmForCausalLM", True, {"pad_token_id": 0, "head_dim": 16, "attention_bias": True}),
    ],
)
def test_a_part_of_each_head_is_rotated(
    make_checkpoint, describe_by, check, architecture, interleaved, overrides, is_outside
):
    """Phi: 12 of 16 elements, in halves. GLM: 8 of 16, in adjacent pairs."""

    def describe(fields):
        heads = head_sizes(fields)
        layer = dense_layer(
            fields,
            heads,
            qkv_bias=fields.flag("attention_bias", False),
            rope=model_rope(fields, heads.head_dim, default_share=0.5, interleaved=interleaved),
        )
        assert layer.attention.rope.rotary_dim == (8 if interleaved else 12)
        return decoder_config(fields, [layer] * num_layers(fields))

    describe_by(architecture, describe)
    share = 0.5 if interleaved else 0.75
    if architecture == "Phi3ForCausalLM":
        overrides = {**overrides, "num_key_value_heads": 1}
    made = make_checkpoint(
        architecture, {"rope_type": "default", "partial_rotary_factor": share}, seed=31, **overrides
    )
    save_split(made)
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    if is_outside:
        del config["rope_parameters"]["partial_rotary_factor"]
        if not interleaved:  # else it is the family's default
            config["partial_rotary_factor"] = share
    path.write_text(json.dumps(config))
    check(made)


@pytest.fixture
def make_mistral(make_checkpoint, monkeypatch):
    """(an attention function of transformers, window) -> a checkpoint of Mistral that uses it, and
    has random sinks."""

    def make(attend, window):
        monkeypatch.setattr(modeling_mistral, "eager_attention_forward", attend)
        made = make_checkpoint(
            "MistralForCausalLM", seed=33, sliding_window=window, attn_implementation="eager"
        )
        generator = torch.Generator().manual_seed(33)
        for layer in made.hf_model.model.layers:
            sinks = torch.randn(made.hf_model.config.num_attention_heads, generator=generator)
            layer.self_attn.sinks = torch.nn.Parameter(sinks * 2)
        made.hf_model.save_pretrained(made.path)
        return made

    return make


def describe_mistral(fields, **options):
    layer = dense_layer(fields, head_sizes(fields), window=sliding_window(fields), **options)
    return decoder_config(fields, [layer] * num_layers(fields))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("pp_size", "tp_size"), [(1, 1), (2, 2)])
def test_sinks(make_mistral, describe_by, check, window, pp_size, tp_size):
    describe_by("MistralForCausalLM", partial(describe_mistral, has_sinks=True))
    check(make_mistral(modeling_gpt_oss.eager_attention_forward, window), pp_size, tp_size)


@pytest.mark.parametrize("window", [None, 6])
def test_capped_scores_of_another_scale(make_mistral, describe_by, check, window):
    def attend(module, query, key, value, mask, scaling, **others):
        return modeling_gemma2.eager_attention_forward(
            module, query, key, value, mask, scaling=SCALE, softcap=SOFTCAP
        )

    options = {"scale": SCALE, "logit_softcap": SOFTCAP}
    describe_by("MistralForCausalLM", partial(describe_mistral, **options))
    check(make_mistral(attend, window))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_layers_with_different_rotations(make_checkpoint, describe_by, check, pp_size):
    """Gemma 3's way: every other layer is of the other type."""
    made = make_checkpoint("LlamaForCausalLM", seed=34)
    types = ["sliding_attention", "full_attention"] * 2
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    }
    for layer, layer_type in zip(made.hf_model.model.layers, types, strict=True):
        config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(parameters[layer_type]))
        rotary = type(made.hf_model.model.rotary_emb)(config)

        def turn(module, args, named, rotary=rotary):
            named["position_embeddings"] = rotary(args[0], named["position_ids"])
            return args, named

        layer.register_forward_pre_hook(turn, with_kwargs=True)

    def describe(fields):
        heads = head_sizes(fields)
        ropes = layer_type_ropes(fields, heads.head_dim, default_theta=1e6, default_local_theta=1e4)
        return decoder_config(fields, [dense_layer(fields, heads, rope=ropes[t]) for t in types])

    describe_by("LlamaForCausalLM", describe)
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rope_parameters": parameters}))
    check(made, pp_size)


@pytest.fixture
def ropes_of(describe_by):
    """(config.json's fields) -> the rotations of a full and of a sliding layer."""

    def parse(**fields):
        def describe(fields):
            heads = head_sizes(fields)
            ropes = layer_type_ropes(
                fields, heads.head_dim, default_theta=1e6, default_local_theta=1e4
            )
            wanted = ("full_attention", "sliding_attention")
            return decoder_config(
                fields, [dense_layer(fields, heads, rope=ropes[t]) for t in wanted]
            )

        describe_by("LlamaForCausalLM", describe)
        config = parse_model_config({**BASE, **fields})
        return tuple(layer.attention.rope for layer in config.layers)

    return parse


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_theta": 5e5, "rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 3e5}}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3e5},
                "sliding_attention": {**LINEAR, "rope_theta": 700.0},
            }
        },
    ],
)
def test_rotations_of_layer_types_are_those_of_transformers(ropes_of, fields):
    types = ["full_attention", "sliding_attention"]
    given = json.loads(json.dumps(fields))  # transformers adds to its arguments
    config = transformers.Gemma3TextConfig(**SIZES, **given, head_dim=12, layer_types=types)
    reference = modeling_gemma3.Gemma3RotaryEmbedding(config)
    for rope, name in zip(ropes_of(**fields), ("full", "sliding"), strict=True):
        expected = getattr(reference, f"{name}_attention_inv_freq")
        assert torch.allclose(rope.inv_freq(), expected, rtol=1e-6)
        assert rope.theta == config.rope_parameters[f"{name}_attention"]["rope_theta"]


def test_rotations_of_layer_types_of_either_release_are_equal(ropes_of):
    full, sliding = LinearRope(12, 5e5, 8.0), DefaultRope(12, 2e4)
    old = ropes_of(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=LINEAR)
    new = ropes_of(
        rope_parameters={
            "full_attention": {**LINEAR, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    )
    assert old == new == (full, sliding)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"chunked_attention": {}}}, "rope_parameters"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope_parameters.full_attention.factor",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, "rope_scaling"),
    ],
)
def test_what_is_wrong_with_a_layer_types_rotation_is_named(ropes_of, fields, named):
    with pytest.raises(ConfigError) as caught:
        ropes_of(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize("share", [0.05, 0.6, 1.5])
def test_a_share_that_is_no_even_number_of_elements_is_refused(describe_by, share):
    def describe(fields):
        heads = head_sizes(fields)
        rope = model_rope(fields, heads.head_dim, default_share=1.0)
        layer = dense_layer(fields, heads, rope=rope)
        return decoder_config(fields, [layer])

    describe_by("LlamaForCausalLM", describe)
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        parse_model_config({**BASE, "partial_rotary_factor": share})
