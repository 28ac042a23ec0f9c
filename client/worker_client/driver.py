"""The loop between a scheduler and a group: keeps steps in flight, passes results on in order,
reports failures to the scheduler, and measures times."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.prompt_embeds import PromptEmbeds
from worker_client.driver_parts.kept_prefixes import KeptPrefixes
from worker_client.driver_parts.request_uploads import RequestUploads, UploadingGroup
from worker_client.errors import (
    DrainingError,
    InvalidSchedulerOutput,
    RequestError,
    SchedulerStalled,
    StepFailed,
    WorkerDied,
)
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.request_checks import refusal, validated
from worker_client.requests import (
    MAX_SAMPLES,
    GenerationRequest,
    forked,
    hashed,
    sample_id,
    seeded,
)
from worker_client.scheduler import (
    HoldingScheduler,
    JumpingScheduler,
    PausingScheduler,
    RequestOutput,
    Scheduler,
    SchedulerInterface,
    failed_request,
)
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.structured.jump_forward import JumpForward
from worker_client.structured.masked_steps import (
    CHECK_S,
    CompiledGrammars,
    MaskedStep,
    MaskedSteps,
)
from worker_client.structured.pending import POLL_S, PendingRequests
from worker_client.tracing.run_times import RequestTiming, RunTimes, StepTiming

MAX_CONSECUTIVE_FAILURES = 3
"""Failed steps in a row, and recoveries without a successful step between them, after which the
driver gives up."""

EMBEDS_LOST = "the daemons have lost the embeddings of its prompt; fix: send the request again"

_NO_FEATURES: Final[tuple[RequestExtension, ...]] = ()

MAX_HISTORY = 65_536
"""Default number of steps and requests whose times a driver keeps."""


class FutureLike(Protocol):
    """The part of worker_client.group.outcomes.StepFuture that the driver uses."""

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the outcome; raises StepFailed."""


