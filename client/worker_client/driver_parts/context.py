"""The driver, as its optional features see it: its group, scheduler, requests and steps."""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from worker_client.driver_parts.interface import FutureLike, StepInFlight
from worker_client.driver_parts.live_requests import LiveRequests
from worker_client.errors import WorkerDied
from worker_client.scheduler import SchedulerInterface
from worker_client.scheduler_output import SchedulerOutput, StepResult, StepValues


class GroupLike(Protocol):
    """The part of worker_client.worker_group.WorkerGroup that every driver uses. Features may need
    more of it."""

    max_in_flight: int

    def execute_model(self, output: SchedulerOutput) -> FutureLike:
        """Send a step."""

    def sample_tokens(
        self,
        deferred: Any,
        extensions: tuple[StepValues, ...] = (),
        req_ids: Collection[str] | None = None,
    ) -> FutureLike:
        """Sample requests that a step has deferred."""

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Give up a step that was not sent, and drop all rows; return the ids of the requests that
        lost theirs."""


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

    group: Any
    """A GroupLike; features look for the further calls that they need."""
    scheduler: SchedulerInterface
    requests: LiveRequests
    steps: StepQueue
    replace: Callable[[WorkerDied], None]
    """Recovers after the death of a daemon, or raises its error. The steps in flight have failed
    then, and the ranks have lost all uploads."""
    on_result: Callable[[StepResult], None] | None
    """Told of the tokens that requests gain without a step."""
