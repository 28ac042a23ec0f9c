"""Figures of the expert loads: of random counts, by their definitions; of several daemons."""

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.config import ParallelConfig
from rpc_schema.lifecycle import ExpertLoad, GetStatusReply
from tests.contract.random_messages import fixed_example
from worker_client.cli.expert_loads import load_figures, num_expert_ranks
from worker_client.group.expert_loads import imbalance, loads_by_layer, loads_since


def statuses(*daemons):
    """({layer: counts} of each daemon) -> their statuses."""
    example = fixed_example(GetStatusReply).status
    return [
        replace(
            example,
            expert_loads=tuple(
                ExpertLoad(layer=layer, counts=np.array(own, "<u8").tobytes())
                for layer, own in loads.items()
            ),
        )
        for loads in daemons
    ]


def test_layers_of_all_stages_once():
    rng = np.random.default_rng()
    counts = {layer: rng.integers(0, 1 << 40, 6).tolist() for layer in (0, 2, 5)}
    first, second = {0: counts[0], 2: counts[2]}, {5: counts[5]}
    found = loads_by_layer(statuses(second, first, first))
    assert list(found) == [0, 2, 5]
    assert {layer: own.tolist() for layer, own in found.items()} == counts
    assert loads_by_layer(statuses({})) == {}


def test_counters_that_began_anew_count_from_there():
    before = {0: np.array([5, 1]), 1: np.array([7, 7])}
    after = {0: np.array([9, 1]), 1: np.array([8, 2]), 4: np.array([3, 4])}
    since = {layer: own.tolist() for layer, own in loads_since(before, after).items()}
    assert since == {0: [4, 0], 1: [8, 2], 4: [3, 4]}


def test_figures():
    rng = np.random.default_rng()
    loads = {layer: rng.integers(0, 3, 16) for layer in range(5)}
    loads[2][:] = 0
    figures = load_figures(loads)
    ratios = [own.max() / (own.sum() / 16) if own.any() else 0.0 for own in loads.values()]
    assert figures.num_layers == 5
    assert figures.num_experts == 16
    assert figures.distinct == pytest.approx(np.mean([(own > 0).sum() for own in loads.values()]))
    assert figures.imbalance == pytest.approx(np.mean(ratios))
    assert figures.worst_imbalance == pytest.approx(max(ratios))
    assert imbalance(np.full(7, 3)) == 1.0
    assert load_figures({}) is None


@pytest.mark.parametrize(
    ("shares", "lockstep", "num_ranks"), [(False, True, 1), (True, False, 2), (True, True, 6)]
)
def test_ranks_that_share_experts(shares, lockstep, num_ranks):
    (status,) = statuses({})
    parallel = ParallelConfig(
        tensor_parallel_size=2, data_parallel_size=3, data_parallel_lockstep=lockstep
    )
    model = replace(status.config.model, enable_expert_parallel=shares)
    status = replace(status, config=replace(status.config, parallel=parallel, model=model))
    assert num_expert_ranks(status) == num_ranks
    assert num_expert_ranks(replace(status, config=None)) == 1


def test_counts_of_replicas_are_added():
    """The two ranks of each have equal ones."""
    counts = np.random.default_rng().integers(0, 1 << 40, (2, 6))
    found = statuses(*({3: own.tolist()} for own in counts.repeat(2, axis=0)))
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    found = [
        replace(each, rank=rank, config=replace(each.config, parallel=parallel))
        for rank, each in enumerate(found)
    ]
    assert loads_by_layer(found)[3].tolist() == counts.sum(0).tolist()
