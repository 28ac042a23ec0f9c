"""Places a layer's experts on the ranks that share them, by measured loads. Pure.

The policy is DeepSeek's, within one node (github.com/deepseek-ai/EPLB): the expert with the largest
load per copy gets another copy, until all slots are used; then the copies are packed, the largest
first, each on the least loaded rank with a free slot. Here no rank gets two copies of an expert,
which would only waste a slot.

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
class PlacedExperts:
    """The experts that each rank has."""

    experts: Sequence[npt.NDArray[np.int64]]
    """For each rank, the numbers of the experts in its slots."""

    def loads_of_ranks(self, loads: Loads) -> npt.NDArray[np.float64]:
        """Return the tokens of each rank, float64 [R], if the copies of an expert have equal parts
        of its tokens."""
        copies = np.bincount(np.concatenate(self.experts), minlength=loads.size)
        per_copy = loads / np.maximum(copies, 1)
        return np.array([per_copy[own].sum() for own in self.experts])

    def near(self, before: "PlacedExperts") -> "PlacedExperts":
        """Return the same lists of experts, given to ranks, and in slots, so that many stay where
        they were. before: a placement with as many ranks and slots."""
        packs = [set(own.tolist()) for own in self.experts]
        free, found = list(range(len(packs))), []
        for own in before.experts:
            held = set(own.tolist())
            best = max(free, key=lambda pack: len(packs[pack] & held))
            free.remove(best)
            found.append(_in_old_slots(packs[best], own))
        return PlacedExperts(found)


def place_in_order(num_experts: int, num_ranks: int) -> PlacedExperts:
    """Return the placement that a load makes: experts in their order, the first ranks having one
    more if they do not divide evenly."""
    return PlacedExperts(np.array_split(np.arange(num_experts), num_ranks))


def place_by_load(loads: Loads, num_ranks: int, num_redundant: int = 0) -> PlacedExperts:
    """Return a placement with num_redundant further copies of experts, as many slots on each rank.

    Raises:
        ClientConfigError: num_redundant is negative, or not all ranks would have equally many, or
            one would have two copies of an expert.
    """
    num_slots, most = loads.size + num_redundant, loads.size * (num_ranks - 1)
    if not 0 <= num_redundant <= most or num_slots % num_ranks:
        problem = f"{num_ranks} ranks cannot have equally many of {loads.size} experts and these"
        fix = f"{-loads.size % num_ranks}, or a multiple of {num_ranks} more, at most {most}"
        raise config_error("num_redundant", num_redundant, problem, fix)
    experts = np.concatenate((np.arange(loads.size), np.zeros(num_redundant, np.int64)))
    copies = np.ones(loads.size, np.int64)
    for slot in range(loads.size, num_slots):
        experts[slot] = np.argmax(np.where(copies < num_ranks, loads / copies, -1.0))
        copies[experts[slot]] += 1
    return PlacedExperts(_packed(experts, (loads / copies), num_ranks))


def _packed(
    experts: npt.NDArray[np.int64], per_copy: npt.NDArray[np.float64], num_ranks: int
) -> list[npt.NDArray[np.int64]]:
    """Divide experts [R * S] into R lists of S different ones. per_copy: [E], their loads."""
    size = experts.size // num_ranks
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    total = np.zeros(num_ranks)
    for slot in np.argsort(-per_copy[experts], kind="stable"):
        expert = int(experts[slot])
        has_room = [len(own) < size and expert not in own for own in packs]
        if not any(has_room):
            _make_room(packs, total, expert, per_copy)
            has_room = [len(own) < size and expert not in own for own in packs]
        lightest = int(np.argmin(np.where(has_room, total, np.inf)))
        packs[lightest].append(expert)
        total[lightest] += per_copy[expert]
    return [np.array(own, np.int64) for own in packs]


def _make_room(
    packs: list[list[int]],
    total: npt.NDArray[np.float64],
    expert: int,
    per_copy: npt.NDArray[np.float64],
) -> None:
    """Move one expert so that a rank without `expert` gets a free slot: all ranks with free slots
    have it already. There is one to move, since a full rank without it has more than they do."""
    size = max(map(len, packs))
    to = next(rank for rank, own in enumerate(packs) if len(own) < size)
    moves = [
        (total[to] + per_copy[other], rank, other)
        for rank, own in enumerate(packs)
        if expert not in own
        for other in own
        if other not in packs[to]
    ]
    _, rank, other = min(moves)
    packs[rank].remove(other)
    packs[to].append(other)
    total[rank] -= per_copy[other]
    total[to] += per_copy[other]


def _in_old_slots(experts: set[int], before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a rank's experts in slots: those that it had where they were."""
    new = iter(sorted(experts.difference(before.tolist())))
    return np.array([old if old in experts else next(new) for old in before.tolist()], np.int64)
