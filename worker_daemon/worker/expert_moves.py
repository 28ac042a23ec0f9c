"""Moves a layer's experts between the ranks that share them: first their weights, into spare
memory, then, once all ranks have them, the switch.

Both are operations in the group's sequence, on the step thread: they meet no step's exchanges, and
every rank switches before the same step.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rpc_schema import expert_placement as wire
from rpc_schema.errors import StateError
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.expert_moves import PeerTensor, exchange
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.errors import config_error
from worker_daemon.layers.expert_slots import (
    ExpertSlots,
    KnownPlacements,
    LayerSlots,
    Placement,
    plan_moves,
    slot_rows,
)
from worker_daemon.layers.experts import ExpertsBlock
from worker_daemon.layers.parameter import Parameter
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.weight_state import WeightState


class MovedExperts(NamedTuple):
    """Result of a move."""

    num_moved: int
    """Slots of this rank that get another expert."""
    num_bytes: int
    """Bytes received from peers."""
    seconds: float


class _Arrived(NamedTuple):
    """The weights in spare memory."""

    layer: int
    placement: Placement
    version: int
    """Version of the weights that they are of."""
    slots: tuple[int, ...]
    """The places, in this rank's stacks, of the experts that have come."""


@dataclass(slots=True)
class ExpertMover:
    """The moves of one loaded model's experts. Owned by the worker, used on the step thread."""

    stage: DecoderStage
    weights: WeightState
    ranks: TensorParallel | ReplicaExperts
    """Those that share the experts."""
    _arrived: _Arrived | None = None

    def move(self, placement: wire.ExpertPlacement) -> MovedExperts:
        """Receive what this rank's slots lack under another placement. Queues copies on the
        device; the caller waits for them.

        Raises:
            ConfigError: the model was loaded without slots, or the placement is not possible.
            StateError: the weights are not complete.
            CommError: a peer is gone, or did not respond in time.
        """
        began = time.monotonic()
        with self._counted():
            slots, block = self._find(placement.layer)
            after = read_experts(placement)
            block_slots = _slots_of(block)
            block_slots.check(after)
            self.weights.require_whole("MoveExperts")
            self._forget()
            num_bytes, own = self._receive(slots, block, after)
        self._arrived = _Arrived(placement.layer, after, self.weights.version, own)
        slots.known.moved = {placement.layer: after}
        return MovedExperts(len(own), num_bytes, time.monotonic() - began)

    def switch(self, placement: wire.ExpertPlacement) -> None:
        """Use the weights that have come.

        Raises:
            ConfigError: as move() does.
            StateError: they have not come, or the weights have changed since.
        """
        with self._counted():
            slots, block = self._find(placement.layer)
            after = read_experts(placement)
            if _slots_of(block).placement == after:
                return
            self.weights.require_whole("SwitchExperts")
            arrived = self._arrived
            here = (placement.layer, after, self.weights.version)
            if arrived is None or (arrived.layer, arrived.placement, arrived.version) != here:
                raise StateError(
                    f"this rank has not received the experts of layer {placement.layer} for this "
                    "placement, or its weights have changed since",
                    fix="move_experts on all ranks first",
                )
            self._use(slots, block, arrived)

    def _receive(
        self, slots: ExpertSlots, block: ExpertsBlock, after: Placement
    ) -> tuple[int, tuple[int, ...]]:
        """Copy and exchange weights into spare memory. Return the bytes from peers, and the places
        that they are for."""
        own, parameters = _slots_of(block), block.slot_parameters
        rows = slot_rows(parameters, own.size)
        spare = slots.spare_rows(parameters, own.size)
        rank, size = self.ranks.rank, own.size
        sent: list[PeerTensor] = []
        received: list[PeerTensor] = []
        filled: list[int] = []
        for move in plan_moves(own.placement, after, size):
            (source, there), (target, here) = divmod(move.source, size), divmod(move.target, size)
            if target == rank:
                filled.append(here)
            if source == target == rank:
                for held, free in zip(rows, spare, strict=True):
                    free[here].copy_(held[there])
            elif source == rank:
                sent += [PeerTensor(target, held[there]) for held in rows]
            elif target == rank:
                received += [PeerTensor(source, free[here]) for free in spare]
        exchange(sent, received, self.ranks.group)
        return sum(each.data.numel() for each in received), tuple(filled)

    def _use(self, slots: ExpertSlots, block: ExpertsBlock, arrived: _Arrived) -> None:
        size, parameters = _slots_of(block).size, block.slot_parameters
        rows = slot_rows(parameters, size)
        for held, free in zip(rows, slots.spare_rows(parameters, size), strict=True):
            for place in arrived.slots:
                held[place].copy_(free[place])
        before = _names(parameters)
        block.use_placement(arrived.placement)
        self.weights.hold(_names(parameters), instead_of=before)
        self._forget()
        counts = self.stage.expert_loads.known.get().get(arrived.layer, b"")
        slots.known.counts_before = {**slots.known.counts_before, arrived.layer: counts}
        slots.publish()
        slots.known.num_moved += len(arrived.slots)
        slots.known.num_switches += 1

    def _forget(self) -> None:
        """Forget the weights in spare memory."""
        self._arrived = None
        if self.stage.expert_slots is not None:
            self.stage.expert_slots.known.moved = {}

    def _find(self, layer: int) -> tuple[ExpertSlots, ExpertsBlock]:
        slots = self.stage.expert_slots
        if slots is None:
            raise config_error("enable_eplb", False, "this model's experts cannot move", "load it")
        if layer not in slots.layers:
            fix = f"use one of {sorted(slots.layers)}"
            raise config_error("placement.layer", layer, "has no experts on this stage", fix)
        return slots, self.stage.experts_of(layer)

    def _counted(self) -> "_CountFailure":
        slots = self.stage.expert_slots
        return _CountFailure(KnownPlacements() if slots is None else slots.known)


