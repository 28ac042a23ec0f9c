"""/v1/completions."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from worker_client.errors import request_error
from worker_client.requests import GenerationRequest, PromptTokenIds
from worker_client.scheduler_output import Experts, FullLogprob, Logprobs
from worker_client.service.context import ServiceContext
from worker_client.service.engine import ChoicePart, Engine, Model, Prompt, renamed
from worker_client.service.fields import BodyFields, read_fields
from worker_client.service.logprobs import CompletionLogprobs, joined, take_full_logprobs
from worker_client.service.options import OPTIONS, take_options
from worker_client.service.response_format import FORMAT_NAMES
from worker_client.service.routed_experts import (
    ASK,
    NAMES,
    experts_field,
    take_routed_experts,
)
from worker_client.service.streaming import (
    JsonObject,
    StreamOptions,
    Usage,
    answer,
    take_stream_options,
)
from worker_client.service.token_texts import TokenTexts

MAX_LOGPROBS: Final = 20
_OWN: Final = (
    *("prompt", "model", "stream", "stream_options", "echo", "logprobs", "best_of"),
    *("full_logprobs", "response_format", "add_special_tokens", ASK),
)
_REFUSED: Final = {
    "suffix": ("text is continued, not filled in", "leave it out"),
    "prompt_logprobs": ("answers have no place for them", "use echo and logprobs"),
}
MAX_TOKENS_AT_ONCE: Final = 16_384
"""Token ids of prompts that are made into requests on the event loop."""
SLOW_OPTIONS: Final = frozenset(("bad_words", "structured_outputs"))
"""Options with texts that are encoded, or with a grammar."""
Count = Annotated[int, Meta(ge=0)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


def completions_router(context: ServiceContext) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()
    engine, settings = context.engine, context.settings
    texts = TokenTexts(engine.tokenizer)

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        fields = await read_fields(http, settings)
        model = engine.take_model(fields)
        streaming = take_stream_options(fields)
        asked = _Asked(fields, settings.max_prompts)
        options = take_options(fields, engine.sampling_defaults) | take_routed_experts(fields)
        fields.check_empty((*OPTIONS, *_OWN))
        asked.check_best_of(options)
        names = {"prompt_logprobs": "logprobs", **NAMES}
        names |= FORMAT_NAMES if asked.has_format else {}
        with renamed(names):
            if asked.takes_time(options):
                requests = await engine.on_thread(lambda: asked.requests(engine, options, model))
            else:
                requests = asked.requests(engine, options, model)
        form = _Form(requests, asked, engine, texts, model, streaming)
        return await answer(http, context, requests, form, names, stream=streaming.stream)

    return router


class _Asked:
    """The fields of a body that are completions' own. Raises RequestError."""

    def __init__(self, fields: BodyFields, max_prompts: int) -> None:
        for name, (problem, fix) in _REFUSED.items():
            fields.refuse(name, problem, fix)
        self.prompts = _prompts(fields, max_prompts)
        self.is_list = len(self.prompts) > 1
        self.echo: bool = fields.take("echo", bool, False)
        self.num_logprobs: int | None = fields.take("logprobs", NumLogprobs, None)
        self.full_logprobs = take_full_logprobs(fields, has_logprobs=self.num_logprobs is not None)
        self.add_special_tokens: bool = fields.take("add_special_tokens", bool, True)
        self.has_format = "response_format" in fields
        self._best_of: int | None = fields.take("best_of", int, None)
        given = fields.take("max_tokens", Count, None)
        self.max_tokens: int | None = given
        self.drops_tokens = given == 0
        """Nothing is generated: one token is, and is left out."""

    def check_best_of(self, options: JsonObject) -> None:
        """Raise RequestError unless as many are returned as are made."""
        if self._best_of not in (None, options.get("n", 1)):
            fix = "leave it out, and choose among n answers"
            raise request_error("best_of", self._best_of, "it differs from n", fix)

    def takes_time(self, options: JsonObject) -> bool:
        """Return True if `requests` encodes texts, or does much else. Otherwise it takes less time
        than waking a thread."""
        if not SLOW_OPTIONS.isdisjoint(options) or any(isinstance(p, str) for p in self.prompts):
            return True
        return sum(map(len, self.prompts)) > MAX_TOKENS_AT_ONCE

    def requests(
        self, engine: Engine, options: JsonObject, model: Model
    ) -> list[GenerationRequest]:
        """Return a request for each prompt; on a thread if that takes time."""
        if self.max_tokens is not None:
            options = {**options, "max_tokens": self.max_tokens or 1}
        if self.num_logprobs is not None:
            full = {"full_logprobs": True} if self.full_logprobs else {}
            options = {**options, "logprobs": self.num_logprobs, **full}
        if self.num_logprobs is not None and self.echo:
            options = {**options, "prompt_logprobs": self.num_logprobs}
        made = []
        for place, prompt in enumerate(self.prompts):
            field = f"prompt[{place}]" if self.is_list else "prompt"
            with renamed({"prompt": field}):
                request = engine.make(
                    options, prompt, model, add_special_tokens=self.add_special_tokens
                )
            made.append(request)
        return made


