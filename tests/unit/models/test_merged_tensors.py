"""Checkpoints with merged tensors (qkv_proj, gate_up_proj), of which a rank holds several regions:
against transformers' Phi-3, through every way that weights come and go."""

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rpc_schema.errors import ConfigError
from tests.support import checkpoints, quantized, quantized_int4
from tests.support.lora_adapters import make_adapter
from tests.support.quantized_stages import Elsewhere, build
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.lora.adapter_files import AdapterFormat
from worker_daemon.models import weights
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names, whole_model
from worker_daemon.models.int4_order import load_orders
from worker_daemon.models.saved_set import GroupShape, load_saved, read_saved_set
from worker_daemon.models.saving import RankWeights, Saver, SaveRequest
from worker_daemon.models.tensor_bytes import checksum
from worker_daemon.models.tensorized import read_tensorized, tensorizer_files
from worker_daemon.models.weight_places import Manifest, checkpoint_places, kernel_places
from worker_daemon.models.weights import WriteObserver, load_dummy_weights, load_weights

pytestmark = pytest.mark.each_value  # make test-all runs every combination

ARCHITECTURE = "Phi3ForCausalLM"
LENGTHS = (1, 5, 40, 13)
QKV = "model.layers.0.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
QUANTIZED_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
"""Ranks split these at blocks of 128."""


@pytest.fixture
def made(make_checkpoint):
    """(seed, overrides) -> a checkpoint of Phi-3."""

    def make(seed=0, **overrides):
        return make_checkpoint(ARCHITECTURE, seed=seed, pad_token_id=0, **overrides)

    return make


def load(path, stage, config=None, observer=None):
    names = checkpoint_names(config or read_model_config(path)) | load_orders(
        stage.parameters(), path
    )
    return load_weights(stage.parameters(), path, names, lambda _: None, observer)


