"""OpenAI's own client."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients import documents as d
from tests.clients.conftest import KEY


class Person(BaseModel):
    name: str
    age: int


class get_weather(BaseModel):  # the name of the tool
    city: Literal["Oslo", "Rome"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def said(content):
    return {"model": d.MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}


def test_models_and_keys(client, server):
    assert [model.id for model in client.models.list()] == [d.MODEL]
    assert client.models.retrieve(d.MODEL).id == d.MODEL
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="another", max_retries=0).models.list()


def test_completions(client):
    prompt = f"<|user|>{d.HELLO}<|end|><|assistant|>"
    given = {"model": d.MODEL, "prompt": prompt, "temperature": 0}
    answer = client.completions.create(**given, logprobs=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (d.HELLO_ANSWER, "stop")
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens
    chunks = list(client.completions.create(**given, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == d.HELLO_ANSWER
    several = client.completions.create(**given | {"prompt": [prompt, prompt]}, echo=True)
    assert [each.text for each in several.choices] == [prompt + d.HELLO_ANSWER] * 2


def test_chats(client):
    answer = client.chat.completions.create(**said(d.HELLO), logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (d.HELLO_ANSWER, "stop")
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert b"".join(bytes(e.bytes) for e in entries[:-1]).decode() == d.HELLO_ANSWER
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    system = {"role": "system", "content": "Be brief."}
    body = said(d.COUNT)
    body["messages"].insert(0, system)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**body, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == d.COUNT_ANSWER
    assert chunks[-1].usage.completion_tokens > 10


@pytest.mark.parametrize("is_streamed", [False, True])
def test_parsed_answers(client, is_streamed):
    if is_streamed:
        with client.chat.completions.stream(**said(d.PERSON), response_format=Person) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.parse(**said(d.PERSON), response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools(client, choice, is_streamed):
    tools = [openai.pydantic_function_tool(get_weather)]
    body = {**said(d.WEATHER), "tools": tools, "tool_choice": choice}
    if is_streamed:
        with client.chat.completions.stream(**body, parallel_tool_calls=False) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_completion()
        # In how many parts depends on what the grammar forces, and on the reader.
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        answer = client.chat.completions.parse(**body, parallel_tool_calls=False)
    message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    (call,) = message.tool_calls
    assert reason == "tool_calls"
    assert call.function.parsed_arguments == get_weather(city=d.CITY)
    result = {"role": "tool", "tool_call_id": call.id, "content": d.WEATHER_RESULT}
    body["messages"] += [message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(**said(d.WEATHER) | {"messages": body["messages"]})
    assert again.choices[0].message.content == d.WEATHER_ANSWER


def test_embeddings(client):
    packed = client.embeddings.create(model=d.MODEL, input=[d.HELLO, d.COUNT])
    plain = client.embeddings.create(model=d.MODEL, input=d.COUNT, encoding_format="float")
    assert packed.data[1].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert sum(value * value for value in plain.data[0].embedding) == pytest.approx(1.0)


def test_errors_name_their_field(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**said(d.HELLO), top_logprobs=3)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**said(d.HELLO) | {"model": "gpt-4o"})
    schema = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**said(d.HELLO), response_format=wrapped)
    assert refused.value.param.startswith("response_format")
    assert json.dumps(refused.value.body)


def test_asynchronous_clients(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY) as client:
            asked = [client.chat.completions.create(**said(d.COUNT)) for _ in range(8)]
            return await asyncio.gather(*asked)

    texts = {answer.choices[0].message.content for answer in asyncio.run(main())}
    assert texts == {d.COUNT_ANSWER}
