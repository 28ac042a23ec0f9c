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
    """Owned by a driver. Its methods are those of DriverPart, for all parts. The calls of each step
    are attributes, so that a step costs nothing for those that no part overrides."""

    def __init__(self, parts: Sequence[DriverPart]) -> None:
        self._all = tuple(parts)
        self.attend: tuple[Callable[[], None], ...] = _overridden(parts, "attend")
        self.prepare: tuple[Callable[[], None], ...] = _overridden(parts, "prepare")
        self.can_send: tuple[Callable[[SchedulerOutput], bool], ...]
        self.can_send = _overridden(parts, "can_send")
        self.plan: tuple[Callable[[SchedulerOutput], SchedulerOutput], ...]
        self.plan = _overridden(parts, "plan")
        self.sent: tuple[Callable[[StepInFlight], None], ...] = _overridden(parts, "sent")
        self.work_in_flight: tuple[Callable[[], bool], ...]
        self.work_in_flight = _overridden(parts, "work_in_flight")
        self.complete: tuple[Callable[[StepInFlight], None], ...] = _overridden(parts, "complete")
        self.settle: tuple[Callable[[StepInFlight, StepResult], StepResult], ...]
        self.settle = _overridden(parts, "settle")
        self.settled: tuple[Callable[[StepInFlight], None], ...] = _overridden(parts, "settled")

    def with_part(self, part: DriverPart) -> "DriverParts":
        """Return these parts and one more."""
        return DriverParts([*self._all, part])

    @property
    def has_waiting(self) -> bool:
        return any(part.has_waiting for part in self._all)

    def check(self, request: GenerationRequest) -> None:
        for part in self._all:
            part.check(request)

    def begin(self, request: GenerationRequest, after: DriverPart | None = None) -> bool:
        """after: the part that has kept the request; only those behind it are asked."""
        return all(part.begin(request) for part in self._behind(after))

    def queued(self, request: GenerationRequest, after: DriverPart | None = None) -> None:
        """after: the part that has delayed this; only those behind it are told."""
        for part in self._behind(after):
            part.queued(request)
            if part.delays(request.id):
                return

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

    def steps_failed(self) -> None:
        for part in self._all:
            part.steps_failed()

    def group_replaced(self) -> None:
        for part in self._all:
            part.group_replaced()

    def wait(self) -> bool:
        return any(part.wait() for part in self._all)

    def _behind(self, part: DriverPart | None) -> Sequence[DriverPart]:
        return self._all if part is None else self._all[self._all.index(part) + 1 :]


def _overridden(parts: Sequence[DriverPart], name: str) -> tuple[Callable[..., Any], ...]:
    """Return a method of the parts whose class does not have DriverPart's."""
    default = getattr(DriverPart, name)
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not default)
