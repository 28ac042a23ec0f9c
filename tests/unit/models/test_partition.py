"""Layers over stages and heads over ranks."""

import pytest

from rpc_schema.errors import ConfigError
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.partition import check_partition, partition_layers


def make_config(heads=8, kv_heads=2, intermediate=96, layers=6):
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 96,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
        }
    )


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "counts"),
    [
        (6, 1, [6]),
        (6, 3, [2, 2, 2]),
        (7, 2, [4, 3]),
        (7, 3, [2, 3, 2]),
        (8, 3, [3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (5, 5, [1] * 5),
    ],
)
def test_remainder_stays_away_from_the_ends(num_layers, pp_size, counts):
    assert [len(part) for part in partition_layers(num_layers, pp_size)] == counts


def test_every_split_covers_the_layers_in_order():
    for num_layers in range(1, 20):
        for pp_size in range(1, num_layers + 1):
            parts = partition_layers(num_layers, pp_size)
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_explicit_partition_is_followed():
    assert partition_layers(6, 3, [1, 4, 1]) == (range(1), range(1, 5), range(5, 6))


@pytest.mark.parametrize("explicit", [[3, 3], [2, 2, 3], [6, 0, 0], [7, -2, 1], []])
def test_a_partition_that_does_not_fit_is_refused(explicit):
    with pytest.raises(ConfigError) as caught:
        partition_layers(6, 3, explicit)
    assert caught.value.field == "parallel.layer_partition"


@pytest.mark.parametrize("pp_size", [0, -1, 7])
def test_stage_counts_out_of_range_are_refused(pp_size):
    with pytest.raises(ConfigError) as caught:
        partition_layers(6, pp_size)
    assert caught.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_tensor_parallel_sizes_that_fit(tp_size):
    check_partition(make_config(), 6, tp_size)


@pytest.mark.parametrize(
    ("sizes", "tp_size", "named"),
    [
        ({}, 3, "num_attention_heads"),
        ({}, 16, "num_attention_heads"),
        ({"intermediate": 97}, 2, "intermediate_size"),
        ({"heads": 12, "kv_heads": 6}, 4, "num_key_value_heads"),
        ({}, 0, "tensor_parallel_size"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide(sizes, tp_size, named):
    with pytest.raises(ConfigError, match=named) as caught:
        check_partition(make_config(**sizes), 1, tp_size)
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", tp_size)
