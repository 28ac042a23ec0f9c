"""Operations of administrators on all replicas, each as one: the replicas that serve do it at once,
or none of them, and one that lacks a rank does it before it takes requests again."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from rpc_schema.errors import WorkerDaemonError
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.errors import MissedOperationFailed, ReplicasDiffer, WorkerDied

POLL_S: Final = 0.005
"""Time between two calls of ReplicaOperation.proceed."""

T = TypeVar("T")

Kind: TypeAlias = Literal["pause", "memory", "weights", "adapters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOperation(Generic[T]):
    """A change of all replicas. Its functions are called on the drivers' threads, between two
    steps."""

    name: str
    """Name of the operation in errors."""
    kind: Kind
    """State that it changes. Those of a kind follow one another."""
    subject: str = ""
    """Part of the state, such as one adapter. A later operation on it takes this one's place."""
    apply: Callable[[Driver], T]
    proceed: Callable[[Driver, T], bool] = lambda driver, result: False
    """Called with the result of `apply` until it returns False: steps run meanwhile."""
    check: Callable[[Sequence[T]], None] = lambda results: None
    """Called with the results of all replicas; raises an error if they do not go together."""
    undo: Callable[[Driver, T | None], object] | None = None
    """Takes it back, of a replica with the result of `apply`, or with None of one that has refused
    it, perhaps only on some ranks; None: it cannot be taken back."""
    catch_up: Callable[[Driver, T], object]
    """Brings a replica that may have missed it, or that has lost its effect with a rank, to what it
    leaves; called with the result of another replica."""
    lasts: bool = True
    """False if it leaves what replicas have that are opened anew, as the end of a pause does."""


class OperationReport(NamedTuple, Generic[T]):
    """Outcome of an operation."""

    results: dict[int, T]
    """Results of `apply`, by replica."""
    missing: dict[int, Exception]
    """Errors of the replicas that lack a rank, or whose drivers have ended. They do it before they
    take requests again."""


def _pause(driver: Driver) -> bool:
    """Return True if it was paused before."""
    was_paused = driver.is_paused
    driver.pause()
    return was_paused


def _undo_pause(driver: Driver, was_paused: bool | None) -> None:
    if was_paused is False:
        driver.resume()


PAUSE: Final = ReplicaOperation(
    name="pause",
    kind="pause",
    apply=_pause,
    proceed=lambda driver, _: driver.num_in_flight > 0,
    undo=_undo_pause,
    catch_up=lambda driver, _: driver.pause(),
)
"""Hold all requests, until no step is in flight on any rank: Driver.pause."""
RESUME: Final = ReplicaOperation(
    name="resume",
    kind="pause",
    apply=lambda driver: driver.resume(),
    catch_up=lambda driver, _: driver.resume(),
    lasts=False,
)
"""Go on where PAUSE has stopped."""


class DoneIn(NamedTuple, Generic[T]):
    """An operation in a replica that has done it."""

    num_losses: int
    """Losses of the replica before."""
    result: T


def not_done_by(serving: Mapping[int, int], done: Mapping[int, DoneIn[T]]) -> dict[int, int]:
    """Return the replicas that have not done an operation, or have lost a rank since. Replicas are
    given with the number of their losses."""
    return {p: n for p, n in serving.items() if p not in done or done[p].num_losses != n}


@dataclass(slots=True)
class _Standing:
    operation: ReplicaOperation[Any]
    result: Any
    """Result of a replica that has done it."""
    missed_by: set[int]
    """Replicas that have to catch up."""


@dataclass(slots=True)
class _Replica:
    num_losses: int = 0
    loss: Exception | None = None
    """Error since which it is missing; None: it serves."""


