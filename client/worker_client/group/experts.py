"""Balances the experts of a group over the ranks that share them: MoveExperts and SwitchExperts.

    report = group.experts.rebalance()

A layer's weights first go to all ranks that need them, beside the steps, while the old placement
serves; then all ranks switch before the same step. Layers follow one another, and need spare memory
for one alone.
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
from rpc_schema.base import StepReply, StepRequest
from rpc_schema.errors import (
    ConfigError,
    ErrorCode,
    StateError,
    WorkerDaemonError,
    WorkerError,
    error_of_rank,
)
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

LEAST_GAIN: Final = 0.05
"""Least fall of a layer's imbalance for which its experts are moved."""
MOVE_TIMEOUT_S: Final = 60.0
"""Limit on moving one layer."""
EVENT_SLACK_S: Final = 2.0
"""Time after a move's limit in which its event comes, if it is not lost."""
LOOK_INTERVAL_S: Final = 0.005
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
class _MoveInProgress:
    """A layer whose weights are on their way."""

    move: _LayerMove
    ids: tuple[int, int]
    """Epoch and seq of its MoveExperts."""
    timeout_s: float
    deadline: float
    """time.monotonic() at which the ranks have ended it, whether their events came or not."""


@dataclass(slots=True)
class Rebalance:
    """A rebalance that goes on layer by layer while steps are sent. Belongs to the group's
    thread."""

    _group: "GroupExperts"
    _moves: deque[_LayerMove]
    _layers: dict[int, LayerBalance]
    _timeout_s: float
    _present: _MoveInProgress | None = None
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        """True once no layer is left."""
        return self._present is None and not self._moves

    @property
    def is_moving(self) -> bool:
        """True while the weights of a layer are on their way."""
        return self._present is not None

    @property
    def planned(self) -> Mapping[int, LayerBalance]:
        """The layers that are left."""
        moves = [] if self._present is None else [self._present.move]
        return {move.placement.layer: move.balance for move in (*moves, *self._moves)}

    @property
    def report(self) -> RebalanceReport:
        """The layers that were switched, and those that stay as they are."""
        return RebalanceReport(dict(self._layers), time.monotonic() - self._began)

    def advance(self) -> None:
        """Do what can be done without waiting for weights: begin to move a layer, or switch it if
        they have come; nothing if they have not, or no layer is left. Raises as
        GroupExperts.rebalance does; the layers that are left stay as they are."""
        try:
            if self._present is not None:
                if self._group.has_come(self._present):
                    self._group.switch(self._present.move)
                    move, self._present = self._present.move, None
                    self._layers[move.placement.layer] = move.balance
            elif self._moves:
                self._present = self._group.begin(self._moves.popleft(), self._timeout_s)
        except BaseException:
            self._present = None
            self._moves.clear()
            raise


