"""Serves the requests of an asyncio program. A separate thread opens the group and runs the
driver's loop; requests and their tokens cross between it and the event loop.

    async with AsyncDriver(open_driver) as driver:
        async for progress in driver.generate(request):
            ...

`open_driver` is a function without arguments that returns a context with a Driver: it attaches and
prepares a group, makes scheduler and driver, and closes the group when the context ends. It runs on
the thread, since a group belongs to the thread that attached it.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from rpc_schema.errors import DrainingError, WorkerDaemonError
from worker_client.driver import Driver
from worker_client.errors import (
    ClientError,
    DriverClosed,
    InvalidSchedulerOutput,
    ReplacementFailed,
    WeightsNotWhole,
    WorkerDied,
)
from worker_client.inputs.request_checks import checked_id, validated
from worker_client.requests import GenerationRequest, Reports, forked, hashed, must_hash, seeded
from worker_client.scheduler import RequestOutput
from worker_client.scheduler_output import Experts

MAX_REQUESTS: Final = 4096
"""Default bound on unfinished requests."""
MAX_UNIQUE_ID: Final = 240
"""Characters of the id by which the daemons know a request, without that of a sample."""
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


class RequestProgress(NamedTuple):
    """New tokens of a request, or of one of its samples."""

    req_id: str
    """Id of the request; of the sample if n > 1."""
    token_ids: list[int]
    """Tokens since the last RequestProgress of this id."""
    output: RequestOutput | None
    """The whole output, once it has ended."""
    reports: Reports | None = None
    """Log probabilities of these tokens, and with the first of them those of the prompt, and the
    experts that became known, if the request asked for any."""


class RequestGivenUp(ClientError):
    """A request cannot go on here, or not soon: its group has lost a rank, or its driver has
    ended. Another driver can continue it (AsyncDriver.generate)."""

    def __init__(self, left: Mapping[str, RequestOutput | None], reason: Exception) -> None:
        super().__init__(f"the request was given up: {reason}")
        self.left = left
        """Its samples that have not ended, by RequestProgress.req_id, each with its output so far,
        which was reported whole; None: it has none."""
        self.reason = reason


class AsyncDriver:
    """Owns the thread. All methods belong to the event loop on which it was entered."""

    def __init__(
        self,
        open_driver: OpenDriver,
        *,
        max_requests: int = MAX_REQUESTS,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """max_requests: generate waits while so many requests are unfinished. on_change: called
        when the group has lost a rank, when the rank has its successor, and when the driver has
        ended. With it, requests are given up at a loss, if the scheduler can
        (ContinuingScheduler); without, they wait for the successor."""
        self._room = asyncio.Semaphore(max_requests)
        self._on_change = on_change
        self._loop = _DriverLoop(
            open_driver, self._end, None if on_change is None else self._note_loss
        )
        self._loss: Exception | None = None
        self._streams: set[_Stream] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        """Calls that have no result yet."""
        self._serials = itertools.count()
        self._error: Exception | None = None
        self._has_ended = asyncio.Event()

    async def __aenter__(self) -> "AsyncDriver":
        """Start the thread, and wait until it can serve. Raises what open_driver raises."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._loop.start(loop, ready)
        try:
            await ready
        except BaseException:  # canceled, too: the thread ends once the group is open
            self._loop.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort all requests, and wait until the group is closed."""
        self._end(DriverClosed("the driver was closed"))
        self._loop.stop()
        await asyncio.to_thread(self._loop.join)

    @property
    def error(self) -> Exception | None:
        """The error with which the driver has ended; None while it serves."""
        return self._error

    @property
    def loss(self) -> Exception | None:
        """Error of a loss for which requests are given up, until it is made good: that of the rank,
        or of its replacement, after which the next attempt follows, or with which the driver has
        ended."""
        return self._loss

    async def wait_ended(self) -> Exception:
        """Wait until the driver has ended; return its error."""
        await self._has_ended.wait()
        assert self._error is not None, "set with the event"
        return self._error

    async def call(self, work: Callable[[Driver], T]) -> T:
        """Call a function with the driver, on its thread and between two steps: no step runs
        meanwhile. Return its result, or raise its error. It has no way back once it has begun.

        Raises:
            DriverClosed, WorkerDaemonError: as generate does.
        """
        if self._error is not None:
            raise self._error
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._loop.call(work, future)
        return await future

    async def call_all(self, work: Callable[[Driver], T]) -> list[T]:
        """Call a function with each driver, as DataParallelDriver.call_all does: there is one."""
        return [await self.call(work)]

    async def pause(self) -> None:
        """Hold all requests, with their KV, until resume(): see Driver.pause. Returns once no step
        is in flight on any rank, and their tokens are on their way to the readers. Requests that
        come meanwhile wait.

        Raises:
            DriverClosed, WorkerDaemonError: as generate does.
        """
        await self.call(lambda driver: driver.pause())
        while await self.call(lambda driver: driver.num_in_flight):
            pass  # a step's result is taken between two calls

    async def resume(self) -> None:
        """Go on where pause() has stopped. Raises as it does."""
        await self.call(lambda driver: driver.resume())

    async def generate(
        self, request: GenerationRequest, left: Mapping[str, RequestOutput | None] | None = None
    ) -> AsyncGenerator[RequestProgress, None]:
        """Serve a request; yield its tokens as they come. The last value of each sample has its
        output. A reader that is slower than the model gets more tokens at a time. Closing the
        generator, or canceling its task, aborts the request. left: serve these samples alone,
        behind what another driver has reported (RequestGivenUp.left).

        Raises:
            RequestGivenUp: see __init__.
            RequestError: the request is wrong, or adding it has failed for another reason, which is
                the error's cause.
            InvalidSchedulerOutput: the scheduler gave a step that cannot be sent, because of this
                request.
            DriverClosed: the driver was closed.
            WorkerDaemonError: the driver has ended, as Driver.step says, and so has every request.
        """
        # Results of an aborted request may still come, so no id is used again.
        unique = await prepared(request, f"{next(self._serials)}:")
        samples = {f"{request.id}{s.id.removeprefix(unique.id)}": s for s in forked(unique)}
        if left is not None:
            samples = {n: replace(samples[n], continues=output) for n, output in left.items()}
        async with self._room:
            self._check_serving(dict.fromkeys(samples) if left is None else left)
            stream = _Stream(samples)
            self._streams.add(stream)
            self._loop.add([*samples.values()], stream)
            try:
                while stream.left:
                    for progress in await stream.take():
                        yield progress
            finally:
                self._streams.remove(stream)
                if stream.left:
                    self._loop.abort(stream)

    def _check_serving(self, left: Mapping[str, RequestOutput | None]) -> None:
        if self._loss is not None:
            raise RequestGivenUp(left, self._loss)
        if self._error is not None:
            raise self._error

    def _note_loss(self, loss: Exception | None) -> None:
        """Note a loss, or with None that it is made good. Requests that have not reached the thread
        are given up too."""
        self._loss = loss
        if loss is not None:
            self._loop.give_up_untaken(loss)
        assert self._on_change is not None, "otherwise nothing is given up"
        self._on_change()

    def _end(self, error: Exception) -> None:
        """Fail every request, and those to come."""
        if self._error is None:
            self._error = error
        if self._on_change is not None:
            self._on_change()
        self._has_ended.set()
        for stream in self._streams:
            stream.fail(self._error)
        for future in tuple(self._calls):
            _resolve(future, None, self._error)


async def prepared(request: GenerationRequest, prefix: str = "") -> GenerationRequest:
    """Return the request, checked, with a seed and with the hashes of its tensors, under an id with
    this prefix that daemons take. Raises RequestError."""
    req_id = checked_id(request)
    request = seeded(validated(replace(request, id=f"{prefix}{req_id}"[:MAX_UNIQUE_ID])))
    return await asyncio.to_thread(hashed, request) if must_hash(request) else request


class _Stream:
    """Results of one request that its reader has not taken yet. Belongs to the event loop; the
    thread only passes it on."""

    def __init__(self, samples: Mapping[str, GenerationRequest]) -> None:
        """samples: by the ids that the reader knows them by."""
        self.names = {sample.id: name for name, sample in samples.items()}
        """By the ids that the driver knows them by."""
        self.left = set(samples)
        """Samples that have not ended."""
        self._former = {name: sample.continues for name, sample in samples.items()}
        """Their outputs under other drivers."""
        self._waiting: dict[str, RequestProgress] = {}
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def put(self, progress: RequestProgress) -> None:
        """Add the progress of a step."""
        before = self._waiting.get(progress.req_id)
        if before is not None:
            progress = _joined(before, progress)
        self._waiting[progress.req_id] = progress
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error, after what was put before."""
        if self._error is None:
            self._error = error
        self._changed.set()

    def give_up(self, outputs: Mapping[str, RequestOutput | None], loss: Exception) -> None:
        """Let another driver serve these samples, after what was put before."""
        named = {self.names[sample]: output for sample, output in outputs.items()}
        left = {name: output or self._former[name] for name, output in named.items()}
        self.fail(RequestGivenUp(left, loss))

    async def take(self) -> list[RequestProgress]:
        """Wait for progress, and return it. Raises the error if there is none before it."""
        await self._changed.wait()
        waiting, self._waiting = self._waiting, {}
        if not waiting and self._error is not None:
            self.left.clear()
            raise self._error
        if self._error is None:
            self._changed.clear()
        self.left.difference_update(name for name, progress in waiting.items() if progress.output)
        return list(waiting.values())


