"""Answers of requests that generate: whole, or as server-sent events while the tokens come. A
client that leaves, or does not read, ends its requests; it holds up nobody else."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rpc_schema.errors import WorkerDaemonError
from worker_client.errors import request_error
from worker_client.requests import GenerationRequest
from worker_client.service.context import ServiceContext
from worker_client.service.engine import ChoicePart, renamed
from worker_client.service.errors import HttpError, as_http_error
from worker_client.service.fields import BodyFields
from worker_client.service.json_text import to_json

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

JsonObject = dict[str, Any]


class StreamOptions(NamedTuple):
    """The form in which a client wants its answer."""

    stream: bool
    include_usage: bool
    """A last chunk has the usage, and no choices."""
    continuous_usage_stats: bool
    """Every chunk has the usage so far."""


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Ignored: OpenAI pads chunks by it."""


def take_stream_options(fields: BodyFields) -> StreamOptions:
    """Return a body's `stream` and `stream_options`. Raises RequestError."""
    stream: bool = fields.take("stream", bool, False)
    options = fields.take("stream_options", _Options, None)
    if options is None:
        return StreamOptions(stream, False, False)
    if not stream:
        fix = "leave it out, or give stream: true"
        raise request_error("stream_options", "given", "the answer is not streamed", fix)
    return StreamOptions(stream, options.include_usage, options.continuous_usage_stats)


class Usage:
    """Counts the tokens of an answer."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.num_prompt_tokens = sum(len(request.prompt) for request in requests)
        self.num_completion_tokens = 0
        self._num_cached = 0
        self._num_samples = requests[0].sampling.n

    def take(self, part: ChoicePart) -> None:
        """Count a part."""
        self.num_completion_tokens += len(part.token_ids)
        # The other samples of a prompt find what the first one has computed.
        if part.output is not None and part.choice % self._num_samples == 0:
            self._num_cached += part.output.num_cached_tokens

    def as_json(self) -> JsonObject:
        """Return OpenAI's usage object."""
        prompt, completion = self.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


class AnswerForm(Protocol):
    """Puts the parts of a body's requests into the form of an endpoint. One for each answer."""

    def chunks(self, part: ChoicePart) -> Iterable[JsonObject]:
        """Return the chunks of a stream for a part."""

    def last_chunks(self) -> Iterable[JsonObject]:
        """Return the chunks behind the last part."""

    def take(self, part: ChoicePart) -> None:
        """Take a part of an answer that is sent whole."""

    def whole(self) -> JsonObject:
        """Return that answer."""


async def answer(
    http: Request,
    context: ServiceContext,
    requests: Sequence[GenerationRequest],
    form: AnswerForm,
    names: Mapping[str, str],
    *,
    stream: bool,
) -> Response:
    """Serve the requests of a body, which have the same n, and answer in a form. names: see
    `renamed`. Raises HttpError: there is no room for so many samples."""
    http.state.ticket.take(len(requests) * requests[0].sampling.n)
    parts = context.engine.parts(requests)
    if stream:
        events = _events(parts, form, names)
        return EventStream(events, context.settings.write_s, source=parts)
    with renamed(names):
        async with unless_client_leaves(http.receive):
            return await _whole(parts, form)


async def _whole(parts: AsyncGenerator[ChoicePart, None], form: AnswerForm) -> Response:
    async with contextlib.aclosing(parts):
        async for part in parts:
            form.take(part)
    return Response(to_json(form.whole()), media_type="application/json")


async def _events(
    parts: AsyncGenerator[ChoicePart, None], form: AnswerForm, names: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: chunks, those of a part together, an error if there is one, and
    the end. What the driver refuses is raised: it does so before the first part."""
    made: list[bytes] = []
    async with contextlib.aclosing(parts):
        with renamed(names):
            part: ChoicePart | None = await anext(parts)
        try:
            while part is not None:
                for chunk in form.chunks(part):
                    made.append(event(chunk))  # those before a chunk that fails are sent
                yield b"".join(made)
                made.clear()
                part = await anext(parts, None)
            made.extend(map(event, form.last_chunks()))
        except (HttpError, WorkerDaemonError) as error:
            made.append(event(as_http_error(error).body))
    yield b"".join([*made, DONE])


def event(value: JsonObject) -> bytes:
    """Return a server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """A response whose body is server-sent events, from an asynchronous generator that it closes.
    A client that leaves, or takes nothing for write_s, ends it. Until the first event is there the
    status is open: what the generator raises before is the answer's error."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        write_s: float,
        *,
        source: AsyncGenerator[Any, None] | None = None,
    ) -> None:
        """source: what the events are made of; it is closed too, since events that were never asked
        for cannot do that."""
        super().__init__()
        self._events = events
        self._write_s = write_s
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI). Raises ClientDisconnect: the client has left before the first."""
        has_begun = False
        watch = None
        try:
            async with unless_client_leaves(receive):
                first = await anext(self._events)
                has_begun = True
                abort = scope["state"].get("abort")
                if abort is not None:  # an aborted connection is one that the client has left
                    watch = _WriteWatch(self._write_s, abort)
                    send = watch.timed(send)
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await send({"type": "http.response.body", "body": first, "more_body": True})
                # A task that is woken goes through all that it has awaited: here twenty functions
                # of the framework, for each token.
                await asyncio.create_task(self._write_rest(send))
        except ClientDisconnect:
            if not has_begun:
                raise
        finally:
            if watch is not None:
                watch.close()
            await self._events.aclose()
            if self._source is not None:
                await self._source.aclose()

    async def _write_rest(self, send: Send) -> None:
        async for body in self._events:
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _WriteWatch:
    """Aborts a connection when a write to it takes too long. One timer for all writes: a timer for
    each would take longer than the write."""

    def __init__(self, write_s: float, abort: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._write_s = write_s
        self._abort = abort
        self._began: float | None = None
        """Time at which the present write began."""
        self._timer = self._loop.call_later(write_s, self._check)

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def timed(self, send: Send) -> Send:
        """Return a function that sends, and is watched."""

        async def watched(message: Message) -> None:
            self._began = self._loop.time()
            await send(message)
            self._began = None

        return watched

    def _check(self) -> None:
        left_s = self._write_s
        if self._began is not None:
            left_s += self._began - self._loop.time()
        if left_s <= 0.0:
            self._abort()
        else:
            self._timer = self._loop.call_later(left_s, self._check)


@contextlib.asynccontextmanager
async def unless_client_leaves(receive: Receive) -> AsyncGenerator[None, None]:
    """Cancel the present task while it is in here once the client leaves, which aborts its
    requests, and raise ClientDisconnect instead. It need not be woken by another task to go on."""
    task = asyncio.current_task()
    assert task is not None, "endpoints run in tasks"
    has_left = False

    async def cancel_when_left() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    leaving = asyncio.ensure_future(cancel_when_left())
    try:
        try:
            yield
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise ClientDisconnect from None
        raise
