"""Libraries that are built on OpenAI's client, or speak its API themselves."""

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import documents as d
from tests.clients.conftest import KEY


class Person(BaseModel):
    """A person."""

    name: str
    age: int


ADA = Person(name="Ada", age=36)


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    assert city == d.CITY
    return d.WEATHER_RESULT


@pytest.fixture(scope="module")
def chat(server):
    return ChatOpenAI(base_url=server.url, api_key=KEY, model=d.MODEL, temperature=0)


def test_langchain_chats(chat):
    assert chat.invoke(d.HELLO).content == d.HELLO_ANSWER
    chunks = list(chat.stream(d.COUNT))
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == d.COUNT_ANSWER
    assert chat.with_structured_output(Person).invoke(d.PERSON) == ADA
    for choice in ("auto", "required"):
        called = chat.bind_tools([get_weather], tool_choice=choice).invoke(d.WEATHER)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == (d.TOOL, {"city": d.CITY})
    result = ToolMessage(d.WEATHER_RESULT, tool_call_id=call["id"])
    messages = [("user", d.WEATHER), called, result]
    assert chat.bind_tools([get_weather]).invoke(messages).content == d.WEATHER_ANSWER


def test_langchain_completions_and_embeddings(server):
    named = {"base_url": server.url, "api_key": KEY, "model": d.MODEL}
    model = OpenAI(**named, temperature=0)
    prompt = f"<|user|>{d.COUNT}<|end|><|assistant|>"
    assert model.invoke(prompt) == d.COUNT_ANSWER
    assert "".join(model.stream(prompt)) == d.COUNT_ANSWER
    embeddings = OpenAIEmbeddings(**named, check_embedding_ctx_length=False)
    first, second = embeddings.embed_documents([d.HELLO, d.COUNT])
    assert embeddings.embed_query(d.COUNT) == pytest.approx(second, abs=1e-6)
    assert first != second


def test_litellm(server):
    named = {"model": f"openai/{d.MODEL}", "api_base": server.url, "api_key": KEY}
    messages = [{"role": "user", "content": d.COUNT}]
    answer = litellm.completion(**named, messages=messages, temperature=0, max_tokens=64)
    assert answer.choices[0].message.content == d.COUNT_ANSWER
    chunks = litellm.completion(**named, messages=messages, temperature=0, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == d.COUNT_ANSWER
    tool = {"name": d.TOOL, "parameters": {"type": "object", "properties": {"city": {}}}}
    called = litellm.completion(
        **named,
        messages=[{"role": "user", "content": d.WEATHER}],
        tools=[{"type": "function", "function": tool}],
        temperature=0,
    )
    assert called.choices[0].message.tool_calls[0].function.name == d.TOOL
    embedded = litellm.embedding(**named, input=[d.HELLO])
    assert len(embedded.data[0]["embedding"]) == 64


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor(server, mode):
    client = openai.OpenAI(base_url=server.url, api_key=KEY)
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=d.MODEL,
        messages=[{"role": "user", "content": d.PERSON}],
        response_model=Person,
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )
    assert isinstance(made, Person)
    if mode is instructor.Mode.JSON_SCHEMA:  # a tool's call is the grammar's, not the model's
        assert made.model_dump() == ADA.model_dump()


def test_pydantic_ai(server):
    provider = OpenAIProvider(base_url=server.url, api_key=KEY)
    model = OpenAIChatModel(d.MODEL, provider=provider)
    settings = {"temperature": 0, "max_tokens": 100}
    asked = Agent(model, tools=[get_weather], model_settings=settings).run_sync(d.WEATHER)
    assert asked.output == d.WEATHER_ANSWER
    made = Agent(model, output_type=Person, model_settings=settings).run_sync(d.PERSON)
    assert isinstance(made.output, Person)
