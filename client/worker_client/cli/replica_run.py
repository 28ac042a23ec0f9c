"""The requests of one run on one replica: its share, and what others hand over."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rpc_schema.extensions import extension_of
from rpc_schema.structured import StructuredOutput
from worker_client.cli.arrivals import Arrivals
from worker_client.cli.handover import Handover
from worker_client.cli.input_adapters import with_adapters
from worker_client.cli.input_request import InputRequest
from worker_client.cli.run_options import RunOptions
from worker_client.driver import Driver
from worker_client.driver_parts.live_requests import GivenUpRequest
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import RequestError, WorkerDied
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.request_fields import flat
from worker_client.inputs.tokenizer import Tokenizer
from worker_client.replicas.driver import MAX_LOSSES
from worker_client.replicas.opening import OpenedReplica
from worker_client.requests import RequestOutput
from worker_client.scheduler import Scheduler
from worker_client.scheduler_output import StepResult
from worker_client.structured.masked_steps import CompiledGrammars
from worker_client.structured.opening import open_grammars
from worker_client.tracing.run_times import RequestTiming, StepTiming
from worker_client.tracing.token_times import TokenTimes
from worker_host.draft_counts import DraftCounts

OnOutcome: TypeAlias = Callable[[str, RequestOutput | str], None]
"""Function of (request id, its output or its error)."""


@dataclass(slots=True)
class Served:
    """Results of a run."""

    outputs: dict[str, RequestOutput]
    errors: dict[str, str]
    seconds: float
    records: list[StepTiming]
    """Times of the steps; of one replica after the other."""
    timings: dict[str, RequestTiming]
    """Times of the requests, by id; they were added when they arrived."""
    drafts: DraftCounts
    """Outcomes of the drafts of all steps."""
    token_gaps_s: list[float] = field(default_factory=list)
    """Times between two tokens of a request (TokenTimes.gaps_s), of a run that was measured."""
    startup_s: dict[str, float] = field(default_factory=dict)
    """Durations of phases, from process start to the first token; `total` is their sum."""
    begun: dict[str, GivenUpRequest] = field(default_factory=dict)
    """Requests that a replica has begun, and others have ended."""


class Stopped(Exception):
    """The run of a replica was ended, since that of all is."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A loaded replica, ready to serve on a thread."""

    opened: OpenedReplica
    options: RunOptions
    tokenizer: Tokenizer | None
    """The model's tokenizer, for stop strings."""

    def serve(self, run: "SharedRun", place: int, is_stopped: Callable[[], bool]) -> Served:
        """Serve the share of replica number `place`, and what others hand over; see Session.serve.
        Raises Stopped at the next step's result once is_stopped()."""
        with contextlib.ExitStack() as stack:
            grammars = self._grammars(run.inputs, run.adopted)
            if grammars is not None:
                stack.callback(grammars.close)
            return ServingReplica(self, run, place, grammars, is_stopped).serve()

    def _grammars(
        self, inputs: Sequence[InputRequest], adopted: Sequence[AdoptedRequest]
    ) -> CompiledGrammars | None:
        """Return the model's grammars if a request has structured output."""
        asked = any(
            entry.request is not None and entry.request.sampling.structured_outputs is not None
            for entry in inputs
        )
        if not asked and not any(extension_of(e.extensions, StructuredOutput) for e in adopted):
            return None
        metadata = self.opened.loaded.metadata
        return open_grammars(
            self.options.plan.model.directory, metadata.vocab_size, metadata.eos_token_ids
        )


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A run of all replicas."""

    inputs: Sequence[InputRequest]
    """Requests of all replicas."""
    shares: Sequence[Sequence[InputRequest]]
    """Those of each of them at first."""
    adopted: Sequence[AdoptedRequest]
    """Requests of an earlier driver, of all replicas."""
    on_outcome: OnOutcome
    handover: Handover
    tokens: TokenTimes
    is_measured: bool


class ServingReplica:
    """Serves a replica's requests in one run, on its thread."""

    def __init__(
        self,
        replica: Replica,
        run: SharedRun,
        place: int,
        grammars: CompiledGrammars | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        plan = replica.options.plan
        self._opened = replica.opened
        self._run = run
        self._place = place
        self._is_stopped = is_stopped
        self._scheduler = Scheduler(self._opened.limits, replica.tokenizer)
        self._driver = Driver(
            self._opened.group,
            self._scheduler,
            self._on_result,
            max_history=None,
            recover=self._opened.recover if run.handover.is_alone else self._give_up_and_recover,
            options=DriverOptions(
                grammars,
                keeps_prefixes=not run.is_measured,
                eplb_step_interval=plan.eplb_step_interval,
            ),
        )
        every = with_adapters(self._opened.group, plan.config.lora, run.inputs)
        self._known = {entry.id: entry for entry in every}
        """The requests of all replicas, as this one takes them."""
        self._began = time.monotonic()
        self._arrivals = Arrivals([self._known[e.id] for e in run.shares[place]], self._began)
        self._begun: dict[str, GivenUpRequest] = {}
        """Requests that this replica has given up."""
        self._outputs: dict[str, RequestOutput] = {}
        self._errors: dict[str, str] = {}

    def serve(self) -> Served:
        """Serve until the run is over, or the driver ends and others go on."""
        try:
            self._serve()
        except Stopped:
            raise
        except Exception as error:
            if not self._leave_to_others(error):
                raise
        self._errors |= {name: each.error for name, each in self._outputs.items() if each.error}
        return Served(
            self._outputs,
            self._errors,
            time.monotonic() - self._began,
            list(self._driver.records),
            _since_arrival(self._driver.timings, self._run.inputs, self._began),
            self._driver.drafts,
            begun=self._begun,
        )

    def _serve(self) -> None:
        run, driver = self._run, self._driver
        adopted = [each for each in run.adopted if each.dp_rank == self._place]
        embeds = [e.request.prompt_embeds for e in run.inputs if e.request is not None]
        kept, lost = driver.claim(
            adopted, [each for each in embeds if isinstance(each, HostTensor)]
        )
        self._end([*lost, *self._scheduler.adopt_requests(kept)])
        running = {request.req_id for request in adopted}
        while True:
            self._arrivals.add([self._as_taken_here(e) for e in run.handover.take(self._place)])
            due = self._arrivals.take_due()
            self._add([entry for entry in due if entry.id not in running])
            if driver.busy:
                self._end(driver.step())
                continue
            for output in driver.run():
                self._end([output])
            _end_if(self._is_stopped)
            if self._arrivals.has_more:
                self._arrivals.wait()
            elif not run.handover.rest(self._place, self._is_stopped):
                return

    def _on_result(self, result: StepResult) -> None:
        if self._run.is_measured:
            self._run.tokens.note(result)
        suspect = self._run.handover.on_trial
        if suspect is not None and suspect in result.req_ids:
            self._run.handover.pass_trial(suspect)
        _end_if(self._is_stopped)

    def _add(self, entries: Sequence[InputRequest]) -> None:
        for name, error in _add_all(self._driver, entries).items():
            self._refuse(name, error)

    def _refuse(self, name: str, error: str) -> None:
        self._errors[name] = error
        self._run.handover.end_request(name)
        self._run.on_outcome(name, error)

    def _end(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._outputs[output.req_id] = output
            self._run.handover.end_request(output.req_id)
            self._run.on_outcome(output.req_id, output)

    def _as_taken_here(self, entry: InputRequest) -> InputRequest:
        """Return a request of another replica as this one takes it, behind what it has."""
        own, request = self._known[entry.id], entry.request
        if own.request is not None and request is not None:
            own = replace(own, request=replace(own.request, continues=request.continues))
        self._known[entry.id] = own
        return own

    def _give_up_and_recover(self, died: WorkerDied) -> None:
        self._give_up(died)
        self._opened.recover(died)
        self._run.handover.come_back(self._place)

    def _give_up(self, loss: Exception) -> None:
        """Hand the requests over to other replicas."""
        self._end(self._driver.take_ended())
        given_up = self._driver.give_up_requests()
        self._begun |= given_up
        entries = [self._continued(name, each.output) for name, each in given_up.items()]
        not_begun = self._arrivals.take_all()
        for entry in self._run.handover.lose(self._place, entries, not_begun):
            self._refuse(entry.id, f"the daemons of {MAX_LOSSES} replicas have died of it: {loss}")

    def _continued(self, name: str, output: RequestOutput | None) -> InputRequest:
        entry = self._known[name]
        if output is None or entry.request is None:
            return entry
        return replace(entry, request=replace(entry.request, continues=output))

    def _leave_to_others(self, error: Exception) -> bool:
        """Let other replicas go on with everything, as this one's driver has ended. Return False if
        there is none, or something cannot go on there."""
        handover = self._run.handover
        if handover.is_alone:
            return False
        self._give_up(error)
        if self._scheduler.has_unfinished_requests() or not handover.end(self._place):
            return False
        sys.stderr.write(f"replica {self._place} has ended, and the others go on: {error}\n")
        return True


def _end_if(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise Stopped


def _since_arrival(
    timings: dict[str, RequestTiming], inputs: Sequence[InputRequest], start: float
) -> dict[str, RequestTiming]:
    """Return the times of requests with those of their arrivals in place of those at which the
    driver took them, between two steps."""
    arrived = {entry.id: start + entry.arrival_s for entry in inputs if entry.arrival_s}
    return {
        req_id: timing._replace(added=arrived.get(req_id, timing.added))
        for req_id, timing in timings.items()
    }


def _add_all(driver: Driver, inputs: Sequence[InputRequest]) -> dict[str, str]:
    """Queue requests; return the errors of those that cannot be queued."""
    errors = {}
    for entry in inputs:
        if entry.request is None:
            errors[entry.id] = entry.error
            continue
        try:
            driver.add_request(entry.request)
        except RequestError as error:
            errors[entry.id] = flat(error).reason
    return errors