class GroupLike(UploadingGroup, Protocol):
    """The part of worker_client.worker_group.WorkerGroup that the driver uses."""

    max_in_flight: int

    def execute_model(self, output: SchedulerOutput) -> FutureLike:
        """Send a step."""

    def sample_tokens(
        self,
        deferred: Any,
        masks: Mapping[str, NDArray[np.int32]] | None = None,
        req_ids: Collection[str] | None = None,
    ) -> FutureLike:
        """Sample requests that a step has deferred; called with a CompiledGrammars only."""

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Give up a step that was not sent, and drop all rows; return the ids of the requests that
        lost theirs."""


Recover: TypeAlias = Callable[[WorkerDied], object]
"""Callable that makes a group usable again after the death of a daemon, or raises."""


def give_up(died: WorkerDied) -> None:
    """Raise the error: the default, which does not replace a lost daemon."""
    raise died


class _InFlight(NamedTuple):
    output: SchedulerOutput
    future: FutureLike
    sent: float
    masked: MaskedStep | None
    later: list[FutureLike]
    """Replies to the messages that sample its deferred requests."""


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
        group: GroupLike,
        scheduler: SchedulerInterface,
        on_result: Callable[[StepResult], None] | None = None,
        *,
        max_history: int | None = MAX_HISTORY,
        recover: Recover = give_up,
        grammars: CompiledGrammars | None = None,
        keeps_prefixes: bool = True,
    ) -> None:
        """on_result is called with every step's tokens as they come, including those past a
        request's end, and with those that requests gain without a step. recover is called when a
        daemon has died: after it (WorkerGroup.replace, say) the requests that were running begin
        again from their known tokens. It is called no more after MAX_CONSECUTIVE_FAILURES
        recoveries without a successful step. max_history bounds `records` and `timings`, the oldest
        of which are dropped first; None keeps all. grammars
        (worker_client.structured.grammars.Grammars) serves requests with structured output, which
        jump forward if the scheduler can (JumpingScheduler); it stays the caller's. keeps_prefixes:
        begin with the cached prefixes of earlier drivers, and keep one's own for later ones, if the
        scheduler can (worker_client.driver_parts.kept_prefixes.RestoringScheduler)."""
        self.group = group
        self.scheduler = scheduler
        self._times = RunTimes(max_history)
        self.num_failures = 0
        self._on_result = on_result
        self._recover = recover
        self._in_flight: deque[_InFlight] = deque()
        self._unsent: SchedulerOutput | None = None
        """Scheduler output that was not sent; it goes first once the group takes steps."""
        self._error: InvalidSchedulerOutput | StepFailed | None = None
        """The error with which the group refused _unsent, or a failure that is given up; raised
        once no step is in flight, and no request that has finished is left to return."""
        self._in_a_row = _InARow()
        self._masks = None if grammars is None else MaskedSteps(grammars)
        self._pending = None if grammars is None else PendingRequests(grammars)
        self._jumps: JumpForward | None = None
        if self._masks is not None and isinstance(scheduler, JumpingScheduler):
            self._jumps = JumpForward(self._masks, scheduler)
        self._uploads = RequestUploads(group)
        self._must_restart_uploads = False
        """The ranks have lost all uploads."""
        self._num_sent = 0
        """Number of steps sent."""
        self._ended: list[RequestOutput] = []
        """Requests that have ended outside the scheduler, and were not returned yet."""
        self._scheduler_checks = (
            isinstance(scheduler, Scheduler)
            and type(scheduler).add_request is Scheduler.add_request
        )
        """The scheduler checks requests whole: those that it alone uses need no second check."""
        self._prefixes = KeptPrefixes(group, scheduler if keeps_prefixes else None)
        self._prefixes.restore()

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
        try:
            if self._scheduler_checks and not self._pending and _is_simple(request):
                self._give(request)
                self._times.added(request.id)
            else:
                self._add_samples(hashed(seeded(validated(request))))
        except RequestError:
            raise
        except Exception as error:  # of a scheduler or a compiler of any kind
            raise refusal(error) from error

    def _add_samples(self, request: GenerationRequest) -> None:
        """Queue the samples of a checked request, all or none."""
        self._check_holds(request)
        samples = forked(request)
        for sample in samples:
            self._check_unused(sample.id)
        added: list[str] = []
        try:
            for sample in samples:
                self._add(sample)
                added.append(sample.id)
        except Exception:
            for req_id in added:
                self._take_back(req_id)
            raise

    def _check_unused(self, req_id: str) -> None:
        if self._times.has(req_id):
            fix = "choose another"
            raise RequestError("the id is in use", field="id", value=req_id, fix=fix)

    def _add(self, request: GenerationRequest) -> None:
        """Queue a request, or wait for its grammar."""
        if request.structured_outputs is None or self._is_compiled(request):
            self._queue(request)
        self._times.added(request.id)

    def _take_back(self, req_id: str) -> None:
        """Abort a request after a failure, whose error counts rather than one of this."""
        with suppress(Exception):
            self._abort(req_id)

    def _check_holds(self, request: GenerationRequest) -> None:
        tensor = request.prompt_embeds
        if tensor is not None and not isinstance(self.scheduler, HoldingScheduler):
            raise RequestError(
                "the scheduler cannot hold a request until its embeddings are uploaded",
                field="prompt_embeds",
                value=list(tensor.shape),
                fix="add hold_request and release_request (HoldingScheduler), or upload them and "
                "give PromptEmbeds in features",
            )

    def _is_compiled(self, request: GenerationRequest) -> bool:
        grammar = request.structured_outputs
        if self._pending is None or grammar is None:
            raise RequestError(
                "this driver has no grammars",
                field="structured_outputs",
                value=grammar,
                fix="give it Driver(grammars=...)",
            )
        if self._pending.add(request, grammar):
            return True
        try:
            self._give(request)  # the scheduler may refuse what it gets later
            self.scheduler.abort_request(request.id)
        except Exception:
            self._pending.forget(request.id)
            raise
        return False

    def _give(self, request: GenerationRequest) -> None:
        """Give the scheduler a request. Raises what it raises; then it has none of it."""
        try:
            self.scheduler.add_request(request)
        except RequestError:  # it has changed nothing, and may have another request of this id
            raise
        except Exception:
            with suppress(Exception):
                self.scheduler.abort_request(request.id)
            raise

    def _queue(self, request: GenerationRequest) -> None:
        """Give the scheduler a request, to be held until its embeddings are uploaded."""
        self._give(request)
        try:
            tensor = request.prompt_embeds
            if isinstance(tensor, HostTensor) and isinstance(self.scheduler, HoldingScheduler):
                self.scheduler.hold_request(request.id)
                self._uploads.add(request.id, tensor)
            if self._jumps is not None:
                self._jumps.add(request)
        except Exception:
            self._take_back(request.id)
            raise

    def check_uploads(self, request: GenerationRequest) -> None:
        """Raise RequestError if extensions of a checked request name an upload that the daemons do
        not have. Its steps would fail, and with them those of all others."""
        named = [name for each in request.features for name in each.uploads]
        found = self.group.find_uploads(named, self.group.first_stage_ranks) if named else []
        for name, is_there in zip(named, found, strict=True):
            if not is_there:
                raise RequestError(
                    "the daemons have no such upload",
                    field="features",
                    value=name.hex(),
                    fix="upload it first (WorkerGroup.upload), and keep it until the request ends",
                )

    def claim_uploads(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor] = ()
    ) -> tuple[list[AdoptedRequest], list[RequestOutput]]:
        """Take over the embeddings of requests that the scheduler is to adopt, which daemons keep
        for them. Return the requests that can continue, and the outputs of those whose embeddings
        are neither there nor among `tensors`, with an error. Call this before anything else."""
        needs = {
            request.req_id: embeds.content_hash
            for request in requests
            if (embeds := extension_of(request.extensions, PromptEmbeds)) is not None
        }
        lost = self._uploads.claim(needs, tensors) if needs else set()
        kept = [each for each in requests if each.req_id not in lost]
        return kept, [failed_request(req_id, EMBEDS_LOST) for req_id in needs if req_id in lost]

    def abort_request(self, req_id: str) -> None:
        """End a request early, without output: all of its samples, or a single one by its id.
        Unknown ids are ignored. Raises RequestError: the id is no text."""
        given: object = req_id
        if not isinstance(given, str):
            fix = "give the id of a request"
            raise RequestError("the id is no text", field="id", value=given, fix=fix)
        samples = [sample_id(req_id, index) for index in range(MAX_SAMPLES)]
        for name in (req_id, *(sample for sample in samples if self._times.has(sample))):
            self._abort(name)

    def _abort(self, req_id: str) -> None:
        try:
            self.scheduler.abort_request(req_id)
        finally:
            if self._pending is not None:
                self._pending.forget(req_id)
            self._release(req_id)
            self._times.forget(req_id)

    @property
    def records(self) -> deque[StepTiming]:
        """Times of the last steps."""
        return self._times.steps

    @property
    def timings(self) -> dict[str, RequestTiming]:
        """Times of the last requests that have ended, by id."""
        return self._times.requests

    @property
    def busy(self) -> bool:
        """True while a step is in flight, an error has not been raised, or a request is
        unfinished."""
        pending = self._in_flight or self._error is not None or self._ended or self._pending
        return bool(pending) or self.scheduler.has_unfinished_requests()

    def run(self) -> Iterator[RequestOutput]:
        """Step until nothing is left; yield requests as they finish."""
        while self.busy:
            yield from self.step()
        for _ in range(MAX_CONSECUTIVE_FAILURES):
            self._fill()  # a step that says which requests have ended, and again if it fails
            while self._in_flight:
                yield from self._take_oldest()
        self._raise_error()

    def step(self) -> list[RequestOutput]:
        """Fill the pipeline, then take the oldest result; return the requests that it finished.

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
            DrainingError: an operator drains the group, and the steps in flight are settled. It may
                be called again, and continues once the drain is undone.
        """
        self._drop_uploads()
        self._attend_grammars()
        if self._jumps is not None and self._jumps.has_new:
            self._ended += self._jump_forward(self._jumps, 0)
        try:
            self._fill()
            if self._uploads.can_proceed:
                self._send_uploads()
                self._fill()
        except DrainingError:
            if not self._in_flight:
                raise
        if self._in_flight:
            return self._take_oldest() + self._take_ended()
        if self._ended:
            return self._take_ended()
        self._raise_error()
        if self._uploads.can_proceed:
            return []
        if self._masks is not None and (self._pending or self._masks.has_paused):
            self._masks.grammars.proceed(POLL_S)
        elif self.scheduler.has_unfinished_requests():
            raise SchedulerStalled(
                "the scheduler has unfinished requests, but no step for them, and none is in flight"
            )
        return []

    def _fill(self) -> None:
        while self._must_restart_uploads:
            self._restart_uploads()
        while self._error is None and len(self._in_flight) < self.group.max_in_flight:
            output = self._unsent or self.scheduler.schedule()
            if output is None:
                return
            sent = time.monotonic()
            self._unsent = output
            masked = None
            try:
                if self._masks is not None:
                    if self._masks.must_wait(output):
                        self._finish_masks(self._masks)
                        if self._masks.must_wait(output):
                            return
                    masked = self._masks.plan(output)
                future = self._send(output if masked is None else masked.output)
            except InvalidSchedulerOutput as refusal:
                self._error = refusal
                return
            self._unsent = None
            self._in_flight.append(_InFlight(output, future, sent, masked, []))
            self._num_sent += 1
            if self._masks is not None and masked is not None:
                self._masks.sent(masked)
                self._send_masks(self._masks)

    def _finish_masks(self, masks: MaskedSteps) -> bool:
        """Send the masks that steps in flight wait for, and pause the requests whose masks take too
        long. Return False if a daemon has died."""
        masks.await_masks()
        if isinstance(self.scheduler, PausingScheduler):
            for req_id in masks.late():
                self.scheduler.pause_request(req_id)
                masks.pause(req_id)
        return self._send_masks(masks)

    def _finish_step(self, masks: MaskedSteps, oldest: MaskedStep) -> None:
        """Send all masks of the oldest step; those of requests that the scheduler cannot pause may
        take long."""
        while oldest.is_waiting and self._finish_masks(masks) and oldest.is_waiting:
            masks.grammars.proceed(CHECK_S)

    def _send_masks(self, masks: MaskedSteps) -> bool:
        """Sample the deferred rows of steps in flight whose masks are known, and end requests whose
        grammars have failed. Return False if a daemon has died."""
        for flight in self._in_flight:
            if flight.masked is not None:
                try:
                    masks.sample_ready(flight.masked, partial(_sample, self.group, flight))
                except WorkerDied as died:
                    self._replace(died)
                    return False  # taking the steps in flight reports the losses
        for output in masks.take_faults().values():
            self.scheduler.abort_request(output.req_id)
            self._end(output)
        return True

    def _attend_grammars(self) -> None:
        """Queue the requests whose grammars are compiled by now, and release those that were paused
        and have their masks."""
        if self._masks is None or not (self._pending or self._masks.has_paused):
            return
        self._masks.grammars.proceed()
        self._admit_compiled()
        if isinstance(self.scheduler, PausingScheduler):
            for req_id in self._masks.take_resumed():
                self.scheduler.release_request(req_id)
            self._send_masks(self._masks)

    def _admit_compiled(self) -> None:
        for request, reason in () if self._pending is None else self._pending.take_done():
            try:
                if not reason:
                    self._queue(request)
                    continue
            except RequestError as error:
                reason = error.reason
            except Exception as error:  # as in add_request
                reason = refusal(error).reason
            num_prompt_tokens = len(request.prompt_token_ids)
            self._end(failed_request(request.id, reason, num_prompt_tokens=num_prompt_tokens))

    def _jump_forward(self, jumps: JumpForward, num_running: int) -> list[RequestOutput]:
        """Let requests gain the tokens that their grammars force; return those that end by it."""
        gained, finished = jumps.proceed(num_running)
        if gained.req_ids and self._on_result is not None:
            self._on_result(gained)
        for output in finished:
            self._record_finish(output.req_id)
        return finished

    def _send_uploads(self) -> None:
        """Send some chunks for held requests, while steps are in flight."""
        try:
            progress = self._uploads.proceed()
        except WorkerDied as died:
            self._replace(died)
            return
        for req_id, reason in progress.refused:
            self.scheduler.abort_request(req_id)
            self._end(failed_request(req_id, reason))
        for req_id in progress.ready:
            assert isinstance(self.scheduler, HoldingScheduler), "it held the request"
            self.scheduler.release_request(req_id)

    def _restart_uploads(self) -> None:
        """Send again what requests need. They have lost their rows too."""
        try:
            lost = self._uploads.restart()
        except WorkerDied as died:
            self._replace(died)
            return
        self._must_restart_uploads = False
        for req_id in lost:
            self.scheduler.abort_request(req_id)
            self._end(failed_request(req_id, EMBEDS_LOST))

    def _drop_uploads(self) -> None:
        """Drop what no request needs and no step in flight reads."""
        if self._uploads.to_drop:
            self._uploads.drop_unused(self._num_sent - len(self._in_flight))

    def _end(self, output: RequestOutput) -> None:
        """End a request that the scheduler does not have, or has no more."""
        self._record_finish(output.req_id)
        self._ended.append(output)

    def _take_ended(self) -> list[RequestOutput]:
        ended, self._ended = self._ended, []
        return ended

    def _take_oldest(self) -> list[RequestOutput]:
        flight = self._in_flight[0]
        if self._masks is not None and flight.masked is not None:
            self._finish_step(self._masks, flight.masked)
        try:
            result = self._result(flight.future)
            for future in flight.later:
                result = result.joined(self._result(future))
        except StepFailed as error:
            self._on_failure(error)
            return self._take_ended()
        self._in_a_row = _InARow()
        self._times.step_done(flight.output, flight.sent, result)
        return self._settle(flight, result)

    def _settle(self, flight: _InFlight, result: StepResult) -> list[RequestOutput]:
        """Pass the result of the oldest step on."""
        self._in_flight.popleft()
        repeated: Collection[str] = ()
        if self._masks is not None and flight.masked is not None:
            repeated = self._masks.take(flight.masked, result)
        if self._on_result is not None:
            self._on_result(result.without(repeated) if repeated else result)
        finished = self.scheduler.update_from_output(flight.output, result)
        for output in finished:
            self._record_finish(output.req_id)
        if self._masks is not None and flight.masked is not None and flight.masked.sampled:
            self._finish_masks(self._masks)
        if self._jumps is not None and flight.masked is not None and flight.masked.sampled:
            num_running = flight.output.num_requests
            finished = [*finished, *self._jump_forward(self._jumps, num_running)]
        self._drop_uploads()
        if self._num_sent >= self._prefixes.due or not self._in_flight:
            self._note_prefixes(flight)
        return finished

    def _note_prefixes(self, last_done: _InFlight) -> None:
        """Note what is cached, now and then and once all is done."""
        if self._unsent is not None:
            return  # the scheduler counts it as sent
        num_left = len(self._in_flight)
        if self._num_sent < self._prefixes.due and self.scheduler.has_unfinished_requests():
            return
        newest = (self._in_flight[-1] if num_left else last_done).future
        self._prefixes.proceed(self._num_sent, self._num_sent - num_left, newest)

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
        if self._in_a_row.recoveries >= MAX_CONSECUTIVE_FAILURES:
            raise died
        self._recover(died)
        self._must_restart_uploads = True
        self._in_a_row.recoveries += 1
        self._in_a_row.failures = 0

    def _on_failure(self, error: StepFailed) -> None:
        """Handle the failure of the oldest step, and so of all behind it. Requests that have
        finished nevertheless are returned before the error is raised, if it is."""
        lost = error.lost_req_ids
        if self._masks is not None:
            self._masks.forget_steps()
            lost = self._settle_partly(lost)
        outputs = [flight.output for flight in self._in_flight]
        self._in_flight.clear()
        self._prefixes.forget()
        self.num_failures += 1
        self._in_a_row.failures += 1
        self._hand_back(outputs, lost)
        if self._in_a_row.failures >= MAX_CONSECUTIVE_FAILURES:
            if self._error is not None or not self._ended:
                raise error
            self._error = error

    def _settle_partly(self, lost: frozenset[str]) -> frozenset[str]:
        """Pass on what steps have sampled before the failure, which may be that of deferred
        requests alone; return all requests that are lost."""
        while self._in_flight:
            flight = self._in_flight[0]
            try:
                result = self._result(flight.future)
            except StepFailed as failed:
                return lost | failed.lost_req_ids
            for future in flight.later:
                try:
                    result = result.joined(self._result(future))
                except StepFailed as failed:
                    lost |= failed.lost_req_ids
            self._ended += self._settle(flight, result)
        return lost

    def _raise_error(self) -> None:
        """Raise the error, if there is one, once the scheduler has a refused step back. No step may
        be in flight: its result must not come after that."""
        if self._error is None:
            return
        if self._unsent is not None:  # otherwise it was returned with failed steps
            self._hand_back([], frozenset())
        error, self._error = self._error, None
        raise error

    def _hand_back(self, outputs: list[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Return steps without a result to the scheduler, and with them the one that was not sent:
        its admissions and its finished requests have not reached the workers."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            outputs = [*outputs, unsent]
            lost_req_ids |= self.group.withdraw(unsent)
        self.scheduler.step_failed(outputs, lost_req_ids)

    def _release(self, req_id: str) -> None:
        """Give up the matcher and the upload of a request that has ended."""
        if self._masks is not None:
            self._masks.forget(req_id)
        if self._jumps is not None:
            self._jumps.forget(req_id)
        self._uploads.end(req_id, self._num_sent)

    def _record_finish(self, req_id: str) -> None:
        self._release(req_id)
        self._times.finished(req_id)


def _is_simple(request: GenerationRequest) -> bool:
    """Return True for one sample without grammar, embeddings and extensions. Its fields may have
    any type."""
    return (
        type(request) is GenerationRequest
        and type(request.n) is int
        and request.n == 1
        and request.structured_outputs is None
        and request.prompt_embeds is None
        and request.features is _NO_FEATURES
    )


def _sample(
    group: GroupLike,
    flight: _InFlight,
    masks: Mapping[str, NDArray[np.int32]],
    req_ids: Collection[str] | None,
) -> None:
    flight.later.append(group.sample_tokens(flight.future, masks, req_ids))
