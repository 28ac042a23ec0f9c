"""Updates of quantized weights with unquantized tensors: the same bits, at the same addresses, as a
load of the new weights in the checkpoint's format, whose quantizer these tests have; and logits of
transformers with the values that these stand for."""

import random

import pytest
import torch
from test_sparse_deltas import delta, manifest_of

from rpc_schema.errors import ConfigError
from tests.support import quantized, quantized_int4
from tests.support.quantized_int4 import Scheme
from tests.support.quantized_stages import Elsewhere, build
from worker_daemon.contracts.int4 import Int4Matrix
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import checkpoint_names
from worker_daemon.models.int4_order import load_orders
from worker_daemon.models.weight_places import checkpoint_places, kernel_places
from worker_daemon.models.weights import load_weights

pytestmark = pytest.mark.each_value  # make test-all runs every combination

INT4_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
BLOCK_SIZES = INT4_SIZES | {"hidden_size": 320, "intermediate_size": 640, "head_dim": 64}
"""Some blocks are partial."""
SCHEMES = [
    Scheme("awq", 64),
    Scheme("awq", -1),
    Scheme("gptq", 32),
    Scheme("gptq", 128, symmetric=True),
    Scheme("gptq", 64, act_order=True),
    Scheme("gptq_v2", 64),
    Scheme("compressed", 32),
    Scheme("compressed", 128, symmetric=True),
    Scheme("compressed", 64, act_order=True),
]
UP = "model.layers.0.mlp.up_proj.weight"


def loaded(path, rank, size):
    stage = build(path, Elsewhere(rank, size))
    names = checkpoint_names(read_model_config(path)) | load_orders(stage.parameters(), path)
    load_weights(stage.parameters(), path, names, lambda _: None)
    return stage


def update(places, state):
    """In chunks of rows that end anywhere, in any order."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    places.check(manifest_of(state))
    for name, tensor in state.items():
        step = rng.randint(1, len(tensor))
        firsts = list(range(0, len(tensor), step))
        rng.shuffle(firsts)
        for first in firsts:
            places.fill(name, first, tensor[first : first + step])
    places.check_complete(list(places.received(manifest_of(state))))


def assert_requantized(path, fresh_path, state, size):
    for rank in range(size):
        stage, fresh = loaded(path, rank, size), loaded(fresh_path, rank, size)
        addresses = [parameter.data.data_ptr() for parameter in stage.parameters()]
        config = read_model_config(path)
        update(checkpoint_places(stage, config), state)
        assert [parameter.data.data_ptr() for parameter in stage.parameters()] == addresses
        for mine, theirs in zip(stage.parameters(), fresh.parameters(), strict=True):
            one, other = mine.data.view(torch.uint8), theirs.data.view(torch.uint8)
            assert torch.equal(one, other), mine.name


def state_of(checkpoint):
    return {name: tensor.clone() for name, tensor in checkpoint.hf_model.state_dict().items()}


INT4_CASES = [(scheme, 1) for scheme in SCHEMES]
INT4_CASES += [(each, 2) for each in SCHEMES if not each.act_order and each.group_size > 0]
"""Ranks cannot split an order; a rank's part of a row that is one group has a scale of its own."""


@pytest.mark.parametrize(("scheme", "size"), INT4_CASES, ids=str)
def test_4_bits(make_checkpoint, scheme, size):
    old, new = (make_checkpoint("Qwen3ForCausalLM", seed=s, **INT4_SIZES) for s in (1, 2))
    state = state_of(new)
    for made in (old, new):
        torch.manual_seed(3)  # of the columns' order
        quantized_int4.quantize(made.path, made.hf_model, scheme, (), torch.float32)
    assert_requantized(old.path, new.path, state, size)


def test_logits_in_4_bits_are_those_of_transformers(
    make_checkpoint, random_sequences, paged_run, reference_logprobs, stages_of
):
    scheme = Scheme("awq", 64)
    old, new = (make_checkpoint("Qwen3ForCausalLM", seed=s, **INT4_SIZES) for s in (4, 5))
    state = state_of(new)
    for made in (old, new):
        quantized_int4.quantize(made.path, made.hf_model, scheme, (), torch.float32)
    stages = stages_of(old.path)
    update(checkpoint_places(stages[0], read_model_config(old.path)), state)
    sequences = random_sequences((1, 5, 40), seed=6)
    expected = reference_logprobs(new.hf_model, sequences)
    for logits, reference in zip(paged_run(stages, sequences).prefill(), expected, strict=True):
        assert (logits.log_softmax(-1) - reference).abs().max().item() <= 2e-4


