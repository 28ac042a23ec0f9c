"""Layers that keep a state of each request: decaying sums, in a family of tests, against sums over
whole sequences in transformers' Llama; and the plan of what such layers keep."""

import pytest
import torch

from rpc_schema import kv_cache
from rpc_schema.errors import ConfigError
from tests.support.decaying_reference import WIDTH, make_decaying
from tests.support.families import all_families
from tests.unit.planning.test_planning import plan
from worker_daemon.layers.cache_spec import KVLayerSpec, StateLayerSpec
from worker_daemon.models import registry
from worker_daemon.models.config import read_model_config
from worker_daemon.models.partition import check_partition
from worker_daemon.models.saved_set import model_fields
from worker_daemon.plan.plan_report import plan_text
from worker_daemon.runner.kv_cache import allocate_kv_caches, describe_layers

LENGTHS = (1, 5, 40, 13)
MAX_NUM_SEQS = 3


@pytest.fixture(autouse=True)
def families(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", all_families())


@pytest.fixture
def made(tmp_path):
    return make_decaying(tmp_path, "model", (1, 2), seed=51, max_position_embeddings=96)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_the_sums_are_those_of_whole_sequences(
    made, random_sequences, stages_of, paged_run, reference_logprobs, on_tensor_parallel_ranks,
    pp, tp,
):  # fmt: skip
    """In chunks, with padding, in rows that hold NaN before."""
    sequences = random_sequences(LENGTHS, seed=52)

    def chunks(rank):
        run = paged_run(stages_of(made.path, pp, rank), sequences)
        first = [-(-length // 2) for length in LENGTHS]
        rest = [length - count for length, count in zip(LENGTHS, first, strict=True)]
        parts = [run.step(counts, num_padding=3).split(counts) for counts in (first, rest)]
        return [torch.cat(both) for both in zip(*parts, strict=True)]

    expected = reference_logprobs(made.model, sequences)
    for ours in on_tensor_parallel_ranks(tp, chunks):
        for logits, reference in zip(ours, expected, strict=True):
            assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


def test_a_row_begins_anew_after_half_a_step(
    made, random_sequences, stages_of, paged_run, reference_logprobs
):
    """A step fails in its last layer, after others have changed the states: the requests are
    admitted again, and computed from their first tokens."""
    sequences = random_sequences(LENGTHS, seed=53)
    run = paged_run(stages_of(made.path), sequences)
    run.step([1, 3, 20, 5])
    last = run.stages[0]._layers[-1]
    forward, last.forward = last.forward, None
    with pytest.raises(TypeError):
        run.step([0, 1, 10, 4])
    last.forward = forward
    run.done = [0] * len(sequences)
    whole = run.prefill()
    for logits, reference in zip(whole, reference_logprobs(made.model, sequences), strict=True):
        assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_the_plan_counts_the_rows_of_states(tmp_path, pp, tp):
    made = make_decaying(tmp_path, "sparse", (1, 2), seed=51, checkpoint_blocks=3)
    planned = plan(made.path, pp=pp, tp=tp, dtype="float32", block_size=16, max_num_seqs=32)
    each = -(-33 * WIDTH * 4 // tp // 256) * 256
    for rank in planned.ranks:
        assert rank.state_bytes == each * (2 if pp == 1 else 1)
        assert rank.kv_block_bytes == 16 * 2 * 2 // tp * 16 * 4 * (2 if pp == 1 else 1)
    text = plan_text(planned)
    assert f"states take up to {planned.ranks[0].state_bytes:,} bytes of a rank" in text
    assert planned.checkpoint_tokens == 16 * 3
    for rank in planned.ranks:
        pages = rank.num_blocks * rank.kv_block_bytes
        assert 0 < rank.checkpoint_bytes <= (pages + rank.checkpoint_bytes) / 10 + 512
        taken = rank.checkpoint_bytes + pages
        assert (
            rank.kv_available_bytes - rank.kv_block_bytes - 1024 < taken <= rank.kv_available_bytes
        )
    assert "a checkpoint of a request's state every 48 tokens: up to" in text
    wider = plan(made.path, pp=pp, tp=tp, dtype="float32", block_size=16, max_num_seqs=320)
    assert wider.num_blocks < planned.num_blocks


def test_a_model_without_pages_has_a_plan(tmp_path):
    made = make_decaying(tmp_path, "model", (0, 1, 2, 3), seed=54)
    planned = plan(made.path, dtype="float32")
    assert planned.kv_cache_dtype == "none" and planned.ranks[0].kv_block_bytes == 0
    assert planned.max_model_len_fits
    assert "no KV cache" not in plan_text(planned)
    with pytest.raises(ConfigError, match="does not divide sum_width 40"):
        check_partition(read_model_config(made.path), 1, 16)


def test_the_spec_of_each_layer_says_what_it_keeps(made, stages_of):
    config = read_model_config(made.path)
    (stage,) = stages_of(made.path)
    assert config.cache_specs(range(4), tp_size=1) == stage.kv_layer_specs
    assert config.keeps_state
    specs = describe_layers(config.cache_specs([1], tp_size=2), torch.bfloat16)
    assert specs == (
        kv_cache.RowState(
            layer_name="model.layers.1.self_attn",
            shape=(WIDTH // 2,),
            dtype="float32",
            bytes_per_row=WIDTH * 2,
        ),
    )
    assert model_fields(config)["mixers"][1] == {"sum_width": WIDTH}


LAYERS = [
    StateLayerSpec("sum.0", (2, 3), torch.float32),
    KVLayerSpec("kv.0", 2, 4, None),
    StateLayerSpec("sum.1", (5,), torch.bfloat16),
]


def planned(layers=LAYERS, num_blocks=5):
    specs = describe_layers(layers, torch.bfloat16)
    groups = kv_cache.plan_groups([specs], 4, 96, 32)
    states = kv_cache.rank_states(specs, MAX_NUM_SEQS)
    return kv_cache.build_kv_cache_config(groups, 0, num_blocks, states)


def test_states_and_pages_share_one_arena():
    made = []

    def zeros(count, dtype):
        made.append(torch.zeros(count, dtype=dtype))
        return made[-1]

    config = planned()
    caches = allocate_kv_caches(config, LAYERS, torch.bfloat16, MAX_NUM_SEQS, zeros).layers
    found = [(tuple(kv.cache.shape), kv.cache.dtype) for kv in caches]
    assert found == [
        ((4, 2, 3), torch.float32),
        ((5, 2, 4, 2, 4), torch.bfloat16),
        ((4, 5), torch.bfloat16),
    ]
    (arena,) = made
    assert arena.nbytes == config.state_bytes + config.size_bytes == 512 + 5 * 4 * 32
    for number, kv in enumerate(caches, 1):
        kv.cache.fill_(number)
    assert [set(kv.cache.flatten().tolist()) for kv in caches] == [{1}, {2}, {3}]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"state_layers": ("sum.0",)}, "kv_cache_config.state_layers"),
        ({"state_bytes": 256}, "kv_cache_config.state_bytes"),
    ],
)
def test_a_plan_for_other_states_is_refused(changes, field):
    config = kv_cache.KVCacheConfig(
        **{name: getattr(planned(), name) for name in kv_cache.KVCacheConfig.__struct_fields__}
        | changes
    )
    with pytest.raises(ConfigError) as refused:
        allocate_kv_caches(config, LAYERS, torch.bfloat16, MAX_NUM_SEQS, torch.zeros)
    assert refused.value.field == field