def rank_part(name, tensor, rank, size, num_heads=4, num_kv_heads=2):
    """A rank's part of a tensor, cut by hand."""
    if name.endswith("qkv_proj.weight"):
        heads = tensor.unflatten(0, (num_heads + 2 * num_kv_heads, -1))
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
        first = rank * num_kv_heads // size
        kv = slice(first, first + max(1, num_kv_heads // size))
        return torch.cat((q.chunk(size)[rank], k[kv], v[kv])).flatten(0, 1)
    if name.endswith("gate_up_proj.weight"):
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return tensor.chunk(size, 1)[rank]
    return tensor


def layers_of(state):
    return {name: tensor for name, tensor in state.items() if ".layers." in name}


def assert_close(ours, reference, tolerance=1e-4):
    for logits, expected in zip(ours, reference, strict=True):
        assert (logits.float().log_softmax(-1) - expected).abs().max().item() <= tolerance


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (1, 2), (2, 2), (4, 1)])
def test_splits_agree_with_transformers(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    tp_size,
    pp_size,
):
    checkpoint = made(seed=1)
    sequences = random_sequences(LENGTHS, seed=2)
    expected = reference_logprobs(checkpoint.hf_model, sequences)

    def prefill(tp):
        return paged_run(stages_of(checkpoint.path, pp_size, tp), sequences).prefill()

    for ours in on_tensor_parallel_ranks(tp_size, prefill):
        assert_close(ours, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("through_buffers", [False, True], ids=["read", "staged"])
def test_a_rank_s_part_is_one_view(made, monkeypatch, size, through_buffers):
    """Its checksum is that of the checkpoint's tensor on one rank, and that of the part of a rank
    that the checkpoint's regions make up otherwise."""
    checkpoint = made(seed=3, max_shard_size="40KB")
    if through_buffers:
        monkeypatch.setattr(
            weights,
            "_load_file",
            lambda path, items, meter, observer: weights.load_through_buffers(
                {path: items}, torch.device("cpu"), meter.advance
            ),
        )
    state = checkpoint.hf_model.state_dict()
    for rank in range(size):
        stage = build(checkpoint.path, Elsewhere(rank, size))
        report = load(checkpoint.path, stage)
        views = stage.checkpoint_views()
        assert report.bytes_loaded == sum(4 * view.numel() for view in views.values())
        for name, tensor in layers_of(state).items():
            expected = rank_part(name, tensor, rank, size)
            assert torch.equal(views[name], expected), name
            assert checksum(views[name]) == checksum(expected)


def test_stages_have_the_checksums_of_the_whole_model(made):
    checkpoint = made(seed=4)
    state = checkpoint.hf_model.state_dict()
    for layers in (range(1), range(1, 4)):
        stage = build(checkpoint.path, SingleRank(), layers)
        load(checkpoint.path, stage)
        for name, view in stage.checkpoint_views().items():
            assert checksum(view) == checksum(state[name]), name


class Events(WriteObserver):
    """Notes what is being written; checks that a tensor is complete once it is reported."""

    def __init__(self, stage, state):
        self.stage, self.state, self.log = stage, state, []

    def writing(self, names):
        self.log += [("writing", name) for name in names]

    def written(self, names):
        for name in names:
            self.log.append(("written", name))
            part = self.state[name]
            assert torch.equal(self.stage.checkpoint_views()[name], part), name


@pytest.mark.parametrize("dummy", [False, True])
def test_a_tensor_is_reported_once_and_when_all_its_regions_are_written(made, dummy):
    checkpoint = made(seed=5, num_hidden_layers=1)
    whole, stage = (build(checkpoint.path, Elsewhere(1, 2)) for _ in range(2))
    if dummy:
        load_dummy_weights(whole.parameters(), 5, lambda _: None)
    else:
        load(checkpoint.path, whole)
    events = Events(stage, whole.checkpoint_views())
    if dummy:
        load_dummy_weights(stage.parameters(), 5, lambda _: None, events)
    else:
        load(checkpoint.path, stage, observer=events)
    written = [name for what, name in events.log if what == "written"]
    assert sorted(written) == sorted(whole.checkpoint_views())
    assert [name for what, name in events.log if what == "writing"] == written
    for name in written:
        assert events.log.index(("writing", name)) < events.log.index(("written", name))


def test_dummy_weights_are_those_of_the_whole_model(made):
    checkpoint = made(seed=6)
    whole = build(checkpoint.path)
    load_dummy_weights(whole.parameters(), 9, lambda _: None)
    for rank in range(2):
        stage = build(checkpoint.path, Elsewhere(rank, 2))
        load_dummy_weights(stage.parameters(), 9, lambda _: None)
        views = stage.checkpoint_views()
        for name, tensor in layers_of(whole.checkpoint_views()).items():
            assert torch.equal(views[name], rank_part(name, tensor, rank, 2)), name


@pytest.mark.parametrize("quantization", [None, ONLINE], ids=["plain", "online"])
@pytest.mark.parametrize("form", ["safetensors", "tensorizer"])
def test_saved_sets_come_back(made, tmp_path, form, quantization):
    checkpoint = made(seed=7)
    config = replace(read_model_config(checkpoint.path), quantization=quantization)
    shape = GroupShape(1, 2, (4,), "float32")
    stages = [stage_of(config, Elsewhere(rank, 2)) for rank in range(2)]
    root = tmp_path / "saved"
    root.mkdir(mode=0o700)
    savers = [Saver(root) for _ in stages]
    request = save_request(form)
    for rank, (saver, stage) in enumerate(zip(savers, stages, strict=True)):
        load(checkpoint.path, stage, config)
        given = RankWeights(rank, shape, config, {}, stage.checkpoint_views(), 0)
        saver.write(request, given, lambda: None)
    for saver in savers:
        saver.finish(request.save, keep=True)
    saved = read_saved_set(root / "set")
    saved.check(shape, config)
    for rank, stage in enumerate(stages):
        again = stage_of(config, Elsewhere(rank, 2))
        reader = read_tensorized if form == "tensorizer" else None
        load_saved(
            [*again.parameters()], saved, rank, lambda _: None, verify=True, load_file=reader
        )
        assert_same(again, stage)
    with pytest.raises(ConfigError) as caught:
        saved.check(GroupShape(1, 1, (4,), "float32"), config)
    assert caught.value.field == "tensor_parallel_size"


def save_request(form):
    save = os.urandom(16).hex()
    if form == "safetensors":
        return SaveRequest(save, "set", "r{rank}-p{part}.safetensors", 20_000)
    pytest.importorskip("tensorizer")
    files = tensorizer_files("load_format", form)
    return SaveRequest(save, "set", "r{rank}-p{part}.tensors", 1 << 30, files)


def stage_of(config, tp=None, adapters=None, attention=None):
    return build_stage(
        config,
        range(config.num_hidden_layers),
        True,
        True,
        tp or SingleRank(),
        torch.float32,
        torch.device("cpu"),
        96,
        attention or NullAttention(),
        TorchOps(),
        adapters,
    )


def assert_same(mine, theirs):
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8)), one.name


