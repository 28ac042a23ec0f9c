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
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, TypeVar

from worker_client.driver import Driver
from worker_client.driver_thread import (
    DriverThread,
    OpenDriver,
    OtherDrivers,
    RequestGivenUp,
    ServedRequest,
)
from worker_client.errors import DriverClosed, config_error
from worker_client.request_stream import MAX_UNIQUE_ID, RequestProgress, RequestStream, streamed
from worker_client.requests import GenerationRequest

MAX_REQUESTS: Final = 4096
"""Default bound on unfinished requests."""

T = TypeVar("T")


class AsyncDriver:
    """Owns the thread. All methods belong to the event loop on which it was entered."""

    def __init__(
        self,
        open_driver: OpenDriver,
        *,
        max_requests: int = MAX_REQUESTS,
        others: OtherDrivers | None = None,
        on_change: Callable[[], None] = lambda: None,
        loss: Exception | None = None,
    ) -> None:
        """max_requests: generate waits while so many requests are unfinished. others: requests are
        given up at a loss, if the scheduler can (ContinuingScheduler); without, they wait for the
        successor, as do calls. on_change: called when the group has lost a rank, when it serves
        again, and when the driver has ended. loss: that of an earlier driver, until this one
        serves. Raises ClientConfigError."""
        given: object = open_driver
        if not callable(given):
            fix = "give a function that returns a context with a Driver"
            raise config_error("open_driver", given, "it is no function", fix)
        if type(max_requests) is not int or max_requests < 1:
            raise config_error("max_requests", max_requests, "it is no count", "use at least 1")
        self._room = asyncio.Semaphore(max_requests)
        self._on_change = on_change
        self._thread = DriverThread(open_driver, self._end, self._note_loss, others)
        self._loss = loss
        self._served: set[ServedRequest] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        """Calls that have no result yet."""
        self._serials = itertools.count()
        self._error: Exception | None = None
        self._has_ended = asyncio.Event()

    async def __aenter__(self) -> "AsyncDriver":
        """Start the thread, and wait until it can serve. Raises what open_driver raises."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._thread.start(loop, ready)
        try:
            await ready
        except BaseException:  # canceled, too: the thread ends once the group is open
            self._thread.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort all requests, and wait until the group is closed."""
        self._end(DriverClosed("the driver was closed"))
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    @property
    def error(self) -> Exception | None:
        """The error with which the driver has ended; None while it serves."""
        return self._error

    @property
    def loss(self) -> Exception | None:
        """Error of a loss for which requests are given up, until it is made good: that of the rank,
        or of its replacement or of what it has missed, after which the next attempt follows, or
        with which the driver has ended."""
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
        self._thread.call(work, future)
        return await future

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

    def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        """Serve a request; yield its tokens as they come. The last value of each sample has its
        output. A reader that is slower than the model gets more tokens at a time. Closing the
        generator, or canceling its task, aborts the request.

        Raises:
            RequestError: the request is wrong, or adding it has failed for another reason, which is
                the error's cause.
            InvalidSchedulerOutput: the scheduler gave a step that cannot be sent, because of this
                request.
            DriverClosed: the driver was closed.
            WorkerDaemonError: the driver has ended, as Driver.step says, and so has every request.
        """
        return streamed(request, self.serve)

    async def serve(self, request: GenerationRequest, stream: RequestStream) -> None:
        """Serve the samples of a request (see streamed) that have not ended in its stream, behind
        what others have reported. Canceling it aborts them. Raises as generate does, and
        RequestGivenUp: see __init__."""
        # Results of an aborted request may still come, so no id is used again.
        unique_id = f"{next(self._serials)}:{request.id}"[:MAX_UNIQUE_ID]
        async with self._room:
            if self._loss is not None:
                raise RequestGivenUp(self._loss, has_begun=False)
            if self._error is not None:
                raise self._error
            served = ServedRequest(request, stream, unique_id)
            self._served.add(served)
            self._thread.add(served)
            try:
                await served.ended
            finally:
                self._served.remove(served)
                if served.ended.cancelled():
                    self._thread.abort(served)

    def _note_loss(self, loss: Exception | None) -> None:
        """Note a loss, or with None that it is made good. Requests and calls that have not reached
        the thread are given up too."""
        self._loss = loss
        if loss is not None:
            self._thread.give_up_untaken(loss)
        self._on_change()

    def _end(self, error: Exception) -> None:
        """Fail every request, and those to come."""
        if self._error is None:
            self._error = error
        self._on_change()
        self._has_ended.set()
        for served in self._served:
            served.fail(self._error)
        for future in tuple(self._calls):
            if not future.done():
                future.set_exception(self._error)