def _prompts(fields: BodyFields, most: int) -> Sequence[Prompt]:
    kind = str | list[str | Count | list[Count]]
    given: Any = fields.take("prompt", kind, None)
    if given is None:
        raise request_error("prompt", None, "there is no prompt", "give a text or token ids")
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if len(kinds) > 1:
        fix = "give texts, token ids, or lists of token ids"
        raise request_error("prompt", "a list of several kinds", "it is no prompt", fix)
    if not given or kinds == {int}:
        return [given]
    if len(given) > most:
        raise request_error("prompt", len(given), "too many prompts", f"give at most {most}")
    return list(given)


class _Form:
    """The answer of one body (streaming.AnswerForm)."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        asked: _Asked,
        engine: Engine,
        texts: TokenTexts,
        model: Model,
        streaming: StreamOptions,
    ) -> None:
        self._asked = asked
        self._streaming = streaming
        self._usage = Usage(requests)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        echoed = [""] * len(requests)
        if asked.echo:
            echoed = [
                prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
                for prompt in asked.prompts
            ]
        self._choices = [
            _Choice(echo, request.prompt, asked, texts)
            for echo, request in zip(echoed, requests, strict=True)
            for _ in range(request.sampling.n)
        ]

    def chunks(self, part: ChoicePart) -> Iterable[JsonObject]:
        """Return the chunk of a part."""
        self._count(part)
        delta = self._choices[part.choice].delta(part)
        if part.routed_experts is not None:
            delta |= experts_field([part.routed_experts])
        elif not (delta["text"] or delta["logprobs"] or delta["finish_reason"]):
            return []  # half a character, or what may be the beginning of a stop string
        chunk: JsonObject = {**self._head, "choices": [delta]}
        if self._streaming.continuous_usage_stats:
            chunk["usage"] = self._usage.as_json()
        return [chunk]

    def last_chunks(self) -> Iterable[JsonObject]:
        """Return the chunk with the usage, if it is wanted."""
        if not self._streaming.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._usage.as_json()}]

    def take(self, part: ChoicePart) -> None:
        """Take a part of an answer that is sent whole."""
        self._count(part)
        choice = self._choices[part.choice]
        choice.deltas.append(choice.delta(part))
        choice.experts.append(part.routed_experts)

    def whole(self) -> JsonObject:
        """Return that answer."""
        choices = [choice.whole() for choice in self._choices]
        return {**self._head, "choices": choices, "usage": self._usage.as_json()}

    def _count(self, part: ChoicePart) -> None:
        self._usage.take(part._replace(token_ids=[]) if self._asked.drops_tokens else part)


class _Choice:
    """One choice of an answer."""

    def __init__(self, echoed: str, prompt: PromptTokenIds, asked: _Asked, texts: TokenTexts):
        """echoed: text to begin with."""
        self.deltas: list[JsonObject] = []
        """Those of an answer that is sent whole."""
        self.experts: list[Experts | None] = []
        """Likewise."""
        self._echoed = echoed
        self._prompt = prompt
        self._drops_tokens = asked.drops_tokens
        self._wants_full = asked.full_logprobs
        self._logprobs: CompletionLogprobs | None = None
        if asked.num_logprobs is not None:
            self._logprobs = CompletionLogprobs(texts, asked.num_logprobs)

    def delta(self, part: ChoicePart) -> JsonObject:
        """Return a part as the choice of a chunk; the first one has the echoed prompt."""
        echoed, self._echoed = self._echoed, ""
        output, reason = part.output, None
        if output is not None:
            reason = "length" if self._drops_tokens else output.finish_reason
        return {
            "index": part.choice,
            "text": echoed + ("" if self._drops_tokens else part.text),
            "logprobs": None if self._logprobs is None else self._reported(self._logprobs, part),
            "finish_reason": reason,
        }

    def _reported(self, logprobs: CompletionLogprobs, part: ChoicePart) -> JsonObject:
        ids: list[int] = []
        entries: list[Logprobs | None] = []
        full: list[FullLogprob] | None = [] if self._wants_full else None
        if part.prompt_logprobs is not None:
            ids, entries = [int(each) for each in self._prompt], [*part.prompt_logprobs]
        if part.logprobs is not None and not self._drops_tokens:
            ids, entries = ids + part.token_ids, [*entries, *part.logprobs]
            full = part.full_logprobs
        return logprobs.take(ids, entries, full)

    def whole(self) -> JsonObject:
        """Return all deltas as one."""
        logprobs = None
        if self._logprobs is not None:
            logprobs = joined([delta["logprobs"] for delta in self.deltas])
        text = "".join(delta["text"] for delta in self.deltas)
        whole = {**self.deltas[-1], "text": text, "logprobs": logprobs}
        return whole | experts_field(self.experts)
