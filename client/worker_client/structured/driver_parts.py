"""Structured output as features of a driver: requests that wait for their grammars, the masks of
its steps, and jumps over forced tokens."""

from collections.abc import Iterable, Sequence
from functools import partial

from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.errors import RequestError, WorkerDied
from worker_client.requests import GenerationRequest
from worker_client.scheduler import ExpectingScheduler, JumpingScheduler, PausingScheduler
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.masks import Masks, StepMasks
from worker_client.structured.jump_forward import JumpForward
from worker_client.structured.masked_steps import (
    CHECK_S,
    CompiledGrammars,
    MaskedStep,
    MaskedSteps,
)
from worker_client.structured.pending import POLL_S, PendingRequests


def structured_parts(
    context: DriverContext, grammars: CompiledGrammars | None
) -> Iterable[DriverPart]:
    """Return the features that serve requests with structured output; without grammars, the one
    that refuses them."""
    if grammars is None:
        return (NoGrammarsPart(),)
    masks = MasksPart(context, MaskedSteps(grammars))
    pending = PendingGrammarsPart(context, grammars)
    parts: list[DriverPart] = [pending, masks]
    if isinstance(context.scheduler, ExpectingScheduler) and context.scheduler.most_expected:
        parts.append(ExpectedTokensPart(masks, context.scheduler))
    if isinstance(context.scheduler, JumpingScheduler):
        parts.append(JumpForwardPart(context, masks, context.scheduler))
    return parts


class NoGrammarsPart(DriverPart):
    """Refuses requests with a grammar."""

    def check(self, request: GenerationRequest) -> None:
        if request.sampling.structured_outputs is not None:
            raise RequestError(
                "this driver has no grammars",
                field="sampling.structured_outputs",
                value=request.sampling.structured_outputs,
                fix="give it Driver(options=DriverOptions(grammars=...))",
            )


class PendingGrammarsPart(DriverPart):
    """Keeps requests until their grammars are compiled."""

    def __init__(self, context: DriverContext, grammars: CompiledGrammars) -> None:
        self._requests = context.requests
        self._grammars = grammars
        self._pending = PendingRequests(grammars)

    def begin(self, request: GenerationRequest) -> bool:
        grammar = request.sampling.structured_outputs
        if grammar is None or self._pending.add(request, grammar):
            return True
        try:
            self._requests.offer(request)
        except Exception:
            self._pending.forget(request.id)
            raise
        return False

    def ended(self, req_id: str) -> None:
        self._pending.forget(req_id)

    @property
    def has_waiting(self) -> bool:
        return bool(self._pending)

    def attend(self) -> None:
        """Queue the requests whose grammars are compiled by now."""
        if not self._pending:
            return
        self._grammars.proceed()
        for request, refusal in self._pending.take_done():
            if refusal is not None:
                self._requests.refuse(request, refusal)
            else:
                self._requests.queue_or_fail(request, after=self)

    def wait(self) -> bool:
        if self._pending:
            self._grammars.proceed(POLL_S)
        return bool(self._pending)


