"""/v1/embeddings."""

import base64
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from worker_client.errors import request_error
from worker_client.service.context import ServiceContext
from worker_client.service.fields import BodyFields, read_fields
from worker_client.service.json_text import to_json
from worker_client.service.pooled import (
    MAX_INPUTS,
    PooledInput,
    Pooling,
    supported_width,
    take_activation,
)

_OWN: Final = (*("input", "model", "encoding_format", "dimensions", "use_activation", "priority"),)
Count = Annotated[int, Meta(ge=0)]
Width = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Form = Literal["float", "base64"]


def embeddings_router(context: ServiceContext) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()
    engine = context.engine

    @router.post("/v1/embeddings")
    async def embeddings(http: Request) -> Response:
        fields = await read_fields(http, context.settings)
        model = engine.take_model(fields)
        inputs = take_inputs(fields)
        form: Form = fields.take("encoding_format", Form, "float")
        dimensions: int = fields.take("dimensions", Width, 0)
        activation = take_activation(fields)
        options = fields.take_all(("priority",))
        fields.check_empty(_OWN)
        supported_width(engine, "embed", "embeddings")
        params = {"task": "embed", "dimensions": dimensions, **activation}
        pooled = await Pooling(context, model, params, options).outputs(http, inputs)
        data = [
            {"object": "embedding", "index": place, "embedding": _written(values, form)}
            for place, values in enumerate(pooled.values)
        ]
        body = {"object": "list", "data": data, "model": model.name, "usage": pooled.usage()}
        return Response(to_json(body), media_type="application/json")

    return router


def take_inputs(fields: BodyFields) -> list[PooledInput]:
    """Return a body's inputs: a text, token ids, or a list of either. Raises RequestError."""
    given: Any = fields.take("input", str | list[str | Count | list[Count]], None)
    if isinstance(given, str):
        return [PooledInput(given, "input")]
    kinds = {type(each) for each in given or ()}
    if len(kinds) != 1:
        fix = "give a text, token ids, or a list of either"
        raise request_error("input", given, "there is no input, or one of several kinds", fix)
    if kinds == {int}:
        return [PooledInput(given, "input")]
    if len(given) > MAX_INPUTS:
        raise request_error("input", len(given), "too many inputs", f"give at most {MAX_INPUTS}")
    return [PooledInput(each, f"input[{place}]") for place, each in enumerate(given)]


def _written(values: NDArray[np.float32], form: Form) -> str | list[float]:
    """Return an embedding as JSON has it; base64 is of little-endian float32."""
    if form == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    numbers: list[float] = values.tolist()
    return numbers
