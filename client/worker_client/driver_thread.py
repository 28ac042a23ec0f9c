"""The thread of an AsyncDriver: opens the group, and runs the driver's loop. Requests, calls and
progress cross between it and the event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from rpc_schema.errors import DrainingError, WorkerDaemonError
from worker_client.driver import Driver
from worker_client.errors import (
    ClientError,
    InvalidSchedulerOutput,
    ReplacementFailed,
    WeightsNotWhole,
    WorkerDied,
)
from worker_client.request_stream import RequestProgress, RequestStream
from worker_client.requests import GenerationRequest, Reports, forked
from worker_client.scheduler import RequestOutput

DRAIN_CHECK_S: Final = 0.2
"""Time between two attempts to send a step while an operator drains the group."""
LOOK_S: Final = 0.25
"""Time between two looks for dead daemons while there is nothing to do."""

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

OpenDriver: TypeAlias = Callable[[], AbstractContextManager[Driver]]


@runtime_checkable
class StreamingScheduler(Protocol):
    """A scheduler that shows the tokens of unfinished requests, as the reference scheduler does.
    With another one, tokens come when the request ends."""

    def generated_tokens(self, req_id: str, first: int) -> list[int]:
        """Return a request's generated tokens from number `first` on, counted from 0. They stay as
        they are, but for the last ones of a request that ends with an error. Empty for an unknown
        request."""


@runtime_checkable
class ReportingScheduler(Protocol):
    """A scheduler that shows the log probabilities of unfinished requests, as the reference
    scheduler does. With another one, they come when the request ends."""

    def generated_reports(self, req_id: str, first: int) -> Reports:
        """Return what a request reports on its generated tokens from number `first` on, and on its
        prompt."""


class OtherDrivers(Protocol):
    """Those who go on with the requests of a driver while its group lacks a rank. They are told on
    the driver's thread."""

    def lose(self, error: Exception) -> None:
        """Take note that it lacks a rank, or ends."""

    def welcome(self, driver: Driver) -> None:
        """Let it do what it has missed, after which it serves; raises a ClientError if that fails.
        It is called again then."""


class RequestGivenUp(ClientError):
    """A request cannot go on here, or not soon: its group has lost a rank, or its driver has
    ended. Another driver can continue it (RequestStream.left)."""

    def __init__(self, reason: Exception, *, has_begun: bool) -> None:
        super().__init__(f"the request was given up: {reason}")
        self.reason = reason
        self.has_begun = has_begun
        """The driver had it, so it may be the cause."""


class ServedRequest:
    """A request as one driver serves it. Belongs to the event loop, but for `samples` and
    `names`."""

    def __init__(self, request: GenerationRequest, stream: RequestStream, unique_id: str) -> None:
        own = forked(replace(request, id=unique_id))
        samples = dict(zip((sample.id for sample in forked(request)), own, strict=True))
        self.samples = [
            samples[name] if output is None else replace(samples[name], continues=output)
            for name, output in stream.left.items()
        ]
        """Those that have not ended, as the driver gets them."""
        self.names = {samples[name].id: name for name in stream.left}
        """Their ids for the reader, by those that the driver knows them by."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once all have ended; has the error otherwise."""
        self._stream = stream

    def put(self, progress: RequestProgress) -> None:
        """Pass the progress of a step on."""
        self._stream.put(progress)
        if not self._stream.left:
            _resolve(self.ended, None, None)

    def fail(self, error: Exception) -> None:
        """End the request with an error, after what was put before."""
        _resolve(self.ended, None, error)

    def give_up(self, given_up: "_GivenUp") -> None:
        """Let another driver serve it, after what was put before."""
        if self.ended.done():
            return
        for sample, output in given_up.outputs.items():
            if output is not None:
                self._stream.left[self.names[sample]] = output
        self.fail(RequestGivenUp(given_up.loss, has_begun=bool(given_up.outputs)))


class _GivenUp(NamedTuple):
    outputs: Mapping[str, RequestOutput | None]
    """By the driver's id of the sample; none: the request was not begun."""
    loss: Exception


_Update: TypeAlias = tuple[ServedRequest, RequestProgress | _GivenUp | Exception]


def _deliver(updates: Sequence[_Update]) -> None:
    for served, item in updates:
        if isinstance(item, Exception):
            served.fail(item)
        elif isinstance(item, _GivenUp):
            served.give_up(item)
        else:
            served.put(item)


