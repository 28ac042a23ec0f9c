"""Layers that keep one vector of each token: multi-head latent attention, in a family of tests,
against transformers' DeepSeek-V3; and the plan of what such layers keep."""

import json

import pytest
import torch

from rpc_schema import kv_cache
from rpc_schema.errors import ConfigError
from tests.support.families import all_families
from tests.unit.planning.test_planning import plan
from worker_daemon.layers.cache_spec import KVLayerSpec, LatentLayerSpec
from worker_daemon.models import registry
from worker_daemon.models.config import read_model_config
from worker_daemon.models.saved_set import model_fields
from worker_daemon.runner.kv_cache import allocate_kv_caches, describe_layers

LENGTHS = (1, 5, 40, 13)
FIELDS = {
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
}
WIDTH = 28
EACH = {"block_size": 4, "max_model_len": 96, "max_num_batched_tokens": 32}


@pytest.fixture(autouse=True)
def families(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", all_families())


@pytest.fixture
def made(make_checkpoint):
    return make_checkpoint("DeepseekV3ForCausalLM", seed=31, **FIELDS)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_the_family_agrees_with_transformers(
    made, random_sequences, stages_of, paged_run, reference_logprobs, on_tensor_parallel_ranks,
    pp, tp,
):  # fmt: skip
    sequences = random_sequences(LENGTHS, seed=32)

    def chunks(rank):
        run = paged_run(stages_of(made.path, pp, rank), sequences)
        first = [-(-length // 2) for length in LENGTHS]
        rest = [length - count for length, count in zip(LENGTHS, first, strict=True)]
        parts = [run.step(counts, num_padding=3).split(counts) for counts in (first, rest)]
        return [torch.cat(both) for both in zip(*parts, strict=True)]

    expected = reference_logprobs(made.hf_model, sequences)
    for ours in on_tensor_parallel_ranks(tp, chunks):
        for logits, reference in zip(ours, expected, strict=True):
            assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_the_plan_counts_one_vector_per_token(made, pp, tp):
    planned = plan(made.path, pp=pp, tp=tp, dtype="float32", block_size=8)
    for rank in planned.ranks:
        assert rank.kv_block_bytes == 8 * WIDTH * 4 * rank.num_layers


def test_the_spec_of_each_layer_says_what_it_keeps(made, stages_of):
    (stage,) = stages_of(made.path)
    specs = describe_layers(stage.kv_layer_specs, torch.bfloat16)
    names = [f"model.layers.{layer}.self_attn" for layer in range(4)]
    assert list(specs) == [
        kv_cache.LatentPages(
            layer_name=name, width=WIDTH, dtype="bfloat16", bytes_per_token=WIDTH * 2
        )
        for name in names
    ]
    config = read_model_config(made.path)
    assert config.cache_specs(range(4), tp_size=2) == stage.kv_layer_specs


def test_a_saved_set_names_the_sizes_of_such_layers(made):
    fields = model_fields(read_model_config(made.path))
    assert (fields["kv_lora_rank"], fields["v_head_dim"]) == (20, 10)
    json.dumps(fields)


def test_a_cache_in_fp8_is_refused(made):
    with pytest.raises(ConfigError, match="other things of a token") as refused:
        plan(made.path, kv_cache_dtype="fp8")
    assert refused.value.field == "cache.kv_cache_dtype"


def both_kinds():
    """A model with both kinds of layers, of 64 and 16 bytes a token."""
    return [KVLayerSpec("kv.0", 2, 4, None), KVLayerSpec("kv.1", 2, 4, 9)] + [
        LatentLayerSpec(f"latent.{index}", 4) for index in range(2)
    ]


def planned(layers, num_blocks=5):
    specs = describe_layers(layers, torch.float32)
    groups = kv_cache.plan_groups([specs], *EACH.values())
    return kv_cache.build_kv_cache_config(groups, 0, num_blocks)


def test_layers_of_both_kinds_share_the_pages_of_one_arena():
    layers = both_kinds()
    config = planned(layers)
    by_name = {name: group for group in config.groups for name in group.layer_names}
    assert {name: group.layout for name, group in by_name.items()} == {
        "kv.0": "NHD", "kv.1": "NHD", "latent.0": "latent", "latent.1": "latent",
    }  # fmt: skip
    sizes = {group.layout: group.block_size for group in config.groups}
    assert sizes == {"NHD": 4, "latent": 16}  # equal pages
    made = []

    def zeros(count, dtype):
        made.append(torch.zeros(count, dtype=dtype))
        return made[-1]

    caches = allocate_kv_caches(config, layers, torch.float32, 3, zeros).layers
    assert [tuple(kv.cache.shape) for kv in caches] == [
        (5, 2, 4, 2, 4), (5, 2, 4, 2, 4), (5, 16, 4), (5, 16, 4),
    ]  # fmt: skip
    (arena,) = made
    assert arena.nbytes == config.size_bytes
    assert all(
        kv.cache.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr() for kv in caches
    )


def test_a_plan_for_another_layout_is_refused():
    with pytest.raises(ConfigError) as refused:
        allocate_kv_caches(
            planned([KVLayerSpec("a", 1, 2, None)]),
            [LatentLayerSpec("a", 4)],
            torch.float32,
            3,
            torch.zeros,
        )
    assert refused.value.field == "kv_cache_config.groups.layout"
    assert refused.value.fix == "latent"
