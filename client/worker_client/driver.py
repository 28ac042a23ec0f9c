"""The loop between a scheduler and a group: keeps steps in flight, passes results on in order,
reports failures to the scheduler, and measures times. Optional features are in driver_parts/."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from rpc_schema.errors import DrainingError, WorkerDaemonError
from worker_client.driver_parts.context import DriverContext, StepQueue
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.driver_parts.live_requests import GivenUpRequest, LiveRequests
from worker_client.driver_parts.registry import DriverOptions, make_driver_parts
from worker_client.errors import (
    InvalidSchedulerOutput,
    RequestError,
    SchedulerStalled,
    StepFailed,
    WeightsNotWhole,
    WorkerDied,
)
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.host_tensor import HostTensor
from worker_client.requests import GenerationRequest, RequestOutput, failed_request
from worker_client.scheduler import EndingScheduler, SchedulerInterface
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.tracing.run_times import RequestTiming, RunTimes, StepTiming
from worker_client.worker_group import WorkerGroup
from worker_host.draft_counts import DraftCounts

MAX_CONSECUTIVE_FAILURES = 3
"""Failed steps in a row, and recoveries without a successful step between them, after which the
driver gives up."""

MAX_HISTORY = 65_536
"""Default number of steps and requests whose times a driver keeps."""

ResultT = TypeVar("ResultT")

Recover: TypeAlias = Callable[[WorkerDied], object]
"""Callable that makes a group usable again after the death of a daemon, or raises."""


def give_up(died: WorkerDied) -> None:
    """Raise the error: the default, which does not replace a lost daemon."""
    raise died


@dataclass(slots=True)
class _InARow:
    """Counts since the last successful step."""

    failures: int = 0
    """Failed steps since the last recovery."""
    recoveries: int = 0


class Driver:
    """Runs one group with one scheduler. Belongs to one thread."""

    def __init__(
        self,
        group: WorkerGroup,
        scheduler: SchedulerInterface,
        on_result: Callable[[StepResult], None] | None = None,
        *,
        max_history: int | None = MAX_HISTORY,
        recover: Recover = give_up,
        options: DriverOptions | None = None,
    ) -> None:
        """on_result is called with every step's tokens as they come, including those past a
        request's end, and with those that requests gain without a step. recover is called when a
        daemon has died: after it (WorkerGroup.replace, say) the requests that were running begin
        again from their known tokens. It is called no more after MAX_CONSECUTIVE_FAILURES
        recoveries without a successful step. max_history bounds `records` and `timings`, the oldest
        of which are dropped first; None keeps all. options: those of optional features."""
        self.group = group
        self.scheduler = scheduler
        self.num_failures = 0
        self.drafts = DraftCounts()
        """Outcomes of all drafts. Any thread may read it."""
        self._on_result = on_result
        self.recover = recover
        """Called when a daemon has died. It may be replaced by a function that calls it."""
        self._times = RunTimes(max_history)
        self._steps = StepQueue()
        self._requests = LiveRequests(scheduler, self._times)
        context = DriverContext(
            group, scheduler, self._requests, self._steps, self._replace, on_result
        )
        self._parts = make_driver_parts(context, options or DriverOptions())
        self._requests.serve_with(self._parts)
        self._planned: SchedulerOutput | None = None
        """The unsent step with what features have added to it."""
        self._error: InvalidSchedulerOutput | StepFailed | None = None
        """The error with which the group refused the unsent step, or a failure that is given up;
        raised once no step is in flight, and no request that has finished is left to return."""
        self._in_a_row = _InARow()
        self.is_paused = False
        """True after pause(), until resume()."""

    def add_part(self, part: DriverPart) -> None:
        """Ask one more feature from now on, behind the others."""
        self._parts = self._parts.with_part(part)
        self._requests.serve_with(self._parts)

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request, with a random seed if it needs one and has none; with n > 1 its samples
        (worker_client.requests.forked). One with structured output waits until its grammar is
        compiled, and one with embeddings until they are uploaded, between steps; if that fails it
        ends with "error".

        Raises:
            RequestError: a field has the wrong type or is out of bounds, its id is in use, or the
                scheduler refuses it. So does anything else that adding it raises, as the cause of
                the error. Nothing of the request is left.
        """
        self._requests.add(request)

    def claim(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor] = ()
    ) -> tuple[list[AdoptedRequest], list[RequestOutput]]:
        """Take over what daemons keep for requests that the scheduler is to adopt, such as uploads.
        Return the requests that can continue, and the outputs of those that lack something which is
        neither there nor among `tensors`, with an error. Call this before anything else."""
        lost = self._parts.adopt(requests, tensors)
        kept = [each for each in requests if each.req_id not in lost]
        return kept, [failed_request(req_id, reason) for req_id, reason in lost.items()]

    def abort_request(self, req_id: str) -> None:
        """End a request early, without output: all of its samples, or a single one by its id.
        Unknown ids are ignored. Raises RequestError: the id is no text."""
        given: object = req_id
        if not isinstance(given, str):
            fix = "give the id of a request"
            raise RequestError("the id is no text", field="id", value=given, fix=fix)
        self._requests.abort(req_id)

    def take_ended(self) -> list[RequestOutput]:
        """Return the requests that have ended and that step() has not returned."""
        return self._requests.take_ended()

    def give_up_requests(self) -> dict[str, GivenUpRequest]:
        """Abort all requests that were added, if they can go on under another driver
        (ContinuingScheduler), and return them by id. To be called in `recover`, or after an error
        of step()."""
        return self._requests.give_up()

    def pause(self) -> None:
        """Send no step until resume(). Requests stay as they are, with their KV, and new ones wait;
        deadlines pass. Call step() while num_in_flight is not 0: from then on all ranks have run
        the same steps, and none runs."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on where pause() has stopped."""
        self.is_paused = False

    @property
    def records(self) -> deque[StepTiming]:
        """Times of the last steps."""
        return self._times.steps

    @property
    def timings(self) -> dict[str, RequestTiming]:
        """Times of the last requests that have ended, by id."""
        return self._times.requests

    @property
    def num_in_flight(self) -> int:
        """Number of steps without a result. Any thread may read it."""
        return len(self._steps.in_flight)

    @property
    def busy(self) -> bool:
        """True while a step is in flight, an error has not been raised, or a request is
        unfinished. Of a driver that is paused, unfinished requests do not count."""
        if self._steps.in_flight or self._error is not None or self._requests.has_ended:
            return True
        if self.is_paused:
            return False
        return self._parts.has_waiting or self.scheduler.has_unfinished_requests()

    def run(self) -> Iterator[RequestOutput]:
        """Step until nothing is left, or the driver is paused and no step is in flight; yield
        requests as they finish."""
        while self.busy:
            yield from self.step()
        for _ in range(MAX_CONSECUTIVE_FAILURES):
            self._fill()  # a step that says which requests have ended, and again if it fails
            while self._steps.in_flight:
                self._take_oldest()
                yield from self._requests.take_ended()
        self._raise_error()

    def step(self) -> list[RequestOutput]:
        """Fill the pipeline, then take the oldest result; return the requests that have finished.

        Raises:
            StepFailed: steps have failed MAX_CONSECUTIVE_FAILURES times in a row, without a
                recovery between them. Requests that have finished before are returned first, and
                the next call raises it.
            SchedulerStalled: the scheduler has requests, no step, and no result to wait for.
            WorkerDied: a daemon is lost, and `recover` does not replace it, or has done so
                MAX_CONSECUTIVE_FAILURES times since the last successful step.
            InvalidSchedulerOutput: the scheduler gave a step that breaks a rule. The steps before
                it are settled, and step_failed has returned it to the scheduler. It may be called
                again.
            DrainingError, WeightsNotWhole: an operator drains the group, or a weight update is open
                or has failed, and the steps in flight are settled. It may be called again, and
                continues once the drain is undone, or the weights are complete.
        """
        for attend in self._parts.attend:
            attend()
        try:
            self._fill()
            has_worked = False
            for work_in_flight in self._parts.work_in_flight:
                has_worked = work_in_flight() or has_worked
            if has_worked:
                self._fill()
        except (DrainingError, WeightsNotWhole):
            if not self._steps.in_flight:
                raise
        if self._steps.in_flight:
            self._take_oldest()
        elif not self._requests.has_ended:
            self._raise_error()
            if self.is_paused:
                return []
            if not self._parts.wait() and self.scheduler.has_unfinished_requests():
                raise SchedulerStalled(
                    "the scheduler has unfinished requests, but no step for them, and none is in "
                    "flight"
                )
        return self._requests.take_ended()

    def look(self) -> None:
        """Replace a daemon that has died, so that the next request need not wait for that; to be
        called now and then while there is nothing to do. Such recoveries are not counted. Whatever
        else is wrong with the group is the next step's error.

        Raises:
            WorkerDied: a daemon is lost, and `recover` does not replace it.
        """
        try:
            self.group.look()
        except WorkerDied as died:
            self.recover(died)
            self._parts.group_replaced()
        except WorkerDaemonError:
            return

    def _fill(self) -> None:
        """Send steps while the group takes some and the scheduler has some."""
        if self.is_paused:
            return
        steps, parts = self._steps, self._parts
        for prepare in parts.prepare:
            prepare()
        while self._error is None and len(steps.in_flight) < self.group.max_in_flight:
            output = steps.unsent or self.scheduler.schedule()
            if output is None:
                return
            sent = time.monotonic()
            steps.unsent = output
            try:
                for can_send in parts.can_send:
                    if not can_send(output):
                        return
                if self._planned is None:
                    planned = output
                    for plan in parts.plan:
                        planned = plan(planned)
                    self._planned = planned
                # After a recovery, a future that reports the losses.
                future = self._recovering(partial(self.group.execute_model, self._planned))
            except InvalidSchedulerOutput as refusal:
                self._error = refusal
                return
            steps.unsent = self._planned = None
            flight = StepInFlight(output, future, sent)
            steps.in_flight.append(flight)
            steps.num_sent += 1
            for sent_by in parts.sent:
                sent_by(flight)

    def _take_oldest(self) -> None:
        """Wait for the oldest step, and pass its result or its failure on."""
        flight = self._steps.in_flight[0]
        for complete in self._parts.complete:
            complete(flight)
        try:
            result = self._recovering(flight.future.result)
            for later in flight.later:
                result = result.joined(self._recovering(later.result))
        except StepFailed as error:
            self._on_failure(error)
            return
        self._in_a_row = _InARow()
        self._times.step_done(flight.output, flight.sent, result)
        self._settle(flight, result)

    def _settle(self, flight: StepInFlight, result: StepResult) -> None:
        """Pass the result of the oldest step on."""
        self._steps.in_flight.popleft()
        for outcome, num_times in Counter(result.drafts.values()).items():
            self.drafts.add(*outcome, num_times)
        shown = result
        for settle in self._parts.settle:
            shown = settle(flight, shown)
        if self._on_result is not None:
            self._on_result(shown)
        self._requests.end(self.scheduler.update_from_output(flight.output, result))
        for settled in self._parts.settled:
            settled(flight)

    def _recovering(self, call: Callable[[], ResultT]) -> ResultT:
        """Make a call to the group, and again after each recovery from the death of a daemon."""
        while True:
            try:
                return call()
            except WorkerDied as died:
                self._replace(died)

    def _replace(self, died: WorkerDied) -> None:
        """Recover, and reset the count of failed steps: the fault may have ended with the process.
        Recoveries are limited too, for a request that kills each successor."""
        if self._in_a_row.recoveries >= MAX_CONSECUTIVE_FAILURES:
            raise died
        self.recover(died)
        self._parts.group_replaced()
        self._in_a_row.recoveries += 1
        self._in_a_row.failures = 0

    def _on_failure(self, error: StepFailed) -> None:
        """Handle the failure of the oldest step, and so of all behind it. Requests that have
        finished nevertheless are returned before the error is raised, if it is."""
        self._parts.steps_failed()
        lost = error.lost_req_ids
        if any(flight.later for flight in self._steps.in_flight):
            self._steps.has_failed = True
            lost = self._settle_partly(lost)
            self._steps.has_failed = False
        outputs = [flight.output for flight in self._steps.in_flight]
        self._steps.in_flight.clear()
        if error.aborted_req_ids:
            self._hand_back(outputs, lost)
            self._abort(error.aborted_req_ids)
            return
        self.num_failures += 1
        self._in_a_row.failures += 1
        self._hand_back(outputs, lost)
        if self._in_a_row.failures >= MAX_CONSECUTIVE_FAILURES:
            if self._error is not None or not self._requests.has_ended:
                raise error
            self._error = error

    def _abort(self, req_ids: frozenset[str]) -> None:
        """End requests that an update has aborted, with their tokens so far."""
        if isinstance(self.scheduler, EndingScheduler):
            self._requests.end(self.scheduler.end_requests(req_ids))
            return
        for req_id in req_ids:
            self._requests.abort(req_id)

    def _settle_partly(self, lost: frozenset[str]) -> frozenset[str]:
        """Pass on what steps have sampled before the failure, which may be that of deferred
        requests alone; return all requests that are lost."""
        while self._steps.in_flight:
            flight = self._steps.in_flight[0]
            try:
                result = self._recovering(flight.future.result)
            except StepFailed as failed:
                return lost | failed.lost_req_ids
            for later in flight.later:
                try:
                    result = result.joined(self._recovering(later.result))
                except StepFailed as failed:
                    lost |= failed.lost_req_ids
            self._settle(flight, result)
        return lost

    def _raise_error(self) -> None:
        """Raise the error, if there is one, once the scheduler has a refused step back. No step may
        be in flight: its result must not come after that."""
        if self._error is None:
            return
        if self._steps.unsent is not None:  # otherwise it was returned with failed steps
            self._hand_back([], frozenset())
        error, self._error = self._error, None
        raise error

    def _hand_back(self, outputs: list[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Return steps without a result to the scheduler, and with them the one that was not sent:
        its admissions and its finished requests have not reached the workers."""
        unsent, self._steps.unsent, self._planned = self._steps.unsent, None, None
        if unsent is not None:
            outputs = [*outputs, unsent]
            lost_req_ids |= self.group.withdraw(unsent)
        self.scheduler.step_failed(outputs, lost_req_ids)
