"""Answers of /v1/chat/completions, whole and in chunks."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from worker_client.requests import RequestOutput
from worker_client.scheduler_output import Experts
from worker_client.service.chat_logprobs import ChatLogprobs
from worker_client.service.engine import ChoicePart
from worker_client.service.errors import HttpError
from worker_client.service.routed_experts import experts_field
from worker_client.service.streaming import JsonObject, StreamOptions, Usage
from worker_client.service.tool_calls import BrokenCall, MoreArguments, Piece, ToolCall


class ChatChoice:
    """The message of one choice, as its parts come."""

    def __init__(
        self, split: "Splitter | None", new_call_id: Callable[[], str], most_calls: int | None
    ) -> None:
        """split: finds calls in the text; None: there are none. most_calls: further ones are left
        out."""
        self._split = split
        self._most_calls = most_calls
        self._new_call_id = new_call_id
        self._is_left_out = False
        """True if the present call is one too many."""
        self.has_begun = False
        self.texts: list[str] = []
        self.calls: list[JsonObject] = []
        self.logprobs: list[JsonObject] = []
        self.experts: list[Experts | None] = []
        self.finish_reason: str | None = None

    def take(self, part: ChoicePart) -> Iterator[JsonObject]:
        """Yield the deltas of a part. Raises HttpError behind those that precede a broken call."""
        pieces = [part.text] if self._split is None else self._split(part)
        yield from (self._said(piece) for piece in pieces if self._is_said(piece))
        if part.output is not None:
            self.finish_reason = self._reason(part.output)

    def _is_said(self, piece: Piece) -> bool:
        """Say whether a piece belongs to the message. One of a call follows its beginning."""
        if isinstance(piece, str):
            return bool(piece)
        if isinstance(piece, ToolCall):
            self._is_left_out = len(self.calls) == self._most_calls
        return not self._is_left_out

    def _said(self, piece: Piece) -> JsonObject:
        """Return the delta of a piece. Raises HttpError: a call cannot go on."""
        if isinstance(piece, str):
            self.texts.append(piece)
            return {"content": piece}
        if isinstance(piece, BrokenCall):
            problem = "the model's call has no complete JSON object of arguments"
            raise HttpError(500, f"{piece.name}: {problem}", code="malformed_tool_call")
        if isinstance(piece, MoreArguments):
            more = {"index": len(self.calls) - 1, "function": {"arguments": piece.text}}
            return {"tool_calls": [more]}
        function = {"name": piece.name, "arguments": piece.arguments}
        call = {"id": self._new_call_id(), "type": "function", "function": function}
        self.calls.append(call)
        return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}

    def _reason(self, output: RequestOutput) -> str:
        is_called = self.calls and output.finish_reason == "stop"
        return "tool_calls" if is_called else output.finish_reason

    def message(self) -> JsonObject:
        """Return the whole message."""
        text = "".join(self.texts)
        content = None if self.calls and not text else text
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": content, "refusal": None, **calls}


Splitter = Callable[[ChoicePart], list[Piece]]
"""Returns the text and the calls of a part."""


class ChatForm:
    """The answer of one body (streaming.AnswerForm)."""

    def __init__(
        self,
        model: str,
        usage: Usage,
        choices: Sequence[ChatChoice],
        streaming: StreamOptions,
        logprobs: ChatLogprobs | None,
    ) -> None:
        """logprobs: None: no log probabilities are asked for."""
        self._usage = usage
        self._choices = choices
        self._streaming = streaming
        self._logprobs = logprobs
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def take(self, part: ChoicePart) -> None:
        """Take a part of an answer that is sent whole."""
        self._usage.take(part)
        choice = self._choices[part.choice]
        for _delta in choice.take(part):
            pass  # the choice keeps them
        choice.logprobs += self._reported(part)
        choice.experts.append(part.routed_experts)

    def whole(self) -> JsonObject:
        """Return that answer."""
        choices = [
            {
                "index": place,
                "message": choice.message(),
                "logprobs": self._content(choice.logprobs),
                "finish_reason": choice.finish_reason,
                **experts_field(choice.experts),
            }
            for place, choice in enumerate(self._choices)
        ]
        whole = {**self._head, "object": "chat.completion", "choices": choices}
        return {**whole, "usage": self._usage.as_json()}

    def chunks(self, part: ChoicePart) -> Iterable[JsonObject]:
        """Return the chunks of a part: the role before the first one, and the reason of the end
        behind the last one."""
        self._usage.take(part)
        choice = self._choices[part.choice]
        reported, experts = self._reported(part), {}
        if part.routed_experts is not None:
            experts = experts_field([part.routed_experts])
        if not choice.has_begun:
            choice.has_begun = True
            yield self._chunk(part.choice, {"role": "assistant", "content": ""})
        for delta in choice.take(part):
            yield self._chunk(part.choice, delta, reported, **experts)
            reported, experts = [], {}
        if reported or experts:
            yield self._chunk(part.choice, {"content": ""}, reported, **experts)
        if part.output is not None:
            yield self._chunk(part.choice, {}, reason=choice.finish_reason)

    def last_chunks(self) -> Iterable[JsonObject]:
        """Return the chunk with the usage, if it is wanted."""
        if not self._streaming.include_usage:
            return []
        last = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return [{**last, "usage": self._usage.as_json()}]

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        reported: Sequence[JsonObject] = (),
        reason: str | None = None,
        **further: str,
    ) -> JsonObject:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._content(reported) if reported else None,
            "finish_reason": reason,
            **further,
        }
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._streaming.continuous_usage_stats:
            chunk["usage"] = self._usage.as_json()
        elif self._streaming.include_usage:
            chunk["usage"] = None
        return chunk

    def _reported(self, part: ChoicePart) -> list[JsonObject]:
        if self._logprobs is None or part.logprobs is None:
            return []
        if part.full_logprobs is None:
            return list(map(self._logprobs.entry, part.logprobs))
        return list(map(self._logprobs.entry, part.logprobs, part.full_logprobs))

    def _content(self, entries: Sequence[JsonObject]) -> dict[str, Any] | None:
        return None if self._logprobs is None else {"content": [*entries], "refusal": None}
