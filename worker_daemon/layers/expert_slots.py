"""The physical slots of a stage's experts: which expert each rank has, and the slot that each token
goes to.

Every rank has as many slots of a layer. An expert may have slots on several ranks: a token takes
one of them by its row, alike on all ranks that route it. Routers, loads and reports name experts;
only the products know slots.

Shapes: N tokens, K experts of a token, E experts of the layer, R ranks, S slots of each rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.errors import config_error
from worker_daemon.layers.parameter import Parameter

_ROWS: Final = 60
"""Rows of a table: the copies of an expert, of which there may be 1 to 6, take turns evenly."""
_ALIGNMENT: Final = 16
"""Alignment of tensors in spare memory, in bytes."""

Placement = tuple[int, ...]
"""[R S]: the expert in each slot, those of rank 0 first."""


class SlotCounts(NamedTuple):
    """Sizes that the layers of a stage share."""

    rank: int
    """Number of this rank among those that share the experts."""
    num_ranks: int
    """R"""
    num_redundant: int
    """Slots of a layer beyond its experts, over all ranks."""
    first_row: int
    """Added to a token's row, so that replicas with few tokens take different copies."""


class Move(NamedTuple):
    """The copy of an expert's weights from one slot to another; both count over all ranks."""

    source: int
    target: int


