"""Corrected token counts: a feature, added to a copy of the tree, refuses counted tokens at random.
Covered: a pipeline, preemption, death of the driver, models with several KV groups, and sampling in
separate requests. Tokens equal those of transformers, as without the feature."""

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.forked_drivers import ForkedDrivers
from tests.support.refusing_feature import copy_with_the_feature
from tests.support.refusing_feature.checks import SHORT, Load, check_serving
from tests.support.toy_feature.checks import start_daemons

pytestmark = pytest.mark.slow

MIXED = ("full_attention", *["sliding_attention"] * 3) * 2
WINDOWED = Load(
    prompt_lens=(3, 20),
    max_tokens=(26, 38),
    max_model_len=64,
    max_num_batched_tokens=16,
    num_blocks=56,
    dies_after=25,
)
"""Contexts of ten windows. Waiting short requests keep nearly all blocks in use: a block freed by a
window is reused immediately."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_with_the_feature(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def drivers(tree):
    with ForkedDrivers(tree) as drivers:
        yield drivers


@pytest.fixture(scope="module")
def daemons(tree, model_root):
    with start_daemons(tree, ["cpu"] * 3, model_root) as daemons:
        yield daemons


@pytest.mark.parametrize("pp", [*map(exhaustively, (1, 2)), 3])
def test_tokens_that_were_refused_are_sampled_again(drivers, daemons, checkpoint, pp):
    check_serving(drivers, daemons.endpoints[:pp], checkpoint())


@pytest.mark.parametrize(("partition", "num_requests"), [exhaustively((8,), 12), ((5, 3), 5)])
def test_windows_keep_what_a_refused_token_sees(
    drivers, daemons, checkpoint, partition, num_requests
):
    """One layer in four sees everything, the others a window. That one more than a block's four
    tokens: a token too early, and the block is gone that the refused one sees."""
    mixed = checkpoint(
        "Qwen3ForCausalLM",
        num_hidden_layers=len(MIXED),
        layer_types=list(MIXED),
        max_window_layers=0,
        use_sliding_window=True,
        sliding_window=5,
        seed=31,
    )
    endpoints = daemons.endpoints[: len(partition)]
    load = WINDOWED._replace(num_requests=num_requests)
    whole = check_serving(drivers, endpoints, mixed, load, layer_partition=partition)
    assert whole.num_groups > 1


@pytest.mark.parametrize("pp", [exhaustively(1), 3])
def test_deferred_sampling(drivers, daemons, checkpoint, pp):
    """The driver dies between a step and the request that samples it."""
    check_serving(drivers, daemons.endpoints[:pp], checkpoint(), SHORT._replace(defers=True))