def test_a_group_of_zeros_stays_zeros(make_checkpoint):
    made = make_checkpoint("Qwen3ForCausalLM", seed=7, **INT4_SIZES)
    state = state_of(made)
    state[UP][5, 64:128] = 0
    for scheme in (Scheme("awq", 64), Scheme("gptq", 64, symmetric=True)):
        other = make_checkpoint("Qwen3ForCausalLM", seed=8, **INT4_SIZES)
        quantized_int4.quantize(other.path, other.hf_model, scheme)
        stage = loaded(other.path, 0, 1)
        update(checkpoint_places(stage, read_model_config(other.path)), state)
        held = {parameter.name: parameter.data for parameter in stage.parameters()}
        name = "model.layers.0.mlp.gate_up_proj.weight"
        matrix = Int4Matrix(held[name], held[f"{name}_groups"], has_zeros=True)
        row = matrix.dequantized(torch.float32)[512 + 5]  # ups follow the gates
        assert row[64:128].eq(0).all()
        assert (row - state[UP][5]).abs().max() <= state[UP][5].abs().max() / 7


SPLIT = {"hidden_size": 512, "intermediate_size": 768}
FP8_CASES = [
    ("Qwen3ForCausalLM", ("compressed", "block"), 1, BLOCK_SIZES),
    ("Qwen3ForCausalLM", ("fp8", "block"), 1, BLOCK_SIZES),
    ("LlamaForCausalLM", ("fp8", "block"), 2, BLOCK_SIZES | SPLIT),
    ("Qwen3ForCausalLM", ("compressed", "channel"), 1, {"head_dim": 16}),
    (
        "Qwen3MoeForCausalLM",
        ("fp8", "block"),
        1,
        {
            "hidden_size": 256,
            "moe_intermediate_size": 128,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_hidden_layers": 2,
        },
    ),
]


@pytest.mark.parametrize(("architecture", "form", "size", "sizes"), FP8_CASES)
def test_fp8(make_checkpoint, architecture, form, size, sizes):
    old, new = (make_checkpoint(architecture, seed=s, **sizes) for s in (9, 10))
    state = state_of(new)
    for made in (old, new):
        quantized.quantize(made.path, made.hf_model, *form)
    assert_requantized(old.path, new.path, state, size)


@pytest.mark.parametrize("form", ["int4", "block"])
def test_what_cannot_be_is_refused_by_name(make_checkpoint, form):
    made = make_checkpoint("Qwen3ForCausalLM", seed=11, **INT4_SIZES)
    state = state_of(made)
    if form == "int4":
        quantized_int4.quantize(made.path, made.hf_model, Scheme("awq", 64))
    else:
        quantized.quantize(made.path, made.hf_model, "fp8", "block")
    places = checkpoint_places(build(made.path), read_model_config(made.path))
    places.check(manifest_of(state))
    with pytest.raises(ConfigError, match="share their scales") as caught:
        places.check(manifest_of(delta(UP)), partial=True)
    assert caught.value.value == UP
    if form == "int4":
        packed = {UP.replace("weight", "qweight"): torch.zeros(256, 64).int()}
        with pytest.raises(ConfigError, match=f"send {UP} unquantized"):
            places.check(manifest_of(packed))
    else:
        scale = {UP.replace("weight", "weight_scale"): torch.ones(4, 2)}
        with pytest.raises(ConfigError, match="computed here"):
            places.check(manifest_of({UP: state[UP]} | scale))


def test_kernel_names_copy_what_is_stored_in_4_bits(make_checkpoint):
    old, new = (make_checkpoint("Qwen3ForCausalLM", seed=s, **INT4_SIZES) for s in (12, 13))
    for made in (old, new):
        quantized_int4.quantize(made.path, made.hf_model, Scheme("gptq", 64, act_order=True))
    stage, fresh = loaded(old.path, 0, 1), loaded(new.path, 0, 1)
    places = kernel_places(stage, read_model_config(old.path), 0, 1, torch.float32)
    update(places, {parameter.name: parameter.data for parameter in fresh.parameters()})
    for mine, theirs in zip(stage.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine.data, theirs.data), mine.name
