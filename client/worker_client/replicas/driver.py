"""Serves the requests of an asyncio program on several replicas, each with its own driver and
thread.

    async with DataParallelDriver(open_drivers) as driver:
        async for progress in driver.generate(request):
            ...

`open_drivers` has one function for each replica, as AsyncDriver takes it. A long prompt, a failure,
or the replacement of a daemon in one replica delays no request of another.
"""

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from worker_client.async_driver import MAX_REQUESTS, AsyncDriver, OpenDriver, RequestProgress
from worker_client.errors import config_error
from worker_client.inputs.request_checks import validated
from worker_client.replicas.placement import ReplicaPlacement
from worker_client.requests import GenerationRequest


class DataParallelDriver:
    """Owns the replicas' drivers. All methods belong to the event loop on which it was entered."""

    def __init__(
        self, open_drivers: Sequence[OpenDriver], *, max_requests: int = MAX_REQUESTS
    ) -> None:
        """max_requests: of one replica. Raises ClientConfigError: there is no replica."""
        if not open_drivers:
            raise config_error("open_drivers", [], "there is no replica", "give one function each")
        self.drivers = tuple(
            AsyncDriver(open_driver, max_requests=max_requests) for open_driver in open_drivers
        )
        """In the order of the replicas."""
        self._placement = ReplicaPlacement(len(self.drivers))
        self._names = map(str, itertools.count())
        """Names of requests in the placement: ids may be equal."""
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "DataParallelDriver":
        """Start the replicas' drivers. Raises what an open_driver raises."""
        async with AsyncExitStack() as opened:
            for driver in self.drivers:
                await opened.enter_async_context(driver)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort all requests, and wait until every driver has ended."""
        await self._opened.aclose()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        """Serve a request on the replica that has the least to compute (placement.py), as
        AsyncDriver.generate does. A replica whose driver has ended gets no more requests; its error
        is raised once no replica is left."""
        serving = [place for place, driver in enumerate(self.drivers) if driver.error is None]
        name, request = next(self._names), validated(request)
        chosen = self._placement.place(name, request, serving or range(len(self.drivers)))
        try:
            async with aclosing(self.drivers[chosen].generate(request)) as progress:
                async for each in progress:
                    yield each
        finally:
            self._placement.remove(name)
