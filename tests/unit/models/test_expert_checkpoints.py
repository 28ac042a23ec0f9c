"""Checkpoints with experts: separate and stacked tensors, files that are wrong, and configurations
that are refused."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.config import ModelConfig
from rpc_schema.errors import CheckpointError, ConfigError
from tests.support.quantized import compressed_config, quantize, quantized_values
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import parse_model_config, read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.partition import check_partition
from worker_daemon.models.weight_places import Manifest, checkpoint_places
from worker_daemon.models.weights import load_weights, tensor_names
from worker_daemon.worker.resolve import resolve_model

pytestmark = pytest.mark.each_value  # make test-all runs every combination

SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": SIZES | {"num_experts": 4, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": SIZES | {"num_experts": 5, "mlp_only_layers": [1]},
}
LENGTHS = (1, 5, 30)
FAMILIES = pytest.mark.parametrize("model", MODELS.items(), ids=MODELS)


def description(**fields):
    values = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
        "num_experts": 8,
    }
    return values | fields


@FAMILIES
@pytest.mark.parametrize("max_shard_size", ["1GB", "30KB"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_stacked_tensors_fill_the_same_parameters(
    make_checkpoint, stages_of, on_tensor_parallel_ranks, model, max_shard_size, tp_size
):
    architecture, fields = model
    forms = [
        make_checkpoint(
            architecture, seed=31, stacked=stacked, max_shard_size=max_shard_size, **fields
        ).path
        for stacked in (False, True)
    ]
    assert any("gate_up_proj" in name for name in _file_names(forms[1]))

    def views(tp):
        return [
            {name: view.clone() for stage in stages_of(path, 2, tp) for name, view in
             stage.checkpoint_views().items()}
            for path in forms
        ]  # fmt: skip

    for separate, stacked in on_tensor_parallel_ranks(tp_size, views):
        assert separate.keys() == stacked.keys()
        assert all(torch.equal(separate[name], stacked[name]) for name in separate)
    assert tensor_names(forms[0]) == checkpoint_names(read_model_config(forms[0]))


@FAMILIES
def test_stacked_checkpoints_agree_with_transformers(
    make_checkpoint, random_sequences, stages_of, paged_run, reference_logprobs, model
):
    architecture, fields = model
    made = make_checkpoint(architecture, seed=32, stacked=True, **fields)
    sequences = random_sequences(LENGTHS, seed=33)
    ours = paged_run(stages_of(made.path), sequences).prefill()
    for logits, expected in zip(ours, reference_logprobs(made.hf_model, sequences), strict=True):
        assert torch.allclose(logits.log_softmax(-1), expected, atol=1e-4)


@FAMILIES
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_with_some_of_the_experts_agree_with_transformers_and_with_split_experts(
    make_checkpoint,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    model,
    tp_size,
):
    architecture, fields = model
    made = make_checkpoint(architecture, seed=38, **fields)
    sequences = random_sequences(LENGTHS, seed=39)

    def prefill(tp, expert_parallel):
        stages = stages_of(made.path, 2, tp, expert_parallel=expert_parallel)
        held = {name for stage in stages for name in stage.loaded_names() if ".experts." in name}
        return held, paged_run(stages, sequences).prefill()

    whole, divided = (
        on_tensor_parallel_ranks(tp_size, partial(prefill, expert_parallel=expert_parallel))
        for expert_parallel in (False, True)
    )
    expected = reference_logprobs(made.hf_model, sequences)
    for (_, split), (_, ours) in zip(whole, divided, strict=True):
        for logits, other, reference in zip(ours, split, expected, strict=True):
            assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)
            assert torch.allclose(logits, other, atol=1e-4)
    held = [names for names, _ in divided]
    assert sum(map(len, held)) == len(set.union(*held)) == len(whole[0][0])
    counts = [len(names) for names in held]
    assert counts == sorted(counts, reverse=True)
    assert min(counts) > 0


def test_more_ranks_than_experts_are_refused():
    config = replace(parse_model_config(description(num_experts=8)), expert_parallel=True)
    check_partition(config, 1, 8)
    few = replace(parse_model_config(description(num_experts=3, num_experts_per_tok=2)),
        expert_parallel=True)  # fmt: skip
    with pytest.raises(ConfigError, match="3 experts") as caught:
        check_partition(few, 1, 4)
    assert caught.value.field == "tensor_parallel_size"
    check_partition(config, 1, 4, 2)
    with pytest.raises(ConfigError, match="8 experts") as caught:
        check_partition(config, 1, 4, 3)
    assert caught.value.field == "data_parallel_size"


def test_divided_experts_need_not_divide_their_inner_size():
    config = parse_model_config(description(moe_intermediate_size=30))
    check_partition(replace(config, expert_parallel=True), 1, 4)


def test_a_model_without_experts_does_not_divide_them(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(description(architectures=["LlamaForCausalLM"]))
    )
    asked = ModelConfig(model=str(tmp_path), enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="has no experts") as caught:
        resolve_model(asked, [tmp_path])
    assert caught.value.field == "enable_expert_parallel"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_half_precision_is_no_worse_than_transformers(
    make_checkpoint, random_sequences, stages_of, paged_run, reference_logprobs, architecture, dtype
):
    """All experts are chosen: otherwise rounding could choose others, on either side."""
    fields = MODELS[architecture] | {"num_experts_per_tok": 4, "num_local_experts": 4}
    fields.pop("num_experts", None)
    made = make_checkpoint(architecture, seed=34, **fields)
    sequences = random_sequences((40, 60, 33), seed=35)
    exact = torch.cat(reference_logprobs(made.hf_model, sequences))
    run = paged_run(stages_of(made.path, dtype=dtype), sequences)
    run.caches = [[cache.to(dtype) for cache in caches] for caches in run.caches]
    ours = torch.cat(run.prefill()).log_softmax(-1)
    theirs = torch.cat(reference_logprobs(made.hf_model.to(dtype), sequences))
    assert (ours - exact).pow(2).mean().sqrt() <= 1.5 * (theirs - exact).pow(2).mean().sqrt()


def test_a_missing_expert_is_named(make_checkpoint, stages_of):
    made = make_checkpoint("Qwen3MoeForCausalLM", seed=36, **MODELS["Qwen3MoeForCausalLM"])
    path = made.path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=name):
        stages_of(made.path)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((4, 48, 48), "no tensor"),  # an expert too few
        ((5, 46, 48), "shape"),
        ((5, 47, 48), "no tensor"),  # gate and up of different sizes
        ((5 * 48, 48), "no tensor"),
        ((0, 48, 48), "no tensor"),
        ((2000, 2, 1), "no tensor"),
    ],
)
def test_stacked_tensors_of_other_shapes_are_refused(make_checkpoint, stages_of, shape, problem):
    fields = MODELS["Qwen3MoeForCausalLM"]
    made = make_checkpoint("Qwen3MoeForCausalLM", seed=37, stacked=True, **fields)
    path = made.path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.experts.gate_up_proj"] = torch.zeros(shape)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=problem) as caught:
        stages_of(made.path)
    assert "model.layers.2.mlp.experts" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 1 << 20}, "num_experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"moe_intermediate_size": 1 << 30}, "moe_intermediate_size"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"n_group": 2}, "n_group"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "num_local_experts": 2,
                "num_experts_per_tok": 3,
            },
            "num_experts_per_tok",
        ),
        (
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "num_key_value_heads": 8,
                "shared_expert_intermediate_size": 0,
            },
            "shared_expert_intermediate_size",
        ),
    ],
)
def test_what_no_router_can_do_is_refused_by_name(fields, named):
    with pytest.raises(ConfigError) as caught:
        parse_model_config(description(**fields))
    assert caught.value.field == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"moe_intermediate_size": 30}, "experts' intermediate_size 30"),
        ({"mlp_only_layers": [0], "intermediate_size": 98}, "intermediate_size 98"),
        (
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "num_key_value_heads": 8,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 42,
            },
            "shared expert's intermediate_size 42",
        ),
    ],
)
def test_experts_that_a_group_cannot_split_are_refused(fields, named):
    config = parse_model_config(description(**fields))
    check_partition(config, 1, 2)
    with pytest.raises(ConfigError, match=named) as caught:
        check_partition(config, 1, 4)
    assert caught.value.field == "tensor_parallel_size"


def test_layers_of_both_kinds_follow_step_and_list():
    config = parse_model_config(
        description(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3, 100])
    )
    has_experts = [experts is not None for experts in config.layer_experts]
    assert has_experts == [False, True, False, False, False, True, False, True]


FP8_FORMATS = [
    ("compressed", "tensor", "static"),
    ("compressed", "channel", "none"),
    ("fp8", "block", "dynamic"),
]
FP8_SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


@pytest.mark.parametrize("form", FP8_FORMATS, ids=str)
@pytest.mark.parametrize(("tp_size", "divided"), [(1, False), (2, False), (2, True)])
def test_experts_in_fp8_agree_with_transformers(
    make_checkpoint,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    form,
    tp_size,
    divided,
):
    made = make_checkpoint("Qwen3MoeForCausalLM", seed=40, **FP8_SIZES)
    quantize(made.path, made.hf_model, *form)
    sequences = random_sequences(LENGTHS, seed=41)

    def prefill(tp):
        stages = stages_of(made.path, 2, tp, expert_parallel=divided)
        dtypes = {p.name: p.data.dtype for stage in stages for p in stage.parameters()}
        assert dtypes["model.layers.0.mlp.experts.down_proj.weight"] == torch.float8_e4m3fn
        assert dtypes["model.layers.0.mlp.gate.weight"] == torch.float32
        return paged_run(stages, sequences).prefill()

    expected = reference_logprobs(made.hf_model, sequences)
    for ours in on_tensor_parallel_ranks(tp_size, prefill):
        for logits, reference in zip(ours, expected, strict=True):
            assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_quantized_while_loading(make_checkpoint, stacked):
    """Each row by its largest value, as other matrices; a trainer's stacked tensors likewise."""
    made = make_checkpoint("Qwen3MoeForCausalLM", seed=42, stacked=stacked, **FP8_SIZES)
    config = replace(read_model_config(made.path), quantization=ONLINE)
    stage = build_stage(
        config, range(2), True, True, SingleRank(), torch.float32, torch.device("cpu"), 16,
        NullAttention(), TorchOps(),
    )  # fmt: skip
    load_weights(stage.parameters(), made.path, checkpoint_names(config), lambda _: None)
    views = stage.checkpoint_views()
    weights = dict(made.hf_model.state_dict())
    prefix = "model.layers.0.mlp.experts"
    up = weights[f"{prefix}.gate_up_proj"][2, 256:]
    values, scale, _ = quantized_values(up, "channel")
    assert torch.equal(views[f"{prefix}.2.up_proj.weight"].float(), values.float())
    assert torch.allclose(views[f"{prefix}.2.up_proj.weight_scale"], scale.squeeze(1))

    places = checkpoint_places(stage, config)
    names = (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
    tensors = tuple(weights[name] for name in names)
    places.check(Manifest(names, (torch.float32,) * 2, tuple(tuple(t.shape) for t in tensors)))
    before = {name: view.clone() for name, view in views.items()}
    for name, tensor in zip(names, tensors, strict=True):
        places.fill(name, 0, -tensor[:1])
        places.fill(name, 1, -tensor[1:])
    for name, view in views.items():
        sign = -1 if f"{prefix}." in name and name.endswith(".weight") else 1
        assert torch.equal(view.float(), sign * before[name].float()), name


def test_experts_of_which_some_are_quantized_are_refused():
    ignored = "model.layers.1.mlp.experts.2.up_proj"
    quantization = compressed_config("channel", "dynamic", [ignored])
    config = parse_model_config(description(quantization_config=quantization))
    with pytest.raises(ConfigError, match="some experts") as caught:
        checkpoint_names(config)
    assert (caught.value.field, caught.value.value) == ("quantization_config", ignored)


def test_experts_in_4_bits_are_refused():
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True
    }  # fmt: skip
    config = parse_model_config(description(quantization_config=quantization))
    with pytest.raises(ConfigError, match="4 bits") as caught:
        checkpoint_names(config)
    assert caught.value.field == "quantization_config"


def _file_names(path):
    index = path / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    return load_file(path / "model.safetensors")