class GroupExperts:
    """`WorkerGroup.experts`. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel, steps: StepsInFlight, state: FailureState) -> None:
        self._channel = channel
        self._steps = steps
        self._state = state
        self._counted: LoadsByLayer = {}
        """The loads that the last rebalance has seen."""
        self._ends: dict[tuple[int, int], dict[int, ep.ExpertMoveEnded]] = {}
        """Ends of the last move, and of late ones: by epoch and seq, then by rank."""
        self._next_look = 0.0
        """time.monotonic() from which has_come() reads events again."""
        self._is_torn = False
        """True if some ranks may have switched a layer, and others not."""
        channel.events.on_move_end = self._take_end

    def rebalance(
        self, loads: LoadsByLayer | None = None, *, timeout_s: float = MOVE_TIMEOUT_S
    ) -> RebalanceReport:
        """Move experts so that ranks have equal loads, all layers one after another, and wait for
        that. loads: tokens of each expert by layer; None: those since this object's last
        rebalance. timeout_s: for one layer. Tokens stay the same, and so do requests. See
        begin_rebalance for steps in between.

        Raises:
            ClientConfigError: the group was loaded without enable_eplb, or timeout_s is not
                possible.
            CommError, DeadlineExceeded: a rank has failed or stalled. The old placement serves on.
                If it failed in a switch, it does over a new link, and running requests are lost as
                in WorkerGroup.relink().
            WorkerDied: a rank is dead: replace() it. It gets the present placement.
            StateError: the ranks dropped the move for another operation.
            WorkerError: a rank refuses, since its weights are not complete for example.
        """
        rebalance = self.begin_rebalance(loads, timeout_s=timeout_s)
        while not rebalance.is_done:
            rebalance.advance()
            if rebalance.is_moving:
                self._channel.take_reply(time.monotonic() + LOOK_INTERVAL_S)
        return rebalance.report

    def begin_rebalance(
        self, loads: LoadsByLayer | None = None, *, timeout_s: float = MOVE_TIMEOUT_S
    ) -> Rebalance:
        """Plan a rebalance; nothing is moved yet. Raises: as rebalance() does."""
        if not 0.001 <= timeout_s <= ep.MAX_TIMEOUT_MS / 1000:
            problem, fix = "it is no limit of a move", f"0.001 to {ep.MAX_TIMEOUT_MS / 1000:g}"
            raise config_error("timeout_s", timeout_s, problem, fix)
        statuses = self._channel.daemons.get_status()
        _check_can_move(statuses)
        entries = _by_layer(self._channel.daemons.ranks, statuses)
        unfinished = _unfinished(entries)
        self._finish(unfinished, entries)
        if loads is None:
            counted = loads_by_layer(statuses)
            loads, self._counted = loads_since(self._counted, counted), counted
        moves: deque[_LayerMove] = deque()
        layers: dict[int, LayerBalance] = {}
        switched = {each.layer: each.experts for each in unfinished}
        for layer, own in sorted(entries.items()):
            experts = switched.get(layer, next(iter(own.values())).experts)
            before = _read(experts, len(own))
            counts = loads.get(layer)
            if counts is None or not counts.any():
                continue
            after, balance = _planned(before, counts)
            if not balance.num_moved:
                layers[layer] = balance
                continue
            wire = ep.ExpertPlacement(layer=layer, experts=_write(after))
            moves.append(_LayerMove(wire, frozenset(entries[layer]), balance))
        return Rebalance(self, moves, layers, timeout_s)

    def check_can_move(self) -> None:
        """Raise ClientConfigError if the group was loaded without enable_eplb."""
        _check_can_move(self._channel.daemons.get_status())

    def begin(self, move: _LayerMove, timeout_s: float) -> _MoveInProgress:
        """Begin to bring a layer's weights to the ranks that share its experts. Raises: as
        rebalance() does."""
        self._channel.check_usable()
        self._channel.check_serving()
        self._ends.clear()
        message = partial(
            ep.MoveExperts,
            placement=move.placement,
            place=self._channel.open_meeting(move.ranks),
            timeout_ms=round(timeout_s * 1000),
        )
        try:
            (reply, *_) = self._ask(message, move.ranks)
        except (WorkerError, DeadlineExceeded) as error:
            self._fail(move.placement.layer, error)
            raise
        deadline = time.monotonic() + timeout_s + EVENT_SLACK_S
        return _MoveInProgress(move, (reply.epoch, reply.seq), timeout_s, deadline)

    def has_come(self, present: _MoveInProgress) -> bool:
        """Return True once all ranks have the weights. Does not wait. Raises: as rebalance()
        does."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_INTERVAL_S
        self._channel.events.read_now()
        self._channel.check_deaths(0.0)
        ends, layer = self._ends.get(present.ids, {}), present.move.placement.layer
        faults = [(rank, end) for rank, end in ends.items() if end.fault]
        if faults:  # one that dropped the move has made others fail
            error = self._error_of(*max(faults, key=lambda each: each[1].is_dropped))
            _LOG.warning("layer %d keeps its experts where they are: %s", layer, error)
            raise error
        if ends.keys() >= present.move.ranks:
            return True
        if now < present.deadline:
            return False
        if self._have_received(present.move):  # events may be lost
            return True
        raise DeadlineExceeded(f"the move of the experts of layer {layer}", present.timeout_s)

    def switch(self, move: _LayerMove) -> None:
        """Switch a layer whose weights all ranks have. Raises: as rebalance() does."""
        self._channel.check_usable()
        self._channel.check_serving()
        try:
            self._ask(partial(ep.SwitchExperts, placement=move.placement), move.ranks)
        except (WorkerError, DeadlineExceeded) as error:
            self._fail(move.placement.layer, error)
            raise

    def _take_end(self, rank: int, end: ep.ExpertMoveEnded) -> None:
        self._ends.setdefault((end.epoch, end.seq), {})[rank] = end

    def _error_of(self, rank: int, end: ep.ExpertMoveEnded) -> WorkerError:
        code = ErrorCode.ILLEGAL_STATE if end.is_dropped else ErrorCode.COMM
        endpoint = self._channel.daemons.client(rank).endpoint.control
        return error_of_rank(code, end.fault, rank=rank, endpoint=endpoint)

    def _have_received(self, move: _LayerMove) -> bool:
        layer, experts = move.placement.layer, move.placement.experts
        statuses = self._channel.daemons.get_status()
        own = _by_layer(self._channel.daemons.ranks, statuses).get(layer, {})
        return all(rank in own and own[rank].moved == experts for rank in move.ranks)

    def finish_switches(self, statuses: Sequence[lc.Status]) -> None:
        """Switch the ranks that a lost driver, or a lost rank, has left behind the others.
        statuses: of all daemons of the group.

        Raises:
            ContentMismatchError: ranks have placements that do not fit each other.
            WorkerError: a rank refuses.
        """
        entries = _by_layer(self._channel.daemons.ranks, statuses)
        self._finish(_unfinished(entries), entries)

    def mend(self) -> None:
        """After a relink, finish a switch in which a rank has failed. Raises: as finish_switches
        does; steps must not be sent then."""
        if self._is_torn:
            self.finish_switches(self._channel.daemons.get_status())
            self._is_torn = False

    def _finish(self, placements: Sequence[ep.ExpertPlacement], entries: "_Entries") -> None:
        for placement in placements:
            self._ask(
                partial(ep.SwitchExperts, placement=placement), frozenset(entries[placement.layer])
            )

    def _ask(self, build: _Build, ranks: frozenset[int]) -> list[StepReply]:
        """Have some ranks do an operation; the others only advance their seqs."""
        return self._channel.ask_each(lambda rank: build if rank in ranks else lc.GetSupportedTasks)

    def _fail(self, layer: int, error: WorkerError | DeadlineExceeded) -> None:
        """Have the ranks link anew, unless all have refused alike: one may hang, or have switched
        alone."""
        _LOG.warning("layer %d keeps its experts where they are: %s", layer, error)
        if isinstance(error, ENDS_OWNERSHIP) or self._are_alike(layer, error):
            return
        self._is_torn = True
        self._channel.abort_links(str(error))
        self._state.apply(Change.LINK_BROKEN)
        self._steps.lose_rows(f"experts could not be moved: {error}", cause=error)

    def _are_alike(self, layer: int, error: WorkerError | DeadlineExceeded) -> bool:
        if not isinstance(error, StateError | ConfigError):
            return False
        try:
            statuses = self._channel.daemons.get_status()
        except WorkerDaemonError:
            return False
        own = _by_layer(self._channel.daemons.ranks, statuses).get(layer, {})
        return len({entry.experts for entry in own.values()}) == 1


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
