"""Sparse deltas of an update: single elements of every kind of tensor, on ranks that hold a part of
it, against a load of the changed checkpoint; and those that are refused."""

import random
from dataclasses import replace

import pytest
import torch

from rpc_schema.errors import ConfigError
from tests.support.quantized_stages import Elsewhere
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.sparse_delta import index_fault
from worker_daemon.models.weight_places import Manifest, checkpoint_places, kernel_places
from worker_daemon.models.weights import load_weights

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "Qwen3MoeForCausalLM": EXPERTS,
    "GptOssForCausalLM": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
}
DOWN = "model.layers.0.mlp.down_proj.weight"


def stage_of(config, tp=None):
    return build_stage(
        config, range(config.num_hidden_layers), True, True, tp or SingleRank(), torch.float32,
        torch.device("cpu"), 16, NullAttention(), TorchOps(),
    )  # fmt: skip


def filled(path, config, tp=None):
    stage = stage_of(config, tp)
    load_weights(stage.parameters(), path, checkpoint_names(config), lambda _: None)
    return stage


def manifest_of(tensors):
    return Manifest(
        tuple(tensors),
        tuple(tensor.dtype for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
    )


def assert_same(mine, theirs):
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.data, other.data), one.name


def chosen(tensor, generator):
    """Places of a few elements; the first and last of them among others."""
    count = min(tensor.numel(), 3 + tensor.numel() // 20)
    places = torch.randperm(tensor.numel(), generator=generator)[:count]
    ends = torch.tensor([0, tensor.numel() - 1])
    return torch.cat((places, ends)).unique()


CASES = [(name, size, "") for name in MODELS for size in (1, 2)]
CASES += [(name, 2, "expert parallel") for name in ("Qwen3MoeForCausalLM", "GptOssForCausalLM")]
CASES += [("Qwen3MoeForCausalLM", size, "separate") for size in (1, 2)]


@pytest.mark.parametrize(("architecture", "size", "way"), CASES)
def test_changed_elements_are_those_of_the_changed_checkpoint(
    make_checkpoint, tmp_path, architecture, size, way
):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    made = make_checkpoint(architecture, seed=seed % 97, **MODELS[architecture])
    config = replace(read_model_config(made.path), expert_parallel=way == "expert parallel")
    old = [filled(made.path, config, Elsewhere(rank, size)) for rank in range(size)]
    deltas = {}
    state = made.hf_model.state_dict()
    if architecture == "Qwen2ForCausalLM":
        del state["lm_head.weight"]
    for name, tensor in state.items():
        places = chosen(tensor, generator)
        values = torch.randn(len(places), generator=generator)
        tensor.view(-1)[places] = values
        deltas |= separate(name, tensor, places) if way == "separate" else {name: (places, values)}
    made.hf_model.save_pretrained(tmp_path / "changed")
    for rank, stage in enumerate(old):
        places = checkpoint_places(stage, config)
        for name, (indices, values) in deltas.items():
            cut = int(torch.randint(len(indices) + 1, (1,), generator=generator))
            for part in (slice(0, cut), slice(cut, None)):
                places.scatter(name, indices[part], values[part])
        assert_same(stage, filled(tmp_path / "changed", config, Elsewhere(rank, size)))


def separate(name, tensor, places):
    """Deltas of single experts' matrices, cut from those of a stack by hand."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: (places, tensor.view(-1)[places])}
    prefix, found = name.rpartition(".")[0], {}
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    mask.view(-1)[places] = True
    for expert, matrix in enumerate(tensor):
        parts = {"down_proj": slice(None)}
        if name.endswith("gate_up_proj"):
            parts = {"gate_proj": slice(0, 24), "up_proj": slice(24, 48)}
        for part, rows in parts.items():
            indices = mask[expert, rows].reshape(-1).nonzero().squeeze(1)
            own = matrix[rows].reshape(-1)[indices]
            found[f"{prefix}.{expert}.{part}.weight"] = (indices, own)
    return found


def test_kernel_names_take_elements_of_the_parameters(make_checkpoint):
    made = make_checkpoint("Qwen2ForCausalLM", seed=3)
    config = read_model_config(made.path)
    for rank in range(2):
        stage = filled(made.path, config, Elsewhere(rank, 2))
        places = kernel_places(stage, config, rank, 2, torch.float32)
        expected = {each.name: each.data.clone() for each in stage.parameters()}
        for name, values in expected.items():
            indices = chosen(values, torch.Generator().manual_seed(rank))
            values.view(-1)[indices] = 7.5
            sent = torch.full((len(indices),), 7.5)
            places.scatter(f"{name}@tp{rank}", indices, sent)
            # Those of the other rank are not for this one.
            places.scatter(f"{name}@tp{1 - rank}", indices, -sent)
        for parameter in stage.parameters():
            assert torch.equal(parameter.data, expected[parameter.name]), parameter.name


@pytest.fixture
def places(make_checkpoint):
    made = make_checkpoint("Qwen3ForCausalLM", seed=5)
    config = read_model_config(made.path)
    return checkpoint_places(stage_of(config), config)


def delta(name=DOWN, count=4, dtype=torch.int32):
    return {
        f"{name}.indices": torch.arange(count, dtype=dtype),
        f"{name}.values": torch.zeros(count),
    }


WRONG = [
    (delta("model.layers.9.mlp.up_proj.weight"), "names", "the model has no such tensor"),
    ({f"{DOWN}.values": torch.zeros(3)}, "names", f"field names = '{DOWN}.indices'"),
    ({f"{DOWN}.indices": torch.arange(3)}, "names", f"field names = '{DOWN}.values'"),
    (delta(dtype=torch.float32), "dtypes", "down_proj.weight.indices are not integers"),
    (delta() | {f"{DOWN}.values": torch.zeros(5)}, "shapes", "one index for each value"),
    (delta() | {f"{DOWN}.values": torch.zeros(4, 1)}, "shapes", "not vectors"),
    (delta(count=48 * 80 + 1), "shapes", "has 3840 elements"),
    (delta() | {f"{DOWN}.values": torch.zeros(4).int()}, "dtypes", "send it as bfloat16"),
    (delta() | {DOWN: torch.zeros(48, 80)}, "names", "whole and as a sparse delta"),
    (dict(reversed(delta().items())), "names", "send all indices first"),
    ({DOWN: torch.zeros(48, 80).int()}, "dtypes", "send it as bfloat16"),
]


@pytest.mark.parametrize(("tensors", "field", "words"), WRONG)
def test_deltas_that_cannot_be_are_refused_before_they_come(places, tensors, field, words):
    with pytest.raises(ConfigError, match=words) as caught:
        places.check(manifest_of(tensors), partial=True)
    assert caught.value.field == field


def test_deltas_need_what_they_leave_as_it_is(places):
    places.check(manifest_of(delta()), partial=True)
    with pytest.raises(ConfigError, match="start a partial update"):
        places.check(manifest_of(delta()))


def test_a_tied_matrix_changes_under_one_name(make_checkpoint):
    made = make_checkpoint("Qwen2ForCausalLM", seed=6, tie_word_embeddings=True)
    config = read_model_config(made.path)
    places = checkpoint_places(stage_of(config), config)
    places.check(manifest_of(delta("lm_head.weight")), partial=True)
    with pytest.raises(ConfigError, match=r"one tensor for lm_head\.weight"):
        places.check(
            manifest_of(delta("lm_head.weight")), ["model.embed_tokens.weight"], partial=True
        )


def test_deltas_of_quantized_tensors_are_refused_by_name(make_checkpoint):
    made = make_checkpoint("Qwen3ForCausalLM", seed=7)
    config = replace(read_model_config(made.path), quantization=ONLINE)
    stage = stage_of(config)
    for known in (
        checkpoint_places(stage, config),
        kernel_places(stage, config, 0, 1, torch.float32),
    ):
        known.check(manifest_of(delta("model.norm.weight")), partial=True)
        with pytest.raises(ConfigError, match="share their scales") as caught:
            known.check(manifest_of(delta()), partial=True)
        assert (caught.value.field, caught.value.value) == ("names", DOWN)


@pytest.mark.parametrize(
    ("indices", "value", "words"),
    [
        ([0, 3, 12], 12, "outside model.norm.weight.*0 to 11"),
        ([-1, 3], -1, "outside"),
        ([0, 3, 3, 5], 3, "occurs twice"),
        ([0, 7, 5], 5, "comes after 7"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wrong_indices_name_the_tensor_and_the_index(indices, value, words, dtype):
    fault = index_fault("model.norm.weight", torch.tensor(indices, dtype=dtype), 12)
    assert isinstance(fault, ConfigError)
    assert (fault.field, fault.value) == ("model.norm.weight.indices", value)
    with pytest.raises(ConfigError, match=words):
        raise fault


def test_right_indices_have_no_fault():
    assert index_fault("a", torch.arange(12), 12) is None
    assert index_fault("a", torch.empty(0, dtype=torch.int32), 12) is None


def test_expert_tensors_that_a_file_has_stacked_change_in_either_form(make_checkpoint):
    """What of one expert lies in another form's tensor is the same element."""
    made = make_checkpoint("Qwen3MoeForCausalLM", seed=8, **EXPERTS)
    config = read_model_config(made.path)
    one, other = filled(made.path, config), filled(made.path, config)
    prefix = "model.layers.1.mlp.experts"
    index = torch.tensor([5 * 48 + 7])
    checkpoint_places(one, config).scatter(f"{prefix}.2.up_proj.weight", index, torch.tensor([3.0]))
    stacked = torch.tensor([(2 * 48 + 24 + 5) * 48 + 7])
    checkpoint_places(other, config).scatter(f"{prefix}.gate_up_proj", stacked, torch.tensor([3.0]))
    assert_same(one, other)
    assert not torch.equal(
        one.checkpoint_views()[f"{prefix}.2.up_proj.weight"],
        filled(made.path, config).checkpoint_views()[f"{prefix}.2.up_proj.weight"],
    )
