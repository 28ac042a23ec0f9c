"""The interface of a driver's optional features.

A feature is a DriverPart: an object that the driver makes once (registry.py) and asks at fixed
points of its loop, on its thread. It overrides the calls that it needs; the driver makes no others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker_client.group.adoption import AdoptedRequest
from worker_client.group.outcomes import StepFuture
from worker_client.inputs.host_tensor import HostTensor
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import SchedulerOutput, StepResult


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that was sent, and whose result is not here."""

    output: SchedulerOutput
    """The scheduler's, without what features have added."""
    future: StepFuture
    sent: float
    """time.monotonic() when it was sent."""
    later: list[StepFuture] = field(default_factory=list)
    """Replies to the messages that sample its deferred requests."""
    notes: dict["DriverPart", Any] = field(default_factory=dict)
    """Values that features keep with it."""


class DriverPart:
    """One feature of a driver. Calls are in the order of a request's life, then of a step's."""

    def check(self, request: GenerationRequest) -> None:
        """Check a request, with all its samples, before anything is done with it.

        Raises:
            RequestError: it can never be served.
        """

    def begin(self, request: GenerationRequest) -> bool:
        """Return True if the scheduler can have a request now. False: the feature keeps it, and
        gives it to LiveRequests.queue or LiveRequests.fail later.

        Raises:
            RequestError: it cannot be served. No other call follows.
        """
        return True

    def queued(self, request: GenerationRequest) -> None:
        """Note that the scheduler has a request."""

    def delays(self, req_id: str) -> bool:
        """Return True if the feature holds a request that was queued, and the features behind it
        are to hear of that later, by LiveRequests.hand_on."""
        return False

    def ended(self, req_id: str) -> None:
        """Forget a request that has ended or was aborted, if it is known."""

    def adopt(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor]
    ) -> Mapping[str, str]:
        """Prepare for requests that the scheduler is to adopt, before the first step. tensors:
        those that the caller has of their uploads. Return the requests that cannot continue, each
        with the reason."""
        return {}

    @property
    def has_waiting(self) -> bool:
        """True while the feature keeps requests that the scheduler does not have."""
        return False

    def attend(self) -> None:
        """Work between steps; do not wait."""

    def prepare(self) -> None:
        """Work that must be done before another step is sent."""

    def can_send(self, output: SchedulerOutput) -> bool:
        """Return False if a step of the scheduler cannot be sent before others are done.

        Raises:
            InvalidSchedulerOutput: the step is malformed.
        """
        return True

    def plan(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step with what the feature adds to it. Called once for each step, which may have
        been changed by other features.

        Raises:
            InvalidSchedulerOutput: the step is malformed.
        """
        return output

    def sent(self, flight: StepInFlight) -> None:
        """Note that the step that was planned last was sent."""

    def work_in_flight(self) -> bool:
        """Work while steps are in flight, in small pieces. Return True if something was done that
        may let the scheduler give another step."""
        return False

    def complete(self, flight: StepInFlight) -> None:
        """Send what the oldest step in flight still waits for: its result is taken next."""

    def settle(self, flight: StepInFlight, result: StepResult) -> StepResult:
        """Take the result of the oldest step, and return the part of it that the driver's listener
        gets. The scheduler gets all of it."""
        return result

    def settled(self, flight: StepInFlight) -> None:
        """Note that the scheduler has taken a step's result."""

    def steps_failed(self) -> None:
        """Forget the steps in flight and the one that was planned: one has failed."""

    def group_replaced(self) -> None:
        """Note that daemons were replaced: the ranks have lost all rows and uploads."""

    def wait(self) -> bool:
        """Wait a little for what the scheduler's next step depends on, as no step is in flight.
        Return False if it does not wait for this feature."""
        return False
