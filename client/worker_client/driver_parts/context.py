"""The driver, as its optional features see it: its group, scheduler, requests and steps."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker_client.driver_parts.interface import StepInFlight
from worker_client.driver_parts.live_requests import LiveRequests
from worker_client.errors import WorkerDied
from worker_client.requests import RequestOutput
from worker_client.scheduler import SchedulerInterface
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.worker_group import WorkerGroup


@dataclass(slots=True)
class StepQueue:
    """The steps of a driver. Only the driver changes them, but for notes and later samplings."""

    in_flight: deque[StepInFlight] = field(default_factory=deque)
    unsent: SchedulerOutput | None = None
    """Scheduler output that was not sent; it goes first once the group takes steps."""
    num_sent: int = 0
    has_failed: bool = False
    """A step in flight has failed, and so have all behind it: what they have sampled before is
    settled."""

    @property
    def num_done(self) -> int:
        """Number of steps that were sent and are done."""
        return self.num_sent - len(self.in_flight)


@dataclass(frozen=True, slots=True)
class DriverContext:
    """The driver, as its features see it."""

    group: WorkerGroup
    scheduler: SchedulerInterface
    requests: LiveRequests
    steps: StepQueue
    replace: Callable[[WorkerDied], None]
    """Recovers after the death of a daemon, or raises its error. The steps in flight have failed
    then, and the ranks have lost all uploads."""
    on_result: Callable[[StepResult], None] | None
    """Told of the tokens that requests gain without a step."""

    def gain(self, gained: StepResult, finished: Iterable[RequestOutput]) -> None:
        """Tell of tokens that requests have gained without a step, and of those that have ended
        with them."""
        if gained.req_ids:
            self.requests.have_gained(gained.req_ids)
            if self.on_result is not None:
                self.on_result(gained)
        self.requests.end(finished)
