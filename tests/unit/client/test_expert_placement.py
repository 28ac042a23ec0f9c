"""Experts placed by random loads: what every placement has, and how even skewed loads become."""

import numpy as np
import pytest

from worker_client.cli.expert_loads import rank_figures
from worker_client.errors import ClientConfigError
from worker_client.group.expert_loads import imbalance
from worker_client.group.expert_placement import place_by_load, place_in_order

SEED = np.random.SeedSequence().entropy


@pytest.fixture
def rng():
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def skewed(rng, num_experts, num_ranks, skew):
    """Random loads, of which the first rank would have `skew` times the mean."""
    loads = rng.pareto(3, num_experts) + 0.1
    first = place_in_order(num_experts, num_ranks).experts[0]
    others = np.setdiff1d(np.arange(num_experts), first)
    loads[first] *= skew / loads[first].sum()
    loads[others] *= (num_ranks - skew) / loads[others].sum()
    return (loads * 1e6).astype(np.int64)


def test_every_slot_is_used_and_every_expert_is_somewhere(rng):
    for _ in range(200):
        num_experts, num_ranks = rng.integers(1, 65), rng.integers(1, 9)
        spare = int(-num_experts % num_ranks + num_ranks * rng.integers(0, 4))
        spare = min(spare, int(num_experts * (num_ranks - 1)))  # one copy on each rank
        loads = rng.integers(0, rng.choice([2, 10, 1 << 40]), num_experts)
        placed = place_by_load(loads, num_ranks, spare)
        assert {own.size for own in placed.experts} == {(num_experts + spare) // num_ranks}
        assert len(placed.experts) == num_ranks
        assert set(np.concatenate(placed.experts).tolist()) == set(range(num_experts))
        assert all(np.unique(own).size == own.size for own in placed.experts)
        np.testing.assert_allclose(placed.loads_of_ranks(loads).sum(), loads.sum())


def test_no_copy_has_more_tokens_than_that_of_an_expert_with_several(rng):
    """Without one of its copies, no expert would have less than the busiest copy has, of those that
    may have more."""
    for _ in range(100):
        loads = rng.integers(1, 1 << 20, 16)
        experts = np.concatenate(place_by_load(loads, 4, int(4 * rng.integers(1, 5))).experts)
        copies = np.bincount(experts)
        several = copies > 1
        before = loads[several] / (copies[several] - 1)
        assert before.min() >= (loads / copies)[copies < 4].max()


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(128, 4), (128, 8), (64, 4)])
def test_skewed_loads_are_even_with_a_quarter_more_experts(rng, num_experts, num_ranks):
    for _ in range(20):
        loads = skewed(rng, num_experts, num_ranks, 3.0)
        in_order = place_in_order(num_experts, num_ranks).loads_of_ranks(loads)
        assert imbalance(in_order) == pytest.approx(3.0, rel=0.01)
        placed = place_by_load(loads, num_ranks, num_experts // 4).loads_of_ranks(loads)
        assert imbalance(placed) <= 1.3


def test_in_order_the_first_ranks_have_one_more():
    assert [own.tolist() for own in place_in_order(7, 3).experts] == [[0, 1, 2], [3, 4], [5, 6]]


def test_experts_that_stay_on_a_rank_keep_their_slots(rng):
    """Ranks get the lists that overlap most with what they have: fewer moves than in any order."""
    for _ in range(50):
        num_ranks = int(rng.integers(2, 6))
        one, other = (
            place_by_load(rng.integers(1, 1 << 20, 24), num_ranks, -24 % num_ranks)
            for _ in range(2)
        )
        near = other.near(one)
        assert sorted(sorted(own.tolist()) for own in near.experts) == sorted(
            sorted(own.tolist()) for own in other.experts
        )
        for before, after in zip(one.experts, near.experts, strict=True):
            kept = set(before.tolist()) & set(after.tolist())
            assert all((before == after)[before == expert].all() for expert in kept)
        same = one.near(one)
        assert all((a == b).all() for a, b in zip(one.experts, same.experts, strict=True))


@pytest.mark.parametrize("num_redundant", [-4, 1, 28])
def test_ranks_with_different_numbers_of_experts_are_refused(num_redundant):
    with pytest.raises(ClientConfigError, match="num_redundant") as caught:
        place_by_load(np.ones(8), 4, num_redundant)
    assert caught.value.value == num_redundant


def test_figures_of_ranks(rng):
    loads = {layer: skewed(rng, 64, 4, 3.0) for layer in (0, 3)}
    figures = rank_figures(loads, 4)
    assert figures.rank_imbalance == pytest.approx(3.0, rel=0.01)
    ranks = [place_by_load(own, 4).loads_of_ranks(own) for own in loads.values()]
    expected = np.mean([own.max() / own.mean() for own in ranks])
    assert figures.balanced_rank_imbalance == pytest.approx(expected)
    assert rank_figures({1: np.zeros(7, np.int64)}, 2) == (0.0, 0.0)
    assert rank_figures({}, 4) is None
