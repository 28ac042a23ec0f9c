"""/tokenize and /detokenize, in vLLM's forms."""

from collections.abc import Callable, Sequence
from typing import Annotated, Final

from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from worker_client.errors import ClientConfigError, request_error
from worker_client.service.chat_prompt import TEMPLATE_FIELDS, take_prompt
from worker_client.service.chat_tools import take_tools
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine, renamed
from worker_client.service.fields import BodyFields, read_fields
from worker_client.service.json_text import to_json

_TEXT: Final = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT: Final = (*TEMPLATE_FIELDS, "tools")
TokenIds = list[Annotated[int, Meta(ge=0)]]


def tokens_router(context: ServiceContext) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter()
    engine = context.engine

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        fields = await read_fields(http, context.settings)
        engine.take_model(fields)
        is_shown: bool = fields.take("return_token_strs", bool, False)
        encode = _take_chat(fields, engine) if "messages" in fields else _take_text(fields, engine)
        fields.check_empty((*_TEXT, *_CHAT))
        ids = await engine.on_thread(encode)
        names = [engine.tokenizer.name_of(token_id) for token_id in ids] if is_shown else None
        body = {
            "count": len(ids),
            "max_model_len": engine.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }
        return Response(to_json(body), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        fields = await read_fields(http, context.settings)
        engine.take_model(fields)
        ids = _take_ids(fields, engine)
        fields.check_empty(("model", "tokens"))
        text = await engine.on_thread(lambda: engine.tokenizer.decode_all(ids))
        return Response(to_json({"prompt": text}), media_type="application/json")

    return router


def _take_text(fields: BodyFields, engine: Engine) -> Callable[[], list[int]]:
    """Return the function that encodes a body's prompt; it runs on a thread."""
    text: str | None = fields.take("prompt", str, None)
    special: bool = fields.take("add_special_tokens", bool, True)
    if text is None:
        fix = "give prompt (a text), or messages"
        raise request_error("prompt", None, "there is no text", fix)
    return lambda: engine.tokenizer.encode(text, add_special_tokens=special)


def _take_chat(fields: BodyFields, engine: Engine) -> Callable[[], list[int]]:
    """Likewise of a body's messages, by the chat template."""
    fields.refuse("prompt", "there are messages, too", "give one of the two")
    prompt, tools = take_prompt(fields), take_tools(fields)
    special: bool = fields.take("add_special_tokens", bool, False)

    def encode() -> list[int]:
        if isinstance(engine.template, ClientConfigError):
            raise engine.template
        text = prompt.render(engine.template, tools.given if tools else None)
        with renamed({"prompt": "messages"}):
            return engine.tokenizer.encode(text, add_special_tokens=special)

    return encode


def _take_ids(fields: BodyFields, engine: Engine) -> Sequence[int]:
    ids: list[int] | None = fields.take("tokens", TokenIds, None)
    if ids is None:
        raise request_error("tokens", None, "there are no tokens", "give a list of token ids")
    most, size = engine.max_model_len, engine.loaded.metadata.vocab_size
    if len(ids) > most:
        raise request_error("tokens", len(ids), "too many", f"give at most {most}")
    wrong = next((place for place, each in enumerate(ids) if each >= size), None)
    if wrong is not None:
        fix = f"use token ids from 0 to {size - 1}"
        raise request_error(f"tokens[{wrong}]", ids[wrong], "there is no such token", fix)
    return ids
