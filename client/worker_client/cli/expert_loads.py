"""Figures of the balance of expert loads."""

from typing import NamedTuple

import numpy as np

from rpc_schema.config import ParallelConfig
from rpc_schema.lifecycle import Status
from worker_client.group.expert_loads import LoadsByLayer, imbalance
from worker_client.group.expert_placement import place_by_load, place_in_order


class LoadFigures(NamedTuple):
    """Figures of the expert balance of a model."""

    num_layers: int
    """Layers with experts."""
    num_experts: float
    """Experts of a layer, on average."""
    distinct: float
    """Experts of a layer that at least one token was routed to, on average."""
    imbalance: float
    """See imbalance(); on average over the layers."""
    worst_imbalance: float
    """The largest imbalance() of a layer."""


def load_figures(loads: LoadsByLayer) -> LoadFigures | None:
    """Return the figures of these counts; None without layers."""
    if not loads:
        return None
    ratios = [imbalance(counts) for counts in loads.values()]
    return LoadFigures(
        len(loads),
        float(np.mean([counts.size for counts in loads.values()])),
        float(np.mean([np.count_nonzero(counts) for counts in loads.values()])),
        float(np.mean(ratios)),
        max(ratios),
    )


class RankFigures(NamedTuple):
    """Balance of the ranks that have whole experts, on average over the layers: see imbalance()."""

    rank_imbalance: float
    """With the experts where they are."""
    balanced_rank_imbalance: float
    """With the experts placed by these loads; redundant ones only as far as the ranks need them to
    have equally many."""


def rank_figures(loads: LoadsByLayer, num_ranks: int) -> RankFigures | None:
    """Return the figures of ranks that share each layer's experts; None without layers."""
    if not loads:
        return None
    placed = [
        (
            imbalance(place_in_order(counts.size, num_ranks).loads_of_ranks(counts)),
            imbalance(
                place_by_load(counts, num_ranks, -counts.size % num_ranks).loads_of_ranks(counts)
            ),
        )
        for counts in loads.values()
    ]
    return RankFigures(*(float(np.mean(each)) for each in zip(*placed, strict=True)))


def num_expert_ranks(status: Status) -> int:
    """Return the number of ranks that share the experts of a daemon's stage, each having some as a
    whole; 1 if each has a part of every expert."""
    if status.config is None or not status.config.model.enable_expert_parallel:
        return 1
    parallel = status.config.parallel
    return parallel.tensor_parallel_size * _num_replicas(parallel)


def _num_replicas(parallel: ParallelConfig) -> int:
    return parallel.data_parallel_size if parallel.data_parallel_lockstep else 1
