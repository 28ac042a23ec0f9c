"""The requests of a driver, from add_request to their outputs."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from rpc_schema.extensions import RequestExtension
from worker_client.driver_parts.driver_parts import DriverParts
from worker_client.driver_parts.interface import DriverPart
from worker_client.errors import RequestError
from worker_client.inputs.request_checks import refusal, validated
from worker_client.inputs.sampling_params import MAX_SAMPLES
from worker_client.requests import (
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    failed_request,
    forked,
    hashed,
    sample_id,
    seeded,
)
from worker_client.scheduler import ContinuingScheduler, Scheduler, SchedulerInterface
from worker_client.tracing.run_times import RunTimes

_NO_FEATURES: Final[tuple[RequestExtension, ...]] = ()


class GivenUpRequest(NamedTuple):
    """A request that another driver may continue."""

    output: RequestOutput | None
    """Its output so far (GenerationRequest.continues); None: it has none."""
    added: float
    """RequestTiming.added"""
    first_token: float | None
    """RequestTiming.first_token; None: it has none."""


class LiveRequests:
    """Owned by a driver; its features end and queue requests here."""

    def __init__(self, scheduler: SchedulerInterface, times: RunTimes) -> None:
        self._scheduler = scheduler
        self._times = times
        self._parts = DriverParts(())
        self._ended: list[RequestOutput] = []
        """Requests that have ended, and were not returned yet."""
        self._scheduler_checks = (
            isinstance(scheduler, Scheduler)
            and type(scheduler).add_request is Scheduler.add_request
        )
        """The scheduler checks requests whole: simple ones need no second check."""

    def serve_with(self, parts: DriverParts) -> None:
        """Take the features, which are made after this object, before the first request."""
        self._parts = parts

    @property
    def has_ended(self) -> bool:
        """True if take_ended has outputs."""
        return bool(self._ended)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request, all of its samples or none. Raises RequestError as Driver.add_request
        does."""
        try:
            if not (self._scheduler_checks and self._is_simple(request)):
                request = hashed(seeded(validated(request)))
            self._parts.check(request)
            self._add_samples((request,) if request.sampling.n == 1 else forked(request))
        except RequestError:
            raise
        except Exception as error:  # of a scheduler or a feature of any kind
            raise refusal(error) from error

    def abort(self, req_id: str) -> None:
        """End a request early: all of its samples, or a single one. Unknown ids are ignored."""
        samples = [sample_id(req_id, index) for index in range(MAX_SAMPLES)]
        for name in (req_id, *(sample for sample in samples if self._times.has(sample))):
            self._abort(name)

    def give_up(self) -> dict[str, GivenUpRequest]:
        """Abort all requests that were added, if the scheduler lets them go on elsewhere; return
        them by id."""
        scheduler = self._scheduler
        if not isinstance(scheduler, ContinuingScheduler):
            return {}
        given_up = {
            name: GivenUpRequest(scheduler.output_so_far(name), *moments)
            for name, moments in self._times.unfinished.items()
        }
        for name in given_up:
            self._take_back(name)
        return given_up

    def queue(self, request: GenerationRequest, after: DriverPart | None = None) -> None:
        """Give the scheduler a request, unless a feature keeps it. after: the feature that has kept
        it. Raises what the scheduler raises; then nothing of the request is left."""
        if not self._parts.begin(request, after):
            return
        self._give(request)
        try:
            self._parts.queued(request)
        except Exception:
            self._take_back(request.id)
            raise

    def offer(self, request: GenerationRequest) -> None:
        """Let the scheduler check a request that it gets later. Raises what it raises."""
        self._give(request)
        self._scheduler.abort_request(request.id)

    def queue_or_fail(self, request: GenerationRequest, after: DriverPart) -> None:
        """Queue a request that a feature has kept; it ends if the scheduler refuses it."""
        try:
            self.queue(request, after)
        except Exception as error:  # as in add
            self.refuse(request, _known(error))

    def hand_on(self, request: GenerationRequest, after: DriverPart) -> None:
        """Tell the features behind one that has delayed it (DriverPart.delays) that the scheduler
        has a request; it ends if one of them fails."""
        try:
            self._parts.queued(request, after)
        except Exception as error:  # as in add
            with suppress(Exception):
                self._scheduler.abort_request(request.id)
            self.refuse(request, _known(error))

    def refuse(self, request: GenerationRequest, error: RequestError) -> None:
        """End a request that the scheduler does not have, with an error."""
        name, num_tokens = request.id, len(request.prompt)
        self.end([failed_request(name, error.reason, num_prompt_tokens=num_tokens, refusal=error)])

    def stop(self, output: RequestOutput) -> None:
        """End a request that the scheduler has."""
        self._scheduler.abort_request(output.req_id)
        self.end([output])

    def end(self, outputs: Iterable[RequestOutput]) -> None:
        """Note requests that have ended; the scheduler has them no more."""
        for output in outputs:
            self._parts.ended(output.req_id)
            self._times.finished(output.req_id)
            self._ended.append(output)

    def have_gained(self, req_ids: Iterable[str]) -> None:
        """Note that requests have got tokens without a step."""
        self._times.tokens_came(req_ids)

    def take_ended(self) -> list[RequestOutput]:
        """Return the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _is_simple(self, request: GenerationRequest) -> bool:
        """Return True for a new request of one sample without grammar, embeddings and extensions.
        Its fields may have any type."""
        return (
            type(request) is GenerationRequest
            and type(request.id) is str
            and not self._times.has(request.id)
            and type(request.sampling) is SamplingParams
            and type(request.sampling.n) is int
            and request.sampling.n == 1
            and request.sampling.structured_outputs is None
            and request.prompt_embeds is None
            and request.replay_experts is None
            and request.features is _NO_FEATURES
        )

    def _add_samples(self, samples: Iterable[GenerationRequest]) -> None:
        samples = tuple(samples)
        for sample in samples:
            if self._times.has(sample.id):
                fix = "choose another"
                raise RequestError("the id is in use", field="id", value=sample.id, fix=fix)
        added: list[str] = []
        try:
            for sample in samples:
                self.queue(sample)
                self._times.added(sample.id)
                added.append(sample.id)
        except Exception:
            for req_id in added:
                self._take_back(req_id)
            raise

    def _give(self, request: GenerationRequest) -> None:
        """Give the scheduler a request. Raises what it raises; then it has none of it."""
        try:
            self._scheduler.add_request(request)
        except RequestError:  # it has changed nothing, and may have another request of this id
            raise
        except Exception:
            with suppress(Exception):
                self._scheduler.abort_request(request.id)
            raise

    def _take_back(self, req_id: str) -> None:
        """Abort a request after a failure, whose error counts rather than one of this."""
        with suppress(Exception):
            self._abort(req_id)

    def _abort(self, req_id: str) -> None:
        try:
            self._scheduler.abort_request(req_id)
        finally:
            self._parts.ended(req_id)
            self._times.forget(req_id)


def _known(error: Exception) -> RequestError:
    """Return the refusal of a request for an error of any kind."""
    return error if isinstance(error, RequestError) else refusal(error)
