"""Moves a layer's experts between the ranks that share them: first their weights, beside the steps,
into spare memory, then, once all ranks have them, the switch: an operation in the group's sequence,
so that every rank switches before the same step.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from rpc_schema import expert_placement as wire
from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import StateError
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.peer_channel import PeerMeeting
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.errors import config_error
from worker_daemon.layers.expert_slots import (
    ExpertSlots,
    KnownPlacements,
    LayerSlots,
    Move,
    Placement,
    plan_moves,
    slot_rows,
)
from worker_daemon.layers.experts import ExpertsBlock
from worker_daemon.layers.parameter import Parameter
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.weight_state import WeightState
from worker_daemon.worker.description import MoveEnd, OnMoveEnd
from worker_daemon.worker.expert_exchange import ExpertExchange, ExpertMemory, SharedMove

_MEETING_LIMIT_S = 10.0
"""Limit on the ranks' meeting: a relink waits while gloo connects."""


class BegunMove(NamedTuple):
    """A move that has begun."""

    num_moved: int
    """Slots of this rank that get another expert."""
    num_bytes: int
    """Bytes to come from peers."""
    seconds: float
    """Time that it has taken to begin."""


class _Move(NamedTuple):
    """A move that has not been switched."""

    epoch: int
    seq: int
    layer: int
    placement: Placement
    version: int
    """Version of the weights."""
    slots: tuple[int, ...]
    """The places, in this rank's stacks, of the experts that come."""
    exchange: ExpertExchange

    def ended(self, fault: str, *, is_dropped: bool = False) -> MoveEnd:
        return MoveEnd(self.epoch, self.seq, self.layer, fault, is_dropped)