class _Add(NamedTuple):
    served: ServedRequest


class _Abort(NamedTuple):
    served: ServedRequest


class _Call(NamedTuple):
    work: Callable[[Driver], Any]
    future: "asyncio.Future[Any]"


class DriverThread:
    """The thread: takes commands between steps, and reports after each."""

    def __init__(
        self,
        open_driver: OpenDriver,
        on_end: Callable[[Exception], None],
        on_loss: Callable[[Exception | None], None],
        others: OtherDrivers | None,
    ) -> None:
        """on_end is called on the event loop with the error with which the thread ends, on_loss
        with AsyncDriver.loss as it changes. others: None: no request is given up."""
        self._open_driver = open_driver
        self._on_end = on_end
        self._on_loss = on_loss
        self._others = others
        self._is_back = False
        """The group has all its ranks again, but was not welcomed."""
        self._welcome_at = 0.0
        """Time of the next attempt."""
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | None] = queue.SimpleQueue()
        """None: stop."""
        self._thread: threading.Thread | None = None
        self._served: dict[str, ServedRequest] = {}
        """By the id of an unfinished sample."""
        self._num_experts: dict[str, int] = {}
        """Positions of each sample whose experts were reported."""
        self._num_reported: dict[str, int] = {}
        """Likewise, the number of tokens that were reported."""
        self._reporting: set[str] = set()
        """Unfinished samples whose requests asked for log probabilities."""
        self._refused: list[_Update] = []
        """Requests that were refused, to be reported after the next step."""

    # On the event loop.

    def start(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]") -> None:
        """Start the thread; `ready` is resolved once it serves."""
        self._thread = threading.Thread(target=self._run, args=(loop, ready), name="driver")
        self._thread.start()

    def add(self, served: ServedRequest) -> None:
        """Serve a request."""
        self._commands.put(_Add(served))

    def abort(self, served: ServedRequest) -> None:
        """End a request early."""
        self._commands.put(_Abort(served))

    def give_up_untaken(self, loss: Exception) -> None:
        """Give up the requests and the calls that the thread has not taken."""
        kept = []
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, _Add):
                    command.served.give_up(_GivenUp({}, loss))
                elif isinstance(command, _Call):
                    _resolve(command.future, None, loss)
                else:
                    kept.append(command)
        for command in kept:
            self._commands.put(command)

    def call(self, work: Callable[[Driver], T], future: "asyncio.Future[T]") -> None:
        """Call a function; the future gets its result."""
        self._commands.put(_Call(work, future))

    def stop(self) -> None:
        """Abort all requests, close the group and end the thread."""
        self._commands.put(None)

    def join(self) -> None:
        """Wait until the thread has ended. Not on the event loop."""
        if self._thread is not None:
            self._thread.join()

    # On the thread.

    def _run(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]") -> None:
        try:
            with self._open_driver() as driver, self._giving_up(driver, loop):
                if self._others is not None:
                    self._others.welcome(driver)
                    loop.call_soon_threadsafe(self._on_loss, None)
                loop.call_soon_threadsafe(_resolve, ready, None, None)
                while self._take_commands(driver):
                    updates = self._step(driver)
                    if updates:
                        loop.call_soon_threadsafe(_deliver, updates)
                    if self._is_back:
                        self._come_back(driver, loop)
                self._abort_all(driver)
        except BaseException as error:  # every request ends with it
            reason = error if isinstance(error, Exception) else _ended_by(error)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_resolve, ready, None, reason)
                loop.call_soon_threadsafe(self._on_end, reason)

    @contextlib.contextmanager
    def _giving_up(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Give all requests up whenever a daemon has died, and if the driver ends with an error."""
        others = self._others
        if others is None:
            yield
            return
        recover = driver.recover

        def give_up(loss: Exception) -> None:
            self._is_back = False
            others.lose(loss)
            loop.call_soon_threadsafe(self._on_loss, loss)
            loop.call_soon_threadsafe(_deliver, self._give_up(driver, loss))

        def give_up_and_recover(died: WorkerDied) -> None:
            give_up(died)
            try:
                recover(died)
            except ReplacementFailed as failed:
                loop.call_soon_threadsafe(self._on_loss, failed)
                raise
            self._is_back = True

        driver.recover = give_up_and_recover
        try:
            yield
        except Exception as error:
            try:
                give_up(error)
            except Exception:  # of the scheduler: they end with the driver's error
                _LOG.exception("giving up the requests of a driver that ends failed")
            raise

    def _come_back(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        """Serve again, once what was missed is done, behind the steps in flight."""
        assert self._others is not None, "it was lost"
        if time.monotonic() < self._welcome_at or (driver.busy and not self._served):
            return
        try:
            self._others.welcome(driver)
        except ClientError as error:
            _LOG.warning("%s", error)
            self._welcome_at = time.monotonic() + LOOK_S
            loop.call_soon_threadsafe(self._on_loss, error)
            return
        self._is_back = False
        loop.call_soon_threadsafe(self._on_loss, None)

    def _give_up(self, driver: Driver, loss: Exception) -> list[_Update]:
        """Give up all requests that can go on elsewhere; return their last updates."""
        updates = self._updates(driver, driver.take_ended())
        left: dict[ServedRequest, dict[str, RequestOutput | None]] = {}
        for sample, given_up in driver.give_up_requests().items():
            served = self._served.get(sample)
            if served is not None:
                left.setdefault(served, {})[sample] = given_up.output
        self._forget([sample for own in left.values() for sample in own])
        return [*updates, *((served, _GivenUp(own, loss)) for served, own in left.items())]

    def _take_commands(self, driver: Driver) -> bool:
        """Obey the commands that are here; if there is nothing else to do, wait for one, or until
        it is time to look for dead daemons. Return False if one of them is to stop."""
        is_idle = not driver.busy
        while True:
            try:
                command = self._commands.get(block=is_idle, timeout=LOOK_S)
            except queue.Empty:
                if is_idle:
                    self._look(driver)
                return True
            is_idle = False
            if command is None:
                return False
            if isinstance(command, _Abort):
                self._abort(driver, command.served.names)
                self._forget(command.served.names)
            elif isinstance(command, _Call):
                self._call(driver, command)
            else:
                self._add(driver, command.served)

    @staticmethod
    def _look(driver: Driver) -> None:
        """Replace a dead daemon. One that has no successor yet is looked for again, as is one in
        whose group an operator drains another."""
        try:
            driver.look()
        except DrainingError:
            return
        except ReplacementFailed as failed:
            _LOG.warning("a daemon that died while there was nothing to do: %s", failed)

    def _add(self, driver: Driver, served: ServedRequest) -> None:
        try:
            for sample in served.samples:
                driver.add_request(sample)
        except Exception as error:  # it is this request's alone
            self._abort(driver, served.names)
            self._refused.append((served, error))
            return
        for sample in served.samples:
            self._served[sample.id] = served
            self._num_reported[sample.id] = _num_reported(sample.continues)
            if sample.continues is not None and sample.continues.routed_experts is not None:
                self._num_experts[sample.id] = len(sample.continues.routed_experts)
        sampling = served.samples[0].sampling
        has_numbers = any(s.sampling.prompt_logprobs is not None for s in served.samples)
        has_numbers = has_numbers or sampling.logprobs is not None or sampling.full_logprobs
        if has_numbers or served.samples[0].routed_experts:
            self._reporting.update(served.names)

    @staticmethod
    def _call(driver: Driver, command: _Call) -> None:
        if command.future.cancelled():
            return
        result, failure = None, None
        try:
            result = command.work(driver)
        except Exception as error:  # it is the caller's
            failure = error
        loop = command.future.get_loop()
        loop.call_soon_threadsafe(_resolve, command.future, result, failure)

    @staticmethod
    def _abort(driver: Driver, samples: Iterable[str]) -> None:
        for sample in samples:
            try:
                driver.abort_request(sample)
            except Exception:  # of the scheduler: the others are served
                _LOG.exception("aborting request %r failed", sample)

    def _refuse_step(self, driver: Driver, refusal: InvalidSchedulerOutput) -> list[_Update]:
        """End the request for which a step was refused, if it is one of ours; else raise the
        refusal: it does not say which request to leave out."""
        served = self._served.get(refusal.req_id) if isinstance(refusal.req_id, str) else None
        if served is None:
            raise refusal
        self._abort(driver, served.names)
        self._forget(served.names)
        return [(served, refusal)]

    def _forget(self, samples: Iterable[str]) -> None:
        for sample in samples:
            self._served.pop(sample, None)
            self._num_reported.pop(sample, None)
            self._num_experts.pop(sample, None)
            self._reporting.discard(sample)

    def _step(self, driver: Driver) -> list[_Update]:
        """Run a step, if there is one; return the updates of its requests."""
        updates, self._refused = self._refused, []
        if not driver.busy:
            return updates
        try:
            outputs = driver.step()
        except (DrainingError, WeightsNotWhole):
            time.sleep(DRAIN_CHECK_S)
            return updates
        except InvalidSchedulerOutput as refusal:
            return updates + self._refuse_step(driver, refusal)
        except ReplacementFailed as failed:
            if self._others is None or self._served:
                raise
            _LOG.warning("a daemon that died, whose requests go on elsewhere: %s", failed)
            time.sleep(LOOK_S)
            return updates
        return updates + self._updates(driver, outputs)

    def _updates(self, driver: Driver, outputs: Iterable[RequestOutput]) -> list[_Update]:
        """Return what is new of requests, some of which have ended. First tokens precede all
        others: the event loop takes updates in this order, and those who wait for a first token
        have waited longest."""
        updates: list[_Update] = []
        later: list[_Update] = []
        for output in outputs:
            served = self._served.pop(output.req_id, None)
            if served is not None:  # else it was aborted
                first, name = self._num_reported.pop(output.req_id), served.names[output.req_id]
                named = replace(output, req_id=name)
                reports = self._last_reports(output, first) if self._reporting else None
                progress = RequestProgress(name, output.token_ids[first:], named, reports)
                (later if first else updates).append((served, progress))
        if isinstance(driver.scheduler, StreamingScheduler):
            self._take_new_tokens(driver.scheduler, updates, later)
        return updates + later

    def _take_new_tokens(
        self, scheduler: StreamingScheduler, first_ones: list[_Update], later: list[_Update]
    ) -> None:
        """Add the tokens of unfinished requests that were not reported yet."""
        is_asked = bool(self._reporting)
        reporter = scheduler if is_asked and isinstance(scheduler, ReportingScheduler) else None
        for sample, first in self._num_reported.items():
            tokens = scheduler.generated_tokens(sample, first)
            if tokens:
                self._num_reported[sample] = first + len(tokens)
                served, reports = self._served[sample], None
                if reporter is not None and sample in self._reporting:
                    reports = reporter.generated_reports(sample, first)
                    reports = self._not_given(sample, _from_first(reports, first))
                progress = RequestProgress(served.names[sample], tokens, None, reports)
                (later if first else first_ones).append((served, progress))

    def _last_reports(self, output: RequestOutput, first: int) -> Reports | None:
        """Return what a sample that has ended reports on its tokens from number `first` on."""
        if output.req_id not in self._reporting:
            return None
        self._reporting.discard(output.req_id)
        own, full = output.logprobs, output.full_logprobs
        reports = Reports(
            None if own is None else own[first:],
            output.prompt_logprobs,
            None if full is None else full[first:],
            output.routed_experts,
        )
        reports = self._not_given(output.req_id, _from_first(reports, first))
        self._num_experts.pop(output.req_id, None)
        return reports

    def _not_given(self, sample: str, reports: Reports) -> Reports:
        """Return reports without the experts that a sample has reported before."""
        experts = reports.routed_experts
        if experts is None:
            return reports
        given, self._num_experts[sample] = self._num_experts.get(sample, 0), len(experts)
        return reports._replace(routed_experts=experts[given:].copy())

    def _abort_all(self, driver: Driver) -> None:
        """End what is unfinished, and let the daemons drop its rows."""
        self._abort(driver, self._served)
        driver.resume()
        with contextlib.suppress(WorkerDaemonError):
            for _ in driver.run():
                pass


def _num_reported(former: RequestOutput | None) -> int:
    """Return the number of tokens that a driver has reported of a request that it has given up: of
    a trace, those with log probabilities."""
    if former is None:
        return 0
    return len(former.token_ids if former.full_logprobs is None else former.full_logprobs)


def _from_first(reports: Reports, first: int) -> Reports:
    """Return reports with those of the prompt only if they begin with the first token."""
    return reports._replace(prompt_logprobs=None) if first else reports


def _ended_by(error: BaseException) -> ClientError:
    """Return the error of requests that end with an exit, which asyncio would take as its own."""
    return ClientError(f"the driver's thread has ended by {type(error).__name__}: {error}")


def _resolve(future: "asyncio.Future[T]", result: T, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
