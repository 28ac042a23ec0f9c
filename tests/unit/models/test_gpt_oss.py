"""GPT-OSS against transformers: checkpoints in MXFP4 and unquantized ones over ranks that split or
divide the experts, updates, and input that is wrong."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss import modeling_gpt_oss

from rpc_schema.errors import CheckpointError, ConfigError
from rpc_schema.weight_transfer import DiskSource, UpdateWeights
from tests.support.quantized_mxfp4 import to_mxfp4
from tests.support.quantized_stages import build
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.mxfp4 import dequantized
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.layers.torch_experts import TorchExperts
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models import weights
from worker_daemon.models.config import parse_model_config, read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.fields import Fields
from worker_daemon.models.partition import check_partition
from worker_daemon.models.weight_places import Manifest, checkpoint_places
from worker_daemon.models.weights import (
    load_dummy_weights,
    load_weights,
    read_headers,
    read_parts,
)
from worker_daemon.worker.weight_transfer.engines import DiskReader, Expected, TensorFiles

pytestmark = pytest.mark.each_value  # make test-all runs every combination

ARCHITECTURE = "GptOssForCausalLM"
FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
}
LENGTHS = (1, 5, 30)
PREFIX = "model.layers.1.mlp.experts"


@pytest.fixture
def made(make_checkpoint):
    return make_checkpoint(ARCHITECTURE, seed=51, **FIELDS)


def description(**fields):
    values = {
        "architectures": [ARCHITECTURE],
        "vocab_size": 100,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return values | FIELDS | fields


def loaded(path, quantization=None):
    """Return a whole stage of a checkpoint, its configuration, and the tensors that it ignores."""
    config = replace(read_model_config(path), quantization=quantization)
    stage = build_stage(
        config, range(config.num_hidden_layers), True, True, SingleRank(), torch.float32,
        torch.device("cpu"), 16, NullAttention(), TorchOps(),
    )  # fmt: skip
    names = checkpoint_names(config)
    report = load_weights(stage.parameters(), path, names, lambda progress: None)
    return stage, config, report.ignored_tensors


def views_of(stage):
    return {name: view.clone() for name, view in stage.checkpoint_views().items()}


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def chunked(run):
    """Return each sequence's logits, computed in chunks and single tokens, between rows of
    padding."""
    pieces = [[] for _ in run.sequences]
    while any(done < len(s) for done, s in zip(run.done, run.sequences, strict=True)):
        left = [len(s) - done for s, done in zip(run.sequences, run.done, strict=True)]
        counts = [min(wish, count) for wish, count in zip((1, 1, 9), left, strict=True)]
        active = [count for count in counts if count]
        logits = iter(run.step(counts, num_padding=2).split(active))
        for rows, count in zip(pieces, counts, strict=True):
            if count:
                rows.append(next(logits))
    return [torch.cat(rows) for rows in pieces]


def test_every_value_and_scale_of_mxfp4():
    """In bf16, which holds them all, against transformers' conversion. The scale 255 is NaN by the
    format's standard."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16)
    ours = dequantized(blocks, scales).bfloat16()
    expected = convert_moe_packed_tensors(blocks[None].clone(), scales[None].clone())[0].t()
    assert torch.equal(ours[:255], expected[:255])
    assert ours[255].isnan().all()