@dataclass(slots=True, eq=False)
class ExpertMover:
    """The moves of one loaded model's experts. Owned by the worker, used on the step thread."""

    stage: DecoderStage
    weights: WeightState
    ranks: TensorParallel | ReplicaExperts
    """Those that share the experts."""
    device: torch.device
    connecting: threading.Lock
    """Held while gloo connects the members of a group."""
    on_end: OnMoveEnd
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """For the exchange's thread; guards also what it writes to `known`."""
    _move: _Move | None = None
    _has_come: bool = False
    """True once the weights of _move are in spare memory."""
    _stream: torch.cuda.Stream | None = None

    def begin(self, message: wire.MoveExperts) -> BegunMove:
        """Begin to receive what this rank's slots lack under another placement. Drops the move
        before.

        Raises:
            ConfigError: the model was loaded without slots, the placement is not possible, or the
                message names no meeting.
            StateError: the weights are not complete.
        """
        began = time.monotonic()
        with self._counted():
            slots, block = self._find(message.placement.layer)
            after = read_experts(message.placement)
            own = _slots_of(block)
            own.check(after)
            if message.place is None:
                problem, fix = "the ranks need a place to meet", "one that OpenRendezvous returned"
                raise config_error("place", None, problem, fix)
            self.weights.require_whole("MoveExperts")
        self.drop("another move has begun")
        moves = plan_moves(own.placement, after, own.size)
        memory = self._memory(slots, block)
        shared = SharedMove(message.placement.layer, moves, own.size, self.weights.version)
        rank, size = self.ranks.rank, own.size
        timeout_s = message.timeout_ms / 1000
        exchange = ExpertExchange(
            shared,
            memory,
            self._meeting(message.place, timeout_s),
            timeout_s,
            self._lock,
            self._ended,
        )
        targets = tuple(move.target % size for move in moves if move.target // size == rank)
        self._move = _Move(
            *(message.epoch, message.seq, message.placement.layer, after),
            *(self.weights.version, targets, exchange),
        )
        exchange.start(self.connecting)
        num_bytes = memory.expert_bytes * sum(_comes_to(move, rank, size) for move in moves)
        return BegunMove(len(targets), num_bytes, time.monotonic() - began)

    def switch(self, placement: wire.ExpertPlacement) -> None:
        """Use the weights that have come.

        Raises:
            ConfigError: as begin() does.
            StateError: they have not come, or the weights have changed since.
        """
        with self._counted():
            slots, block = self._find(placement.layer)
            after = read_experts(placement)
            if _slots_of(block).placement == after:
                return
            self.weights.require_whole("SwitchExperts")
            move = self._move if self._has_come else None
            here = (placement.layer, after, self.weights.version)
            if move is None or (move.layer, move.placement, move.version) != here:
                raise StateError(
                    f"this rank has not received the experts of layer {placement.layer} for this "
                    "placement, or its weights have changed since",
                    fix="move_experts on all ranks first",
                )
            self._use(slots, block, move)

    def drop(self, cause: str) -> None:
        """End a move, and forget what it has brought: from now on nothing of it touches the
        device."""
        if self._move is not None:
            self._leave(cause)

    def drop_unfinished(self, cause: str) -> None:
        """End a move whose weights have not come. If they have, a driver may switch yet."""
        if self._move is not None and not self._has_come:
            self._leave(cause)

    def _leave(self, cause: str) -> None:
        move, known = self._move, self._known
        assert move is not None
        with self._lock:
            move.exchange.drop()
            has_failed = move.exchange.has_ended and not self._has_come
            self._move, self._has_come = None, False
            known.moved = {}
            known.num_dropped += not has_failed
        if not has_failed:
            self.on_end(move.ended(f"dropped: {cause}", is_dropped=True))

    def _ended(self, fault: str) -> None:
        """Take the end of the present exchange, on its thread, with the lock held."""
        move, known = self._move, self._known
        assert move is not None
        if fault:
            known.num_failed += 1
        else:
            self._has_come = True
            known.moved = {move.layer: move.placement}
        self.on_end(move.ended(fault))

    def _memory(self, slots: ExpertSlots, block: ExpertsBlock) -> ExpertMemory:
        parameters, size = block.slot_parameters, _slots_of(block).size
        if self.device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        rows = slot_rows(parameters, size)
        return ExpertMemory(rows, slots.spare_rows(parameters, size), self._stream)

    def _meeting(self, place: RendezvousAddress, timeout_s: float) -> PeerMeeting:
        return PeerMeeting(
            "expert move",
            "see which rank is slow or lost; the next rebalance meets anew",
            *(place.host, place.port, place.secret, self.ranks.rank, self.ranks.size),
            min(timeout_s, _MEETING_LIMIT_S),
        )

    def _use(self, slots: ExpertSlots, block: ExpertsBlock, move: _Move) -> None:
        size, parameters = _slots_of(block).size, block.slot_parameters
        before = _names(parameters)
        block.use_placement(move.placement)  # first, since it may lack memory
        rows = slot_rows(parameters, size)
        for held, free in zip(rows, slots.spare_rows(parameters, size), strict=True):
            for place in move.slots:
                held[place].copy_(free[place])
        self.weights.hold(_names(parameters), instead_of=before)
        self._move, self._has_come = None, False
        known = slots.known
        known.moved = {}
        counts = self.stage.expert_loads.known.get().get(move.layer, b"")
        known.counts_before = {**known.counts_before, move.layer: counts}
        slots.publish()
        known.num_moved += len(move.slots)
        known.num_switches += 1

    @property
    def _known(self) -> KnownPlacements:
        slots = self.stage.expert_slots
        return KnownPlacements() if slots is None else slots.known

    def _find(self, layer: int) -> tuple[ExpertSlots, ExpertsBlock]:
        slots = self.stage.expert_slots
        if slots is None:
            raise config_error("enable_eplb", False, "this model's experts cannot move", "load it")
        if layer not in slots.layers:
            fix = f"use one of {sorted(slots.layers)}"
            raise config_error("placement.layer", layer, "has no experts on this stage", fix)
        return slots, self.stage.experts_of(layer)

    def _counted(self) -> "_CountFailure":
        return _CountFailure(self._known, self._lock)


class _CountFailure:
    """A context that counts its failure."""

    def __init__(self, known: KnownPlacements, lock: threading.Lock) -> None:
        self._known, self._lock = known, lock

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            with self._lock:
                self._known.num_failed += 1


def _comes_to(move: Move, rank: int, size: int) -> bool:
    """Return True if a peer sends the expert of a move to this rank."""
    return move.target // size == rank != move.source // size


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
        num_moved=known.num_moved,
        num_switches=known.num_switches,
        num_failed=known.num_failed,
        num_dropped=known.num_dropped,
    )


def _as_bytes(placement: Placement) -> bytes:
    return np.array(placement, "<u2").tobytes()