@dataclass(slots=True)
class StandingOperations:
    """The replicas that are missing, and what these have to do before they serve. Any thread may
    call it."""

    num_replicas: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _replicas: list[_Replica] = field(default_factory=list)
    _standing: dict[tuple[Kind, str], _Standing] = field(default_factory=dict)
    """By kind and subject, in the order in which they were done."""

    def __post_init__(self) -> None:
        self._replicas = [_Replica() for _ in range(self.num_replicas)]

    @property
    def missing(self) -> dict[int, Exception]:
        """The errors of missing replicas."""
        with self._lock:
            return self._errors()

    @property
    def serving(self) -> dict[int, int]:
        """The replicas that serve, each with the number of its losses so far."""
        with self._lock:
            return self._serving()

    def lose(self, place: int, error: Exception, num_losses: int | None = None) -> None:
        """Note that a replica is missing, unless it was lost more than num_losses times: then it
        was noted already."""
        with self._lock:
            replica = self._replicas[place]
            if num_losses is None or replica.num_losses == num_losses:
                replica.loss = error
                replica.num_losses += 1
                for each in self._standing.values():
                    each.missed_by.add(place)

    def settle(
        self, operation: ReplicaOperation[T], done: Mapping[int, DoneIn[T]]
    ) -> dict[int, Exception] | None:
        """Let the missing replicas do an operation that the others have done, and return their
        errors; None if one that serves has not."""
        with self._lock:
            if not_done_by(self._serving(), done):
                return None
            missing, key = self._errors(), (operation.kind, operation.subject)
            self._standing.pop(key, None)
            if operation.lasts or missing:
                result = next(iter(done.values())).result
                self._standing[key] = _Standing(operation, result, set(missing))
            return missing

    def catch_up(self, place: int, driver: Driver) -> None:
        """Do what a replica has to do, on its driver's thread; then it serves. Raises
        MissedOperationFailed; then it is missing still."""
        while due := self._due(place):
            for standing in due:
                operation = standing.operation
                try:
                    operation.catch_up(driver, standing.result)
                except WorkerDaemonError as error:
                    raise MissedOperationFailed(place, operation.name, error) from error
                self._have_caught_up(place, operation)

    def _due(self, place: int) -> list[_Standing]:
        """Return what a replica has to do; if that is nothing, it serves."""
        with self._lock:
            due = [each for each in self._standing.values() if place in each.missed_by]
            if not due:
                self._replicas[place].loss = None
            return due

    def _have_caught_up(self, place: int, operation: ReplicaOperation[Any]) -> None:
        with self._lock:
            key = operation.kind, operation.subject
            standing = self._standing.get(key)
            if standing is None or standing.operation is not operation:
                return  # another has taken its place
            standing.missed_by.discard(place)
            if not (operation.lasts or standing.missed_by):
                del self._standing[key]

    def _errors(self) -> dict[int, Exception]:
        losses = {place: each.loss for place, each in enumerate(self._replicas)}
        return {place: loss for place, loss in losses.items() if loss is not None}

    def _serving(self) -> dict[int, int]:
        replicas = enumerate(self._replicas)
        return {place: each.num_losses for place, each in replicas if each.loss is None}


class OtherReplicas(NamedTuple):
    """The other replicas, as the driver of one sees them (OtherDrivers)."""

    standing: StandingOperations
    place: int
    """Number of the driver's replica."""

    def lose(self, error: Exception) -> None:
        """See OtherDrivers."""
        self.standing.lose(self.place, error)

    def welcome(self, driver: Driver) -> None:
        """See OtherDrivers."""
        self.standing.catch_up(self.place, driver)


