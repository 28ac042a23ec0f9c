"""/v1/chat/completions."""

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from worker_client.errors import ClientConfigError, request_error
from worker_client.inputs.chat_template import ChatTemplate
from worker_client.inputs.request_fields import Json
from worker_client.inputs.text_stream import StreamedText
from worker_client.requests import GenerationRequest
from worker_client.service.chat_form import ChatChoice, ChatForm, Splitter
from worker_client.service.chat_logprobs import ChatLogprobs, take_logprobs
from worker_client.service.chat_prompt import TEMPLATE_FIELDS, ChatPrompt, take_prompt
from worker_client.service.chat_tools import ChatTools, take_tools
from worker_client.service.context import ServiceContext
from worker_client.service.engine import ChoicePart, Engine, Model, renamed
from worker_client.service.fields import BodyFields, read_fields
from worker_client.service.logprobs import take_full_logprobs
from worker_client.service.marked_text import MarkedText
from worker_client.service.options import OPTIONS, take_options
from worker_client.service.response_format import FORMAT_NAMES
from worker_client.service.routed_experts import ASK, NAMES, take_routed_experts
from worker_client.service.streaming import StreamOptions, Usage, answer, take_stream_options
from worker_client.service.token_texts import TokenTexts
from worker_client.service.tool_calls import (
    Piece,
    ToolCallStream,
    ToolForm,
    detected_form,
    marks_of,
)
from worker_client.service.tool_grammar import call_grammar, text_grammar, written_marks

_OWN: Final = (
    *TEMPLATE_FIELDS,
    *("model", "stream", "stream_options", "logprobs", "top_logprobs", "max_completion_tokens"),
    *("full_logprobs", ASK),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
)
_LONG_ID, _SHORT_ID = 24, 9
"""Characters of a call's id. Templates of Mistral demand the latter number."""


def chat_router(context: ServiceContext) -> APIRouter:
    """Return the endpoint."""
    router = APIRouter()
    engine = context.engine
    chats = _Chats(engine, context.settings.tool_call_parser)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        fields = await read_fields(http, context.settings)
        model = engine.take_model(fields)
        streaming = take_stream_options(fields)
        asked = chats.take(fields)
        fields.check_empty((*OPTIONS, *_OWN))
        request = await engine.on_thread(lambda: chats.request(asked, model))
        form = chats.form_of(asked, request, model, streaming)
        return await answer(http, context, [request], form, asked.names, stream=streaming.stream)

    return router


class _ChatBody(NamedTuple):
    """A body's fields."""

    prompt: ChatPrompt
    options: dict[str, Json]
    tools: ChatTools | None
    num_top: int | None
    names: Mapping[str, str]
    """Names of fields in the body, by those of the driver."""


