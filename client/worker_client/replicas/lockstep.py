"""Schedules the requests of replicas in lockstep: a scheduler for each replica, behind the
interface of one.

    parallel = ParallelConfig(data_parallel_size=2, data_parallel_lockstep=True)
    group = WorkerGroup(endpoints, parallel)
    ...
    limits = scheduler_limits(loaded, config)
    driver = Driver(group, LockstepScheduler([Scheduler(limits), Scheduler(limits)]))
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from worker_client.errors import config_error
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.loading import check_kind
from worker_client.group.weights_state import WeightsVersion
from worker_client.inputs.request_checks import validated
from worker_client.replicas.placement import ReplicaPlacement
from worker_client.requests import GenerationRequest, Reports, RequestOutput
from worker_client.scheduler import Jump, Scheduler
from worker_client.scheduler_output import LockstepOutput, SchedulerOutput, StepResult

_IDLE = SchedulerOutput()

ValueT = TypeVar("ValueT")


class LockstepScheduler:
    """Owned by a Driver, as any scheduler. A request stays on the replica that it was placed on:
    the one with the least to compute (placement.py), or that of the other samples of its prompt."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        """schedulers: of each replica, by dp_rank. Raises ClientConfigError: there are none, or
        they are none."""
        given: object = schedulers
        if not isinstance(given, Sequence) or not given:
            raise config_error(
                "schedulers", given, "there is no replica", "give one scheduler each"
            )
        for each in given:
            check_kind("schedulers", each, Scheduler)
        self._schedulers = tuple(schedulers)
        self._placement = ReplicaPlacement(len(self._schedulers))

    def add_request(self, request: GenerationRequest) -> None:
        """See Scheduler.add_request."""
        request = validated(request)
        present = self._placement.replica_of(request.id)
        if present is not None:
            self._schedulers[present].add_request(request)  # refuses it: its id is in use
            return
        place = self._placement.place(request.id, request, range(len(self._schedulers)))
        try:
            self._schedulers[place].add_request(request)
        except BaseException:
            self._placement.remove(request.id)
            raise

    def adopt_requests(self, requests: Sequence[AdoptedRequest]) -> list[RequestOutput]:
        """Continue requests of another driver, each on the replica that has it: see
        Scheduler.adopt_requests. If one is refused, those of earlier replicas are adopted."""
        ended = []
        for place, scheduler in enumerate(self._schedulers):
            own = [request for request in requests if request.dp_rank == place]
            done = scheduler.adopt_requests(own)
            for request in own:
                self._placement.count(request.req_id, place, len(request.token_ids))
            for output in done:
                self._placement.remove(output.req_id)
            ended += done
        return ended

    def abort_request(self, req_id: str) -> None:
        """See Scheduler.abort_request."""
        self._scheduler_of(req_id).abort_request(req_id)
        self._placement.remove(req_id)

    def hold_request(self, req_id: str) -> None:
        """See Scheduler.hold_request."""
        self._scheduler_of(req_id).hold_request(req_id)

    def release_request(self, req_id: str) -> None:
        """See Scheduler.release_request."""
        self._scheduler_of(req_id).release_request(req_id)

    def pause_request(self, req_id: str) -> None:
        """See Scheduler.pause_request."""
        self._scheduler_of(req_id).pause_request(req_id)

    def jump_forward(self, req_id: str, token_ids: Sequence[int]) -> Jump:
        """See Scheduler.jump_forward."""
        jump = self._scheduler_of(req_id).jump_forward(req_id, token_ids)
        if jump.finished is not None:
            self._placement.remove(req_id)
        return jump

    @property
    def most_expected(self) -> int:
        """See Scheduler.most_expected."""
        return max(scheduler.most_expected for scheduler in self._schedulers)

    def expect_tokens(self, req_id: str, token_ids: Sequence[int], num_forced: int) -> None:
        """See Scheduler.expect_tokens."""
        self._scheduler_of(req_id).expect_tokens(req_id, token_ids, num_forced)

    def generated_tokens(self, req_id: str, first: int) -> list[int]:
        """See Scheduler.generated_tokens."""
        return self._scheduler_of(req_id).generated_tokens(req_id, first)

    def generated_reports(self, req_id: str, first: int) -> Reports:
        """See Scheduler.generated_reports."""
        return self._scheduler_of(req_id).generated_reports(req_id, first)

    def use_weights(self, version: WeightsVersion) -> None:
        """See Scheduler.use_weights."""
        self._placement.forget_prefixes()
        for scheduler in self._schedulers:
            scheduler.use_weights(version)

    def share_recomputed(self) -> None:
        """See Scheduler.share_recomputed."""
        for scheduler in self._schedulers:
            scheduler.share_recomputed()

    def await_recompute(self, req_ids: Collection[str]) -> None:
        """See Scheduler.await_recompute."""
        for scheduler in self._schedulers:
            scheduler.await_recompute(req_ids)

    def has_unfinished_requests(self) -> bool:
        """See Scheduler.has_unfinished_requests."""
        return any(scheduler.has_unfinished_requests() for scheduler in self._schedulers)

    def schedule(self) -> LockstepOutput | None:
        """Return the next step of all replicas; an idle one has an empty part. None if all are
        idle."""
        parts = [scheduler.schedule() for scheduler in self._schedulers]
        if not any(part is not None for part in parts):
            return None
        return LockstepOutput.of([_IDLE if part is None else part for part in parts])

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """See Scheduler.update_from_output."""
        ended = []
        results = self._split(result)
        for scheduler, part, own in zip(self._schedulers, _parts_of(output), results, strict=True):
            if part is not _IDLE:
                ended += scheduler.update_from_output(part, own)
        for request in ended:
            self._placement.remove(request.req_id)
        return ended

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """See Scheduler.step_failed."""
        steps = [_parts_of(output) for output in outputs]
        for place, scheduler in enumerate(self._schedulers):
            own = [parts[place] for parts in steps if parts[place] is not _IDLE]
            scheduler.step_failed(own, lost_req_ids)

    def end_requests(self, req_ids: Collection[str]) -> list[RequestOutput]:
        """See Scheduler.end_requests."""
        ended = [each for own in self._schedulers for each in own.end_requests(req_ids)]
        for request in ended:
            self._placement.remove(request.req_id)
        return ended

    def _scheduler_of(self, req_id: str) -> Scheduler:
        """Return the scheduler that has a request; any for an unknown one."""
        return self._schedulers[self._placement.replica_of(req_id) or 0]

    def _split(self, result: StepResult) -> list[StepResult]:
        """Return each replica's share of a result, without requests that have ended meanwhile."""
        shares: list[tuple[list[str], list[int]]] = [([], []) for _ in self._schedulers]
        places = self._placement.replicas_of(result.req_ids)
        for place, req_id, token_id in zip(places, result.req_ids, result.token_ids, strict=True):
            if place is not None:
                req_ids, token_ids = shares[place]
                req_ids.append(req_id)
                token_ids.append(token_id)
        return [
            StepResult(
                req_ids,
                token_ids,
                {kind: self._at(place, own) for kind, own in result.reports.items()},
                self._at(place, result.refused),
                result.weights_version,
                self._at(place, result.samples),
                self._at(place, result.drafts),
                self._at(place, result.gained),
            )
            for place, (req_ids, token_ids) in enumerate(shares)
        ]

    def _at(self, place: int, values: Mapping[str, ValueT]) -> dict[str, ValueT]:
        """Return the values of a replica's requests."""
        if not values:
            return {}
        place_of = self._placement.replica_of
        return {key: value for key, value in values.items() if place_of(key) == place}


def _parts_of(output: SchedulerOutput) -> Sequence[SchedulerOutput]:
    assert isinstance(output, LockstepOutput), "the driver returns what schedule() gave"
    return output.replicas