class MasksPart(DriverPart):
    """Adds masks to steps, and sends those that become known later."""

    def __init__(self, context: DriverContext, masks: MaskedSteps) -> None:
        self.masks = masks
        self._context = context
        self._planned: MaskedStep | None = None

    def ended(self, req_id: str) -> None:
        self.masks.forget(req_id)

    def attend(self) -> None:
        """Release the requests that were paused and have their masks."""
        scheduler = self._context.scheduler
        if self.masks.has_paused and isinstance(scheduler, PausingScheduler):
            self.masks.grammars.proceed()
            for req_id in self.masks.take_resumed():
                scheduler.release_request(req_id)
            self._send_known()

    def can_send(self, output: SchedulerOutput) -> bool:
        if not self.masks.must_wait(output):
            return True
        self._send_or_pause()
        return not self.masks.must_wait(output)

    def plan(self, output: SchedulerOutput) -> SchedulerOutput:
        self._planned = self.masks.plan(output)
        return self._planned.output

    def sent(self, flight: StepInFlight) -> None:
        assert self._planned is not None, "it was planned"
        flight.notes[self] = self._planned
        self.masks.sent(self._planned)
        self._send_known()

    def complete(self, flight: StepInFlight) -> None:
        """Send all masks of a step; those of requests that the scheduler cannot pause may take
        long."""
        step = self.masked(flight)
        while step.is_waiting and self._send_or_pause() and step.is_waiting:
            self.masks.grammars.proceed(CHECK_S)

    def settle(self, flight: StepInFlight, result: StepResult) -> StepResult:
        repeated = self.masks.take(self.masked(flight), result)
        self._end_failed()  # before the scheduler can end them too
        return result.without(repeated) if repeated else result

    def settled(self, flight: StepInFlight) -> None:
        if self.masked(flight).sampled:
            self._begin_stray_again()
            self._send_or_pause()

    def steps_failed(self) -> None:
        self.masks.forget_steps()

    def wait(self) -> bool:
        if self.masks.has_paused:
            self.masks.grammars.proceed(POLL_S)
        return self.masks.has_paused

    def masked(self, flight: StepInFlight) -> MaskedStep:
        """Return a step in flight with its rows that have a grammar."""
        step: MaskedStep = flight.notes[self]
        return step

    def _send_or_pause(self) -> bool:
        """Send the masks that steps in flight wait for, and pause the requests whose masks take too
        long. Return False if a daemon has died."""
        self.masks.await_masks()
        scheduler = self._context.scheduler
        if isinstance(scheduler, PausingScheduler):
            for req_id in self.masks.late():
                scheduler.pause_request(req_id)
                self.masks.pause(req_id)
        return self._send_known()

    def _send_known(self) -> bool:
        """Sample the deferred rows of steps in flight whose masks are known, and end requests whose
        grammars have failed. Return False if a daemon has died."""
        for flight in self._context.steps.in_flight:
            try:
                self.masks.sample_ready(self.masked(flight), partial(self._sample, flight))
            except WorkerDied as died:
                self._context.replace(died)
                return False  # taking the steps in flight reports the losses
        self._end_failed()
        return True

    def _end_failed(self) -> None:
        """End the requests that their grammars have ended."""
        for output in self.masks.take_faults().values():
            self._context.requests.stop(output)

    def _begin_stray_again(self) -> None:
        """Let requests begin again from their known tokens if steps in flight sample behind others;
        end them if the scheduler cannot pause them."""
        scheduler = self._context.scheduler
        for req_id in self.masks.take_stray():
            if isinstance(scheduler, PausingScheduler):
                scheduler.pause_request(req_id)
                self.masks.pause(req_id)
            else:
                self.masks.fail_stray(req_id)

    def _sample(self, flight: StepInFlight, masks: Masks, req_ids: Sequence[str] | None) -> None:
        group = self._context.group
        flight.later.append(group.sample_tokens(flight.future, (StepMasks(masks),), req_ids))


class ExpectedTokensPart(DriverPart):
    """Tells a scheduler which tokens the next step of a request may have as drafts, before requests
    jump: forced ones that its steps compute so need no jump. Guesses are looked up here, since the
    driver must know drafts to make their masks; the text of a request is with its masks."""

    def __init__(self, masks: MasksPart, scheduler: ExpectingScheduler) -> None:
        self._masks = masks
        self._scheduler = scheduler
        self._most = scheduler.most_expected
        self._jumps = isinstance(scheduler, JumpingScheduler)

    def settled(self, flight: StepInFlight) -> None:
        if self._masks.masked(flight).sampled:
            found = self._masks.masks.find_expected(
                self._most, num_running=flight.output.num_requests, jumps=self._jumps
            )
            for req_id, expected in found:
                self._scheduler.expect_tokens(req_id, *expected)


class JumpForwardPart(DriverPart):
    """Lets requests gain the tokens that their grammars force."""

    def __init__(
        self, context: DriverContext, masks: MasksPart, scheduler: JumpingScheduler
    ) -> None:
        self._context = context
        self._masks = masks
        self._jumps = JumpForward(masks.masks, scheduler)

    def queued(self, request: GenerationRequest) -> None:
        self._jumps.add(request)

    def ended(self, req_id: str) -> None:
        self._jumps.forget(req_id)

    def attend(self) -> None:
        if self._jumps.has_new:
            self._jump(0)

    def settled(self, flight: StepInFlight) -> None:
        if self._masks.masked(flight).sampled:
            self._jump(flight.output.num_requests)

    def _jump(self, num_running: int) -> None:
        self._context.gain(*self._jumps.proceed(num_running))
