"""/v1/models: the model by its names, and its LoRA adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from worker_client.service.context import ServiceContext
from worker_client.service.errors import unknown_model
from worker_client.service.json_text import to_json

OWNER = "worker-daemon"


def models_router(context: ServiceContext) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter()
    engine = context.engine

    def listed(name: str) -> dict[str, Any]:
        adapter = name not in engine.names
        return {
            "id": name,
            "object": "model",
            "created": engine.created,
            "owned_by": OWNER,
            "root": name if adapter else engine.plan.model.sent_as,
            "parent": engine.names[0] if adapter else None,
            "max_model_len": engine.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        data = [listed(name) for name in (*engine.names, *engine.adapters)]
        return _json({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        known = (*engine.names, *engine.adapters)
        if name not in known:
            raise unknown_model(name, known)
        return _json(listed(name))

    return router


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
