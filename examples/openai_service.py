"""An HTTP service in the form of OpenAI's, on daemons that run already:

    python -m examples.openai_service --endpoints ipc://...,ipc://... --model build/demo-model

It serves POST /v1/completions and /v1/chat/completions, whole or streamed, and GET /health, and
needs `pip install "worker-daemon[service]"`.

A client that leaves aborts its request, a wrong request gets a 400 that names the field, and a full
service answers 503. When a daemon dies, requests wait until a supervisor has restarted it, and go
on. At SIGTERM the service takes no new connections, and ends after its last request.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import uvicorn
import zmq
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect

from rpc_schema.config import (
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.errors import WorkerDaemonError
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.errors import (
    ClientConfigError,
    RequestError,
    WorkerDied,
    request_error,
)
from worker_client.inputs.chat_template import ChatTemplate, load_chat_template
from worker_client.inputs.request_fields import flat
from worker_client.inputs.request_parser import RequestParser, read_object
from worker_client.inputs.text_stream import StreamedText
from worker_client.inputs.tokenizer import load_tokenizer
from worker_client.requests import GenerationRequest, forked
from worker_client.scheduler import RequestOutput, Scheduler, scheduler_limits
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.worker_client import AskingClient
from worker_client.worker_group import WorkerGroup
from worker_host.plain_text import printable

WAIT_S = 60.0
"""Time for daemons to be started, at first and after a death."""
HEALTH_TIMEOUT_S = 1.0
MAX_BODY_BYTES = 4 << 20
"""Bound on a request's body: it is parsed at once, and nothing else runs meanwhile."""
MAX_MAKING = 64
"""Requests whose prompts are made at a time."""
OPTIONS = {
    *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "stop", "seed", "n"),
    *("include_stop_str_in_output", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "priority"),
}
"""Fields that RequestParser reads as they are; it has more."""

Body: TypeAlias = dict[str, Any]
T = TypeVar("T")


class Part(NamedTuple):
    """New text of a choice; the last part of it has its output."""

    choice: int
    text: str
    output: RequestOutput | None


class FullError(Exception):
    """As many requests run as may."""


class TooLongError(Exception):
    """A body is longer than MAX_BODY_BYTES."""


