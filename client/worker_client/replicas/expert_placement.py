"""Places a layer's experts on the ranks that share them, by measured loads. Pure.

The policy is DeepSeek's, within one node (github.com/deepseek-ai/EPLB): the expert with the largest
load per copy gets another copy, until all slots are used; then the copies are packed, the largest
first, each on the least loaded rank with a free slot.

Shapes: E experts of the layer, R ranks, S slots of each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_client.errors import config_error

Loads = npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""[E]: the tokens of each expert."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts that each rank has."""

    experts: Sequence[npt.NDArray[np.int64]]
    """For each rank, the numbers of the experts in its slots."""

    def loads_of_ranks(self, loads: Loads) -> npt.NDArray[np.float64]:
        """Return the tokens of each rank, float64 [R], if the copies of an expert have equal parts
        of its tokens."""
        copies = np.bincount(np.concatenate(self.experts), minlength=loads.size)
        per_copy = loads / np.maximum(copies, 1)
        return np.array([per_copy[own].sum() for own in self.experts])


def place_in_order(num_experts: int, num_ranks: int) -> ExpertPlacement:
    """Return the placement that a load makes: experts in their order, the first ranks having one
    more if they do not divide evenly."""
    return ExpertPlacement(np.array_split(np.arange(num_experts), num_ranks))


def place_by_load(loads: Loads, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
    """Return a placement with num_redundant further copies of experts, as many slots on each rank.

    Raises:
        ClientConfigError: num_redundant is negative, or not all ranks would have equally many.
    """
    num_slots = loads.size + num_redundant
    if num_redundant < 0 or num_slots % num_ranks:
        problem = f"{num_ranks} ranks cannot have equally many of {loads.size} experts and these"
        fix = f"{-loads.size % num_ranks}, or a multiple of {num_ranks} more"
        raise config_error("num_redundant", num_redundant, problem, fix)
    experts = np.concatenate((np.arange(loads.size), np.zeros(num_redundant, np.int64)))
    copies = np.ones(loads.size, np.int64)
    for slot in range(loads.size, num_slots):
        experts[slot] = np.argmax(loads / copies)
        copies[experts[slot]] += 1
    return ExpertPlacement(_packed(experts, (loads / copies)[experts], num_ranks))


def _packed(
    experts: npt.NDArray[np.int64], loads: npt.NDArray[np.float64], num_ranks: int
) -> list[npt.NDArray[np.int64]]:
    """Divide experts with their loads, both [R * S], into R lists of S."""
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    total = np.zeros(num_ranks)
    for slot in np.argsort(-loads, kind="stable"):
        lightest = int(np.argmin(total))
        packs[lightest].append(int(experts[slot]))
        total[lightest] += loads[slot]
        if len(packs[lightest]) == experts.size // num_ranks:
            total[lightest] = np.inf
    return [np.array(own, np.int64) for own in packs]
