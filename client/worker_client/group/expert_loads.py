"""The expert loads in the daemons' statuses: counts by layer."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rpc_schema.lifecycle import Status

Counts: TypeAlias = npt.NDArray[np.int64]
"""[E]: the tokens routed to each expert of a layer."""
LoadsByLayer: TypeAlias = Mapping[int, Counts]


def loads_by_layer(statuses: Iterable[Status]) -> dict[int, Counts]:
    """Return the counts of all layers that the daemons have, in the order of layers; empty for a
    model without experts. Those of replicas are added. Ranks of one replica's stage have equal
    counts; the first status that has a layer is used."""
    found: dict[tuple[int, int], Counts] = {}
    for status in statuses:
        size = 1 if status.config is None else status.config.parallel.world_size
        for load in status.expert_loads:
            counts = np.frombuffer(load.counts, "<i8").astype(np.int64)
            found.setdefault((load.layer, status.rank // size), counts)
    total: dict[int, Counts] = {}
    for (layer, _), counts in sorted(found.items(), key=lambda item: item[0]):
        total[layer] = total[layer] + counts if layer in total else counts
    return total


def loads_since(before: LoadsByLayer, after: LoadsByLayer) -> dict[int, Counts]:
    """Return the tokens counted between two readings, by layer. If a layer's counters were reset in
    between, its second reading is returned."""
    return {
        layer: counts - before[layer]
        if layer in before and (counts >= before[layer]).all()
        else counts
        for layer, counts in after.items()
    }


def imbalance(counts: Counts | npt.NDArray[np.float64]) -> float:
    """Return the tokens of the busiest expert, or rank, over the mean of all: 1 if they have equal
    counts, 0 if no token was routed."""
    return float(counts.max() / counts.mean()) if counts.any() else 0.0
