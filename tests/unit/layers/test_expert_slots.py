"""Slots of experts: which one a token takes, and the moves from one placement to another."""

import numpy as np
import pytest
import torch

from rpc_schema.errors import ConfigError
from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.layers.expert_slots import (
    ExpertSlots,
    SlotCounts,
    check_placement,
    placement_in_order,
    plan_moves,
)

SEED = np.random.SeedSequence().entropy


@pytest.fixture
def rng():
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def random_placement(rng, num_experts, num_ranks, size):
    """Every expert somewhere, none twice on a rank."""
    while True:
        ranks = [rng.permutation(num_experts)[:size] for _ in range(num_ranks)]
        placement = tuple(int(each) for own in ranks for each in own)
        if len(set(placement)) == num_experts:
            return placement


def slots_on(rank, placement, num_experts, num_ranks, first_row=0):
    counts = SlotCounts(rank, num_ranks, len(placement) - num_experts, first_row)
    slots = ExpertSlots(counts, {3: placement})
    layer = slots.add(3, num_experts)
    slots.allocate(torch.device("cpu"))
    return layer


def test_tokens_take_turns_at_the_copies_of_their_expert_alike_on_all_ranks(rng):
    for _ in range(20):
        placement = random_placement(rng, 6, 4, 3)
        experts = torch.from_numpy(rng.integers(-1, 6, (240, 2)).astype(np.int32))
        routed = RoutedTokens(experts, torch.rand(240, 2))
        found = [slots_on(r, placement, 6, 4, 5).slots_of(routed).experts for r in range(4)]
        assert all(torch.equal(each, found[0]) for each in found)
        slots = found[0].numpy()
        padding = experts.numpy() < 0
        assert (slots[padding] == -1).all()
        assert (np.array(placement)[slots[~padding]] == experts.numpy()[~padding]).all()
        everyone = torch.arange(6, dtype=torch.int32).repeat(60, 1)
        own = slots_on(0, placement, 6, 4)
        taken = own.slots_of(RoutedTokens(everyone, everyone.float())).experts.numpy()
        for expert in range(6):
            _, turns = np.unique(taken[:, expert], return_counts=True)
            assert turns.size == placement.count(expert)
            assert turns.max() == turns.min() == 60 // turns.size


def test_moves_lead_from_any_placement_to_any_other(rng):
    """Each slot that changes gets its expert once, from a slot that has it: of its own rank if that
    has one."""
    for _ in range(100):
        before, after = (random_placement(rng, 7, 3, 4) for _ in range(2))
        moves = plan_moves(before, after, 4)
        assert [m.target for m in moves] == [i for i in range(12) if before[i] != after[i]]
        for source, target in moves:
            assert before[source] == after[target]
            own = before[target // 4 * 4 : target // 4 * 4 + 4]
            assert (source // 4 == target // 4) == (after[target] in own)


def test_a_load_repeats_experts_in_order():
    assert placement_in_order(5, 8) == (0, 1, 2, 3, 4, 0, 1, 2)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((0, 1, 2), "2 ranks have 4 slots"),
        ((0, 1, 0, 1), "no slot"),
        ((0, 1, 2, 3), "has 3 experts"),
        ((0, 0, 1, 2), "rank 0 would have an expert twice"),
    ],
)
def test_impossible_placements_are_refused(placement, message):
    with pytest.raises(ConfigError, match=message):
        check_placement(placement, 3, 2, 4)
