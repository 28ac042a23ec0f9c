"""Sinks of attention, and rotations that differ between layers or take a part of each head, against
transformers."""

import json

import pytest
import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral import modeling_mistral

from rpc_schema.errors import ConfigError
from worker_daemon.layers.rotary import DefaultRope, LinearRope
from worker_daemon.models import registry
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    num_layers,
    sliding_window,
    with_attention,
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
LINEAR = {"rope_type": "linear", "factor": 8.0}


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


def describe_mistral_with_sinks(fields):
    layer = dense_layer(fields, head_sizes(fields), window=sliding_window(fields))
    layer = with_attention(layer, has_sinks=True)
    return decoder_config(fields, [layer] * num_layers(fields))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("pp_size", "tp_size"), [(1, 1), (2, 2)])
def test_sinks(make_mistral, describe_by, check, window, pp_size, tp_size):
    describe_by("MistralForCausalLM", describe_mistral_with_sinks)
    check(make_mistral(modeling_gpt_oss.eager_attention_forward, window), pp_size, tp_size)


def ropes_of(**fields):
    """Return the rotations of a full and of a sliding layer of Gemma 3."""
    types = ["full_attention", "sliding_attention"]
    gemma = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 12, "layer_types": types}
    config = parse_model_config({**SIZES, **gemma, **fields})
    return tuple(layer.attention.rope for layer in config.layers)


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
def test_rotations_of_layer_types_are_those_of_transformers(fields):
    types = ["full_attention", "sliding_attention"]
    given = json.loads(json.dumps(fields))  # transformers adds to its arguments
    config = transformers.Gemma3TextConfig(**SIZES, **given, head_dim=12, layer_types=types)
    reference = modeling_gemma3.Gemma3RotaryEmbedding(config)
    for rope, name in zip(ropes_of(**fields), ("full", "sliding"), strict=True):
        expected = getattr(reference, f"{name}_attention_inv_freq")
        assert torch.allclose(rope.inv_freq(), expected, rtol=1e-6)
        assert rope.theta == config.rope_parameters[f"{name}_attention"]["rope_theta"]


def test_rotations_of_layer_types_of_either_release_are_equal():
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
def test_what_is_wrong_with_a_layer_types_rotation_is_named(fields, named):
    with pytest.raises(ConfigError) as caught:
        ropes_of(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize("share", [0.05, 0.6, 1.5])
def test_a_share_that_is_no_even_number_of_elements_is_refused(share):
    phi = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": share}
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        parse_model_config({**SIZES, **phi})


@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_a_share_is_read_wherever_it_stands(place):
    share = {"partial_rotary_factor": 0.5}
    phi = {"architectures": ["Phi3ForCausalLM"], **(share if place == "top" else {place: share})}
    (rope,) = parse_model_config({**SIZES, **phi}).ropes
    assert rope == DefaultRope(6, 1e4)
