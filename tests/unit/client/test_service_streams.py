"""Parts of the server without a daemon: streams to clients that leave or do not read, tickets,
fields of bodies."""

import asyncio
import json
from types import SimpleNamespace
from typing import Annotated

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from worker_client.errors import RequestError
from worker_client.requests import GenerationRequest
from worker_client.service.admission import Admission
from worker_client.service.chat_form import ChatChoice, ChatForm
from worker_client.service.engine import ChoicePart
from worker_client.service.errors import HttpError, error_body
from worker_client.service.fields import BodyFields
from worker_client.service.streaming import EventStream, StreamOptions, Usage, answer
from worker_client.service.tool_calls import ToolCallStream, ToolForm

WRITE_S = 0.1


class Client:
    """The other end of a response: leaves when it is told to, or when it is aborted."""

    def __init__(self, takes=lambda number: True):
        """takes: called with the number of each write; False: it is not taken."""
        self.bodies = []
        self.was_aborted = False
        self.left = asyncio.Event()
        self._takes = takes

    def abort(self):
        self.was_aborted = True
        self.left.set()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if not self._takes(len(self.bodies)):
            await self.left.wait()
        elif message["type"] == "http.response.body":
            self.bodies.append(message["body"])


class Source:
    """Events, one after the other, and whether they were closed."""

    def __init__(self, number, pause_s=0.0):
        self.is_closed = False
        self.source = self._source(number, pause_s)

    async def _source(self, number, pause_s):
        try:
            for each in range(number):
                await asyncio.sleep(pause_s)
                yield str(each).encode()
        finally:
            self.is_closed = True

    async def events(self):
        async for each in self.source:
            yield each


def serve(client_of, number, pause_s=0.0, **options):
    """Serve a stream to a client; return both."""

    async def main():
        client, source = client_of(), Source(number, pause_s)
        await anext(source.source)  # as `answer` does, before there is a response
        stream = EventStream(source.events(), WRITE_S, source=source.source)
        if options.get("leaves_first"):
            client.left.set()
        async with asyncio.timeout(30):
            scope = {"type": "http", "state": {"abort": client.abort}}
            if options.get("leaves_first"):
                with pytest.raises(ClientDisconnect):
                    await stream(scope, client.receive, client.send)
            else:
                await stream(scope, client.receive, client.send)
        return client, source.is_closed

    return asyncio.run(main())


def test_a_stream_is_written_and_closed():
    """A source that is slower than the time for a write is waited for."""
    client, is_closed = serve(Client, 4, pause_s=2.5 * WRITE_S)
    assert client.bodies == [b"1", b"2", b"3", b""]
    assert is_closed and not client.was_aborted


def test_a_client_that_has_left_before_the_first_event_frees_its_source():
    client, is_closed = serve(Client, 10**6, leaves_first=True)
    assert is_closed and not client.bodies


def test_a_client_that_takes_nothing_more_is_aborted():
    client, is_closed = serve(lambda: Client(lambda number: number < 3), 10**6)
    assert is_closed and client.was_aborted and len(client.bodies) == 3


def events_of(*pushed):
    """The events of a chat whose model writes these texts, each of which comes as one part."""
    request = GenerationRequest("r", [1], 64)
    split = ToolCallStream(ToolForm.HERMES, ["add"], in_parts=True)
    choice = ChatChoice(lambda part: split.push(part.text), lambda: "id", None)
    form = ChatForm("m", Usage([request]), [choice], StreamOptions(True, False, False), None)

    async def main():
        client = Client()

        async def parts(_):
            for text in pushed:
                yield ChoicePart(0, text, [], None, None, None)

        admission = Admission()
        admission.open(1)
        state = SimpleNamespace(ticket=admission.ticket())
        http = SimpleNamespace(state=state, receive=client.receive)
        settings = SimpleNamespace(write_s=WRITE_S)
        context = SimpleNamespace(engine=SimpleNamespace(parts=parts), settings=settings)
        response = await answer(http, context, [request], form, {}, stream=True)
        await response({"state": {"abort": client.abort}}, client.receive, client.send)
        return b"".join(client.bodies).decode().split("\n\n")

    *events, done, end = asyncio.run(main())
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_error_follows_all_that_precedes_it(size):
    """However much of the text comes at once."""
    text = 'Look.<tool_call>\n{"name": "add", "arguments": {"a": Oslo}}\n</tool_call>'
    *chunks, last = events_of(*(text[at : at + size] for at in range(0, len(text), size)))
    assert last["error"]["code"] == "malformed_tool_call"
    role, *deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert role == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "add"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": Oslo}'


def test_tickets_bound_what_is_unfinished():
    admission = Admission()
    with pytest.raises(HttpError, match="loaded") as refused:
        admission.ticket().take(1)
    assert refused.value.status == 503 and refused.value.headers["Retry-After"]
    admission.open(4)
    first, second = admission.ticket(), admission.ticket()
    first.take(1)
    first.take(3)
    second.take(1)
    assert admission.num_taken == 4
    with pytest.raises(HttpError, match="too many") as refused:
        second.take(2)
    assert refused.value.status == 503
    with pytest.raises(RequestError, match="no room for so many"):
        second.take(5)
    admission.close("it ends")
    first.take(3)  # what was taken goes on
    with pytest.raises(HttpError, match="it ends"):
        admission.ticket().take(1)
    first.release()
    first.release()
    second.release()
    assert admission.num_taken == 0


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    a: list[Annotated[int, msgspec.Meta(ge=0)]]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": [1, -1]}, "x.a[1]"),
        ({"a": "b"}, "x.a"),
        ({"a": [], "b": 1}, "x"),
        ({}, "x"),
        (5, "x"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(value, field):
    with pytest.raises(RequestError) as wrong:
        BodyFields({"x": value}).take("x", Inner, None)
    assert wrong.value.field == field and wrong.value.fix


def test_fields_are_taken_once_and_the_rest_is_refused():
    fields = BodyFields({"a": 1, "b": None, "user": "u", "o": {"p": True, "q": 2}})
    assert fields.take("a", int, 0) == 1 and fields.take("a", int, 0) == 0
    assert fields.take("b", int, 7) == 7 and "b" not in fields
    inner = fields.take_object("o")
    assert inner.take("p", bool, False)
    with pytest.raises(RequestError) as wrong:
        inner.check_empty()
    assert wrong.value.field == "o.q"
    fields.check_empty()


def test_errors_show_no_control_characters():
    body = error_body(400, "a\x1b[2J\ud800", "\u202eb")
    assert body["error"]["message"].isprintable() and body["error"]["param"].isprintable()
    msgspec.json.encode(body)