@pytest.mark.parametrize("form", ["interleaved", "mxfp4", "mixed"])
@pytest.mark.parametrize(
    ("pp_size", "tp_size", "divided"), [(1, 1, False), (2, 2, False), (3, 4, False), (2, 4, True)]
)
def test_checkpoints_agree_with_transformers_over_ranks(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    form,
    pp_size,
    tp_size,
    divided,
):
    """Parts of 4 ranks cut blocks; scales and values are in different files."""
    model = made.hf_model
    if form != "interleaved":
        model = to_mxfp4(made.path, 52, [1] if form == "mixed" else [], num_files=2)
    sequences = random_sequences(LENGTHS, seed=53)

    def on_rank(tp):
        stages = stages_of(made.path, pp_size, tp, expert_parallel=divided)
        return [paged_run(stages, sequences).prefill(), chunked(paged_run(stages, sequences))]

    expected = reference_logprobs(model, sequences)
    for outcomes in on_tensor_parallel_ranks(tp_size, on_rank):
        for ours in outcomes:
            for logits, reference in zip(ours, expected, strict=True):
                assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_transformers(
    made, random_sequences, stages_of, paged_run, reference_logprobs, dtype
):
    """All experts are chosen: otherwise rounding could choose others, on either side."""
    config = made.path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_experts_per_tok": 5}))
    model = to_mxfp4(made.path, 54)
    sequences = random_sequences((40, 60, 33), seed=55)
    exact = torch.cat(reference_logprobs(model, sequences))
    run = paged_run(stages_of(made.path, dtype=dtype), sequences)
    run.caches = [[cache.to(dtype) for cache in caches] for caches in run.caches]
    ours = torch.cat(run.prefill()).log_softmax(-1)
    theirs = torch.cat(reference_logprobs(model.to(dtype), sequences))
    assert (ours - exact).pow(2).mean().sqrt() <= 1.5 * (theirs - exact).pow(2).mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_agrees_with_transformers(dtype):
    """Scores differ, since transformers leaves the order of equal ones open."""
    config = modeling_gpt_oss.GptOssConfig(**FIELDS | {"num_local_experts": 32, "hidden_size": 32})
    router = modeling_gpt_oss.GptOssTopKRouter(config).to(dtype)
    scores = torch.stack([torch.randperm(32) for _ in range(500)]).div(4).sub(3).to(dtype)
    torch.nn.init.eye_(router.weight)
    torch.nn.init.zeros_(router.bias)
    with torch.no_grad():
        _, weights, experts = router(scores)
    spec = parse_model_config(description(num_local_experts=32)).layer_experts[0]
    starts = torch.tensor([0, 500], dtype=torch.int32)
    routed = TorchExperts().route(scores, spec.routing, starts)
    assert torch.equal(routed.experts.long(), experts)
    torch.testing.assert_close(routed.weights.to(dtype), weights)


def test_nothing_is_ignored(made):
    assert loaded(made.path)[2] == ()
    to_mxfp4(made.path)
    rewrite(made.path, lambda tensors: tensors.update(other=torch.zeros(1)))
    assert loaded(made.path)[2] == ("other",)


@pytest.mark.parametrize("quantization", [None, ONLINE])
def test_updates_and_weights_that_are_quantized(made, quantization):
    """A trainer has the model without blocks, whatever the files have."""
    model = to_mxfp4(made.path, 56)
    stage, config, _ = loaded(made.path, quantization)
    before = views_of(stage)
    tensors = model.state_dict()
    down = tensors[f"{PREFIX}.down_proj"][2].t()
    held = before[f"{PREFIX}.2.down_proj"].float()
    if quantization is not None:
        scale = before[f"{PREFIX}.2.down_proj.weight_scale"].unsqueeze(1)
        assert torch.equal(scale[:, 0], down.abs().amax(1) / 448)
        held = (held * scale - down).abs().max() / scale.max()
        assert held <= 16  # half of the largest step of FP8
    else:
        assert torch.equal(held, down)
        gate_up = before[f"{PREFIX}.2.gate_up_proj"]
        assert torch.equal(gate_up[:96], tensors[f"{PREFIX}.gate_up_proj"][2, :, 0::2].t())
        assert torch.equal(gate_up[96:], tensors[f"{PREFIX}.gate_up_proj"][2, :, 1::2].t())

    places = checkpoint_places(stage, config)
    names = tuple(tensors)
    assert set(names) == set(places.specs)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    places.check(Manifest(names, (torch.float32,) * len(names), shapes))
    for parameter in stage.parameters():
        parameter.data.fill_(0)
    for name, tensor in tensors.items():
        places.fill(name, 0, tensor[:2])
        places.fill(name, 2, tensor[2:])
    for name, view in views_of(stage).items():
        assert torch.equal(view.float(), before[name].float()), name
    with pytest.raises(ConfigError, match=rf"send {PREFIX}.down_proj as \[5, 96, 64\]"):
        places.check(Manifest((f"{PREFIX}.down_proj_blocks",), (torch.uint8,), ((5, 64, 3, 16),)))


