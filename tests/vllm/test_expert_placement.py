"""The placement of experts by load is that of vLLM's copy of DeepSeek's algorithm, unless that puts
two copies of an expert on one rank."""

import numpy as np
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from worker_client.group.expert_placement import place_by_load


def test_placements_of_random_loads_are_vllm_s():
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_repeats = 0
    for _ in range(50):
        num_ranks, per_rank = int(rng.integers(1, 9)), int(rng.integers(2, 9))
        num_redundant = int(num_ranks * rng.integers(0, 3)) if num_ranks > 1 else 0
        loads = rng.permutation(rng.pareto(1.5, num_ranks * per_rank) + 1e-3)
        (theirs,) = DefaultEplbPolicy.rebalance_experts_hierarchical(
            loads[None], loads.size + num_redundant, 1, 1, num_ranks
        )
        ours = place_by_load(loads, num_ranks, num_redundant).experts
        parts = np.split(theirs, num_ranks)
        if any(np.unique(own).size < own.size for own in parts):
            num_repeats += 1
            assert all(np.unique(own).size == own.size for own in ours), f"seed {seed}"
            continue
        assert [sorted(own.tolist()) for own in ours] == [sorted(own.tolist()) for own in parts], (
            f"seed {seed}"
        )
    assert num_repeats < 25, f"seed {seed}"