class _CountFailure:
    """A context that counts its failure."""

    def __init__(self, known: KnownPlacements) -> None:
        self._known = known

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._known.num_failed += error is not None


def _names(parameters: Iterable[Parameter]) -> frozenset[str]:
    return frozenset(piece.name for each in parameters for piece in each.loaded_pieces)


def _slots_of(block: ExpertsBlock) -> LayerSlots:
    assert block.slots is not None, "the model was loaded with slots"
    return block.slots


def read_experts(placement: wire.ExpertPlacement) -> Placement:
    """Return the experts of a message. Raises ConfigError for half a number."""
    data = placement.experts
    if len(data) % 2:
        raise config_error("placement.experts", len(data), "are 16-bit numbers", "an even length")
    return tuple(np.frombuffer(data, "<u2").tolist())


def read_placements(
    given: Iterable[wire.ExpertPlacement], decoder: DecoderConfig
) -> Mapping[int, Placement]:
    """Return the placements of a LoadModel by layer. Raises ConfigError if the model's experts
    cannot move, or a layer has none; whether a placement is possible is checked later."""
    found = {each.layer: read_experts(each) for each in given}
    if found and decoder.num_redundant_experts is None:
        problem, fix = "this model's experts cannot move", "leave it out, or use enable_eplb"
        raise config_error("expert_placements", sorted(found), problem, fix)
    with_experts = {index for index, each in enumerate(decoder.layer_experts) if each is not None}
    unknown = sorted(found.keys() - with_experts)
    if unknown:
        fix = f"use {sorted(with_experts)[:16]}"
        raise config_error("expert_placements", unknown, "these layers have no experts", fix)
    return found


def placements_on_wire(known: KnownPlacements) -> tuple[wire.RankPlacement, ...]:
    """Return placements as a status has them. Any thread may call it."""
    moved, counts_before = known.moved, known.counts_before
    return tuple(
        wire.RankPlacement(
            layer=layer,
            experts=_as_bytes(placement),
            moved=_as_bytes(moved.get(layer, ())),
            counts_before=counts_before.get(layer, b""),
        )
        for layer, placement in known.by_layer.items()
    )


def moves_on_wire(known: KnownPlacements) -> wire.ExpertMoves:
    """Return counts as a status has them. Any thread may call it."""
    return wire.ExpertMoves(
        num_moved=known.num_moved, num_switches=known.num_switches, num_failed=known.num_failed
    )


def _as_bytes(placement: Placement) -> bytes:
    return np.array(placement, "<u2").tobytes()
