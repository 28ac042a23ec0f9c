"""The loop between a scheduler and a group: keeps steps in flight, passes results on in order,
reports failures to the scheduler, and measures times."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol, TypeAlias

from worker_client.errors import (
    DrainingError,
    InvalidSchedulerOutput,
    SchedulerStalled,
    StepFailed,
    WorkerDied,
)
from worker_client.requests import GenerationRequest, seeded
from worker_client.scheduler import RequestOutput, SchedulerInterface
from worker_client.scheduler_output import SchedulerOutput, StepResult

StepKind: TypeAlias = Literal["prefill", "decode", "mixed", "empty"]

MAX_CONSECUTIVE_FAILURES = 3
"""Failed steps in a row, and recoveries without a successful step between them, after which the
driver gives up."""


MAX_HISTORY = 65_536
"""Default number of steps and requests whose times a driver keeps."""


class FutureLike(Protocol):
    """The part of worker_client.outcomes.StepFuture that the driver uses."""

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the outcome; raises StepFailed."""


class GroupLike(Protocol):
    """The part of worker_client.worker_group.WorkerGroup that the driver uses."""

    max_in_flight: int

    def execute_model(self, output: SchedulerOutput) -> FutureLike:
        """Send a step."""

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Give up a step that was not sent, and drop all rows; return the ids of the requests that
        lost theirs."""


Recover: TypeAlias = Callable[[WorkerDied], object]
"""Callable that makes a group usable again after the death of a daemon, or raises."""


def give_up(died: WorkerDied) -> None:
    """Raise the error: the default, which does not replace a lost daemon."""
    raise died


class StepTiming(NamedTuple):
    """Duration of a step, in seconds."""

    kind: StepKind
    num_tokens: int
    num_requests: int
    seconds: float
    """Time from sending to the result."""
    interval_s: float
    """Time from the previous result (or its own sending, if that was later) to its own."""


class RequestTiming(NamedTuple):
    """Moments of a request, by time.monotonic()."""

    added: float
    first_token: float
    finished: float


class _InFlight(NamedTuple):
    output: SchedulerOutput
    future: FutureLike
    kind: StepKind
    sent: float


class Driver:
    """Runs one group with one scheduler. Belongs to one thread."""

    def __init__(
        self,
        group: GroupLike,
        scheduler: SchedulerInterface,
        on_result: Callable[[StepResult], None] | None = None,
        *,
        max_history: int | None = MAX_HISTORY,
        recover: Recover = give_up,
    ) -> None:
        """on_result is called with every step's tokens as they come, including those past a
        request's end. recover is called when a daemon has died: after it (WorkerGroup.replace, say)
        the requests that were running begin again from their known tokens. It is called no more
        after MAX_CONSECUTIVE_FAILURES recoveries without a successful step. max_history bounds
        `records` and `timings`, the oldest of which are dropped first; None keeps all."""
        self.group = group
        self.scheduler = scheduler
        self.records: deque[StepTiming] = deque(maxlen=max_history)
        self.timings: dict[str, RequestTiming] = {}
        self.num_failures = 0
        self._on_result = on_result
        self._recover = recover
        self._max_history = max_history
        self._in_flight: deque[_InFlight] = deque()
        self._unsent: SchedulerOutput | None = None
        """Scheduler output that was not sent; it goes first once the group takes steps."""
        self._refusal: InvalidSchedulerOutput | None = None
        """The error with which the group refused _unsent; raised once no step is in flight."""
        self._added: dict[str, float] = {}
        self._first_token: dict[str, float] = {}
        self._without_token: set[str] = set()
        self._last_result = 0.0
        self._consecutive_failures = 0
        self._consecutive_recoveries = 0

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request, with a random seed if it needs one and has none. Raises RequestError as
        the scheduler does."""
        self.scheduler.add_request(seeded(request))
        self._added[request.id] = time.monotonic()
        self._without_token.add(request.id)

    def abort_request(self, req_id: str) -> None:
        """End a request early, without output."""
        self.scheduler.abort_request(req_id)
        self._added.pop(req_id, None)
        self._first_token.pop(req_id, None)
        self._without_token.discard(req_id)

    @property
    def busy(self) -> bool:
        """True while a step is in flight, a refusal has not been raised, or a request is
        unfinished."""
        pending = self._in_flight or self._refusal is not None
        return bool(pending) or self.scheduler.has_unfinished_requests()

    def run(self) -> Iterator[RequestOutput]:
        """Step until nothing is left; yield requests as they finish."""
        while self.busy:
            yield from self.step()
        self._fill()
        while self._in_flight:
            yield from self._take_oldest()
        self._raise_refusal()

    def step(self) -> list[RequestOutput]:
        """Fill the pipeline, then take the oldest result; return the requests that it finished.

        Raises:
            StepFailed: steps have failed MAX_CONSECUTIVE_FAILURES times in a row, without a
                recovery between them.
            SchedulerStalled: the scheduler has requests, no step, and no result to wait for.
            WorkerDied: a daemon is lost, and `recover` does not replace it, or has done so
                MAX_CONSECUTIVE_FAILURES times since the last successful step.
            InvalidSchedulerOutput: the scheduler gave a step that breaks a rule. The steps before
                it are settled, and step_failed has returned it to the scheduler. It may be called
                again.
            DrainingError: an operator drains the group, and the steps in flight are settled. It may
                be called again, and continues once the drain is undone.
        """
        try:
            self._fill()
        except DrainingError:
            if not self._in_flight:
                raise
        if self._in_flight:
            return self._take_oldest()
        self._raise_refusal()
        if self.scheduler.has_unfinished_requests():
            raise SchedulerStalled(
                "the scheduler has unfinished requests, but no step for them, and none is in flight"
            )
        return []

    def _fill(self) -> None:
        while self._refusal is None and len(self._in_flight) < self.group.max_in_flight:
            output = self._unsent or self.scheduler.schedule()
            if output is None:
                return
            sent = time.monotonic()
            self._unsent = output
            try:
                future = self._send(output)
            except InvalidSchedulerOutput as refusal:
                self._refusal = refusal
                return
            self._unsent = None
            self._in_flight.append(_InFlight(output, future, _kind(output), sent))

    def _take_oldest(self) -> list[RequestOutput]:
        flight = self._in_flight[0]
        try:
            result = self._result(flight.future)
        except StepFailed as error:
            self._on_failure(error)
            return []
        self._in_flight.popleft()
        self._consecutive_failures = self._consecutive_recoveries = 0
        self._record(flight, result)
        if self._on_result is not None:
            self._on_result(result)
        finished = self.scheduler.update_from_output(flight.output, result)
        for output in finished:
            self._record_finish(output.req_id)
        return finished

    def _send(self, output: SchedulerOutput) -> FutureLike:
        try:
            return self.group.execute_model(output)
        except WorkerDied as died:
            self._replace(died)
        return self.group.execute_model(output)  # a future that reports the losses

    def _result(self, future: FutureLike) -> StepResult:
        try:
            return future.result()
        except WorkerDied as died:
            self._replace(died)
        return future.result()  # raises StepFailed with the losses

    def _replace(self, died: WorkerDied) -> None:
        """Recover, and reset the count of failed steps: the fault may have ended with the process.
        Recoveries are limited too, for a request that kills each successor."""
        if self._consecutive_recoveries >= MAX_CONSECUTIVE_FAILURES:
            raise died
        self._recover(died)
        self._consecutive_recoveries += 1
        self._consecutive_failures = 0

    def _on_failure(self, error: StepFailed) -> None:
        """Handle the failure of the oldest step, and thus of all later ones."""
        outputs = [flight.output for flight in self._in_flight]
        self._in_flight.clear()
        self.num_failures += 1
        self._consecutive_failures += 1
        self._hand_back(outputs, error.lost_req_ids)
        if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise error

    def _raise_refusal(self) -> None:
        """Raise the reason for a refused step, if there is one, once the scheduler has the step
        back. No step may be in flight: its result must not come after that."""
        if self._refusal is None:
            return
        if self._unsent is not None:  # else it was returned with steps that failed
            self._hand_back([], frozenset())
        refusal, self._refusal = self._refusal, None
        raise refusal

    def _hand_back(self, outputs: list[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Return steps without a result to the scheduler, and with them the one that was not sent:
        its admissions and its finished requests have not reached the workers."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            outputs = [*outputs, unsent]
            lost_req_ids |= self.group.withdraw(unsent)
        self.scheduler.step_failed(outputs, lost_req_ids)

    def _record(self, flight: _InFlight, result: StepResult) -> None:
        now = time.monotonic()
        output = flight.output
        self.records.append(
            StepTiming(
                kind=flight.kind,
                num_tokens=output.total_num_scheduled_tokens,
                num_requests=len(output.decode_req_ids) + len(output.num_scheduled_tokens),
                seconds=now - flight.sent,
                interval_s=now - max(flight.sent, self._last_result),
            )
        )
        self._last_result = now
        if self._without_token:
            first = self._without_token.intersection(result.req_ids)
            self._first_token.update(dict.fromkeys(first, now))
            self._without_token -= first

    def _record_finish(self, req_id: str) -> None:
        now = time.monotonic()
        added = self._added.pop(req_id, now)
        first = self._first_token.pop(req_id, now)
        self.timings[req_id] = RequestTiming(added, first, now)
        if self._max_history is not None and len(self.timings) > self._max_history:
            del self.timings[next(iter(self.timings))]


def _kind(output: SchedulerOutput) -> StepKind:
    decodes = bool(output.decode_req_ids)
    others = bool(output.num_scheduled_tokens)
    if decodes and others:
        return "mixed"
    if not decodes and not others:
        return "empty"
    return "decode" if decodes else "prefill"
