"""FP8 checkpoints: against transformers with dequantized weights, split over ranks, and refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CheckpointError, ConfigError
from rpc_schema.weight_transfer import DiskSource, UpdateWeights
from tests.support.quantized import (
    LAYER_MATRICES,
    compressed_config,
    fp8_config,
    quantize,
    quantized_values,
)
from tests.support.quantized_stages import Elsewhere, build
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers import fp8
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.quantization import ONLINE, IgnoredModules
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models import weights
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.weight_places import Manifest, checkpoint_places, kernel_places
from worker_daemon.models.weights import load_dummy_weights, load_weights
from worker_daemon.worker.weight_transfer.engines import DiskReader, Expected, TensorFiles

pytestmark = pytest.mark.each_value  # make test-all runs every combination

LENGTHS = (1, 5, 40, 13)
TOLERANCE = 1e-4
BLOCKS = {
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
"""Sizes that ranks split at blocks; some blocks are partial."""
FORMATS = [
    ("compressed", "tensor", "static", torch.float32),
    ("compressed", "tensor", "dynamic", torch.bfloat16),
    ("compressed", "channel", "dynamic", torch.float32),
    ("compressed", "channel", "none", torch.bfloat16),
    ("compressed", "block", "dynamic", torch.float32),
    ("fp8", "tensor", "static", torch.float32),
    ("fp8", "tensor", "dynamic", torch.float32),
    ("fp8", "block", "dynamic", torch.float32),
    ("modelopt", "tensor", "static", torch.float32),
    ("modelopt", "channel", "dynamic", torch.float32),
]
IDS = [f"{method}-{strategy}-{activations}" for method, strategy, activations, _ in FORMATS]


def load(path, stage):
    names = checkpoint_names(read_model_config(path))
    return load_weights(stage.parameters(), path, names, lambda _: None)


def edit_config(path, **fields):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture
def made(make_checkpoint):
    """(architecture, format, ignore, overrides) -> an FP8 checkpoint."""

    def make(architecture, form, ignore=(), seed=0, **overrides):
        checkpoint = make_checkpoint(architecture, seed=seed, **overrides)
        method, strategy, activations, scale_dtype = form
        quantize(
            checkpoint.path,
            checkpoint.hf_model,
            method,
            strategy,
            activations,
            ignore,
            scale_dtype,
        )
        return checkpoint

    return make


def assert_close(ours, reference, tolerance=TOLERANCE):
    for logits, expected in zip(ours, reference, strict=True):
        assert (logits.float().log_softmax(-1) - expected).abs().max().item() <= tolerance


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_parity_over_pipeline_stages(
    made, random_sequences, stages_of, paged_run, reference_logprobs, form
):
    sizes = BLOCKS if form[1] == "block" else {"num_hidden_layers": 2}
    checkpoint = made("Qwen3ForCausalLM", form, seed=11, **{"head_dim": 16, **sizes})
    sequences = random_sequences(LENGTHS, seed=12)
    expected = reference_logprobs(checkpoint.hf_model, sequences)
    whole = paged_run(stages_of(checkpoint.path), sequences).prefill()
    assert_close(whole, expected)
    split = paged_run(stages_of(checkpoint.path, 2), sequences).prefill()
    assert all(torch.equal(a, b) for a, b in zip(split, whole, strict=True))


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_parity_of_tensor_parallel_ranks(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    form,
):
    sizes = BLOCKS if form[1] == "block" else {"num_hidden_layers": 2}
    checkpoint = made(
        "LlamaForCausalLM", form, seed=13, **{**sizes, "mlp_bias": True, "attention_bias": True}
    )
    if form[1] == "block":  # a rank's part of down_proj must end at a block
        checkpoint = made("LlamaForCausalLM", form, seed=14, **{**sizes, "intermediate_size": 768})
    sequences = random_sequences(LENGTHS, seed=15)
    ranks = on_tensor_parallel_ranks(
        2, lambda tp: paged_run(stages_of(checkpoint.path, tp=tp), sequences).prefill()
    )
    expected = reference_logprobs(checkpoint.hf_model, sequences)
    for ours in ranks:
        assert_close(ours, expected)


def test_bfloat16_equals_transformers_with_rounded_weights(
    made, random_sequences, stages_of, paged_run, reference_logprobs
):
    checkpoint = made("LlamaForCausalLM", FORMATS[2], seed=16, num_hidden_layers=1)
    sequences = random_sequences((9, 4), seed=17)
    stage = build(checkpoint.path, dtype=torch.bfloat16)
    load(checkpoint.path, stage)
    views = stage.checkpoint_views()
    name = "model.layers.0.self_attn.v_proj"
    values = views[f"{name}.weight"].float() * views[f"{name}.weight_scale"].unsqueeze(1)
    assert torch.equal(values, checkpoint.hf_model.model.layers[0].self_attn.v_proj.weight.detach())
    assert views["lm_head.weight"].dtype == torch.bfloat16
    reference = reference_logprobs(checkpoint.hf_model.bfloat16(), sequences)
    ours = paged_run(stages_of(checkpoint.path, dtype=torch.bfloat16), sequences)
    ours.caches = [[cache.bfloat16() for cache in caches] for caches in ours.caches]
    assert_close(ours.prefill(), reference, 0.25)


@pytest.mark.parametrize(("pattern", "first"), [("re:.*layers.1.*", 1), ("re:.*mlp.*", None)])
def test_ignored_matrices_stay_in_the_models_dtype(
    made, random_sequences, stages_of, paged_run, reference_logprobs, pattern, first
):
    layers = [f"model.layers.{index}" for index in range(2)]
    modules = [
        f"{layer}.{block}.{name}"
        for layer in (layers if first is None else layers[first:])
        for block, names in (
            ("self_attn", ["q_proj", "k_proj", "v_proj", "o_proj"] if first else []),
            ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        )
        for name in names
    ]
    checkpoint = made("LlamaForCausalLM", FORMATS[2], modules, seed=18, num_hidden_layers=2)
    listed = paged_run(stages_of(checkpoint.path), random_sequences((7, 20), seed=19)).prefill()
    edit_config(
        checkpoint.path,
        quantization_config=compressed_config("channel", "dynamic", [pattern]),
    )
    sequences = random_sequences((7, 20), seed=19)
    ours = paged_run(stages_of(checkpoint.path), sequences).prefill()
    assert all(torch.equal(a, b) for a, b in zip(ours, listed, strict=True))
    assert_close(ours, reference_logprobs(checkpoint.hf_model, sequences))


def test_names_of_transformers_that_are_not_converted():
    ignored = IgnoredModules(paths=("model.layers.1", "mlp.down_proj"))
    assert ignored.has("model.layers.1.self_attn.q_proj")
    assert not ignored.has("model.layers.11.self_attn.q_proj")
    assert ignored.has("model.layers.3.mlp.down_proj")
    assert not ignored.has("model.layers.3.mlp.up_proj")


def test_scales_of_transformers_own_names(made):
    checkpoint = made("LlamaForCausalLM", FORMATS[5], num_hidden_layers=1)
    stage = build(checkpoint.path)
    load(checkpoint.path, stage)
    expected = {name: view.clone() for name, view in stage.checkpoint_views().items()}

    def rename(tensors):
        for name in list(tensors):
            for ours, theirs in (
                (".weight_scale", ".weight_scale_inv"),
                (".input_scale", ".activation_scale"),
            ):
                if name.endswith(ours):
                    tensors[name.removesuffix(ours) + theirs] = tensors.pop(name).reshape(1)

    rewrite(checkpoint.path, rename)
    again = build(checkpoint.path)
    load(checkpoint.path, again)
    for name, view in again.checkpoint_views().items():
        assert torch.equal(view.view(torch.uint8), expected[name].view(torch.uint8)), name
    source = DiskSource(model=str(checkpoint.path))
    names = tuple(load_file(checkpoint.path / "model.safetensors"))
    message = UpdateWeights(seq=1, epoch=1, link=1, names=names, source=source)
    places = checkpoint_places(again, read_model_config(checkpoint.path))
    reader = DiskReader(torch.device("cpu"))
    places.check(
        manifest := reader.describe(
            message, None, Expected(places, TensorFiles([checkpoint.path.parent]))
        )
    )
    places.check_complete(manifest.names)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_loads_through_buffers_give_the_same_bits(made, monkeypatch, form):
    """The way to a GPU."""
    sizes = {**BLOCKS, "intermediate_size": 768} if form[1] == "block" else {}
    checkpoint = made("LlamaForCausalLM", form, seed=23, **sizes)
    stages = [build(checkpoint.path, Elsewhere(1, 2)) for _ in range(2)]
    load(checkpoint.path, stages[0])
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


@pytest.mark.parametrize("form", [FORMATS[2], FORMATS[4]], ids=["channel", "block"])
def test_dummy_weights_are_equal_for_every_split(made, form):
    sizes = {**BLOCKS, "intermediate_size": 768}
    checkpoint = made("LlamaForCausalLM", form, seed=20, **sizes)
    whole = build(checkpoint.path)
    load_dummy_weights(whole.parameters(), 7, lambda _: None)
    for tp in (Elsewhere(0, 2), Elsewhere(1, 2)):
        for layers in (range(1), range(1, 2)):
            part = build(checkpoint.path, tp, layers)
            load_dummy_weights(part.parameters(), 7, lambda _: None)
            full = {p.name: p for stage in (whole,) for p in stage.parameters()}
            for parameter in part.parameters():
                for piece in parameter.pieces:
                    if piece.is_repeated:
                        continue
                    other = next(p for p in full[parameter.name].pieces if p.name == piece.name)
                    theirs = full[parameter.name].data[other.target][piece.source]
                    mine = parameter.data[piece.target]
                    assert torch.equal(mine.float(), theirs.float()), piece.name
    down = whole.checkpoint_views()["model.layers.0.mlp.down_proj.weight"].float()
    assert down.isfinite().all() and 0.2 < down.std() / 448 < 0.6
    assert len(down.unique()) > 100


def test_the_bytes_of_a_stage_are_those_of_fp8(made, make_checkpoint):
    checkpoint = made("LlamaForCausalLM", FORMATS[2], seed=21, num_hidden_layers=1)
    plain = make_checkpoint("LlamaForCausalLM", seed=22, num_hidden_layers=1)
    quantized = build(checkpoint.path, dtype=torch.bfloat16)
    unquantized = build(plain.path, dtype=torch.bfloat16)
    matrices = [p for p in quantized.parameters() if p.data.dtype == torch.float8_e4m3fn]
    scales = sum(p.num_bytes for p in quantized.parameters() if p.data.dtype == torch.float32)
    saved = sum(p.num_bytes for p in matrices) - scales
    assert len(matrices) == 4
    assert unquantized.num_parameters_bytes - quantized.num_parameters_bytes == saved


def build_online(path, tp=None, dtype=torch.float32):
    config = replace(read_model_config(path), quantization=ONLINE)
    stage = build_stage(
        config,
        range(config.num_hidden_layers),
        True,
        True,
        tp or SingleRank(),
        dtype,
        torch.device("cpu"),
        16,
        NullAttention(),
        TorchOps(),
    )
    return config, stage


def assert_online(stage, state, rank=0, size=1):
    """Each row of this rank is quantized by its own largest value."""
    views = stage.checkpoint_views()
    for name, tensor in state.items():
        if not name.endswith(tuple(f"{matrix}.weight" for matrix in LAYER_MATRICES)):
            assert views[name].dtype not in (torch.float8_e4m3fn,)
            continue
        is_row_parallel = name.endswith(("o_proj.weight", "down_proj.weight"))
        part = tensor.float().chunk(size, 1 if is_row_parallel else 0)[rank]
        values, scale, _ = quantized_values(part, "channel")
        mine = views[f"{name}_scale"]
        assert torch.allclose(mine, scale.squeeze(1), rtol=1e-6), name
        differs = values.float() != views[name].float()
        assert differs.float().mean() < 1e-3, name  # quotients may be rounded differently


@pytest.mark.parametrize("size", [1, 2])
def test_online_quantization_of_a_rank(make_checkpoint, size):
    made = make_checkpoint("LlamaForCausalLM", seed=30, max_shard_size="60KB")
    for rank in range(size):
        config, stage = build_online(made.path, Elsewhere(rank, size))
        report = load_weights(stage.parameters(), made.path, checkpoint_names(config), ignore)
        assert report.ignored_tensors == ()
        if size == 1:
            assert_online(stage, made.hf_model.state_dict())
        else:
            state = {
                name: tensor
                for name, tensor in made.hf_model.state_dict().items()
                if "layers" in name and "norm" not in name
            }
            assert_online(stage, state, rank, size)


def test_online_quantization_in_batches_and_through_buffers_gives_the_same_bits(
    make_checkpoint, monkeypatch
):
    made = make_checkpoint("LlamaForCausalLM", seed=31)
    config, whole = build_online(made.path)
    load_weights(whole.parameters(), made.path, checkpoint_names(config), ignore)
    monkeypatch.setattr(weights, "_ARRIVAL_BYTES", 20_000)
    monkeypatch.setattr(fp8, "_CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(
        weights,
        "_load_file",
        lambda path, items, meter, observer: weights.load_through_buffers(
            {path: items}, torch.device("cpu"), meter.advance
        ),
    )
    _, again = build_online(made.path)
    load_weights(again.parameters(), made.path, checkpoint_names(config), ignore)
    for name, view in again.checkpoint_views().items():
        expected = whole.checkpoint_views()[name]
        assert torch.equal(view.view(torch.uint8), expected.view(torch.uint8)), name


def test_an_update_requantizes_in_place(make_checkpoint):
    old = make_checkpoint("LlamaForCausalLM", seed=32)
    new = make_checkpoint("LlamaForCausalLM", seed=33)
    config, stage = build_online(old.path)
    load_weights(stage.parameters(), old.path, checkpoint_names(config), ignore)
    addresses = [parameter.data.data_ptr() for parameter in stage.parameters()]
    _, fresh = build_online(new.path)
    load_weights(fresh.parameters(), new.path, checkpoint_names(config), ignore)
    places = checkpoint_places(stage, config)
    state = new.hf_model.state_dict()
    manifest = Manifest(
        tuple(state),
        tuple(tensor.dtype for tensor in state.values()),
        tuple(tuple(tensor.shape) for tensor in state.values()),
    )
    places.check(manifest)
    for name, tensor in state.items():
        middle = tensor.shape[0] // 3
        places.fill(name, middle, tensor[middle:].detach())
        places.fill(name, 0, tensor[:middle].detach())
    places.check_complete(tuple(state))
    assert [parameter.data.data_ptr() for parameter in stage.parameters()] == addresses
    for name, view in stage.checkpoint_views().items():
        expected = fresh.checkpoint_views()[name]
        assert torch.equal(view.view(torch.uint8), expected.view(torch.uint8)), name
    bad = Manifest(manifest.names, (torch.float8_e4m3fn,) * len(state), manifest.shapes)
    with pytest.raises(ConfigError, match="another format"):
        places.check(bad)


def test_kernel_names_are_copied_as_they_are(made):
    checkpoint = made("LlamaForCausalLM", FORMATS[2], num_hidden_layers=1)
    stage = build(checkpoint.path)
    load(checkpoint.path, stage)
    for config, target in [
        (read_model_config(checkpoint.path), build(checkpoint.path)),
        build_online(checkpoint.path),
    ]:
        places = kernel_places(target, config, 0, 1, torch.float32)
        tensors = {parameter.name: parameter.data for parameter in stage.parameters()}
        places.check(
            Manifest(
                tuple(tensors),
                tuple(tensor.dtype for tensor in tensors.values()),
                tuple(tuple(tensor.shape) for tensor in tensors.values()),
            )
        )
        for name, tensor in tensors.items():
            places.fill(name, 0, tensor)
        places.check_complete(tuple(tensors))
        for mine, theirs in zip(target.parameters(), stage.parameters(), strict=True):
            assert torch.equal(mine.data.view(torch.uint8), theirs.data.view(torch.uint8))


def test_rows_of_zeros_and_of_nan_are_kept():
    values = torch.randn(3, 8)
    values[0] = 0
    values[2, 5] = torch.nan
    into, scale = torch.zeros(3, 8, dtype=torch.float8_e4m3fn), torch.zeros(3)
    fp8.quantize_rows(values, into, scale)
    assert torch.equal(into[0].float(), torch.zeros(8))
    assert into[1].float().abs().max() == 448
    assert (into[2].float() * scale[2]).isnan().all()


def test_online_dummy_weights_do_not_depend_on_pipeline_stages(make_checkpoint):
    made = make_checkpoint("LlamaForCausalLM", seed=34)
    _, one = build_online(made.path)
    _, two = build_online(made.path)
    for stage in (one, two):
        load_dummy_weights(stage.parameters(), 5, ignore)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine.data.view(torch.uint8), theirs.data.view(torch.uint8))
    down = one.checkpoint_views()["model.layers.1.mlp.down_proj.weight"]
    assert (down.float().abs().amax(1) == 448).all()


def ignore(progress):
    return None


def refused(path):
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        stage = build(path)
        before = [parameter.data.clone() for parameter in stage.parameters()]
        try:
            load(path, stage)
        finally:
            for old, parameter in zip(before, stage.parameters(), strict=True):
                assert torch.equal(old.view(torch.uint8), parameter.data.view(torch.uint8))
    return str(caught.value)


def spoil(config, path, value):
    """Return the configuration with another value at a dotted path."""
    config = json.loads(json.dumps(config))
    at = config
    *parents, last = path.split(".")
    for part in parents:
        at = at[part]
    at[last] = value
    return config


GROUP = "config_groups.group_0"
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("quant_method", "aqlm", "quant_method"),
        ("quant_method", None, "quant_method"),
        ("format", "marlin-24", "format"),
        ("format", "int-quantized", "format"),
        ("kv_cache_scheme", INT8, "kv_cache_scheme.type"),
        ("kv_cache_scheme", {**FP8, "dynamic": True}, "kv_cache_scheme.dynamic"),
        ("kv_cache_scheme", {**FP8, "strategy": "group"}, "kv_cache_scheme.strategy"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format"),
        ("transform_config", {"config_groups": {}}, "transform_config"),
        (f"{GROUP}.weights", INT8, "group_0.weights.type"),
        (f"{GROUP}.weights", None, "group_0.weights"),
        (f"{GROUP}.weights.num_bits", 4, "group_0.weights.num_bits"),
        (f"{GROUP}.weights.symmetric", False, "group_0.weights.symmetric"),
        (f"{GROUP}.weights.strategy", "group", "group_0.weights.strategy"),
        (f"{GROUP}.weights.dynamic", True, "group_0.weights.dynamic"),
        (f"{GROUP}.input_activations.num_bits", 4, "group_0.input_activations.num_bits"),
        (f"{GROUP}.input_activations", INT8, "group_0.input_activations.type"),
        (f"{GROUP}.output_activations", {"num_bits": 8}, "group_0.output_activations"),
        (f"{GROUP}.targets", ["Linear", "Embedding"], "group_0.targets"),
        (f"{GROUP}.targets", ["re:.*q_proj"], "group_0.targets"),
        (f"{GROUP}.format", "int-quantized", "group_0.format"),
        ("config_groups", {}, "config_groups"),
        ("config_groups", {"a": {}, "b": {}}, "config_groups"),
        ("ignore", ["re:(.+)+!"], "ignore"),
        ("ignore", ["re:["], "ignore"),
        ("ignore", "lm_head", "ignore"),
    ],
)
def test_unknown_compressed_tensors_are_refused_by_name(made, path, value, named):
    checkpoint = made("LlamaForCausalLM", FORMATS[2], num_hidden_layers=1)
    config = compressed_config("channel", "dynamic", [])
    edit_config(checkpoint.path, quantization_config=spoil(config, path, value))
    text = refused(checkpoint.path)
    assert f"{named} " in text and "quantization_config." in text


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("activation_scheme", "none", "activation_scheme"),
        ("activation_scheme", "static", "activation_scheme"),
        ("weight_block_size", [64, 64], "weight_block_size"),
        ("weight_block_size", [128], "weight_block_size"),
        ("fmt", "e5m2", "fmt"),
        ("modules_to_convert", ["lm_head"], "modules_to_convert"),
        ("modules_to_not_convert", ["layers.*"], "modules_to_not_convert"),
    ],
)
def test_unknown_fp8_is_refused_by_name(made, path, value, named):
    checkpoint = made("LlamaForCausalLM", FORMATS[7], **BLOCKS)
    config = fp8_config("block", "dynamic", [])
    edit_config(checkpoint.path, quantization_config=spoil(config, path, value))
    assert f"quantization_config.{named}" in refused(checkpoint.path)


def test_block_scales_of_compressed_tensors_have_128_rows_and_columns(made):
    checkpoint = made("LlamaForCausalLM", FORMATS[4], **BLOCKS)
    config = compressed_config("block", "dynamic", [])
    edit_config(
        checkpoint.path,
        quantization_config=spoil(config, f"{GROUP}.weights.block_structure", [64, 128]),
    )
    assert "block_structure" in refused(checkpoint.path)


def test_tensor_parallel_ranks_that_cut_blocks_are_refused_alike(made):
    checkpoint = made("LlamaForCausalLM", FORMATS[4], **BLOCKS)
    for rank in range(2):
        with pytest.raises(ConfigError, match=r"cuts a block.*weight_block_size") as caught:
            build(checkpoint.path, Elsewhere(rank, 2))
        assert "gate_proj" in str(caught.value)
        assert "tensor_parallel_size" in str(caught.value)


def test_a_merged_matrix_in_mixed_formats_is_refused_by_name(made):
    ignored = "model.layers.1.self_attn.k_proj"
    checkpoint = made("LlamaForCausalLM", FORMATS[2], [ignored])
    text = refused(checkpoint.path)
    assert ignored in text and "not all of them are quantized" in text


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        (FORMATS[0], "weight_scale"),
        (FORMATS[0], "input_scale"),
        (FORMATS[2], "weight_scale"),
        (FORMATS[4], "weight_scale"),
    ],
    ids=["tensor", "inputs", "channel", "block"],
)
def test_missing_scales_are_refused_by_name(made, form, suffix):
    sizes = BLOCKS if form[1] == "block" else {}
    checkpoint = made("LlamaForCausalLM", form, **sizes)
    name = f"model.layers.1.mlp.down_proj.{suffix}"
    rewrite(checkpoint.path, lambda tensors: tensors.pop(name))
    assert name in refused(checkpoint.path)


def test_other_formats_than_config_json_says_are_refused_by_name(made):
    checkpoint = made("LlamaForCausalLM", FORMATS[2])
    name = "model.layers.3.mlp.up_proj"
    config = json.loads((checkpoint.path / "config.json").read_text())
    rewrite(checkpoint.path, lambda t: t.update({f"{name}.weight": t[f"{name}.weight"].float()}))
    text = refused(checkpoint.path)
    assert f"{name}.weight" in text and "float32" in text and "quantization_config" in text
    rewrite(
        checkpoint.path,
        lambda t: t.update({f"{name}.weight": t[f"{name}.weight"].to(torch.float8_e4m3fn)}),
    )
    load(checkpoint.path, build(checkpoint.path))
    del config["quantization_config"]
    (checkpoint.path / "config.json").write_text(json.dumps(config))
    text = refused(checkpoint.path)
    assert ".weight" in text and "float8_e4m3fn" in text and "quantization_config" in text


@pytest.mark.parametrize("shape", [(2, 1), (1, 80), (80, 2), (0,)])
def test_scales_of_another_shape_are_refused_by_name(made, shape):
    checkpoint = made("LlamaForCausalLM", FORMATS[2])
    name = "model.layers.2.mlp.gate_proj.weight_scale"
    rewrite(checkpoint.path, lambda tensors: tensors.update({name: torch.ones(shape)}))
    assert name in refused(checkpoint.path)