class _Chats:
    """Requests and answers of chats with one model."""

    def __init__(self, engine: Engine, tool_call_parser: str) -> None:
        """tool_call_parser: a ToolForm; empty: as the template shows."""
        self._engine = engine
        self._texts = TokenTexts(engine.tokenizer)
        template = engine.template
        sources = template.sources if isinstance(template, ChatTemplate) else ()
        self._form = ToolForm(tool_call_parser) if tool_call_parser else detected_form(sources)
        found = {mark: engine.tokenizer.special_id(mark) for mark in marks_of(self._own_form)}
        self._special = {mark: own for mark, own in found.items() if own is not None}
        self._written = written_marks(self._special, sources)

    @property
    def _own_form(self) -> ToolForm:
        """The form of calls that a grammar makes, which any model can be held to."""
        return self._form or ToolForm.LLAMA3_JSON

    def take(self, fields: BodyFields) -> _ChatBody:
        """Return a body's fields. Raises RequestError."""
        prompt, tools, num_top = take_prompt(fields), take_tools(fields), take_logprobs(fields)
        names = {"prompt": "messages", "logprobs": "top_logprobs", **NAMES}
        most = fields.take_raw("max_completion_tokens")
        if most is not None:
            fix = "give max_completion_tokens alone"
            fields.refuse("max_tokens", "there are two bounds on the tokens", fix)
            names["max_tokens"] = "max_completion_tokens"
        format_field = "structured_outputs"
        if "response_format" in fields:
            format_field = "response_format"
            names |= FORMAT_NAMES
        options = take_options(fields, self._engine.sampling_defaults)
        if most is not None:
            options["max_tokens"] = most
        if num_top is not None:
            options["logprobs"] = num_top
        if take_full_logprobs(fields, has_logprobs=num_top is not None):
            options["full_logprobs"] = True
        options |= take_routed_experts(fields)
        if tools is not None:
            if "structured_outputs" in options:
                problem = "an output that follows a grammar can call no tool"
                fix = 'give tool_choice: "none", or leave the grammar out'
                raise request_error(format_field, "given", problem, fix)
            names |= {"structured_outputs": "tools", "structured_outputs.grammar": "tools"}
            self._hold_to_calls(tools, options)
        return _ChatBody(prompt, options, tools, num_top, names)

    def _hold_to_calls(self, tools: ChatTools, options: dict[str, Json]) -> None:
        """Let an output that must be calls be nothing else, and one that may have strict calls have
        no others."""
        if not tools.is_required and self._form is None:
            problem = "the chat template shows no form of calls that is known here"
            fix = 'give tool_choice: "required" or "none", or start the server with '
            forms = ", ".join(ToolForm)
            raise request_error(
                "tool_choice", "auto", problem, f"{fix}--tool-call-parser ({forms})"
            )
        if tools.is_required:
            options["structured_outputs"] = {"grammar": self._grammar(call_grammar, tools)}
        elif any(function.is_strict for function in tools.functions):
            options["structured_outputs"] = {"grammar": self._grammar(text_grammar, tools)}

    def _grammar(self, grammar: Callable[..., str], tools: ChatTools) -> str:
        own = tools.functions, self._written
        try:
            return grammar(self._own_form, *own, several=tools.several)
        except RecursionError:
            problem, fix = "a schema is nested too deeply", "flatten it"
            raise request_error("tools", len(tools.functions), problem, fix) from None

    def request(self, asked: _ChatBody, model: Model) -> GenerationRequest:
        """Return the request of a body; on a thread. Raises ClientConfigError."""
        engine, template = self._engine, self._engine.template
        if isinstance(template, ClientConfigError):
            raise template
        with renamed(asked.names):
            text = asked.prompt.render(template, asked.tools.given if asked.tools else None)
            ids = engine.tokenizer.encode(text, add_special_tokens=False)
            rest = max(1, engine.max_model_len - len(ids))
            return engine.make({"max_tokens": rest, **asked.options}, ids, model)

    def form_of(
        self, asked: _ChatBody, request: GenerationRequest, model: Model, streaming: StreamOptions
    ) -> ChatForm:
        """Return the form of the answer."""
        new_id = self._new_short_id if self._own_form is ToolForm.MISTRAL else self._new_id
        most_calls = None if asked.tools is None or asked.tools.several else 1
        choices = [
            ChatChoice(self._splitter(asked, request, streaming), new_id, most_calls)
            for _ in range(request.sampling.n)
        ]
        usage = Usage([request])
        logprobs = None
        if asked.num_top is not None:
            logprobs = ChatLogprobs(self._engine.tokenizer, self._texts, asked.num_top)
        return ChatForm(model.name, usage, choices, streaming, logprobs)

    def _splitter(
        self, asked: _ChatBody, request: GenerationRequest, streaming: StreamOptions
    ) -> Splitter | None:
        """Return what finds the calls in an output."""
        if asked.tools is None:
            return None
        names = [function.name for function in asked.tools.functions]
        stream = ToolCallStream(self._own_form, names, in_parts=streaming.stream)
        text = self._text(request)

        def split(part: ChoicePart) -> list[Piece]:
            pieces = stream.push(text(part))
            if part.output is not None:
                pieces += stream.finish(is_cut=part.output.finish_reason == "length")
            return pieces

        return split

    def _text(self, request: GenerationRequest) -> Callable[[ChoicePart], str]:
        """Return the function from a part to its text, with the marks of calls."""
        if not self._special:
            return lambda part: part.text
        sampling = request.sampling
        plain = StreamedText(
            self._engine.tokenizer,
            sampling.stop,
            includes_stop=sampling.include_stop_str_in_output,
        )
        marks = {token_id: mark for mark, token_id in self._special.items()}
        marked = MarkedText(plain, marks)
        return lambda part: marked.take(part.token_ids, part.output)

    @staticmethod
    def _new_id() -> str:
        return f"call_{secrets.token_hex(_LONG_ID // 2)}"

    @staticmethod
    def _new_short_id() -> str:
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(_SHORT_ID))