def manifest_of(tensors):
    return Manifest(
        tuple(tensors),
        tuple(tensor.dtype for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


@pytest.mark.parametrize("quantization", [None, ONLINE], ids=["plain", "online"])
@pytest.mark.parametrize("size", [1, 2])
def test_updates_by_checkpoint_names(made, size, quantization):
    """In chunks of rows that end anywhere."""
    old, new = made(seed=8), made(seed=9)
    config = replace(read_model_config(old.path), quantization=quantization)
    state = {name: tensor.detach() for name, tensor in new.hf_model.state_dict().items()}
    for rank in range(size):
        stage, fresh = (stage_of(config, Elsewhere(rank, size)) for _ in range(2))
        load(old.path, stage, config)
        load(new.path, fresh, config)
        places = checkpoint_places(stage, config)
        places.check(manifest_of(state))
        for name, tensor in state.items():
            for first in reversed(range(0, len(tensor), 11)):
                places.fill(name, first, tensor[first : first + 11])
        places.check_complete(tuple(state))
        assert places.names_of(QKV, torch.float32) == (QKV,)
        assert_same(stage, fresh)


@pytest.mark.parametrize("size", [1, 2])
def test_updates_by_kernel_names(made, size):
    """Ranks hold different parts under one name, which is the checkpoint's own."""
    old, new = made(seed=10), made(seed=11)
    config = read_model_config(old.path)
    state = new.hf_model.state_dict()
    for rank in range(size):
        stage, fresh = (build(old.path, Elsewhere(rank, size)) for _ in range(2))
        load(old.path, stage)
        load(new.path, fresh)
        places = kernel_places(stage, config, rank, size, torch.float32)
        sent = {
            f"{name}@tp{each}": rank_part(name, state[name], each, size).contiguous()
            for name in layers_of(state)
            for each in range(size)
        }
        sent |= {
            f"{parameter.name}@tp{rank}": parameter.data
            for parameter in fresh.parameters()
            if ".layers." not in parameter.name
        }
        places.check(manifest_of(sent))
        for name, tensor in sent.items():
            places.fill(name, 0, tensor.detach())
        assert places.names_of(f"{QKV}@tp{rank}", torch.float32) == (QKV,)
        assert_same(stage, fresh)


FP8_FORMATS = [
    ("compressed", "tensor", "static"),
    ("compressed", "channel", "dynamic"),
    ("compressed", "block", "dynamic"),
    ("fp8", "tensor", "dynamic"),
    ("fp8", "block", "dynamic"),
]


@pytest.mark.parametrize("form", FP8_FORMATS, ids="-".join)
@pytest.mark.parametrize("size", [1, 2])
def test_fp8_checkpoints(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    form,
    size,
):
    checkpoint = made(seed=12, **QUANTIZED_SIZES)
    quantized.quantize(checkpoint.path, checkpoint.hf_model, *form)
    stored = load_file(checkpoint.path / "model.safetensors")
    assert stored[QKV].dtype == stored[GATE_UP].dtype == torch.float8_e4m3fn
    sequences = random_sequences(LENGTHS[:3], seed=13)
    expected = reference_logprobs(checkpoint.hf_model, sequences)

    def prefill(tp):
        stages = stages_of(checkpoint.path, tp=tp)
        module = QKV.removesuffix(".weight")
        views = stages[0].checkpoint_views()
        assert views[QKV].dtype == torch.float8_e4m3fn
        assert (f"{module}.input_scale" in views) == (form[2] == "static")
        return paged_run(stages, sequences).prefill()

    for ours in on_tensor_parallel_ranks(size, prefill):
        assert_close(ours, expected, 3e-4)


def test_online_fp8_quantizes_each_row(made):
    checkpoint = made(seed=14)
    config = replace(read_model_config(checkpoint.path), quantization=ONLINE)
    state = checkpoint.hf_model.state_dict()
    for rank in range(2):
        stage = stage_of(config, Elsewhere(rank, 2))
        load(checkpoint.path, stage, config)
        views = stage.checkpoint_views()
        for name in (QKV, GATE_UP):
            part = rank_part(name, state[name], rank, 2)
            values, scale, _ = quantized.quantized_values(part, "channel")
            assert torch.allclose(views[f"{name}_scale"], scale.squeeze(1), rtol=1e-6)
            differs = values.float() != views[name].float()
            assert differs.float().mean() < 1e-3, name  # quotients may be rounded differently


INT4_SCHEMES = [
    quantized_int4.Scheme("awq", 64),
    quantized_int4.Scheme("gptq", 32),
    quantized_int4.Scheme("gptq", -1, act_order=True),
    quantized_int4.Scheme("compressed", 64),
]


@pytest.mark.parametrize("scheme", INT4_SCHEMES, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_4_bit_checkpoints(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    scheme,
    size,
):
    checkpoint = made(seed=15, **QUANTIZED_SIZES)
    torch.manual_seed(16)
    quantized_int4.quantize(checkpoint.path, checkpoint.hf_model, scheme)
    sequences = random_sequences(LENGTHS[:3], seed=17)
    expected = reference_logprobs(checkpoint.hf_model, sequences)
    for ours in on_tensor_parallel_ranks(
        size, lambda tp: paged_run(stages_of(checkpoint.path, tp=tp), sequences).prefill()
    ):
        assert_close(ours, expected, 3e-4)


def test_activation_order_of_a_part(made):
    """The order of a matrix is read once, whatever regions of it a rank holds."""
    checkpoint = made(seed=18, **QUANTIZED_SIZES)
    torch.manual_seed(19)
    scheme = quantized_int4.Scheme("gptq", 64, act_order=True)
    quantized_int4.quantize(checkpoint.path, checkpoint.hf_model, scheme)
    with pytest.raises(ConfigError, match="ranks cannot split"):
        build(checkpoint.path, Elsewhere(0, 2))
    whole = build(checkpoint.path)
    load(checkpoint.path, whole)


def test_blocks_that_a_rank_would_cut_are_refused(made):
    sizes = {**QUANTIZED_SIZES, "intermediate_size": 704}
    checkpoint = made(seed=20, **sizes)
    quantized.quantize(checkpoint.path, checkpoint.hf_model, "fp8", "block")
    build(checkpoint.path)  # the blocks of a single rank are those of the checkpoint
    with pytest.raises(ConfigError, match="cuts a block"):
        build(checkpoint.path, Elsewhere(0, 2))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("targets", [("qkv_proj",), ("qkv_proj", "gate_up_proj", "down_proj")])
def test_adapters_of_merged_modules(
    made,
    random_sequences,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    size,
    targets,
):
    """PEFT makes the adapter and merges it into transformers' model."""
    checkpoint = made(seed=21)
    given = checkpoints.Checkpoint(checkpoint.path, checkpoint.hf_model)
    merged = make_adapter(given, "adapter", seed=22, rank=3, targets=targets)
    sequences = random_sequences(LENGTHS, seed=23)
    expected = reference_logprobs(merged.model, sequences)
    config = read_model_config(checkpoint.path)
    whole = AdapterLayout(1, 1)
    whole_model(config, SingleRank(), torch.float32, whole)
    assert whole.shapes["model.layers.0.self_attn.qkv_proj"] == (96, 48)

    def prefill(tp):
        layout = AdapterLayout(1, 4)
        stage = stage_of(config, tp, layout, TorchPagedAttention())
        load(checkpoint.path, stage)
        files = AdapterFormat(layout, whole.shapes, torch.float32, pinned=False).read(merged.path)
        layout.bind(files.weights.unsqueeze(0))
        layout.token_slots = torch.ones(sum(LENGTHS), dtype=torch.int32)
        return paged_run([stage], sequences).prefill()

    for ours in on_tensor_parallel_ranks(size, prefill):
        assert_close(ours, expected)