class ReplicaOperations:
    """Does what concerns all replicas. Belongs to the event loop."""

    def __init__(
        self, drivers: Sequence[AsyncDriver], standing: StandingOperations | None = None
    ) -> None:
        """standing: told of the drivers' losses; None: of a driver alone, for whose lost ranks
        operations wait."""
        self._drivers = drivers
        self._standing = standing or StandingOperations(len(drivers))
        self._locks: defaultdict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def missing(self) -> dict[int, Exception]:
        """The errors of replicas that lack a rank, or whose drivers have ended, by replica."""
        return self._standing.missing

    async def do(self, operation: ReplicaOperation[T]) -> OperationReport[T]:
        """Do an operation in all replicas that serve, at the same time, and in those that are
        missing before they take requests again. If a replica refuses it, none has done it. It goes
        on if the caller is canceled.

        Raises:
            ReplicasDiffer: a replica has refused it, others have done it, and it cannot be taken
                back. Missing ones do not do it.
            DriverClosed, WorkerDaemonError: as AsyncDriver.call does: that of a replica that has
                refused it, or of one that is missing if all are.
        """
        return await asyncio.shield(self._do(operation))

    async def ask(self, question: Callable[[Driver], T]) -> list[T]:
        """Call a function with the driver of each replica that serves, at the same time; return the
        results in order. Raises as `do` does; if several fail, the error of the first."""
        asked = self._standing.serving
        outcomes = await self._on_each(asked, lambda place: self._drivers[place].call(question))
        self._note_losses(asked, outcomes)
        serving = self._standing.serving
        answers = [each for place, each in outcomes.items() if place in serving]
        failed = next((each for each in answers if isinstance(each, BaseException)), None)
        if failed is not None:
            raise failed
        if not answers:
            raise next(iter(self.missing.values()))
        return [each for each in answers if not isinstance(each, BaseException)]

    async def _do(self, operation: ReplicaOperation[T]) -> OperationReport[T]:
        async with self._locks[operation.kind]:
            done: dict[int, DoneIn[T]] = {}
            while True:
                serving = self._standing.serving
                if not serving:
                    raise next(iter(self.missing.values()))
                refused = await self._apply(operation, not_done_by(serving, done), done)
                if refused:
                    await self._take_back(operation, done, refused)
                    first, *others = refused.values()
                    for other in others:
                        first.add_note(f"and in another replica: {other}")
                    raise first
                results = {p: done[p].result for p in sorted(done.keys() - self.missing.keys())}
                try:
                    operation.check([*results.values()])
                except WorkerDaemonError:
                    await self._take_back(operation, done, {})
                    raise
                missing = self._standing.settle(operation, done)
                if missing is not None:
                    return OperationReport(results, missing)

    async def _apply(
        self, operation: ReplicaOperation[T], todo: Mapping[int, int], done: dict[int, DoneIn[T]]
    ) -> dict[int, BaseException]:
        """Do an operation in these replicas, and add those that have done it. Return the errors of
        those that refuse it."""

        async def apply(place: int) -> T:
            driver = self._drivers[place]
            result = await driver.call(operation.apply)
            while await driver.call(lambda inner: operation.proceed(inner, result)):
                await asyncio.sleep(POLL_S)
            return result

        outcomes = await self._on_each(todo, apply)
        self._note_losses(todo, outcomes)
        serving, refused = self._standing.serving, dict[int, BaseException]()
        for place, outcome in outcomes.items():
            if not isinstance(outcome, BaseException):
                done[place] = DoneIn(todo[place], outcome)
            elif serving.get(place) == todo[place]:  # else it was lost, and perhaps is back
                refused[place] = outcome
        return refused

    async def _take_back(
        self,
        operation: ReplicaOperation[T],
        done: Mapping[int, DoneIn[T]],
        refused: Mapping[int, BaseException],
    ) -> None:
        """Take an operation back that some replicas have refused. Raises ReplicasDiffer: it cannot
        be taken back, and not all have refused it."""
        states = dict.fromkeys(done, "has done it")
        if operation.undo is not None:
            undo = operation.undo
            results = {p: done[p].result if p in done else None for p in (*done, *refused)}

            async def take_back(place: int) -> None:
                await self._drivers[place].call(lambda inner: undo(inner, results[place]))

            undone = await self._on_each(results, take_back)
            states = {
                place: f"has done it, and cannot take it back: {error}"
                for place, error in undone.items()
                if error is not None and place in done
            }
        if states and refused:
            states |= {place: f"has refused it: {error}" for place, error in refused.items()}
            states |= {place: f"is missing: {error}" for place, error in self.missing.items()}
            raise ReplicasDiffer(operation.name, states) from next(iter(refused.values()))

    def _note_losses(
        self, asked: Mapping[int, int], outcomes: Mapping[int, T | BaseException]
    ) -> None:
        """Note replicas that were lost in a call, by the number of their losses before."""
        if len(self._drivers) == 1:
            return
        for place, outcome in outcomes.items():
            has_ended = self._drivers[place].error is not None
            if isinstance(outcome, WorkerDied) or (has_ended and isinstance(outcome, Exception)):
                self._standing.lose(place, outcome, asked[place])

    async def _on_each(
        self, places: Collection[int], call: Callable[[int], Awaitable[T]]
    ) -> dict[int, T | BaseException]:
        """Make a call for each of these replicas, at the same time; return the outcomes."""
        outcomes = await asyncio.gather(*map(call, places), return_exceptions=True)
        return dict(zip(places, outcomes, strict=True))
