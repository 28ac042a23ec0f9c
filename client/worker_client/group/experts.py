"""Balances the experts of a group over the ranks that share them: MoveExperts and SwitchExperts.

    report = group.experts.rebalance()        # between steps

A layer's weights first go to all ranks that need them, while the old placement serves; then all
ranks switch before the same step. Layers follow one another, and need spare memory for one alone.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from rpc_schema import expert_placement as ep
from rpc_schema import lifecycle as lc
from rpc_schema.base import StepRequest
from rpc_schema.errors import WorkerError
from worker_client.errors import ContentMismatchError, DeadlineExceeded, config_error
from worker_client.group.expert_loads import (
    Counts,
    LoadsByLayer,
    imbalance,
    loads_by_layer,
    loads_since,
)
from worker_client.group.expert_placement import PlacedExperts, place_by_load
from worker_client.group.failure_state import ENDS_OWNERSHIP, Change, FailureState
from worker_client.group.group_channel import GroupChannel
from worker_client.group.outcomes import StepsInFlight
from worker_client.group.waiting import Waiter

LEAST_GAIN: Final = 0.05
"""Least fall of a layer's imbalance for which its experts are moved."""
_LOG = logging.getLogger(__name__)
_Build: TypeAlias = Callable[..., StepRequest[Any]]


class LayerBalance(NamedTuple):
    """The ranks' balance of one layer: tokens of the busiest rank over the mean of all, if copies
    of an expert have equal parts of its tokens."""

    before: float
    after: float
    """With the new placement and the same loads; as before if the layer stays as it is."""
    num_moved: int
    """Slots that got another expert."""


@dataclass(frozen=True, slots=True)
class RebalanceReport:
    """Result of a rebalance, so far."""

    layers: Mapping[int, LayerBalance]
    """By layer of the model."""
    seconds: float

    @property
    def num_moved(self) -> int:
        """Slots of all layers that got another expert."""
        return sum(layer.num_moved for layer in self.layers.values())


class _LayerMove(NamedTuple):
    """A layer that is to be switched."""

    placement: ep.ExpertPlacement
    ranks: frozenset[int]
    """Global ranks that share its experts."""
    balance: LayerBalance


@dataclass(slots=True)
class Rebalance:
    """A rebalance that goes on layer by layer; steps may be sent in between. Belongs to the group's
    thread."""

    _group: "GroupExperts"
    _moves: deque[_LayerMove]
    _layers: dict[int, LayerBalance]
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        """True once no layer is left."""
        return not self._moves

    @property
    def planned(self) -> Mapping[int, LayerBalance]:
        """The layers that are left."""
        return {move.placement.layer: move.balance for move in self._moves}

    @property
    def report(self) -> RebalanceReport:
        """The layers that were switched, and those that stay as they are."""
        return RebalanceReport(dict(self._layers), time.monotonic() - self._began)

    def advance(self) -> None:
        """Move and switch one layer; nothing if none is left. Raises as
        GroupExperts.rebalance does; the layers that are left stay as they are."""
        if not self._moves:
            return
        move = self._moves.popleft()
        try:
            self._group.move(move.placement, move.ranks)
        except BaseException:
            self._moves.clear()
            raise
        self._layers[move.placement.layer] = move.balance


