"""Serves the requests of an asyncio program on several replicas, each with its own driver and
thread.

    async with DataParallelDriver(open_drivers) as driver:
        async for progress in driver.generate(request):
            ...

`open_drivers` has one function for each replica, as AsyncDriver takes it. A long prompt, a failure,
or the replacement of a daemon in one replica delays no request of another. The requests of a
replica that has lost a rank, or whose driver has ended, go on in the others.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import Final

from worker_client.async_driver import MAX_REQUESTS, AsyncDriver
from worker_client.driver_thread import OpenDriver, RequestGivenUp
from worker_client.errors import MissedOperationFailed, ReplacementFailed, config_error
from worker_client.replicas.operations import (
    PAUSE,
    RESUME,
    OtherReplicas,
    ReplicaOperations,
    StandingOperations,
)
from worker_client.replicas.placement import ReplicaPlacement
from worker_client.request_stream import RequestProgress, RequestStream, streamed
from worker_client.requests import GenerationRequest

_LOG = logging.getLogger(__name__)

_ATTEMPT_FAILED: Final = (ReplacementFailed, MissedOperationFailed)
"""Losses that another attempt may end, if a cause outside is removed."""

MAX_LOSSES: Final = 3
"""Losses in a row, without a new token between them, after which a request fails: it may be what
kills the daemons. Before the last of them it is on trial: no other request is meanwhile, so that
those which were lost beside it get their next token."""


class DataParallelDriver:
    """Owns the replicas' drivers. All methods belong to the event loop on which it was entered."""

    def __init__(
        self,
        open_drivers: Sequence[OpenDriver],
        *,
        max_requests: int = MAX_REQUESTS,
        reopen_s: float | None = None,
    ) -> None:
        """max_requests: of one replica. reopen_s: while others serve, the function of a replica
        whose driver has ended is called again every so many seconds, to attach anew
        (DataParallelGroup.reconnect), until that succeeds; None: never.

        Raises:
            ClientConfigError: there is no replica, or an argument is wrong.
        """
        given: object = open_drivers
        if not isinstance(given, Sequence) or not given:
            raise config_error(
                "open_drivers", given, "there is no replica", "give one function each"
            )
        self._open_drivers = tuple(open_drivers)
        self._max_requests = max_requests
        self._standing = StandingOperations(len(open_drivers))
        self.drivers = [self._make_driver(place) for place in range(len(open_drivers))]
        """In the order of the replicas."""
        self.operations = ReplicaOperations(self.drivers, self._standing)
        """Operations of administrators on all replicas."""
        self._trial = asyncio.Lock()
        """Held by the request that is on trial."""
        self._lost: set[int] = set()
        self._change = asyncio.Event()
        """Set once a replica was lost, has come back, or has ended."""
        self._placement = ReplicaPlacement(len(self.drivers))
        self._names = map(str, itertools.count())
        """Names of requests in the placement: ids may be equal."""
        self._opened = AsyncExitStack()
        self._reopen_s = reopen_s
        self._is_closing = asyncio.Event()
        self._reopening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "DataParallelDriver":
        """Start the replicas' drivers. Raises what an open_driver raises."""
        async with AsyncExitStack() as opened:
            for driver in self.drivers:
                await opened.enter_async_context(driver)
            self._opened = opened.pop_all()
        if self._reopen_s is not None:
            self._reopening = asyncio.create_task(self._reopen_ended(self._reopen_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort all requests, and wait until every driver has ended."""
        self._is_closing.set()
        if self._reopening is not None:
            await self._reopening
        await self._opened.aclose()

    @property
    def error(self) -> Exception | None:
        """The error with which the first driver has ended; None while one of them serves."""
        errors = [driver.error for driver in self.drivers]
        return None if None in errors else errors[0]

    async def wait_ended(self) -> Exception:
        """Wait until all drivers have ended; return the error of the first."""
        while (error := self.error) is None:
            self._change.clear()
            await self._change.wait()
        return error

    async def pause(self) -> None:
        """Hold all requests on all replicas: see AsyncDriver.pause."""
        await self.operations.do(PAUSE)

    async def resume(self) -> None:
        """Go on where pause() has stopped. Raises as it does."""
        await self.operations.do(RESUME)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        """Serve a request as AsyncDriver.generate does, on the replica that has the least to
        compute (placement.py). If that loses a rank or its driver ends, another one computes prompt
        and known tokens again, and goes on with the same tokens, at once: whether or not a reader
        asks for more. The request waits if no replica has all its ranks.

        Raises:
            ReplacementFailed: no replica is left, or has got its successors in time.
            WorkerDaemonError: the error of the last of MAX_LOSSES losses in a row without a token
                between them, or that of a replica if the drivers of all have ended.
        """
        return streamed(request, self._serve)

    async def _serve(self, request: GenerationRequest, stream: RequestStream) -> None:
        """Serve a request, on one replica after the other, until it has ended."""
        name, num_losses = next(self._names), 0
        while True:
            with ExitStack() as trial:
                if num_losses == MAX_LOSSES - 1:
                    await self._trial.acquire()
                    trial.callback(self._trial.release)
                    stream.on_tokens = trial.close
                num_before = stream.num_tokens
                chosen = self._placement.place(name, request, await self._whole_replicas())
                try:
                    await self.drivers[chosen].serve(request, stream)
                    return
                except RequestGivenUp as given_up:
                    num_losses = num_losses if stream.num_tokens == num_before else 0
                    num_losses += given_up.has_begun
                    if num_losses == MAX_LOSSES:
                        raise given_up.reason from None
                finally:
                    stream.on_tokens = None
                    self._placement.remove(name)

    def _make_driver(self, place: int, loss: Exception | None = None) -> AsyncDriver:
        return AsyncDriver(
            self._open_drivers[place],
            max_requests=self._max_requests,
            others=OtherReplicas(self._standing, place),
            on_change=partial(self._note_change, place),
            loss=loss,
        )

    async def _reopen_ended(self, every_s: float) -> None:
        while not self._is_closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), every_s)
            ended = [place for place, each in enumerate(self.drivers) if each.error is not None]
            for place in ended if self.error is None else ():
                if not self._is_closing.is_set():
                    await self._reopen(place)

    async def _reopen(self, place: int) -> None:
        self.drivers[place] = self._make_driver(place, self.drivers[place].error)
        try:
            await self._opened.enter_async_context(self.drivers[place])
        except Exception as error:  # of open_driver, whatever it does
            _LOG.warning("replica %d cannot be opened again: %s", place, error)
        else:
            _LOG.info("replica %d serves again", place)

    async def _whole_replicas(self) -> list[int]:
        """Return the replicas that serve; wait while there is none. Raises the error of one if none
        is expected to."""
        while True:
            errors = [driver.error or driver.loss for driver in self.drivers]
            whole = [place for place, error in enumerate(errors) if error is None]
            if whole:
                return whole
            living = [driver.loss for driver in self.drivers if driver.error is None]
            failed = [loss for loss in living if isinstance(loss, _ATTEMPT_FAILED)]
            if len(failed) == len(living):
                raise next(filter(None, [*failed, *errors]))
            self._change.clear()
            await self._change.wait()

    def _note_change(self, place: int) -> None:
        """Note that a replica was lost, has come back, or has ended. A lost KV cache has no
        prefixes."""
        loss = self.drivers[place].loss
        if loss is None:
            self._lost.discard(place)
        elif place not in self._lost:
            _LOG.warning("replica %d is lost; its requests go on in others: %s", place, loss)
            self._lost.add(place)
            self._placement.forget_prefixes(place)
        self._change.set()