class Service:
    """Makes requests of HTTP bodies, and text of their tokens. All of it but _open_driver and the
    making of requests, which takes time, runs on the event loop. A prompt that takes too long ends
    with an error, and holds up nothing but its own thread."""

    def __init__(self, model: Path, endpoints: Sequence[str], config: WorkerConfig, most: int):
        """most: bound on unfinished requests."""
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise SystemExit(f"{model} has no tokenizer.json")
        self.name = model.name
        self.endpoints = endpoints
        self.driver = AsyncDriver(self._open_driver, max_requests=most)
        self.num_running = 0
        self._config = config
        self._most = most
        self._max_model_len = 0
        self._tokenizer = tokenizer
        self._parser = RequestParser(tokenizer.encode)
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(MAX_MAKING, "prompts")
        self._template: ChatTemplate | ClientConfigError
        try:
            self._template = load_chat_template(model)
        except ClientConfigError as error:  # told to those who chat
            self._template = error

    @contextlib.contextmanager
    def _open_driver(self) -> Iterator[Driver]:
        """Attach to the daemons, and load the model if they do not have it; on the driver's
        thread."""
        with WorkerGroup(self.endpoints, self._config.parallel) as group:
            group.attach(wait_s=WAIT_S)
            loaded = group.prepare(self._config)
            self._max_model_len = loaded.max_model_len
            self._tokenizer.fit_context(loaded.max_model_len)
            scheduler = Scheduler(scheduler_limits(loaded, self._config), self._tokenizer)

            def recover(died: WorkerDied) -> None:  # without it, the driver ends with the daemon
                group.replace(died.rank, within_s=WAIT_S)

            yield Driver(group, scheduler, recover=recover)

    async def make(
        self, work: Callable[[Body], GenerationRequest], body: Body
    ) -> GenerationRequest:
        """Return the request of a body, by `completion` or `chat`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, body)

    def close(self) -> None:
        """End the making of requests."""
        self._tokenizer.close()
        if isinstance(self._template, ChatTemplate):
            self._template.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def completion(self, body: Body) -> GenerationRequest:
        """Return the request of a body for /v1/completions. Raises ClientConfigError."""
        prompt = body.pop("prompt", None)
        field = "prompt_token_ids" if isinstance(prompt, list) else "prompt"
        return self._request(body, {field: prompt})

    def chat(self, body: Body) -> GenerationRequest:
        """Return the request of a body for /v1/chat/completions. Raises ClientConfigError."""
        messages, tools = body.pop("messages", None), body.pop("tools", None)
        if isinstance(self._template, ClientConfigError):
            raise self._template
        prompt = self._template.render(messages, tools)
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        rest = max(1, self._max_model_len - len(ids))
        return self._request({"max_tokens": rest, **body}, {"prompt_token_ids": ids})

    def _request(self, options: Body, prompt: Body) -> GenerationRequest:
        model = options.pop("model", self.name)
        if model != self.name:
            raise request_error("model", model, "it is not served here", f"use {self.name!r}")
        for field in sorted(options.keys() - OPTIONS):
            fix = "use " + ", ".join(sorted(OPTIONS))
            raise request_error(field[:80], options[field], "unknown field", fix)
        fields = {"temperature": 1.0, **options, **prompt}
        return self._parser.from_fields(fields, next(self._numbers))

    async def parts(self, request: GenerationRequest) -> AsyncGenerator[Part, None]:
        """Serve a request. Closing the generator aborts it. Raises FullError, and what
        AsyncDriver.generate raises."""
        if self.num_running >= self._most:
            raise FullError
        ids = [sample.id for sample in forked(request)]
        stop, includes_stop = request.sampling.stop, request.sampling.include_stop_str_in_output
        texts = [StreamedText(self._tokenizer, stop, includes_stop=includes_stop) for _ in ids]
        self.num_running += 1
        try:
            async with contextlib.aclosing(self.driver.generate(request)) as stream:
                async for req_id, token_ids, output in stream:
                    index = ids.index(req_id)
                    text = texts[index].take(token_ids, output)
                    if text or output is not None:
                        yield Part(index, text, output)
        finally:
            self.num_running -= 1


class Form(NamedTuple):
    """Form of an endpoint. whole, part: `object` of a whole response and of a chunk."""

    prompt: str
    """Field that the prompt is made of."""
    whole: str
    part: str
    say: Callable[[str, bool, bool], Body]
    """Called with (text, is_part, is_first); returns the fields of a choice that hold it."""


def say_text(text: str, is_part: bool, is_first: bool) -> Body:
    return {"text": text}


def say_message(text: str, is_part: bool, is_first: bool) -> Body:
    role = {"role": "assistant"} if is_first else {}
    return {"delta" if is_part else "message": {**role, "content": text}}


COMPLETION = Form("prompt", "text_completion", "text_completion", say_text)
CHAT = Form("messages", "chat.completion", "chat.completion.chunk", say_message)


async def answer_whole(parts: AsyncGenerator[Part, None], form: Form, head: Body) -> Response:
    """Answer with all choices."""
    texts: dict[int, str] = {}
    outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(parts):
        async for index, text, output in parts:
            texts[index] = texts.get(index, "") + text
            if output is not None:
                outputs[index] = output
    for output in outputs.values():
        if output.error:
            return failure(500, output.error)
    choices = [
        {
            "index": index,
            **form.say(texts[index], False, True),
            "finish_reason": output.finish_reason,
        }
        for index, output in sorted(outputs.items())
    ]
    num_in = outputs[0].num_prompt_tokens
    num_out = sum(len(output.token_ids) for output in outputs.values())
    counts = {"prompt_tokens": num_in, "completion_tokens": num_out}
    usage = {**counts, "total_tokens": num_in + num_out}
    return JSONResponse({**head, "object": form.whole, "choices": choices, "usage": usage})


async def events(
    first: Part, parts: AsyncGenerator[Part, None], form: Form, head: Body
) -> AsyncGenerator[str, None]:
    """Yield server-sent events: choices, an error if there is one, and the end."""
    begun: set[int] = set()

    def event(part: Part) -> str:
        index, text, output = part
        if output is not None and output.error:
            return error_event(output.error)
        reason = None if output is None else output.finish_reason
        said = form.say(text, True, index not in begun)
        begun.add(index)
        choice = {"index": index, **said, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'object': form.part, 'choices': [choice]})}\n\n"

    try:
        yield event(first)
        async for part in parts:
            yield event(part)
    except WorkerDaemonError as error:  # the driver has ended
        yield error_event(str(error))
    yield "data: [DONE]\n\n"


def error_event(message: str) -> str:
    return f"data: {json.dumps({'error': {'message': message, 'type': 'server_error'}})}\n\n"


async def unless_client_leaves(http: Request, work: Awaitable[T]) -> T:
    """Return the result of work. If the client leaves, cancel it: that aborts its request."""

    async def leave() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def read_body(http: Request) -> Body:
    """Return the fields that are not null. Raises TooLongError once the body is too long."""
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise TooLongError
    fields = read_object(bytes(body), "body")
    return {field: value for field, value in fields.items() if value is not None}


def failure(status: int, message: str, field: str | None = None, **headers: str) -> Response:
    """Return an answer with an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # What a client has sent may have lone surrogates, which no JSON text in UTF-8 can have.
    named = None if field is None else printable(field)
    error = {"message": printable(message), "type": kind, "param": named, "code": None}
    return JSONResponse({"error": error}, status, headers)