class GroupExperts:
    """`WorkerGroup.experts`. Belongs to the group's thread."""

    def __init__(
        self, channel: GroupChannel, steps: StepsInFlight, state: FailureState, waiter: Waiter
    ) -> None:
        self._channel = channel
        self._steps = steps
        self._state = state
        self._waiter = waiter
        self._counted: LoadsByLayer = {}
        """The loads that the last rebalance has seen."""

    def rebalance(self, loads: LoadsByLayer | None = None) -> RebalanceReport:
        """Move experts so that ranks have equal loads, all layers one after another. loads: tokens
        of each expert by layer; None: those since this object's last rebalance. Tokens stay the
        same, and so do requests. See begin_rebalance for steps in between.

        Raises:
            ClientConfigError: the group was loaded without enable_eplb.
            CommError, DeadlineExceeded: a rank has failed or stalled. The old placement serves on
                over a new link, and running requests are lost as in WorkerGroup.relink().
            WorkerDied: a rank is dead: replace() it. It gets the present placement.
            WorkerError: a rank refuses, since its weights are not complete for example.
        """
        rebalance = self.begin_rebalance(loads)
        while not rebalance.is_done:
            rebalance.advance()
        return rebalance.report

    def begin_rebalance(self, loads: LoadsByLayer | None = None) -> Rebalance:
        """Plan a rebalance; nothing is moved yet. Raises: as rebalance() does."""
        statuses = self._channel.daemons.get_status()
        _check_can_move(statuses)
        entries = _by_layer(self._channel.daemons.ranks, statuses)
        self._finish(_unfinished(entries), entries)
        if loads is None:
            counted = loads_by_layer(statuses)
            loads, self._counted = loads_since(self._counted, counted), counted
        moves: deque[_LayerMove] = deque()
        layers: dict[int, LayerBalance] = {}
        for layer, of_ranks in sorted(self._placements().items()):
            before = _read(of_ranks.experts, len(entries[layer]))
            counts = loads.get(layer)
            if counts is None or not counts.any():
                continue
            after, balance = _planned(before, counts)
            if not balance.num_moved:
                layers[layer] = balance
                continue
            wire = ep.ExpertPlacement(layer=layer, experts=_write(after))
            moves.append(_LayerMove(wire, frozenset(entries[layer]), balance))
        return Rebalance(self, moves, layers)

    def check_can_move(self) -> None:
        """Raise ClientConfigError if the group was loaded without enable_eplb."""
        _check_can_move(self._channel.daemons.get_status())

    def move(self, placement: ep.ExpertPlacement, ranks: frozenset[int]) -> None:
        """Bring one layer to a placement. ranks: those that share its experts. Raises: as
        rebalance() does."""
        self._channel.check_usable()
        self._channel.check_serving()
        self._waiter.wait_for_all()
        try:
            self._ask(partial(ep.MoveExperts, placement=placement), ranks)
            self._ask(partial(ep.SwitchExperts, placement=placement), ranks)
        except (WorkerError, DeadlineExceeded) as error:
            self._fail(placement.layer, error)
            raise

    def finish_switches(self, statuses: Sequence[lc.Status]) -> None:
        """Switch the ranks that a lost driver, or a lost rank, has left behind the others.
        statuses: of all daemons of the group.

        Raises:
            ContentMismatchError: ranks have placements that do not fit each other.
            WorkerError: a rank refuses.
        """
        entries = _by_layer(self._channel.daemons.ranks, statuses)
        self._finish(_unfinished(entries), entries)

    def _finish(self, placements: Sequence[ep.ExpertPlacement], entries: "_Entries") -> None:
        for placement in placements:
            self._ask(
                partial(ep.SwitchExperts, placement=placement), frozenset(entries[placement.layer])
            )

    def _placements(self) -> dict[int, ep.ExpertPlacement]:
        statuses = self._channel.daemons.get_status()
        return {each.layer: each for each in present_placements(statuses)}

    def _ask(self, build: _Build, ranks: frozenset[int]) -> None:
        """Have some ranks do an operation; the others only advance their seqs."""
        self._channel.ask_each(lambda rank: build if rank in ranks else lc.GetSupportedTasks)

    def _fail(self, layer: int, error: WorkerError | DeadlineExceeded) -> None:
        """Let the ranks leave the link: some may wait for the one that failed."""
        _LOG.warning("layer %d keeps its experts where they are: %s", layer, error)
        if isinstance(error, ENDS_OWNERSHIP):
            return
        self._channel.abort_links(str(error))
        self._state.apply(Change.LINK_BROKEN)
        self._steps.lose_rows(f"experts could not be moved: {error}", cause=error)


def _check_can_move(statuses: Sequence[lc.Status]) -> None:
    if not any(status.expert_placements for status in statuses):
        problem, fix = "experts cannot move", "load the model with enable_eplb"
        raise config_error("enable_eplb", False, problem, fix)


_Entries: TypeAlias = Mapping[int, Mapping[int, ep.RankPlacement]]
"""By layer and global rank."""


def present_placements(statuses: Sequence[lc.Status]) -> list[ep.ExpertPlacement]:
    """Return the placement of each layer that the daemons have, as they will all have it once the
    switches that have begun are finished. Raises ContentMismatchError: see finish_switches."""
    entries = _by_layer(range(len(statuses)), statuses)
    switching = {each.layer: each for each in _unfinished(entries)}
    return [
        switching.get(layer)
        or ep.ExpertPlacement(layer=layer, experts=next(iter(of_ranks.values())).experts)
        for layer, of_ranks in entries.items()
    ]


def _by_layer(ranks: Sequence[int], statuses: Sequence[lc.Status]) -> _Entries:
    found: dict[int, dict[int, ep.RankPlacement]] = {}
    for rank, status in zip(ranks, statuses, strict=True):
        for entry in status.expert_placements:
            found.setdefault(entry.layer, {})[rank] = entry
    return found


def _unfinished(entries: _Entries) -> list[ep.ExpertPlacement]:
    """Return the placements that some ranks have, and the others have received."""
    found = []
    for layer, of_ranks in entries.items():
        placements = {entry.experts for entry in of_ranks.values()}
        if len(placements) == 1:
            continue
        wanted = [
            experts
            for experts in placements
            if all(experts in (entry.experts, entry.moved) for entry in of_ranks.values())
        ]
        if not wanted:
            raise ContentMismatchError(
                f"the ranks have placements of layer {layer}'s experts that do not fit each other",
                field="expert_placements",
                value=sorted(of_ranks),
                fix="prepare the group with reload=True",
            )
        found.append(ep.ExpertPlacement(layer=layer, experts=wanted[0]))
    return found


def _planned(before: PlacedExperts, counts: Counts) -> tuple[PlacedExperts, LayerBalance]:
    """Return a layer's next placement, and what it brings; the present one if that is little."""
    num_ranks = len(before.experts)
    num_redundant = sum(own.size for own in before.experts) - counts.size
    after = place_by_load(counts, num_ranks, num_redundant).near(before)
    old, new = (imbalance(each.loads_of_ranks(counts)) for each in (before, after))
    if old - new < LEAST_GAIN:
        return before, LayerBalance(old, old, 0)
    pairs = zip(before.experts, after.experts, strict=True)
    return after, LayerBalance(old, new, sum(int((a != b).sum()) for a, b in pairs))


def _read(experts: bytes, num_ranks: int) -> PlacedExperts:
    return PlacedExperts(np.split(np.frombuffer(experts, "<u2").astype(np.int64), num_ranks))


def _write(placement: PlacedExperts) -> bytes:
    return np.concatenate(placement.experts).astype("<u2").tobytes()
