"""/health: whether the server serves."""

from fastapi import APIRouter
from starlette.responses import Response

from worker_client.service.context import ServiceContext
from worker_client.service.json_text import to_json


def health_router(context: ServiceContext) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        error, closed = context.engine.driver.error, context.admission.closed
        state = f"ended: {error}" if error is not None else closed or "serving"
        body = {"state": state, "running": context.admission.num_taken}
        status = 200 if state == "serving" else 503
        return Response(to_json(body), status, media_type="application/json")

    return router
