"""Probes of whether the server serves: /health, /livez, /readyz and /startupz; and /metrics."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from worker_client.service.context import ServiceContext
from worker_client.service.json_text import to_json
from worker_client.service.metrics.counts import ServiceCounts
from worker_client.service.metrics.readings import ServiceReadings
from worker_host.exposition import RenderedMetrics

UNKNOWN_ROUTE = "other"


def health_router(context: ServiceContext) -> APIRouter:
    """Return the endpoints. The probes need no key, and tell no reasons that name anything."""
    router = APIRouter()
    engine, admission = context.engine, context.admission
    metrics = RenderedMetrics(ServiceReadings(engine, admission).read)

    def not_alive() -> list[str]:
        return [] if engine.driver.error is None else ["the driver has ended"]

    def not_started() -> list[str]:
        return [] if engine.is_ready else [f"the model is being loaded: {engine.phase}"]

    def not_ready() -> list[str]:
        closed = [admission.closed] if engine.is_ready and admission.closed else []
        return [*not_alive(), *not_started(), *closed]

    @router.get("/health")
    async def health() -> Response:
        reasons = not_ready()
        state = reasons[0] if reasons else "serving"
        return _json({"state": state, "running": admission.num_taken}, is_good=not reasons)

    @router.get("/livez")
    async def livez() -> Response:
        return _probe(not_alive())

    @router.get("/readyz")
    async def readyz() -> Response:
        return _probe(not_ready())

    @router.get("/startupz")
    async def startupz() -> Response:
        return _probe(not_started())

    @router.get("/metrics")
    async def all_metrics() -> Response:
        return Response(await metrics.text(), media_type=metrics.content_type)

    return router


def _probe(reasons: list[str]) -> Response:
    status = "unavailable" if reasons else "ok"
    return _json({"status": status, "reasons": reasons}, is_good=not reasons)


def _json(value: dict[str, object], *, is_good: bool) -> Response:
    return Response(to_json(value), 200 if is_good else 503, media_type="application/json")


class CountedAnswers:
    """Counts the answers of an application by route and status."""

    def __init__(self, app: ASGIApp, counts: ServiceCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, self._counted(scope, send))

    def _counted(self, scope: Scope, send: Send) -> Callable[[Message], Awaitable[None]]:
        def sent(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
                self._counts.responses[route, message["status"]] += 1
            return send(message)

        return sent
