"""Chats, tools, tokens and pooling over HTTP: the endpoints of `worker-client serve` on real
daemons, against a model that was trained to give these answers, and against transformers."""

import asyncio
import base64
import json
import re
import threading
from functools import partial

import jsonschema
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rpc_schema.config import LoraConfig
from tests.support.checkpoints import Checkpoint
from tests.support.lora_adapters import make_adapter
from tests.support.pooling_reference import write_tokenizer
from tests.support.service_app import service_app
from tests.support.serving import worker_config
from tests.support.trained_model import call_text, chat, train_model
from tests.support.waiting import PATIENCE_S
from worker_client.service.engine import MAX_MAKING

HELLO, COUNT, OSLO, BOTH = "Say hello.", "Count to ten.", "Weather in Oslo?", "Oslo and Rome?"
BROKEN = "Weather?"
COUNTED = "one two three four five six seven eight nine ten"
COUNTING = f"<|user|>{COUNT}<|end|><|assistant|>"
OSLO_CALL, ROME_CALL = (call_text("get_weather", city=city) for city in ("Oslo", "Rome"))
DOCUMENTS = [
    chat(HELLO, answer="Hello, world."),
    chat(COUNT, answer=COUNTED),
    chat(OSLO, answer=OSLO_CALL),
    chat(OSLO, f"<|assistant|>{OSLO_CALL}", "<|tool|>3 degrees", answer="It is 3 degrees."),
    chat(BROKEN, answer=OSLO_CALL.replace('"Oslo"', "Oslo")),
    chat(BOTH, answer=f"Let me look.\n{OSLO_CALL}\n{ROME_CALL}"),
]
CHAT = "/v1/chat/completions"
KEY = "of an administrator"
ADMIN = {"headers": {"Authorization": f"Bearer {KEY}"}}
BOMB = "{%- for a in range((n or 0) ** 4) %}{% for b in range(n ** 4) %}{% endfor %}{% endfor %}"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def model(model_root):
    path = model_root / "trained"
    train_model(path, DOCUMENTS)
    generation = path / "generation_config.json"
    own = json.loads(generation.read_text())
    generation.write_text(json.dumps({**own, "temperature": 2.0, "top_k": 1}))
    with (path / "chat_template.jinja").open("a") as file:
        file.write(BOMB)
    return path


@pytest.fixture(scope="module")
def service(daemons, model):
    room = LoraConfig(max_loras=1, max_lora_rank=8, max_cpu_loras=2)
    config = worker_config(model, enable_sleep_mode=True, lora=room)
    keys = {"admin_keys": (KEY,), "api_keys": ()}
    with service_app(model, config, daemons.endpoints(1), **keys) as service:
        yield service


def said(*contents):
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def asked(*contents, **fields):
    return {**said(*contents), "temperature": 0, **fields}


def message(body):
    (choice,) = body["choices"]
    return choice["message"], choice["finish_reason"]


