"""/v1/score and /v1/rerank, in vLLM's forms: how well texts fit each other."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from fastapi import APIRouter
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from worker_client.errors import request_error
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Model
from worker_client.service.fields import BodyFields, read_fields
from worker_client.service.json_text import to_json
from worker_client.service.pooled import (
    MAX_INPUTS,
    PooledInput,
    Pooling,
    supported_width,
    take_activation,
)
from worker_client.service.streaming import JsonObject

_SHARED: Final = ("model", "use_activation", "priority")
Positive = Annotated[int, Meta(ge=1)]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class _Text(msgspec.Struct):
    """A text of a body."""

    text: str
    path: str


def scores_router(context: ServiceContext) -> APIRouter:
    """Return the endpoints, each at two paths."""
    router = APIRouter()
    scores = _Scores(context)

    async def score(http: Request) -> Response:
        fields = await read_fields(http, context.settings)
        model = context.engine.take_model(fields)
        first, second = _take_texts(fields, "text_1"), _take_texts(fields, "text_2")
        if len(first) not in (1, len(second)):
            fix = "give one text_1, or as many as text_2"
            raise request_error("text_1", len(first), f"there are {len(second)} text_2", fix)
        params, options = _take_shared(fields)
        fields.check_empty((*_SHARED, "text_1", "text_2"))
        pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
        values, usage = await scores.of(http, model, pairs, params, options)
        data = [
            {"index": place, "object": "score", "score": value}
            for place, value in enumerate(values)
        ]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return _json({**head, "model": model.name, "data": data, "usage": usage})

    async def rerank(http: Request) -> Response:
        fields = await read_fields(http, context.settings)
        model = context.engine.take_model(fields)
        query: str | None = fields.take("query", str, None)
        if query is None:
            raise request_error("query", None, "there is no query", "give a text")
        documents = _take_texts(fields, "documents")
        top: int = fields.take("top_n", Positive, len(documents))
        shown: bool = fields.take("return_documents", bool, True)
        params, options = _take_shared(fields)
        fields.check_empty((*_SHARED, "query", "documents", "top_n", "return_documents"))
        pairs = [(_Text(query, "query"), document) for document in documents]
        values, usage = await scores.of(http, model, pairs, params, options)
        best = sorted(range(len(values)), key=lambda place: -values[place])[:top]
        results = [
            {
                "index": place,
                **({"document": {"text": documents[place].text}} if shown else {}),
                "relevance_score": values[place],
            }
            for place in best
        ]
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model.name}
        return _json({**head, "results": results, "usage": usage})

    for path in ("/v1/score", "/score"):
        router.post(path)(score)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        router.post(path)(rerank)
    return router


class _Scores:
    """Scores of pairs of texts: of a cross-encoder, or the cosine of two embeddings."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def of(
        self,
        http: Request,
        model: Model,
        pairs: Sequence[tuple[_Text, _Text]],
        params: JsonObject,
        options: JsonObject,
    ) -> tuple[list[float], JsonObject]:
        """Return the score of each pair, and the usage. Raises as Pooling.outputs does."""
        support = self._context.engine.loaded.metadata.pooling
        if support.find("classify") is None and support.find("embed") is not None:
            return await self._cosines(http, model, pairs, options)
        width = supported_width(self._context.engine, "classify", "scores")
        if width != 1:
            name, fix = self._context.engine.names[0], "serve a model with one label"
            raise request_error("model", name, f"it has {width} labels, not one score", fix)
        inputs = [PooledInput((first.text, second.text), second.path) for first, second in pairs]
        own = Pooling(self._context, model, {"task": "classify", **params}, options)
        pooled = await own.outputs(http, inputs)
        return [float(values[0]) for values in pooled.values], pooled.usage()

    async def _cosines(
        self,
        http: Request,
        model: Model,
        pairs: Sequence[tuple[_Text, _Text]],
        options: JsonObject,
    ) -> tuple[list[float], JsonObject]:
        texts = {text.path: text for pair in pairs for text in pair}
        inputs = [PooledInput(text.text, text.path) for text in texts.values()]
        own = Pooling(self._context, model, {"task": "embed", "use_activation": True}, options)
        pooled = await own.outputs(http, inputs)
        found = dict(zip(texts, map(_unit, pooled.values), strict=True))
        cosines = [float(found[a.path] @ found[b.path]) for a, b in pairs]
        return cosines, pooled.usage()


def _unit(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return an embedding with length 1, more exactly than float32."""
    own = values.astype(np.float64)
    unit: NDArray[np.float64] = own / np.linalg.norm(own)
    return unit


def _take_texts(fields: BodyFields, name: str) -> list[_Text]:
    """Return a text, or a list of texts or documents. Raises RequestError."""
    given: Any = fields.take(name, str | list[str | _Document], None)
    if isinstance(given, str):
        return [_Text(given, name)]
    if not given:
        raise request_error(name, given, "there is no text", "give a text, or a list of texts")
    if len(given) > MAX_INPUTS:
        raise request_error(name, len(given), "too many texts", f"give at most {MAX_INPUTS}")
    return [
        _Text(each.text if isinstance(each, _Document) else each, f"{name}[{place}]")
        for place, each in enumerate(given)
    ]


def _take_shared(fields: BodyFields) -> tuple[JsonObject, JsonObject]:
    """Return the fields of PoolingParams, and those of requests."""
    return take_activation(fields), fields.take_all(("priority",))


def _json(value: JsonObject) -> Response:
    return Response(to_json(value), media_type="application/json")
