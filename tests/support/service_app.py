"""The application of `worker-client serve` in this process, on running daemons, without a socket:
for tests of what its endpoints answer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx2

from rpc_schema.config import WorkerConfig
from worker_client.driven_group import DrivenGroup
from worker_client.inputs.model_source import ModelSource
from worker_client.service.access import KeyCheck
from worker_client.service.admission import Admission
from worker_client.service.app import make_app
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine
from worker_client.service.settings import ServiceSettings

MAX_SAMPLES = 64
T = TypeVar("T")


class ServiceApp(NamedTuple):
    """A service and the event loop that it runs on."""

    runner: asyncio.Runner
    context: ServiceContext
    app: Any

    def run(self, work: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        """Run a coroutine with a client."""

        async def main() -> T:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
                return await work(client)

        return self.runner.run(main())

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        """Return the answer to a request."""
        return self.run(lambda client: client.post(path, json=body, **options))

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Likewise."""
        return self.run(lambda client: client.get(path, **options))

    def ok(self, path: str, body: Any = None, **options: Any) -> Any:
        """Return the body of an answer that is no error."""
        answer = self.post(path, body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400) -> tuple[str | None, str]:
        """Return the field that an error names, and its message."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        return error["param"], error["message"]

    def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the chunks of a streamed answer, without the end, which is checked."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        return [json.loads(event) for event in events[:-2]]


@contextlib.contextmanager
def service_app(
    model: Path,
    config: WorkerConfig,
    endpoints: Sequence[str],
    eplb_step_interval: int | None = None,
    **settings: Any,
) -> Iterator[ServiceApp]:
    """Yield a service that is ready. settings: of ServiceSettings."""
    own = ServiceSettings(**settings)
    plan = DrivenGroup(
        ModelSource.of(model),
        config,
        endpoints=tuple(endpoints),
        reload=True,
        eplb_step_interval=eplb_step_interval,
    )
    with asyncio.Runner() as runner:
        engine = Engine(plan, own)
        access = KeyCheck(own.api_keys, own.admin_keys)
        context = ServiceContext(own, engine, access, Admission())
        opened = _opened(engine)
        try:
            runner.run(anext(opened))
            context.admission.open(MAX_SAMPLES)
            yield ServiceApp(runner, context, make_app(context))
        finally:
            runner.run(opened.aclose())
            engine.close()


async def _opened(engine: Engine) -> AsyncIterator[None]:
    async with engine:
        yield