def assembled(chunks):
    """The message that the chunks of one choice make, and its finish reason."""
    made, reasons = {"content": "", "tool_calls": []}, []
    first = chunks[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            made["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    assert part["type"] == "function"
                    made["tool_calls"].append(part)
                else:
                    call = made["tool_calls"][part["index"]]["function"]
                    call["arguments"] += part["function"]["arguments"]
            reasons.append(choice["finish_reason"])
    assert not any(reasons[:-1])
    return made, reasons[-1]


def test_answers_whole_and_in_chunks(service):
    body = service.ok(CHAT, asked(HELLO, model="trained"))
    assert body["object"] == "chat.completion"
    assert body["model"] == "trained"
    own = {"role": "assistant", "content": "Hello, world.", "refusal": None}
    assert message(body) == (own, "stop")
    for _ in range(20):  # a slow reader gets tokens together, seldom all of them
        chunks = service.chunks(CHAT, asked(COUNT, stream_options={"include_usage": True}))
        assert assembled(chunks[:-1])[0]["content"] == COUNTED
        if len(chunks) > 4:
            break
    assert len(chunks) > 4, "it was not streamed"  # role, text, reason and usage
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (
        usage["completion_tokens"] == service.ok(CHAT, asked(COUNT))["usage"]["completion_tokens"]
    )
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_sampling_defaults_are_those_of_the_checkpoint(service):
    """The most likely token alone, unless a body says otherwise."""
    assert message(service.ok(CHAT, said(COUNT)))[0]["content"] == COUNTED
    drawn = {**said(COUNT), "top_k": -1, "n": 4, "max_tokens": 12}
    found = service.ok(CHAT, drawn)["choices"]
    assert len({choice["message"]["content"] for choice in found}) > 1
    prompt = {"prompt": COUNTING, "max_tokens": 40}
    assert service.ok("/v1/completions", prompt)["choices"][0]["text"] == COUNTED


def test_options_of_chats(service):
    cut = service.ok(CHAT, asked(COUNT, max_completion_tokens=3))
    assert message(cut)[1] == "length"
    assert cut["usage"]["completion_tokens"] == 3
    stopped = service.ok(CHAT, asked(COUNT, stop=[" five"]))
    assert message(stopped) == (
        {"role": "assistant", "content": "one two three four", "refusal": None},
        "stop",
    )
    several = service.ok(CHAT, asked(COUNT, n=2, temperature=1.5, seed=3, max_tokens=12))
    again = service.ok(CHAT, asked(COUNT, n=2, temperature=1.5, seed=3, max_tokens=12))
    assert several["choices"] == again["choices"]
    assert [each["index"] for each in several["choices"]] == [0, 1]
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    joined = service.ok("/tokenize", {"messages": [{"role": "user", "content": parts}]})
    assert joined["tokens"] == service.ok("/tokenize", said("Say\nhello."))["tokens"]
    going_on = asked(COUNT, continue_final_message=True)
    going_on["messages"].append({"role": "assistant", "content": "one two three"})
    assert message(service.ok(CHAT, going_on))[0]["content"] == COUNTED.removeprefix(
        "one two three"
    )


def test_logprobs_are_those_of_transformers(service, model):
    fields = asked(HELLO, logprobs=True, top_logprobs=3)
    (choice,) = service.ok(CHAT, fields)["choices"]
    entries = choice["logprobs"]["content"]
    streamed = [
        entry
        for chunk in service.chunks(CHAT, fields)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(fields["messages"], add_generation_prompt=True)[
        "input_ids"
    ]
    answer = tokenizer("Hello, world.<|end|>")["input_ids"]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(entries) == len(answer)
    for entry, token_id, row in zip(entries, answer, expected, strict=True):
        best = row.topk(3)
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        assert bytes(entry["bytes"]).decode() == entry["token"] == tokenizer.decode([token_id])
    assert "".join(entry["token"] for entry in entries) == "Hello, world.<|end|>"


def test_both_logprobs_of_a_chat(service):
    fields = asked(HELLO, logprobs=True, full_logprobs=True, temperature=2.0, seed=4, max_tokens=6)
    plain = service.ok(CHAT, {**fields, "full_logprobs": False})["choices"][0]["logprobs"]
    whole = service.ok(CHAT, fields)["choices"][0]["logprobs"]["content"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in service.chunks(CHAT, fields)]
    assert [entry for part in parts if part for entry in part["content"]] == whole
    for entry, own in zip(whole, plain["content"], strict=True):
        # Without a grammar, `logprob` is that of the model; at temperature 2 the drawn one differs.
        assert entry["logprob_full"] == pytest.approx(own["logprob"], abs=1e-4)
        assert entry["logprob_sampled"] <= 0
        assert "logprob_full" not in own
    assert any(abs(e["logprob_full"] - e["logprob_sampled"]) > 1e-3 for e in whole)
    greedy = service.ok(CHAT, {**fields, "temperature": 0})["choices"][0]["logprobs"]["content"]
    assert {entry["logprob_sampled"] for entry in greedy} == {0}


def test_calls_of_tools_by_the_template(service):
    fields = asked(OSLO, tools=[WEATHER, NOW])
    found, reason = message(service.ok(CHAT, fields))
    (call,) = found["tool_calls"]
    assert (found["content"], reason) == (None, "tool_calls")
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3 degrees"}
    fields["messages"] += [{"role": "assistant", **found}, result]
    assert message(service.ok(CHAT, fields))[0]["content"] == "It is 3 degrees."
    both = service.chunks(CHAT, asked(BOTH, tools=[WEATHER]))
    made, reason = assembled(both)
    assert (made["content"], reason) == ("Let me look.", "tool_calls")
    assert [call["index"] for call in made["tool_calls"]] == [0, 1]
    parts = sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in both)
    assert parts > 6, "arguments were not streamed"
    whole = service.ok(CHAT, asked(OSLO, tools=[WEATHER]))
    cut = asked(OSLO, tools=[WEATHER], max_tokens=whole["usage"]["completion_tokens"] - 6)
    begun, reason = assembled(service.chunks(CHAT, cut))
    (call,) = begun["tool_calls"]
    assert (call["function"]["name"], reason) == ("get_weather", "length")
    assert '{"city": "Oslo"}'.startswith(call["function"]["arguments"])
    cities = [json.loads(call["function"]["arguments"])["city"] for call in made["tool_calls"]]
    assert cities == ["Oslo", "Rome"]
    one = service.ok(CHAT, asked(BOTH, tools=[WEATHER], parallel_tool_calls=False))
    assert len(message(one)[0]["tool_calls"]) == 1
    none = service.ok(CHAT, asked(OSLO, tools=[WEATHER], tool_choice="none"))
    assert message(none)[0]["content"] == OSLO_CALL.removeprefix("<tool_call>")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_of_strict_functions_follow_their_schemas(service, is_streamed):
    """The model would write Oslo, and behind it Rome; text around the calls is its own."""
    place = {**CITY, "properties": {"city": {"enum": ["Rome", "Paris"]}}}
    strict = {"type": "function", "function": {"name": "get_weather", "strict": True}}
    strict["function"]["parameters"] = place
    free = {"type": "function", "function": {**WEATHER["function"], "strict": False}}
    for content, tools, text, cities in [
        (BOTH, [strict, NOW], "Let me look.", {"Rome", "Paris"}),
        (BOTH, [free, NOW], "Let me look.", {"Oslo", "Rome"}),
        (HELLO, [strict], "Hello, world.", set()),
    ]:
        fields = asked(content, tools=tools, max_tokens=200)
        if is_streamed:
            found, reason = assembled(service.chunks(CHAT, fields))
        else:
            found, reason = message(service.ok(CHAT, fields))
        assert (found["content"], reason) == (text, "tool_calls" if cities else "stop")
        calls = [each["function"] for each in found.get("tool_calls", [])]
        assert {json.loads(call["arguments"])["city"] for call in calls} <= cities
        assert bool(calls) == bool(cities)
    one = asked(BOTH, tools=[strict], parallel_tool_calls=False, max_tokens=200)
    assert len(message(service.ok(CHAT, one))[0]["tool_calls"]) == 1


def test_a_call_that_is_none_is_text_or_an_error(service):
    """Once its arguments have been streamed it can be no text any more."""
    fields = asked(BROKEN, tools=[WEATHER], n=1)
    found, reason = message(service.ok(CHAT, fields))
    assert ("tool_calls" in found, reason) == (False, "stop")
    assert found["content"].endswith('"arguments": {"city": Oslo}}\n</tool_call>')
    *parts, last = service.chunks(CHAT, fields)
    assert assembled(parts)[0]["tool_calls"]
    assert last["error"]["code"] == "malformed_tool_call"
    assert "get_weather" in last["error"]["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_of_tools_by_a_grammar(service, is_streamed):
    """The model would answer in prose."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        fields = asked(HELLO, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=200)
        fields |= {"parallel_tool_calls": False}
        if is_streamed:
            found, reason = assembled(service.chunks(CHAT, fields))
        else:
            found, reason = message(service.ok(CHAT, fields))
        (call,) = found["tool_calls"]
        assert reason == "tool_calls"
        assert not found["content"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert name in (["get_weather"] if choice == named else ["get_weather", "now"])
        jsonschema.validate(arguments, CITY if name == "get_weather" else {"maxProperties": 0})


def test_response_formats(service):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    text = message(service.ok(CHAT, asked(HELLO, response_format=wrapped, max_tokens=60)))[0]
    assert json.loads(text["content"]) in ({"n": 1}, {"n": 2})
    plain = asked(HELLO, response_format={"type": "text"})
    assert message(service.ok(CHAT, plain))[0]["content"] == "Hello, world."


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}
BAD_SCHEMA = {"name": "n", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}
LONG_SCHEMA = {"name": "n", "schema": {"enum": ["x" * 70_000]}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
DEEP = json.loads('{"items":' * 900 + "{}" + "}" * 900)
DEEP_TOOL = {"type": "function", "function": {"name": "f", "parameters": DEEP}}
BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "absent": ({"messages": None}, "messages"),
    "no object": ({"messages": ["a"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role"),
    "another role": ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "a number": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]},
                 "messages[0].content[0].type"),
    "arguments": ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
                  "messages[0].tool_calls[0].function.arguments"),
    "top alone": ({"top_logprobs": 2}, "top_logprobs"),
    "full alone": ({"full_logprobs": True}, "full_logprobs"),
    "too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a number of logprobs": ({"logprobs": 3}, "logprobs"),
    "max": ({"max_completion_tokens": "x"}, "max_completion_tokens"),
    "two bounds": ({"max_completion_tokens": 2, "max_tokens": 3}, "max_tokens"),
    "tools": ({"tools": {}}, "tools"),
    "a tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
               "tools[0].function.name"),
    "strict": ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
               "tools[0].function.strict"),
    "twice": ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice": ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    "an unknown one": (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name"),
    "both": ({"tools": [NOW], "response_format": {"type": "json_object"}}, "response_format"),
    "no grammar": ({"response_format": {"type": "json_schema", "json_schema": BAD_SCHEMA}},
                   "response_format.json_schema.schema"),
    "a long schema": ({"response_format": {"type": "json_schema", "json_schema": LONG_SCHEMA}},
                      "response_format.json_schema.schema"),
    "a bad tool": ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
    "a strict tool": ({"tools": [{**BAD_TOOL, "function": {**BAD_TOOL["function"],
                                                           "strict": True}}]}, "tools"),
    "a deep tool": ({"tools": [DEEP_TOOL], "tool_choice": "required"}, "tools"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "variables": ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    "two ends": ({"continue_final_message": True, "add_generation_prompt": True},
                 "continue_final_message"),
    "unknown": ({"modalities": ["audio"]}, "modalities"),
    "old": ({"functions": []}, "functions"),
    "too long": ({"messages": [{"role": "user", "content": "a b " * 2000}]}, "messages"),
    "bias": ({"logit_bias": {"100000": 1}}, "logit_bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chats_name_their_field(service, name):
    fields, field = BAD_CHATS[name]
    found, text = service.refused(CHAT, {**asked(HELLO), **fields})
    assert found == field, text
    assert service.refused(CHAT, {**asked(HELLO), **fields, "stream": True})[0] == field


WRONG = ("x", -3, 10**400, 1e9, [], {}, {"a": 1}, True, [[]], [-1], ["x"] * 300, "a b " * 20_000)
GIVEN = {
    CHAT: asked(HELLO),
    "/v1/completions": {"prompt": HELLO, "temperature": 0},
    "/v1/embeddings": {"input": HELLO},
    "/v1/score": {"text_1": HELLO, "text_2": COUNT},
    "/v1/rerank": {"query": HELLO, "documents": [COUNT]},
    "/tokenize": {"prompt": HELLO},
    "/detokenize": {"tokens": [1]},
}
"""By path, a body that is served."""
NEEDED = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [NOW]},
}
"""Fields that another one must go with."""


@pytest.mark.parametrize("path", GIVEN)
def test_errors_name_a_field_that_was_sent(service, path):
    """Whatever is wrong with it, and whoever notices."""
    _, known = service.refused(path, {**GIVEN[path], "unknown": 1})
    names = re.findall(r"\w+", known.rpartition("this endpoint has ")[2])
    assert {*GIVEN[path]} <= {*names}, known

    async def main(client):
        bodies = []
        for name in names:
            for value in WRONG:
                body = {**GIVEN[path], "max_tokens": 2, **NEEDED.get(name, {}), name: value}
                if "max_tokens" not in names or name == "max_completion_tokens":
                    del body["max_tokens"]
                if name == "messages" and "messages" not in GIVEN[path]:
                    del body["prompt"]  # one of the two
                bodies.append((name, body))
        answers = []
        for _, body in bodies:
            content = json.dumps(body).encode()
            answers.append(await client.post(path, content=content))
        return zip(bodies, answers, strict=True)

    num_refused = 0
    for (name, body), answer in service.run(main):
        if answer.status_code != 200:
            num_refused += 1
            param = answer.json()["error"]["param"]
            assert answer.status_code in (400, 404), (body, answer.text)
            assert re.match(r"\w+", param or "")[0] == name, (str(body)[:200], answer.text[:300])
    assert num_refused > 4 * len(names)


def test_an_error_of_echoed_log_probabilities_names_their_field(service, monkeypatch):
    monkeypatch.setattr("worker_client.scheduler.new_requests.MAX_PROMPT_LOGPROBS_TOKENS", 1)
    body = {"prompt": HELLO, "echo": True, "logprobs": 1}
    assert service.refused("/v1/completions", body)[0] == "logprobs"


def test_a_template_that_takes_too_long_holds_up_nobody(service):
    async def main(client):
        bomb = client.post(CHAT, json=asked(HELLO, chat_template_kwargs={"n": 10}))
        refused = asyncio.ensure_future(bomb)
        served = await client.post(CHAT, json=asked(HELLO))
        return served, refused.done(), await refused

    served, was_done, refused = service.run(main)
    assert (served.status_code, refused.status_code) == (200, 400)
    assert refused.json()["error"]["param"] == "messages"
    assert not was_done


def test_prompts_of_token_ids_wait_for_no_text(service):
    go_on = threading.Event()

    async def main(client):
        held = [service.context.engine.on_thread(go_on.wait) for _ in range(MAX_MAKING)]
        texts = asyncio.gather(*held)
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await client.post("/v1/completions", json={"prompt": [[1, 2], [3]]})
        finally:
            go_on.set()
            await texts

    assert service.run(main).status_code == 200


def test_tokens_and_back(service, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = service.ok("/tokenize", {"prompt": HELLO, "return_token_strs": True})
    assert found["tokens"] == tokenizer(HELLO)["input_ids"]
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 1024
    messages = asked(OSLO)["messages"]
    chatted = service.ok("/tokenize", {"messages": messages, "tools": [WEATHER]})["tokens"]
    assert (
        chatted == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    assert service.ok("/detokenize", {"tokens": chatted})["prompt"] == tokenizer.decode(chatted)
    assert service.refused("/detokenize", {"tokens": [1, 10**6]})[0] == "tokens[1]"
    assert service.refused("/detokenize", {"tokens": [1] * 2000})[0] == "tokens"
    assert service.refused("/tokenize", {"prompt": "x" * (4 << 20)}, 413)[0] == "body"
    assert service.refused("/tokenize", {})[0] == "prompt"
    assert service.refused("/tokenize", {"messages": messages, "prompt": "a"})[0] == "prompt"


def test_embeddings(service, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model)
    ids = [tokenizer(text)["input_ids"] for text in (HELLO, COUNT)]
    with torch.no_grad():
        states = [reference.model(torch.tensor([own])).last_hidden_state[0, -1] for own in ids]
    expected = np.stack([(state / state.norm()).numpy() for state in states])
    for given in ([HELLO, COUNT], ids):
        body = service.ok("/v1/embeddings", {"input": given})
        np.testing.assert_allclose(
            [each["embedding"] for each in body["data"]], expected, atol=1e-5
        )
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    (short,) = service.ok("/v1/embeddings", {"input": HELLO, "dimensions": 8})["data"]
    cut = states[0][:8] / states[0][:8].norm()
    np.testing.assert_allclose(short["embedding"], cut.numpy(), atol=1e-5)
    (packed,) = service.ok("/v1/embeddings", {"input": ids[0], "encoding_format": "base64"})["data"]
    values = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
    np.testing.assert_allclose(values, expected[0], atol=1e-5)
    score = service.ok("/score", {"text_1": HELLO, "text_2": [COUNT, HELLO]})
    scores = [each["score"] for each in score["data"]]
    assert scores == pytest.approx([float(expected[0] @ expected[1]), 1.0], abs=1e-5)


BAD_POOLED = {
    "nothing": ("/v1/embeddings", {}, "input"),
    "empty": ("/v1/embeddings", {"input": []}, "input"),
    "kinds": ("/v1/embeddings", {"input": ["a", 1]}, "input"),
    "ids": ("/v1/embeddings", {"input": [[1], [10**6]]}, "input[1]"),
    "too long": ("/v1/embeddings", {"input": ["a", "a b " * 2000]}, "input[1]"),
    "form": ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    "dimensions": ("/v1/embeddings", {"input": "a", "dimensions": 1000}, "dimensions"),
    "sampling": ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
    "numbers": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    "no query": ("/v1/rerank", {"documents": ["a"]}, "query"),
    "documents": ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    "top": ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
}


@pytest.mark.parametrize("name", BAD_POOLED)
def test_bad_inputs_name_their_field(service, name):
    path, fields, field = BAD_POOLED[name]
    assert service.refused(path, fields)[0] == field


def greedy(model, path, prompt, length=8):
    """Text of the tokens that transformers' model takes."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    found = model.generate(ids, max_new_tokens=length, do_sample=False, attention_mask=ids > -1)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def completed(service, prompt, **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
    return service.ok("/v1/completions", body)["choices"][0]["text"]


def test_administrators_load_adapters(service, model):
    base = Checkpoint(model, AutoModelForCausalLM.from_pretrained(model))
    merged = make_adapter(base, "first", seed=3).model
    make_adapter(base, "large", seed=4, rank=16)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert service.post(load, {"lora_name": "first"}).status_code == 401
    assert service.refused("/v1/completions", {"prompt": "a", "model": "first"}, 404)[0] == "model"
    service.ok(load, {"lora_name": "poet", "lora_path": "first"}, **ADMIN)
    models = [each["id"] for each in service.get("/v1/models").json()["data"]]
    assert models == ["trained", "poet"]
    own, others = completed(service, COUNTING, model="poet"), completed(service, COUNTING)
    assert own == greedy(merged, model, COUNTING)
    assert own != others == greedy(base.model, model, COUNTING)
    wrong = [
        (load, {"lora_name": "none"}, 400),
        (load, {"lora_name": "large"}, 400),
        (load, {"lora_name": "first", "lora_path": "/elsewhere"}, 400),
        (load, {"lora_name": "poet", "lora_path": "large"}, 400),
        (load, {"lora_name": "trained", "lora_path": "first"}, 400),
        (load, {}, 400),
        (unload, {"lora_name": "large"}, 404),
    ]
    for path, body, status in wrong:
        answer = service.post(path, body, **ADMIN)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] in ("lora_name", "lora_path"), answer.text
    assert completed(service, COUNTING, model="poet") == own
    service.ok(unload, {"lora_name": "poet"}, **ADMIN)
    assert service.refused("/v1/completions", {"prompt": "a", "model": "poet"}, 404)[0] == "model"


def test_administrators_put_the_group_to_sleep(service):
    before = completed(service, HELLO)
    assert service.post("/sleep").status_code == 401
    assert service.post("/sleep?level=3", **ADMIN).json()["error"]["param"] == "level"
    assert service.post("/wake_up?tags=all", **ADMIN).json()["error"]["param"] == "tags"
    assert service.get("/is_sleeping", **ADMIN).json() == {"is_sleeping": False}
    assert service.ok("/sleep", **ADMIN) == {"is_sleeping": True}
    assert service.get("/is_sleeping", **ADMIN).json() == {"is_sleeping": True}
    answer = service.post(CHAT, asked(HELLO))
    assert (answer.status_code, "wake_up" in answer.text) == (503, True)
    assert service.ok("/wake_up?tags=weights", **ADMIN) == {"is_sleeping": True}
    assert service.post(CHAT, asked(HELLO)).status_code == 503
    assert service.ok("/wake_up", **ADMIN) == {"is_sleeping": False}
    assert completed(service, HELLO) == before
    service.ok("/sleep?level=2", **ADMIN)
    service.ok("/wake_up", **ADMIN)
    answer = service.post(CHAT, asked(HELLO))
    assert (answer.status_code, "update_weights" in answer.text) == (503, True)
    service.ok("/update_weights", {}, **ADMIN)
    assert completed(service, HELLO) == before


def test_administrators_update_the_weights(service, model, model_root):
    before = completed(service, COUNTING)
    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        reference.model.layers[0].mlp.down_proj.weight.neg_()
    reference.save_pretrained(model_root / "changed")
    first = service.ok("/update_weights", {"path": str(model_root / "changed")}, **ADMIN)
    after = completed(service, COUNTING)
    assert before != after == greedy(reference, model, COUNTING)
    answer = service.post("/update_weights", {"path": str(model_root / "none")}, **ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path"), answer.text
    answer = service.post("/update_weights", {"version": first["version"]}, **ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version"), answer.text
    assert completed(service, COUNTING) == after
    again = service.ok("/update_weights", {"path": str(model), "version": 40}, **ADMIN)
    assert again == {"version": 40}
    assert completed(service, COUNTING) == before


def test_requests_that_run_are_not_lost(service):
    """An administrator waits for them, and they do not wait for an administrator."""

    async def main(client):
        body = {"prompt": HELLO, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
        running = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while not service.context.admission.num_taken:
            await asyncio.sleep(0)
        refused = [
            await client.post("/sleep", **ADMIN),
            await client.post("/update_weights", json={}, **ADMIN),
        ]
        return await running, refused

    answer, refused = service.run(main)
    assert answer.json()["usage"]["completion_tokens"] == 150
    assert [each.status_code for each in refused] == [409, 409]
    assert completed(service, COUNTING)


def test_administrators_pause_requests_that_run(service, model):
    """They go on with the same tokens, over a reload of the same weights too, or end with those
    that they have."""
    body = {"prompt": COUNTING, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    expected = service.ok("/v1/completions", body)["choices"][0]["text"]
    assert [service.post(path).status_code for path in ("/pause", "/resume")] == [401, 401]
    assert service.get("/is_paused").status_code == 401
    wrong = service.post("/update_weights", {"running": "wait"}, **ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "running")
    wrong = service.post("/update_weights", {"running": "keep", "recompute_budget": 9}, **ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "recompute_budget")

    async def main(client, running, **more):
        text = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while not service.context.admission.num_taken:
            await asyncio.sleep(0)
        assert (await client.post("/pause", **ADMIN)).json() == {"is_paused": True}
        fields = {"path": str(model), "running": running, **more}
        updated = await client.post("/update_weights", json=fields, **ADMIN)
        assert updated.status_code == 200, updated.text
        late = asyncio.ensure_future(client.post("/v1/completions", json=body | {"max_tokens": 3}))
        await asyncio.sleep(0.2)
        assert not text.done() and not late.done()
        assert (await client.get("/is_paused", **ADMIN)).json() == {"is_paused": True}
        assert (await client.post("/resume", **ADMIN)).json() == {"is_paused": False}
        return [(await each).json()["choices"][0] for each in (text, late)]

    for running, more in (("keep", {}), ("recompute", {}), ("recompute", {"recompute_budget": 7})):
        kept, late = service.run(partial(main, running=running, **more))
        assert (kept["finish_reason"], kept["text"]) == ("length", expected)
        assert expected.startswith(late["text"])
    aborted, late = service.run(lambda client: main(client, "abort"))
    assert expected.startswith(aborted["text"])
    assert late["finish_reason"] == "length"
    # Without a token by then, it has waited for the new weights.
    assert aborted["finish_reason"] == ("abort" if aborted["text"] != expected else "length")


def test_scores_of_a_cross_encoder(daemons, checkpoint):
    reference = checkpoint("BertForSequenceClassification", num_labels=1, seed=4)
    write_tokenizer(reference.path, "Bert")
    query, texts = "w9 w10 w11", ["w20 w21", "w30 w9 w100 w8", "w9"]
    tokenizer = AutoTokenizer.from_pretrained(reference.path)
    model = AutoModelForSequenceClassification.from_pretrained(reference.path)
    with torch.no_grad():
        logits = [model(**tokenizer(query, text, return_tensors="pt")).logits for text in texts]
    expected = torch.cat(logits)[:, 0]
    config = worker_config(reference.path, max_num_batched_tokens=64)
    with service_app(reference.path, config, daemons.endpoints(2)[1:]) as service:
        found = service.ok("/v1/score", {"text_1": query, "text_2": texts})["data"]
        scores = [each["score"] for each in found]
        assert scores == pytest.approx(expected.sigmoid().tolist(), abs=1e-5)
        raw = {"text_1": [query] * 3, "text_2": texts, "use_activation": False}
        scores = [each["score"] for each in service.ok("/score", raw)["data"]]
        assert scores == pytest.approx(expected.tolist(), abs=1e-4)
        documents = [{"text": texts[0]}, *texts[1:]]
        body = {"query": query, "documents": documents, "top_n": 2}
        results = service.ok("/rerank", body)["results"]
        best = expected.argsort(descending=True)[:2].tolist()
        assert [each["index"] for each in results] == best
        assert [each["document"]["text"] for each in results] == [texts[place] for place in best]
        long = {"query": query, "documents": ["w9", "w9 " * 70]}
        assert service.refused("/rerank", long)[0] == "documents[1]"
        many = {"text_1": query, "text_2": ["w9"] * 150}
        assert len(service.ok("/score", many)["data"]) == 150
        assert service.refused("/v1/embeddings", {"input": "w9"})[0] == "model"
        assert service.refused(CHAT, asked("w9"))[0] == "chat_template"
        assert service.post("/sleep").status_code == 403
