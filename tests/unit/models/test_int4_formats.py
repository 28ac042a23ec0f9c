"""4-bit checkpoints: against transformers with their weights, split over ranks, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CheckpointError, ConfigError
from tests.support.quantized_int4 import Scheme, int4_config, quantize
from tests.support.quantized_stages import Elsewhere, build
from worker_daemon.models import weights
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import checkpoint_names
from worker_daemon.models.int4_order import load_orders
from worker_daemon.models.weights import load_dummy_weights, load_weights

pytestmark = pytest.mark.each_value  # make test-all runs every combination

LENGTHS = (1, 5, 40, 13)
TOLERANCE = 2e-4
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
SCHEMES = [
    Scheme("awq", 64),
    Scheme("awq", -1),
    Scheme("gptq", 32),
    Scheme("gptq", 128, symmetric=True),
    Scheme("gptq", 64, act_order=True),
    Scheme("gptq_v2", 64),
    Scheme("gptq_v2", -1, act_order=True),
    Scheme("compressed", 128, symmetric=True),
    Scheme("compressed", 32),
    Scheme("compressed", -1),
    Scheme("compressed", -1, symmetric=True),
    Scheme("compressed", 64, act_order=True),
]
UNORDERED = [scheme for scheme in SCHEMES if not scheme.act_order or scheme.group_size == -1]


def load(path, stage):
    names = checkpoint_names(read_model_config(path))
    names |= load_orders(stage.parameters(), path)
    return load_weights(stage.parameters(), path, names, lambda _: None)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture
def made(make_checkpoint):
    """(architecture, scheme, ignore, overrides) -> a 4-bit checkpoint."""

    def make(architecture, scheme, ignore=(), seed=0, **overrides):
        checkpoint = make_checkpoint(architecture, seed=seed, **{**SIZES, **overrides})
        torch.manual_seed(seed)
        quantize(checkpoint.path, checkpoint.hf_model, scheme, ignore)
        return checkpoint

    return make


def assert_close(ours, reference, tolerance=TOLERANCE):
    for logits, expected in zip(ours, reference, strict=True):
        assert (logits.float().log_softmax(-1) - expected).abs().max().item() <= tolerance


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_parity_over_pipeline_stages(
    made, random_sequences, stages_of, paged_run, reference_logprobs, scheme
):
    checkpoint = made("Qwen3ForCausalLM", scheme, seed=11)
    sequences = random_sequences(LENGTHS, seed=12)
    expected = reference_logprobs(checkpoint.hf_model, sequences)
    whole = paged_run(stages_of(checkpoint.path), sequences).prefill()
    assert_close(whole, expected)
    split = paged_run(stages_of(checkpoint.path, 2), sequences).prefill()
    assert all(torch.equal(a, b) for a, b in zip(split, whole, strict=True))


@pytest.mark.parametrize("scheme", UNORDERED, ids=str)
def test_parity_of_tensor_parallel_ranks(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    scheme,
):
    checkpoint = made("LlamaForCausalLM", scheme, seed=13, mlp_bias=True, attention_bias=True)
    sequences = random_sequences(LENGTHS, seed=15)
    ranks = on_tensor_parallel_ranks(
        2, lambda tp: paged_run(stages_of(checkpoint.path, tp=tp), sequences).prefill()
    )
    expected = reference_logprobs(checkpoint.hf_model, sequences)
    for ours in ranks:
        assert_close(ours, expected)


@pytest.mark.parametrize("scheme", SCHEMES[:3] + SCHEMES[7:9], ids=str)
def test_loads_through_buffers_give_the_same_bits(made, monkeypatch, scheme):
    """The way to a GPU."""
    checkpoint = made("LlamaForCausalLM", scheme, seed=23)
    stages = [build(checkpoint.path, Elsewhere(1, 2)) for _ in range(2)]
    report = load(checkpoint.path, stages[0])
    assert report.ignored_tensors == ()
    monkeypatch.setattr(
        weights,
        "_load_file",
        lambda path, items, meter, observer: weights.load_through_buffers(
            {path: items}, torch.device("cpu"), meter.advance
        ),
    )
    load(checkpoint.path, stages[1])
    for mine, theirs in zip(*(stage.parameters() for stage in stages), strict=True):
        assert torch.equal(mine.data.view(torch.uint8), theirs.data.view(torch.uint8)), mine.name


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[2], SCHEMES[7]], ids=str)
def test_dummy_weights_are_equal_for_every_split(made, scheme):
    checkpoint = made("LlamaForCausalLM", scheme, seed=20)
    whole = build(checkpoint.path)
    load_dummy_weights(whole.parameters(), 7, lambda _: None)
    name = "model.layers.1.mlp.down_proj.weight"
    (full,) = (each for each in whole.parameters() if each.name == name)
    parts = []
    for rank in range(2):
        part = build(checkpoint.path, Elsewhere(rank, 2), range(1, 2))
        load_dummy_weights(part.parameters(), 7, lambda _: None)
        parts += [each.data for each in part.parameters() if each.name == name]
    assert torch.equal(torch.cat(parts, 1), full.data)
    values = full.data.view(torch.uint8) & 15
    assert len(values.unique()) == 16 and 7 < values.float().mean() < 8


def test_ignored_matrices_stay_in_the_models_dtype(
    made, random_sequences, stages_of, paged_run, reference_logprobs
):
    modules = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
    sequences = random_sequences((7, 20), seed=19)
    for scheme in (SCHEMES[0], SCHEMES[7]):
        checkpoint = made("LlamaForCausalLM", scheme, modules, seed=18)
        assert "model.layers.1.mlp.down_proj.weight" in build(checkpoint.path).checkpoint_views()
        ours = paged_run(stages_of(checkpoint.path), sequences).prefill()
        assert_close(ours, reference_logprobs(checkpoint.hf_model, sequences))


def test_the_bytes_of_a_matrix_are_half_and_those_of_its_groups(made):
    stage = build(made("LlamaForCausalLM", SCHEMES[0], seed=21).path, dtype=torch.bfloat16)
    sizes = {each.name: each.num_bytes for each in stage.parameters()}
    name = "model.layers.0.mlp.down_proj"
    assert sizes[f"{name}.weight"] == 256 * 512 // 2
    assert sizes[f"{name}.weight_groups"] == 256 * (512 // 64) * 2 * 2


QKV = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("scheme", "change", "named"),
    [
        (SCHEMES[0], lambda t: t.pop(f"{QKV}.q_proj.scales"), f"{QKV}.q_proj.scales"),
        (SCHEMES[0], lambda t: t.pop(f"{QKV}.q_proj.qzeros"), f"{QKV}.q_proj.qzeros"),
        (
            SCHEMES[2],
            lambda t: t.update({f"{QKV}.q_proj.qweight": torch.rand(32, 256)}),
            "4-bit values",
        ),
        (
            SCHEMES[2],
            lambda t: t.update({f"{QKV}.q_proj.scales": torch.rand(3, 256)}),
            f"{QKV}.q_proj.scales",
        ),
        (SCHEMES[4], lambda t: t.pop(f"{QKV}.q_proj.g_idx"), f"{QKV}.q_proj.g_idx"),
        (SCHEMES[4], lambda t: t[f"{QKV}.q_proj.g_idx"].fill_(1), "groups are not each of 64"),
        (SCHEMES[4], lambda t: t[f"{QKV}.q_proj.g_idx"].fill_(-1), "groups are not each of 64"),
        (
            SCHEMES[4],
            lambda t: t.update({f"{QKV}.q_proj.g_idx": t[f"{QKV}.q_proj.g_idx"].flip(0)}),
            "differ in order",
        ),
        (
            SCHEMES[3],
            lambda t: t[f"{QKV}.o_proj.g_idx"].copy_(t[f"{QKV}.o_proj.g_idx"].flip(0)),
            "not consecutive columns",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(made, scheme, change, named):
    checkpoint = made("LlamaForCausalLM", scheme)
    rewrite(checkpoint.path, change)
    stage = build(checkpoint.path)
    with pytest.raises(CheckpointError, match=named):
        load(checkpoint.path, stage)
    assert all(not each.data.view(torch.uint8).any() for each in stage.parameters())


def refused(path, config):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(ConfigError) as raised:
        read_model_config(path)
    return raised.value.field


@pytest.mark.parametrize(
    ("form", "field", "value"),
    [
        ("awq", "bits", 8),
        ("awq", "version", "gemv"),
        ("awq", "zero_point", False),
        ("awq", "group_size", 48),
        ("awq", "modules_to_not_convert", ["a*"]),
        ("gptq", "bits", 8),
        ("gptq", "bits", 3),
        ("gptq", "lm_head", True),
        ("gptq", "checkpoint_format", "marlin"),
        ("gptq", "dynamic", {"+:.*": {"bits": 8}}),
        ("gptq", "modules_in_block_to_quantize", [["self_attn.q_proj"]]),
        ("gptq", "pack_dtype", "int64"),
        ("gptq", "desc_act", "yes"),
        ("gptq", "quant_method", "quip"),
        ("compressed", "format", "marlin-24"),
    ],
)
def test_unknown_options_are_refused_by_name(made, form, field, value):
    checkpoint = made("LlamaForCausalLM", Scheme("awq", 32), num_hidden_layers=1)
    config = int4_config(Scheme(form, 32)) | {field: value}
    assert refused(checkpoint.path, config) == f"quantization_config.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_bits", 8),
        ("type", "float"),
        ("dynamic", True),
        ("strategy", "tensor"),
        ("group_size", 16),
        ("actorder", "other"),
    ],
)
def test_unknown_schemes_are_refused_by_name(made, field, value):
    checkpoint = made("LlamaForCausalLM", Scheme("awq", 32), num_hidden_layers=1)
    config = int4_config(Scheme("compressed", 32))
    config["config_groups"]["group_0"]["weights"][field] = value
    expected = f"quantization_config.config_groups.group_0.weights.{field}"
    assert refused(checkpoint.path, config) == expected


@pytest.mark.parametrize(
    ("scheme", "overrides", "tp", "field", "problem"),
    [
        (Scheme("awq", 64), {"intermediate_size": 192}, 2, "group_size", "cuts a group"),
        (Scheme("awq", 128), {"intermediate_size": 320}, 1, "group_size", "no multiple of 128"),
        (Scheme("gptq", 64, act_order=True), {}, 2, "tensor_parallel_size", "not consecutive"),
    ],
    ids=str,
)
def test_parts_that_cut_groups_are_refused(
    made, make_checkpoint, scheme, overrides, tp, field, problem
):
    checkpoint = make_checkpoint("LlamaForCausalLM", **{**SIZES, **overrides})
    file = checkpoint.path / "config.json"
    config = {"quantization_config": int4_config(scheme)}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ConfigError, match=problem) as raised:
        build(checkpoint.path, Elsewhere(0, tp))
    assert field in raised.value.field
