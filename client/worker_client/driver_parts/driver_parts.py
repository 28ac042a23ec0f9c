"""The features of one driver, asked in their order. Calls of a step reach only those that override
them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.host_tensor import HostTensor
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import SchedulerOutput, StepResult


class DriverParts:
    """Owned by a driver. Its methods are those of DriverPart, for all parts."""

    def __init__(self, parts: Sequence[DriverPart]) -> None:
        self._all = tuple(parts)
        self._attend = _overridden(parts, "attend")
        self._prepare = _overridden(parts, "prepare")
        self._can_send = _overridden(parts, "can_send")
        self._plan = _overridden(parts, "plan")
        self._sent = _overridden(parts, "sent")
        self._work_in_flight = _overridden(parts, "work_in_flight")
        self._complete = _overridden(parts, "complete")
        self._settle = _overridden(parts, "settle")
        self._settled = _overridden(parts, "settled")

    @property
    def has_waiting(self) -> bool:
        return any(part.has_waiting for part in self._all)

    def check(self, request: GenerationRequest) -> None:
        for part in self._all:
            part.check(request)

    def begin(self, request: GenerationRequest, after: DriverPart | None = None) -> bool:
        """after: the part that has kept the request; only those behind it are asked."""
        first = 0 if after is None else self._all.index(after) + 1
        return all(part.begin(request) for part in self._all[first:])

    def queued(self, request: GenerationRequest) -> None:
        for part in self._all:
            part.queued(request)

    def ended(self, req_id: str) -> None:
        for part in self._all:
            part.ended(req_id)

    def adopt(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor]
    ) -> Mapping[str, str]:
        lost: dict[str, str] = {}
        for part in self._all:
            lost |= part.adopt(requests, tensors)
        return lost

    def attend(self) -> None:
        for call in self._attend:
            call()

    def prepare(self) -> None:
        for call in self._prepare:
            call()

    def can_send(self, output: SchedulerOutput) -> bool:
        return all(call(output) for call in self._can_send)

    def plan(self, output: SchedulerOutput) -> SchedulerOutput:
        for call in self._plan:
            output = call(output)
        return output

    def sent(self, flight: StepInFlight) -> None:
        for call in self._sent:
            call(flight)

    def work_in_flight(self) -> bool:
        done = False
        for call in self._work_in_flight:
            done = call() or done
        return done

    def complete(self, flight: StepInFlight) -> None:
        for call in self._complete:
            call(flight)

    def settle(self, flight: StepInFlight, result: StepResult) -> StepResult:
        for call in self._settle:
            result = call(flight, result)
        return result

    def settled(self, flight: StepInFlight) -> None:
        for call in self._settled:
            call(flight)

    def steps_failed(self) -> None:
        for part in self._all:
            part.steps_failed()

    def group_replaced(self) -> None:
        for part in self._all:
            part.group_replaced()

    def wait(self) -> bool:
        return any(part.wait() for part in self._all)


def _overridden(parts: Sequence[DriverPart], name: str) -> tuple[Callable[..., Any], ...]:
    """Return a method of the parts whose class does not have DriverPart's."""
    default = getattr(DriverPart, name)
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not default)