@pytest.mark.parametrize("quantization", [None, ONLINE])
def test_batches_and_buffers_give_the_same_bits(made, monkeypatch, quantization):
    to_mxfp4(made.path, 57, num_files=3)
    whole = views_of(loaded(made.path, quantization)[0])
    monkeypatch.setattr(weights, "_ARRIVAL_BYTES", 20_000)
    monkeypatch.setattr(
        weights,
        "_load_file",
        lambda path, items, meter, observer: weights.load_through_buffers(
            {path: items}, torch.device("cpu"), meter.advance
        ),
    )
    for name, view in views_of(loaded(made.path, quantization)[0]).items():
        assert torch.equal(view.view(torch.uint8), whole[name].view(torch.uint8)), name


def test_an_update_from_files_reads_some_experts_at_a_time(made, monkeypatch):
    monkeypatch.setattr(weights, "_PART_BYTES", 150_000)
    stage, config, _ = loaded(made.path)
    before = views_of(stage)
    for parameter in stage.parameters():
        parameter.data.fill_(0)
    places, path = checkpoint_places(stage, config), made.path / "model.safetensors"
    for name, header in read_headers(made.path).items():
        num_rows = [len(values) for _, values in read_parts(header.path, name)]
        assert sum(num_rows) == header.shape[0]
        assert len(num_rows) > 1 or "experts.gate_up_proj" not in name or "bias" in name
        for first, values in read_parts(path, name):
            places.fill(name, first, values)
    for name, view in views_of(stage).items():
        assert torch.equal(view, before[name]), name


def test_dummy_weights_do_not_depend_on_the_form(made, on_tensor_parallel_ranks):
    def views(path, tp):
        config = read_model_config(path)
        stage = build_stage(
            config, range(3), True, True, tp, torch.float32, torch.device("cpu"), 16,
            NullAttention(), TorchOps(),
        )  # fmt: skip
        load_dummy_weights(stage.parameters(), 3, lambda progress: None)
        return views_of(stage)

    name = f"{PREFIX}.1.gate_up_proj"
    whole = views(made.path, SingleRank())
    to_mxfp4(made.path)
    parts = on_tensor_parallel_ranks(2, partial(views, made.path))
    for rank, part in enumerate(parts):
        inner = slice(48 * rank, 48 * rank + 48)
        assert torch.equal(part[name][:48], whole[name][:96][inner])
        assert torch.equal(part[name][48:], whole[name][96:][inner])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"{PREFIX}.down_proj_scales", "no tensor"),
        (f"{PREFIX}.gate_up_proj_blocks", "no tensor"),
        (f"{PREFIX}.gate_up_proj_bias", "no tensor"),
        ("model.layers.2.self_attn.sinks", "no tensor"),
        ("model.layers.0.mlp.router.bias", "no tensor"),
    ],
)
def test_missing_tensors_are_named(made, name, problem):
    to_mxfp4(made.path)
    rewrite(made.path, lambda tensors: tensors.pop(name))
    named = name.replace("experts.", "experts.0.") if "bias" not in name else name
    with pytest.raises(CheckpointError, match=problem) as caught:
        loaded(made.path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("down_proj_blocks", torch.zeros(5, 64, 2, 16, dtype=torch.uint8), "shape"),
        ("down_proj_blocks", torch.zeros(5, 64, 3, 16), "bytes of 4-bit values"),
        ("down_proj_blocks", torch.zeros(4, 64, 3, 16, dtype=torch.uint8), "no tensor"),
        ("down_proj_scales", torch.zeros(5, 64, 4, dtype=torch.uint8), "shape"),
        ("down_proj_scales", torch.zeros(5, 64, 3, dtype=torch.int32), "exponents"),
        ("gate_up_proj_bias", torch.zeros(5, 96), "shape"),
        ("gate_up_proj_bias", torch.zeros(5, 192, dtype=torch.uint8), "unquantized"),
    ],
)
def test_tensors_that_do_not_fit_are_named(made, name, tensor, problem):
    to_mxfp4(made.path)
    rewrite(made.path, lambda tensors: tensors.update({f"{PREFIX}.{name}": tensor}))
    with pytest.raises(CheckpointError, match=problem) as caught:
        loaded(made.path)
    assert name in str(caught.value)