class LayerSlots:
    """The slots of one layer. Used on the step thread; `table` is device memory that never moves
    once it is allocated."""

    def __init__(self, num_experts: int, counts: SlotCounts, placement: Placement | None) -> None:
        """placement: None for that of a load.

        Raises:
            ConfigError: see check_placement.
        """
        num_slots = num_experts + counts.num_redundant
        self.num_experts = num_experts
        self.num_ranks = counts.num_ranks
        self.size = num_slots // counts.num_ranks
        """S"""
        self.first = counts.rank * self.size
        """This rank's first slot."""
        self.placement = placement_in_order(num_experts, num_slots)
        """The expert in each slot."""
        if placement is not None:
            self.check(placement)
            self.placement = placement
        self.table = torch.empty(0, dtype=torch.int32, device="meta")
        """int32 [_ROWS, stride], flat: a slot of expert e at e + 1; -1 at 0, for padding."""
        self._offsets = _Offsets(0)

    @property
    def num_slots(self) -> int:
        """R S"""
        return self.size * self.num_ranks

    @property
    def own(self) -> Sequence[int]:
        """The experts in this rank's slots."""
        return self.placement[self.first : self.first + self.size]

    def check(self, placement: Placement) -> None:
        """Raise ConfigError unless a placement is possible. It depends on the message alone, so
        that all ranks agree."""
        check_placement(placement, self.num_experts, self.num_ranks, self.num_slots)

    def bind(self, table: Tensor, offsets: "_Offsets") -> None:
        """Use memory for the table from now on, and fill it."""
        self.table, self._offsets = table, offsets
        self.use(self.placement)

    def use(self, placement: Placement) -> None:
        """Send tokens to these slots from the next step on."""
        if self.table.device.type != "meta":
            rows = slot_table(placement, self.num_experts, self.table.numel() // _ROWS).flatten()
            if self.table.device.type == "cuda":
                rows = rows.pin_memory()  # otherwise the copy waits for the steps in flight
            self.table.copy_(rows, non_blocking=True)
        self.placement = placement

    def slots_of(self, routed: RoutedTokens) -> RoutedTokens:
        """Return tokens with the slots of their experts, int32 [N, K]. Does not wait for the
        device."""
        experts, weights = routed
        index = experts + self._offsets.of(experts)
        return RoutedTokens(self.table.index_select(0, index.flatten()).view_as(index), weights)


class _Offsets:
    """The begin of each token's row in a table: int32 [N, 1]. The memory profile's step, the
    largest, comes first: no step in a graph makes it grow."""

    def __init__(self, first_row: int, stride: int = 1) -> None:
        self._first_row = first_row
        self._stride = stride
        self._known = torch.empty((0, 1), dtype=torch.int32)

    def of(self, experts: Tensor) -> Tensor:
        """Return the offsets of as many rows as experts, [N, K], has, on its device."""
        num_rows = experts.shape[0]
        if num_rows > self._known.shape[0] or self._known.device != experts.device:
            rows = torch.arange(num_rows, dtype=torch.int32, device=experts.device)
            offsets = (rows + self._first_row) % _ROWS * self._stride + 1
            if experts.is_cuda and torch.cuda.is_current_stream_capturing():
                return offsets.unsqueeze(1)  # what is recorded to compile kernels never runs
            self._known = offsets.unsqueeze(1)
        return self._known[:num_rows]


@dataclass(slots=True, eq=False)
class KnownPlacements:
    """The placements now, without device memory: any thread may read them."""

    by_layer: Mapping[int, Placement] = field(default_factory=dict)
    """Replaced, never changed."""
    moved: Mapping[int, Placement] = field(default_factory=dict)
    """Those whose weights this rank has received, of layers that were not switched yet."""
    counts_before: Mapping[int, bytes] = field(default_factory=dict)
    """The loads that were known when layers were switched: see KnownLoads.by_layer."""
    num_moved: int = 0
    num_switches: int = 0
    num_failed: int = 0
    num_dropped: int = 0


class ExpertSlots:
    """The slots of all layers of a stage, and the spare memory for one layer's experts. Used on the
    step thread, except `known`; freed with the stage."""

    def __init__(self, counts: SlotCounts, placements: Mapping[int, Placement]) -> None:
        """placements: by layer; that of a load for layers without one. Those of other stages are
        ignored."""
        self.counts = counts
        self.known = KnownPlacements()
        self.layers: dict[int, LayerSlots] = {}
        """By layer of the model."""
        self.spare: Parameter | None = None
        """uint8: room for the experts of any layer; None until reserve. A parameter without
        checkpoint tensors, so that it is allocated, counted and put to sleep with the weights."""
        self._placements = placements

    def add(self, layer: int, num_experts: int) -> LayerSlots:
        """Return the slots of another layer. Raises ConfigError: see LayerSlots."""
        slots = LayerSlots(num_experts, self.counts, self._placements.get(layer))
        self.layers[layer] = slots
        return slots

    def reserve(self, layers: Iterable[Sequence[Parameter]], device: torch.device) -> None:
        """Make the spare memory. layers: the parameters of each layer's experts."""
        size = max((sum(_aligned(p.num_bytes) for p in own) for own in layers), default=0)
        self.spare = Parameter((size,), (), name="expert_spare", dtype=torch.uint8, device=device)

    def allocate(self, device: torch.device) -> None:
        """Give memory to the tables, and fill them. Raises torch.OutOfMemoryError."""
        stride = self._stride
        tables = torch.zeros((len(self.layers), _ROWS * stride), dtype=torch.int32, device=device)
        offsets = _Offsets(self.counts.first_row, stride)
        for slots, table in zip(self.layers.values(), tables, strict=True):
            slots.bind(table, offsets)
        self.publish()

    @property
    def num_bytes(self) -> int:
        """Device memory of all tables."""
        return len(self.layers) * _ROWS * self._stride * torch.int32.itemsize

    @property
    def _stride(self) -> int:
        return 1 + max((slots.num_experts for slots in self.layers.values()), default=0)

    def publish(self) -> None:
        """Show the present placements in `known`."""
        self.known.by_layer = {layer: slots.placement for layer, slots in self.layers.items()}

    def spare_rows(self, parameters: Sequence[Parameter], size: int) -> list[Tensor]:
        """Return spare memory for each of a layer's parameters, like slot_rows."""
        assert self.spare is not None, "reserve was called"
        rows, first = [], 0
        for parameter in parameters:
            own = self.spare.data[first : first + parameter.num_bytes]
            rows.append(own.view(size, -1))
            first += _aligned(parameter.num_bytes)
        return rows


def slot_rows(parameters: Sequence[Parameter], size: int) -> list[Tensor]:
    """Return views, uint8 [S, n], of parameters that have the experts of S slots one after
    another."""
    return [each.data.view(-1).view(torch.uint8).view(size, -1) for each in parameters]


def placement_in_order(num_experts: int, num_slots: int) -> Placement:
    """Return the placement of a load: experts in order, then the redundant ones, which repeat them
    in order."""
    return tuple(slot % num_experts for slot in range(num_slots))


def check_placement(placement: Placement, num_experts: int, num_ranks: int, num_slots: int) -> None:
    """Raise ConfigError unless every expert has a slot, and none has two on one rank."""
    name = "placement.experts"
    if len(placement) != num_slots:
        problem = f"{num_ranks} ranks have {num_slots} slots of the layer"
        raise config_error(name, len(placement), problem, f"give {num_slots} experts")
    without = sorted(set(range(num_experts)).difference(placement))
    if without:
        raise config_error(name, without[:16], "these experts have no slot", "give each one")
    unknown = [each for each in placement if each >= num_experts]
    if unknown:
        problem = f"the layer has {num_experts} experts"
        raise config_error(name, unknown[:16], problem, f"use 0 to {num_experts - 1}")
    size = num_slots // num_ranks
    for rank in range(num_ranks):
        own = placement[rank * size : (rank + 1) * size]
        if len(set(own)) < size:
            problem = f"rank {rank} would have an expert twice"
            raise config_error(name, list(own), problem, "put its copies on different ranks")


def plan_moves(before: Placement, after: Placement, size: int) -> list[Move]:
    """Return the moves that lead from one placement to another, alike on every rank: by target,
    each from the rank itself if it has the expert, else from one of those that do, in turn."""
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(before):
        holders.setdefault(expert, []).append(slot)
    moves = []
    for target, expert in enumerate(after):
        if before[target] == expert:
            continue
        slots = holders[expert]
        here = [slot for slot in slots if slot // size == target // size]
        moves.append(Move(here[0] if here else slots[target % len(slots)], target))
    return moves


def slot_table(placement: Placement, num_experts: int, stride: int) -> Tensor:
    """Return the slots of each expert, int32 [_ROWS, stride]: see LayerSlots.table."""
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(placement):
        slots[expert].append(slot)
    table = torch.full((_ROWS, stride), -1, dtype=torch.int32)
    for expert, own in enumerate(slots):
        turns = torch.tensor(own, dtype=torch.int32)
        table[:, expert + 1] = turns[torch.arange(_ROWS) % len(own)]
    return table


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
