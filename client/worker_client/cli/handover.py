"""Requests of one run of a command on several replicas, each served on its own thread: which
replica has which, and those of a lost one, with which the others go on."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from worker_client.cli.input_request import InputRequest
from worker_client.group.adoption import AdoptedRequest
from worker_client.replicas.driver import MAX_LOSSES
from worker_client.replicas.placement import ReplicaPlacement

_LOOK_S: Final = 0.1
"""Time after which a replica without work looks whether the run was ended."""


class Handover:
    """Any thread may call it. The run is over once no replica has anything to do; a lost one has
    nothing."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._placement = ReplicaPlacement(num_replicas)
        self._changed = threading.Condition()
        self._given: list[list[InputRequest]] = [[] for _ in range(num_replicas)]
        """Requests that each replica has not taken."""
        self._waiting: list[InputRequest] = []
        """Those that no replica can have now."""
        self._resting: set[int] = set()
        self._lost: set[int] = set()
        """Replicas that lack a rank, or have ended."""
        self._ended: set[int] = set()
        self._losses: dict[str, tuple[int, int]] = {}
        """Number of times in a row that each request was given up without a new token, and of the
        tokens that it had."""
        self._suspects: list[InputRequest] = []
        """Requests that wait for their trial."""
        self.on_trial: str | None = None
        """The request that may be what kills the daemons, until it has a token (MAX_LOSSES). A
        driver's thread reads it at each step."""
        self._is_over = False

    def share_out(
        self, inputs: Sequence[InputRequest], adopted: Sequence[AdoptedRequest]
    ) -> list[list[InputRequest]]:
        """Return each replica's share of the requests: running ones where they run, the samples of
        a prompt together."""
        for running in adopted:
            self._placement.count(running.req_id, running.dp_rank, len(running.token_ids))
        shares: list[list[InputRequest]] = [[] for _ in range(self._num_replicas)]
        for entry in inputs:
            place = self._placement.replica_of(entry.id)
            if place is None and entry.request is not None:
                place = self._placement.place(entry.id, entry.request, range(self._num_replicas))
            shares[place or 0].append(entry)
        return shares

    @property
    def is_alone(self) -> bool:
        """True if there is one replica, which keeps its requests."""
        return self._num_replicas == 1

    def take(self, place: int) -> list[InputRequest]:
        """Return what others have given up for this replica."""
        if not self._given[place]:  # most often
            return []
        with self._changed:
            taken, self._given[place] = self._given[place], []
        return taken

    def rest(self, place: int, is_stopped: Callable[[], bool]) -> bool:
        """Wait until a replica that has nothing to do has something, or is_stopped(). Return False
        once the run is over."""
        with self._changed:
            self._resting.add(place)
            self._end_if_all_rest()
            while not (self._is_over or self._given[place] or is_stopped()):
                self._changed.wait(_LOOK_S)
            self._resting.discard(place)
            return not self._is_over

    def end_request(self, req_id: str) -> None:
        """Note that a request has ended."""
        with self._changed:
            self._placement.remove(req_id)
            self._end_trial(req_id)

    def pass_trial(self, req_id: str) -> None:
        """Note that the request on trial has a new token."""
        with self._changed:
            self._end_trial(req_id)

    def lose(
        self, place: int, given_up: Iterable[InputRequest], not_begun: Iterable[InputRequest]
    ) -> list[InputRequest]:
        """Note that a replica is lost, and give its requests to others. Return those that nobody
        takes: they may be what kills the daemons."""
        refused: list[InputRequest] = []
        with self._changed:
            self._lost.add(place)
            self._placement.forget_prefixes(place)
            self._waiting += [*self._given[place], *not_begun]
            self._given[place] = []
            for entry in given_up:
                count = self._count_loss(entry)
                if count == MAX_LOSSES:
                    refused.append(entry)
                else:
                    is_suspect = count == MAX_LOSSES - 1
                    (self._suspects if is_suspect else self._waiting).append(entry)
                self._end_trial(entry.id)
            self._begin_trial()
            self._share_waiting()
            self._end_if_all_rest()
        return refused

    def come_back(self, place: int) -> None:
        """Note that a lost replica serves again."""
        with self._changed:
            self._lost.discard(place)
            self._share_waiting()

    def end(self, place: int) -> bool:
        """Note that a lost replica does not come back. Return False if there is no other."""
        with self._changed:
            self._ended.add(place)
            return len(self._ended) < self._num_replicas

    def _end_trial(self, req_id: str) -> None:
        if self.on_trial == req_id:
            self.on_trial = None
            self._begin_trial()
            self._share_waiting()

    def _begin_trial(self) -> None:
        if self.on_trial is None and self._suspects:
            entry = self._suspects.pop(0)
            self.on_trial = entry.id
            self._waiting.append(entry)

    def _share_waiting(self) -> None:
        whole = [place for place in range(self._num_replicas) if place not in self._lost]
        if not whole:
            return
        for entry in self._waiting:
            place = whole[0]
            if entry.request is not None:
                self._placement.remove(entry.id)
                place = self._placement.place(entry.id, entry.request, whole)
            self._given[place].append(entry)
        self._waiting.clear()
        self._changed.notify_all()

    def _end_if_all_rest(self) -> None:
        is_given = self._suspects or self._waiting or any(self._given)
        if not is_given and len(self._resting | self._lost) == self._num_replicas:
            self._is_over = True
            self._changed.notify_all()

    def _count_loss(self, entry: InputRequest) -> int:
        """Return how many times in a row a request was lost without a new token."""
        request = entry.request
        former = None if request is None else request.continues
        num_tokens = 0 if former is None else len(former.token_ids)
        count, before = self._losses.get(entry.id, (0, 0))
        count = count + 1 if num_tokens == before else 1
        self._losses[entry.id] = count, num_tokens
        return count