def _joined(first: RequestProgress, second: RequestProgress) -> RequestProgress:
    """Return the progress of two steps as that of one."""
    reports = second.reports
    if first.reports is not None and reports is not None:
        reports = Reports(
            _both(first.reports.logprobs, reports.logprobs),
            first.reports.prompt_logprobs or reports.prompt_logprobs,
            _both(first.reports.full_logprobs, reports.full_logprobs),
            _both_experts(first.reports.routed_experts, reports.routed_experts),
        )
    token_ids = first.token_ids + second.token_ids
    return second._replace(token_ids=token_ids, reports=reports)


def _both(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    return None if first is None or second is None else first + second


def _both_experts(first: Experts | None, second: Experts | None) -> Experts | None:
    if first is None or second is None:
        return second if first is None else first
    return np.concatenate((first, second))


class _GivenUp(NamedTuple):
    outputs: Mapping[str, RequestOutput | None]
    loss: Exception


_Update: TypeAlias = tuple[_Stream, RequestProgress | _GivenUp | Exception]


def _deliver(updates: Sequence[_Update]) -> None:
    for stream, item in updates:
        if isinstance(item, Exception):
            stream.fail(item)
        elif isinstance(item, _GivenUp):
            stream.give_up(*item)
        else:
            stream.put(item)


class _Add(NamedTuple):
    samples: Sequence[GenerationRequest]
    stream: _Stream


class _Abort(NamedTuple):
    stream: _Stream


class _Call(NamedTuple):
    work: Callable[[Driver], Any]
    future: "asyncio.Future[Any]"


class _DriverLoop:
    """The thread: takes commands between steps, and reports after each."""

    def __init__(
        self,
        open_driver: OpenDriver,
        on_end: Callable[[Exception], None],
        on_loss: Callable[[Exception | None], None] | None,
    ) -> None:
        """on_end is called on the event loop with the error with which the thread ends, on_loss
        with AsyncDriver.loss as it changes. None: no request is given up."""
        self._open_driver = open_driver
        self._on_end = on_end
        self._on_loss = on_loss
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | None] = queue.SimpleQueue()
        """None: stop."""
        self._thread: threading.Thread | None = None
        self._streams: dict[str, _Stream] = {}
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

    def add(self, samples: Sequence[GenerationRequest], stream: _Stream) -> None:
        """Serve the samples of a request."""
        self._commands.put(_Add(samples, stream))

    def abort(self, stream: _Stream) -> None:
        """End a request early."""
        self._commands.put(_Abort(stream))

    def give_up_untaken(self, loss: Exception) -> None:
        """Give up the requests that the thread has not taken."""
        kept = []
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, _Add):
                    command.stream.give_up(dict.fromkeys(command.stream.names), loss)
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
                loop.call_soon_threadsafe(_resolve, ready, None, None)
                while self._take_commands(driver):
                    updates = self._step(driver)
                    if updates:
                        loop.call_soon_threadsafe(_deliver, updates)
                self._abort_all(driver)
        except BaseException as error:  # every request ends with it
            reason = error if isinstance(error, Exception) else _ended_by(error)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_resolve, ready, None, reason)
                loop.call_soon_threadsafe(self._on_end, reason)

    @contextlib.contextmanager
    def _giving_up(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Give all requests up whenever a daemon has died, and if the driver ends with an error."""
        on_loss = self._on_loss
        if on_loss is None:
            yield
            return
        recover = driver.recover

        def give_up(loss: Exception) -> None:
            loop.call_soon_threadsafe(on_loss, loss)
            loop.call_soon_threadsafe(_deliver, self._give_up(driver, loss))

        def give_up_and_recover(died: WorkerDied) -> None:
            give_up(died)
            try:
                recover(died)
            except ReplacementFailed as failed:
                loop.call_soon_threadsafe(on_loss, failed)
                raise
            loop.call_soon_threadsafe(on_loss, None)

        driver.recover = give_up_and_recover
        try:
            yield
        except Exception as error:
            try:
                give_up(error)
            except Exception:  # of the scheduler: they end with the driver's error
                _LOG.exception("giving up the requests of a driver that ends failed")
            raise

    def _give_up(self, driver: Driver, loss: Exception) -> list[_Update]:
        """Give up all requests that can go on elsewhere; return their last updates."""
        updates = self._updates(driver, driver.take_ended())
        left: dict[_Stream, dict[str, RequestOutput | None]] = {}
        for sample, given_up in driver.give_up_requests().items():
            stream = self._streams.get(sample)
            if stream is not None:
                left.setdefault(stream, {})[sample] = given_up.output
        self._forget([sample for own in left.values() for sample in own])
        return [*updates, *((stream, _GivenUp(own, loss)) for stream, own in left.items())]

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
                self._abort(driver, command.stream.names)
                self._forget(command.stream.names)
            elif isinstance(command, _Call):
                self._call(driver, command)
            else:
                self._add(driver, command)

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

    def _add(self, driver: Driver, command: _Add) -> None:
        try:
            for sample in command.samples:
                driver.add_request(sample)
        except Exception as error:  # it is this request's alone
            self._abort(driver, command.stream.names)
            self._refused.append((command.stream, error))
            return
        for sample in command.samples:
            self._streams[sample.id] = command.stream
            self._num_reported[sample.id] = _num_reported(sample.continues)
            if sample.continues is not None and sample.continues.routed_experts is not None:
                self._num_experts[sample.id] = len(sample.continues.routed_experts)
        sampling = command.samples[0].sampling
        has_numbers = any(s.sampling.prompt_logprobs is not None for s in command.samples)
        has_numbers = has_numbers or sampling.logprobs is not None or sampling.full_logprobs
        if has_numbers or command.samples[0].routed_experts:
            self._reporting.update(command.stream.names)

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
        stream = self._streams.get(refusal.req_id) if isinstance(refusal.req_id, str) else None
        if stream is None:
            raise refusal
        self._abort(driver, stream.names)
        self._forget(stream.names)
        return [(stream, refusal)]

    def _forget(self, samples: Iterable[str]) -> None:
        for sample in samples:
            self._streams.pop(sample, None)
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
            if self._on_loss is None or self._streams:
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
            stream = self._streams.pop(output.req_id, None)
            if stream is not None:  # else it was aborted
                first, name = self._num_reported.pop(output.req_id), stream.names[output.req_id]
                named = replace(output, req_id=name)
                reports = self._last_reports(output, first) if self._reporting else None
                progress = RequestProgress(name, output.token_ids[first:], named, reports)
                (later if first else updates).append((stream, progress))
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
                stream, reports = self._streams[sample], None
                if reporter is not None and sample in self._reporting:
                    reports = reporter.generated_reports(sample, first)
                    reports = self._not_given(sample, _from_first(reports, first))
                progress = RequestProgress(stream.names[sample], tokens, None, reports)
                (later if first else first_ones).append((stream, progress))

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
        self._abort(driver, self._streams)
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