def make_app(service: Service) -> FastAPI:
    """Return the application; the driver lives as long as it does."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.driver:
            try:
                yield
            finally:
                service.close()

    app = FastAPI(title="worker-daemon", lifespan=lifespan)

    async def answer(
        http: Request, make: Callable[[Body], GenerationRequest], form: Form
    ) -> Response:
        body = await read_body(http)
        names = {"prompt_token_ids": form.prompt}
        if "max_completion_tokens" in body:
            names["max_tokens"] = "max_completion_tokens"
        try:
            return await answer_body(http, body, make, form)
        except RequestError as error:
            found = flat(error, form.prompt)
            raise found.named(names.get(found.field, found.field)) from None

    async def answer_body(
        http: Request, body: Body, make: Callable[[Body], GenerationRequest], form: Form
    ) -> Response:
        streamed = body.pop("stream", False)
        if not isinstance(streamed, bool):
            raise request_error("stream", streamed, "it is no truth value", "use true or false")
        request = await service.make(make, body)
        head = {"id": f"req-{request.id}", "created": int(time.time()), "model": service.name}
        parts = service.parts(request)
        if not streamed:
            return await unless_client_leaves(http, answer_whole(parts, form, head))
        # The driver refuses a request before its first token: the status is still open until then.
        first = await unless_client_leaves(http, anext(parts))

        async def close() -> None:  # the client may have left before the last event
            await parts.aclose()

        return StreamingResponse(
            events(first, parts, form, head),
            media_type="text/event-stream",
            background=BackgroundTask(close),
        )

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer(http, service.completion, COMPLETION)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answer(http, service.chat, CHAT)

    @app.get("/health")
    async def health() -> Response:
        daemons = await asyncio.to_thread(lambda: [daemon_state(e) for e in service.endpoints])
        error = service.driver.error
        state = "serving" if error is None else f"ended: {error}"  # a supervisor restarts us
        body = {"state": state, "running": service.num_running, "daemons": daemons}
        return JSONResponse(body, 200 if error is None else 503)

    answer_errors(app)
    return app


def answer_errors(app: FastAPI) -> None:
    """Let errors before the first token become answers."""

    @app.exception_handler(ClientConfigError)
    async def wrong(_: Request, error: ClientConfigError) -> Response:
        return failure(400, str(error), error.field)

    @app.exception_handler(FullError)
    async def full(*_: object) -> Response:
        return failure(503, "too many requests are running", **{"Retry-After": "1"})

    @app.exception_handler(TooLongError)
    async def too_long(*_: object) -> Response:
        message = f"the body is too long; fix: send at most {MAX_BODY_BYTES} bytes"
        return failure(413, message, "body", Connection="close")

    @app.exception_handler(WorkerDaemonError)
    async def ended(_: Request, error: WorkerDaemonError) -> Response:
        return failure(503, str(error))

    @app.exception_handler(ClientDisconnect)
    async def left(*_: object) -> Response:
        return Response(status_code=499)  # nobody reads it


def daemon_state(endpoint: str) -> Body:
    """Ask a daemon how it is, over sockets of this call's own: it needs no lease."""
    with zmq.Context() as context:
        client = AskingClient(context, parse_endpoint(endpoint), 0, new_driver_id())
        try:
            status = client.get_status(HEALTH_TIMEOUT_S)
        except WorkerDaemonError as error:
            return {"endpoint": endpoint, "error": str(error)}
        finally:
            client.close()
    state = {"serving": status.serving, "load": status.load, "link": status.link_state}
    return {"endpoint": endpoint, "pid": status.pid, "step": status.last_seq, **state}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--endpoints", required=True, help="running daemons: EP,EP,...")
    parser.add_argument("--model", required=True, type=Path, help="checkpoint directory")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="in a step")
    parser.add_argument("--max-requests", type=int, default=256, help="unfinished at once")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    config = WorkerConfig(
        parallel=ParallelConfig(
            pipeline_parallel_size=options.pipeline_parallel_size,
            tensor_parallel_size=options.tensor_parallel_size,
        ),
        model=ModelConfig(model=str(options.model.resolve())),
        scheduler=SchedulerConfig(max_num_batched_tokens=options.max_num_batched_tokens),
    )
    service = Service(options.model, options.endpoints.split(","), config, options.max_requests)
    uvicorn.run(make_app(service), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