def test_packed_experts_in_an_update_without_names_are_refused(made):
    """Otherwise a partial update would leave out all experts, and say nothing."""
    to_mxfp4(made.path)
    root = made.path.parent
    places = checkpoint_places(build(made.path), read_model_config(made.path))
    source = DiskSource(model=str(made.path))
    message = UpdateWeights(seq=1, epoch=1, link=1, names=(), source=source)
    manifest = DiskReader(torch.device("cpu")).describe(
        message, None, Expected(places, TensorFiles([root]))
    )
    with pytest.raises(ConfigError, match="_blocks") as caught:
        places.check(manifest)
    assert "in bfloat16" in caught.value.fix


def test_blocks_without_a_quantization_config_are_refused(made):
    to_mxfp4(made.path)
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.0.mlp.experts.0"):
        loaded(made.path)


MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": "7"}, "swiglu_limit"),
        ({"swiglu_limit": -7.0}, "swiglu_limit"),
        ({"swiglu_alpha": True}, "swiglu_alpha"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        (
            {"quantization_config": {**MXFP4, "modules_to_not_convert": "lm_head"}},
            "quantization_config.modules_to_not_convert",
        ),
        (
            {"quantization_config": {**MXFP4, "modules_to_not_convert": ["a.(*"]}},
            "quantization_config.modules_to_not_convert",
        ),
        (
            {"quantization_config": {**MXFP4, "modules_to_not_convert": ["(?i)a.*"]}},
            "quantization_config.modules_to_not_convert",
        ),
        ({"quantization_config": MXFP4, "intermediate_size": 80}, "intermediate_size"),
        ({"quantization_config": MXFP4, "hidden_size": 72}, "hidden_size"),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": MXFP4},
            "quantization_config.quant_method",
        ),
    ],
)
def test_fields_that_are_wrong_are_named(fields, named):
    with pytest.raises(ConfigError) as caught:
        parse_model_config(description(**fields))
    assert caught.value.field == named


def test_modelopts_file_is_refused_by_name():
    modelopt = Fields({"quantization": {"quant_algo": "FP8"}}, "hf_quant_config.json: ")
    with pytest.raises(ConfigError) as caught:
        parse_model_config(description(), modelopt)
    assert caught.value.field == "hf_quant_config.json: quantization"


def test_experts_that_ranks_cannot_share_are_refused():
    config = parse_model_config(description(intermediate_size=90))
    with pytest.raises(ConfigError, match="experts' intermediate_size 90"):
        check_partition(config, 1, 4)
    check_partition(replace(config, expert_parallel=True), 1, 4)


def test_fields_that_transformers_fills_in():
    config = parse_model_config(description(max_position_embeddings=131072))
    rope = config.layers[0].attention.rope
    assert (rope.theta, rope.factor, rope.truncate) == (150_000.0, 32.0, False)
    assert [layer.attention.sliding_window for layer in config.layers] == [7, None, 7]
    assert config.dtype == "bfloat16"
    for field in ("dtype", "torch_dtype"):
        assert parse_model_config(description(**{field: "float16"})).dtype == "float16"
