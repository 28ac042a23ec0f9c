"""`worker-client serve` as its users run it: a process of its own on real daemons, with many
clients at once. Texts are those of `worker-client generate`, log probabilities those of
transformers."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from typing import NamedTuple

import httpx2
import numpy as np
import psutil
import pytest

from examples import embedded_driver
from examples.lora_adapter import write_adapter
from rpc_schema.config import ParallelConfig
from tests.support.command_line import (
    CLIENT,
    environment,
    processes_of,
    run_client,
    short_directory,
    status_of,
)
from tests.support.stopping import stop_process
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.cli.demo_model import SENTENCES, make_demo_model
from worker_client.inputs.tokenizer import load_tokenizer
from worker_client.worker_group import WorkerGroup

SEED = random.randrange(10**6)
MAX_NUM_SEQS = 16
MAX_UNFINISHED = 32
WRITE_S = 2.0
READ_S = 10.0
KEY = "key-of-clients"
LONG = 900
"""Tokens of requests that are left before their end."""
LIMIT_S = PATIENCE_S
PATH = "/v1/completions"
SCHEMA_FIELD = "response_format.json_schema.schema"


def completion(prompt, **fields):
    return {"prompt": prompt, "temperature": 0, **fields}


def random_cases(rng):
    """Greedy and sampled requests; most have stop strings from the middle of the text to come."""
    lines = SENTENCES.splitlines()
    for _ in range(10):
        line = rng.choice(lines)
        words = line.split()
        start, rest = " ".join(words[:2]), " ".join(words[2:])
        places = [rng.randrange(len(rest) - 8) for _ in range(rng.randint(1, 3))]
        stops = [rest[place:][: rng.randint(2, 8)] for place in places]
        fields = {"max_tokens": rng.randint(1, 24), "stop": [*stops, "zebra"]}
        if rng.random() < 0.3:
            fields["include_stop_str_in_output"] = True
        if rng.random() < 0.3:
            fields |= {"min_tokens": 1, "ignore_eos": True}
        yield completion(start, **fields)
    yield completion("The", temperature=1.0, seed=rng.randrange(1000), n=3, max_tokens=12)


def long_case(number, max_tokens=LONG, **fields):
    words = SENTENCES.split()
    prompt = " ".join(words[number:][:3])
    return completion(prompt, max_tokens=max_tokens, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def model(model_root):
    path = model_root / "served"
    make_demo_model(path)
    return path


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def endpoints(daemons):
    return daemons.endpoints(2)


@pytest.fixture(scope="module")
def options(endpoints, model):
    named = ("--endpoints", ",".join(endpoints), "--model", str(model))
    sizes = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "256")
    return (*named, "--pipeline-parallel-size", "2", *sizes)


@pytest.fixture(scope="module")
def cases():
    rng = random.Random(SEED)
    lengths = (40, 40, 160)  # the last one goes on while a daemon is killed
    return [*random_cases(rng), *(long_case(*each) for each in enumerate(lengths))]


@pytest.fixture(scope="module")
def expected(cases, options, directory, kept_service):
    """The texts of each case, by the command."""
    kept_service.stop()
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    with source.open("w") as file:
        for number, fields in enumerate(cases):
            file.write(json.dumps({**fields, "id": number}) + "\n")
    files = ("--input", str(source), "--output", str(target))
    run_client(directory, "generate", *options, "--reload", *files)
    texts = [[] for _ in cases]
    for line in map(json.loads, target.read_text().splitlines()):
        texts[int(line.get("request", line["id"]))].append((line["text"], line["finish_reason"]))
    return texts


class Running(NamedTuple):
    """The service's process and address."""

    process: subprocess.Popen
    url: str

    def client(self, key=KEY, **options):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # The server may close a connection that was idle just as the next request is sent.
        options.setdefault("limits", httpx2.Limits(max_keepalive_connections=0))
        return httpx2.AsyncClient(base_url=self.url, timeout=LIMIT_S, headers=headers, **options)

    @property
    def address(self):
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


@contextlib.contextmanager
def running(directory, *options):
    process = subprocess.Popen(
        [*CLIENT, "serve", *options, "--port", "0"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=environment(directory, WORKER_CLIENT_API_KEY=KEY),
    )  # fmt: skip
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"serve: serving \S+ at (http://\S+)", line)
            if found:
                break
        else:
            pytest.fail(f"the service ended with {process.wait()}: {said}")
        yield Running(process, found[1])
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


class KeptService:
    """Starts a service when a test needs one and none runs."""

    def __init__(self, *words):
        self._words = words
        self._stack = contextlib.ExitStack()
        self._current = None

    def running(self):
        if self._current is None or self._current.process.poll() is not None:
            self.stop()
            self._current = self._stack.enter_context(running(*self._words))
        return self._current

    def stop(self):
        """End it, if one runs, so that a test can use its daemons."""
        if self._current is not None:
            self._current.process.send_signal(signal.SIGTERM)
            self._current.process.wait(LIMIT_S)
        self._stack.close()
        self._current = None


@pytest.fixture(scope="module")
def kept_service(options, directory):
    bounds = ("--max-queue", str(MAX_UNFINISHED - MAX_NUM_SEQS), "--max-prompts", "20")
    times = ("--write-timeout", str(WRITE_S), "--read-timeout", str(READ_S))
    kept = KeptService(directory, *options, "--reload", *bounds, *times)
    yield kept
    kept.stop()


@pytest.fixture
def service(expected, kept_service):
    return kept_service.running()


async def post(client, fields):
    """The body of a whole answer."""
    answer = await client.post(PATH, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def whole(client, fields):
    """The texts of a request, with their finish reasons, by index."""
    body = await post(client, fields)
    assert body["usage"]["completion_tokens"] > 0
    assert [choice["index"] for choice in body["choices"]] == [*range(len(body["choices"]))]
    return [(choice["text"], choice["finish_reason"]) for choice in body["choices"]]


async def events(client, fields):
    """The events of a streamed request."""
    async with client.stream("POST", PATH, json={**fields, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


async def chunks(client, fields):
    """The chunks of a streamed request, up to its end."""
    found = [event async for event in events(client, fields)]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


async def streamed(client, fields, on_first=lambda: None):
    """The same texts as of `whole`, joined; and the number of events."""
    texts, reasons, num_events = {}, {}, 0
    async for event in events(client, fields):
        if event == "[DONE]":
            break
        (choice,) = json.loads(event)["choices"]
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        reasons[index] = choice["finish_reason"]
        num_events += 1
        if num_events == 1:
            on_first()
    return [(texts[index], reasons[index]) for index in sorted(texts)], num_events


async def health(client):
    return (await client.get("/health")).json()


async def until_idle(client):
    deadline = time.monotonic() + LIMIT_S
    while (state := await health(client))["running"]:
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.01)
    return state


def test_texts_are_those_of_generate_whole_and_streamed(service, cases, expected):
    async def main():
        async with service.client() as client:
            asked = [whole(client, case) for case in cases[:6]]
            found = asyncio.gather(*(streamed(client, case) for case in cases))
            return (
                await asyncio.gather(*asked),
                await found,
                await asyncio.gather(*(whole(client, case) for case in cases[6:])),
            )

    wholes, streams, rest = asyncio.run(main())
    assert [*wholes, *rest] == expected, f"seed {SEED}"
    assert [texts for texts, _ in streams] == expected, f"seed {SEED}"
    assert sum(number for _, number in streams) > 4 * len(streams), "they were not streamed"
    reasons = {reason for texts in expected for _, reason in texts}
    assert reasons == {"stop", "length"}


def test_a_body_has_a_prompt_or_several_as_texts_or_token_ids(service, model):
    """Choices come in the order of the prompts; an answer has the usage of all of them."""
    texts = ["The driver", "A request gets", "Each"]
    tokenizer = load_tokenizer(model)
    ids = [tokenizer.encode(text) for text in texts]
    num_prompt = sum(map(len, ids))
    options = {"n": 2, "temperature": 9.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}

    async def main():
        async with service.client() as client:
            alone = [await post(client, completion(text, **options)) for text in texts]
            alone_ids = [await post(client, completion(each, **options)) for each in ids]
            together = await post(client, completion(texts, **options))
            together_ids = await post(client, completion(ids, **options, user="a", store=True))
            usage = {"include_usage": True}
            some = await chunks(client, completion(texts, **options, stream_options=usage))
            usage = {"include_usage": True, "continuous_usage_stats": True}
            more = await chunks(client, completion(ids, **options, stream_options=usage))
            return alone, alone_ids, together, together_ids, some, more

    alone, alone_ids, together, together_ids, some, more = asyncio.run(main())
    tokenizer.close()
    wanted = [choice["text"] for body in alone for choice in body["choices"]]
    assert len(set(wanted)) > 3
    assert [choice["text"] for body in alone_ids for choice in body["choices"]] == wanted
    for body in (together, together_ids):
        assert [choice["text"] for choice in body["choices"]] == wanted
        assert [choice["index"] for choice in body["choices"]] == [*range(6)]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 36)
        assert usage["total_tokens"] == num_prompt + 36
        assert (body["object"], body["model"]) == ("text_completion", "served")
        assert abs(body["created"] - time.time()) < 3600
    for stream in (some, more):
        *parts, last = stream
        assert last["choices"] == [] and last["usage"] == together["usage"] | {
            "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
        }
        joined = [""] * 6
        for part in parts:
            (choice,) = part["choices"]
            joined[choice["index"]] += choice["text"]
            assert ("usage" in part) == (stream is more)
        assert joined == wanted
        assert len({part["id"] for part in stream}) == 1
    counts = [part["usage"]["completion_tokens"] for part in more]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 36


def reference_logprobs(model, ids):
    """float64 [len(ids) - 1, vocabulary]: what transformers gives the tokens after the first."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = loaded(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).numpy()


def test_log_probabilities_are_those_of_transformers(service, model):
    """In the forms that lm-eval's local-completions asks for: a prompt with its continuation, as
    token ids or as text, echoed, with max_tokens 0 or 1; and of generated tokens."""
    text = "The driver decides which requests run in a"
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text)
    asked = {"echo": True, "logprobs": 1}

    async def main():
        async with service.client() as client:
            echoed = [
                await post(client, completion(prompt, **asked, max_tokens=most, seed=1234))
                for prompt in (text, ids, [ids])
                for most in (0, 1)
            ]
            made = await post(client, completion(ids[:3], logprobs=3, max_tokens=8))
            several = {"logprobs": 3, "echo": True, "n": 2, "temperature": 1.0, "seed": 5}
            several["full_logprobs"] = True
            wide = await post(client, completion([ids[:3], ids[:4]], **several, max_tokens=4))
            parts = await chunks(client, completion([ids[:3], ids[:4]], **several, max_tokens=4))
            return echoed, made, wide, parts

    echoed, made, wide, parts = asyncio.run(main())
    expected = reference_logprobs(model, ids)
    own = expected[np.arange(len(ids) - 1), ids[1:]]
    pieces = [tokenizer.decode([each]) for each in ids]
    for body in echoed:
        (choice,), usage = body["choices"], body["usage"]
        found, num_made = choice["logprobs"], usage["completion_tokens"]
        assert choice["text"].startswith(text) and (choice["text"] == text) == (num_made == 0)
        assert len(found["tokens"]) == len(ids) + num_made == len(found["text_offset"])
        assert found["tokens"][: len(ids)] == pieces
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][1 : len(ids)], own, atol=1e-3)
        for place, top in enumerate(found["top_logprobs"][1 : len(ids)]):
            is_greedy = max(top, key=top.get) == found["tokens"][place + 1]
            assert is_greedy == (expected[place].argmax() == ids[place + 1])
            assert max(top.values()) == pytest.approx(expected[place].max(), abs=1e-3)
        ends = np.cumsum([len(each) for each in found["tokens"]])
        assert found["text_offset"] == [0, *ends[:-1]]
        assert choice["finish_reason"] == "length"
    (choice,) = made["choices"]
    tokens = tokenizer.encode(text[: len(tokenizer.decode(ids[:3]))] + choice["text"])
    assert tokens[:3] == ids[:3], "the model's text is made of the same tokens"
    expected = reference_logprobs(model, tokens)[2:]
    np.testing.assert_allclose(
        choice["logprobs"]["token_logprobs"], expected[np.arange(8), tokens[3:]], atol=1e-3
    )
    for row, top in zip(expected, choice["logprobs"]["top_logprobs"], strict=True):
        np.testing.assert_allclose(sorted(top.values())[-3:], np.sort(row)[-3:], atol=1e-3)
    tokenizer.close()
    for choice in wide["choices"]:
        mine = [
            part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in mine) == choice["text"]
        reports = [part["logprobs"] for part in mine]
        found = {name: [each for own in reports for each in own[name]] for name in reports[0]}
        for name in ("tokens", "text_offset"):
            assert found[name] == choice["logprobs"][name]
        kinds = ("token_logprobs", "top_logprobs", "token_logprobs_full", "token_logprobs_sampled")
        for name in kinds:  # batches of other sizes round otherwise
            for one, other in zip(found[name], choice["logprobs"][name], strict=True):
                assert one == pytest.approx(other, abs=1e-3)
        num_prompt = (3, 3, 4, 4)[choice["index"]]
        assert len(found["tokens"]) == num_prompt + 4
        both = found["token_logprobs_full"], found["token_logprobs_sampled"]
        for values in both:  # at temperature 1, without filters, both are the model's
            assert values[:num_prompt] == [None] * num_prompt
            assert values[num_prompt:] == pytest.approx(
                found["token_logprobs"][num_prompt:], abs=1e-3
            )


def schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


BAD = [
    (completion("a", max_tokens=-1), "max_tokens"),
    (completion("a", max_tokens=True), "max_tokens"),
    (completion("a", temperature="hot"), "temperature"),
    (completion("a", logprobs=21), "logprobs"),
    (completion("a", logprobs=True), "logprobs"),
    (completion("a", full_logprobs=True), "full_logprobs"),
    (completion("a", echo="yes"), "echo"),
    (completion("a", best_of=3), "best_of"),
    (completion("a", suffix="b"), "suffix"),
    (completion("a", stop=["x"] * 17), "stop"),
    (completion("a", stop=[5]), "stop"),
    (completion("a", n=65), "n"),
    (completion("a", n=33), "n"),
    (completion("a", logit_bias={"x": 1}), "logit_bias"),
    (completion("a", logit_bias={"9999": 1}), "logit_bias"),
    (completion("a", stream_options={"include_usage": True}), "stream_options"),
    (completion("a", stream=True, stream_options={"usage": 1}), "stream_options"),
    (completion("a", stream=1), "stream"),
    (completion("a", response_format={"type": "xml"}), "response_format.type"),
    (completion("a", response_format={"type": "json_schema"}), "response_format.json_schema"),
    (completion("a", response_format=schema({"type": "x"})), SCHEMA_FIELD),
    (completion("a", response_format=schema({"a": "x" * 70_000})), SCHEMA_FIELD),
    (completion("a", structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (completion("a", structured_outputs={"regex": "("}, stream=True), "structured_outputs.regex"),
    (completion("a", lora="x"), "lora"),
    (completion("a", deadline=5), "deadline"),
    (completion("a", x=1), "x"),
    (completion(5), "prompt"),
    (completion(None), "prompt"),
    (completion([]), "prompt"),
    (completion([[]]), "prompt"),
    (completion([10**6]), "prompt"),
    (completion([2**31 - 1], echo=True, logprobs=1), "prompt"),
    (completion([2**70], echo=True), "prompt"),
    (completion(["a", [5]]), "prompt"),
    (completion(["a", 5]), "prompt"),
    (completion([[5], [10**6]]), "prompt[1]"),
    (completion([[5], "x" * 10]), "prompt"),
    (completion([[5], ["x"]]), "prompt[1][0]"),
    (completion(["a"] * 21), "prompt"),
    (completion("a", priority=1.5), "priority"),
    (completion("The driver " * 800), "prompt"),
    (completion("The driver " * 800, stream=True), "prompt"),
    (completion(["The", "The driver " * 800]), "prompt[1]"),
]
"""Bodies, each with the field in the error of its answer."""

BODIES = [
    *((body, 400, "body") for body in (b"{", b"[]", b"\xff", b"[" * 100_000, b"", b"9" * 5000)),
    (b'{"prompt": "x", "\\ud800": 1}', 400, r"\ud800"),
    (b'{"prompt": "\\ud800"}', 400, "prompt"),
    (b'{"prompt": "x", "model": "\\ud800"}', 404, "model"),
    (b'{"prompt": "x", "stop": "\\ud800"}', 400, "stop"),
    (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}', 400, "max_tokens"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": "x", "max_tokens": 1e999}', 400, "max_tokens"),
    (b'{"prompt": "x", "seed": %s}' % (b"9" * 400), 400, "seed"),
    (b'{"prompt": [%s]}' % (b"9" * 400), 400, "prompt"),
    (b'{"prompt": "x", "stop": {"a": 1}}', 400, "stop"),
    (b'{"prompt": "x", "user": %s%s}' % (b"[" * 200, b"]" * 200), 200, None),
    (b'{"prompt": "%s"}' % (b"x" * (5 << 20)), 413, "body"),
]
"""Bodies, each with the status of its answer and the field in its error."""


def test_bad_requests_name_their_field_and_do_no_harm(service, cases, expected):
    async def main():
        async with service.client() as client:
            good = asyncio.create_task(streamed(client, cases[0]))
            for fields, param in BAD:
                answer = await client.post(PATH, json=fields)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (fields, error)
                assert {*error} == {"message", "type", "param", "code"}
                assert param.split("[")[0] in error["message"]
                assert error["type"] == "invalid_request_error"
            for body, status, param in BODIES:
                answer = await client.post(PATH, content=body)
                assert answer.headers["Content-Type"] == "application/json"
                assert answer.status_code == status, answer.text
                if status != 200:
                    assert answer.json()["error"]["param"] == param
            again = await whole(client, cases[0])
            assert (await until_idle(client))["state"] == "serving"
            return again, await good

    again, (texts, _) = asyncio.run(main())
    assert again == texts == expected[0]


def raw_client(service, body, length=None):
    """Send a request by a socket of its own; return it. length: as the request declares it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(service.address)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    length = len(body) if length is None else length
    client.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return client


def test_paths_models_and_keys(service):
    """A body, or a head, that does not come is not waited for."""

    async def main():
        late = raw_client(service, b"{", 9)
        idle = [socket.create_connection(service.address) for _ in range(2)]
        idle[1].sendall(b"GET /health HTTP/1.1\r\nHos")
        async with service.client() as client:
            listed = (await client.get("/v1/models")).json()
            assert [(each["id"], each["object"]) for each in listed["data"]] == [
                ("served", "model")
            ]
            assert (await client.get("/v1/models/served")).json() == listed["data"][0]
            for method, path, status in (
                ("GET", "/v1/models/other", 404),
                ("GET", "/v1/nothing", 404),
                ("GET", PATH, 405),
                ("DELETE", "/v1/models", 405),
                ("GET", "/openapi.json", 404),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status
                assert answer.json()["error"]["message"]
            answer = await client.post(PATH, json=completion("a", model="other"))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert "served" in error["message"]
        for key in (None, "", "another-key", KEY + "x", KEY[:-1], "ü" * 8):
            header = None if key is None else f"Bearer {key}".strip().encode()
            headers = {} if header is None else {"Authorization": header}
            async with httpx2.AsyncClient(base_url=service.url, headers=headers) as stranger:
                for path in ("/v1/models", "/v1/nothing", "/metrics"):
                    answer = await stranger.get(path)
                    assert answer.status_code == 401, (key, path)
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                assert (await stranger.post(PATH, content=b"{")).status_code == 401
                assert (await stranger.get("/health")).status_code == 200
        return late, *idle

    late, *idle = asyncio.run(main())
    with late, idle[0], idle[1]:
        late.settimeout(LIMIT_S)
        assert late.recv(4096).startswith(b"HTTP/1.1 408"), "its body was waited for"
        for each in idle:
            each.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_abort_their_requests(service, endpoints, is_streamed):
    async def leave_stream(client, number, begun):
        async for _ in events(client, long_case(number)):
            begun.release()
            await asyncio.Event().wait()

    async def leave_whole(client, number, begun):
        begun.release()
        await whole(client, long_case(number))

    async def main():
        begun = asyncio.Semaphore(0)
        leave = leave_stream if is_streamed else leave_whole
        limits = httpx2.Limits(max_connections=None)
        async with service.client() as client, service.client(limits=limits) as leaving:
            await until_idle(client)
            before = (await asyncio.to_thread(status_of, endpoints[0])).last_seq
            running = MAX_NUM_SEQS if is_streamed else MAX_UNFINISHED
            tasks = [asyncio.create_task(leave(leaving, n, begun)) for n in range(running)]
            for _ in tasks:
                await begun.acquire()
            while (await health(client))["running"] < running:
                await asyncio.sleep(0)
            if not is_streamed:
                refused = await client.post(PATH, json={"prompt": "The", "max_tokens": 1})
                assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_idle(client)
            after = (await asyncio.to_thread(status_of, endpoints[0])).last_seq
            assert after - before < LONG, "they ran to their ends"
            assert len(await whole(client, completion("The", max_tokens=1))) == 1

    asyncio.run(main())


def test_a_client_that_does_not_read_delays_nobody_and_is_left(service, model):
    """Streamed or whole: its connection is ended, and what was kept for it is freed."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(SENTENCES)[:400]
    tokenizer.close()
    large = completion([ids] * 3, echo=True, logprobs=20, max_tokens=4, n=4)

    async def main():
        async with service.client() as client:
            await until_idle(client)
            began = time.monotonic()
            slow = raw_client(service, json.dumps({**large, "stream": True}).encode())
            while not (await health(client))["running"]:
                await asyncio.sleep(0.01)
            await whole(client, long_case(0, 20))
            await until_idle(client)
            return slow, time.monotonic() - began

    slow, seconds = asyncio.run(main())
    assert seconds > WRITE_S / 2, "it was not held up"
    with slow:
        slow.settimeout(LIMIT_S)
        with pytest.raises(ConnectionResetError):
            while slow.recv(1 << 20):
                pass
            raise ConnectionResetError  # an end in order, as far as the kernel had it already


def test_streams_go_on_when_a_daemon_is_killed(service, daemons, endpoints, cases, expected):
    async def main():
        begun = asyncio.Semaphore(0)
        async with service.client() as client:
            before = (await asyncio.to_thread(status_of, endpoints[1])).pid
            tasks = [
                asyncio.create_task(streamed(client, case, begun.release)) for case in cases[-3:]
            ]
            for _ in tasks:
                await begun.acquire()
            daemons.kill(1)
            await asyncio.to_thread(daemons.restart_dead)
            found = await asyncio.gather(*tasks)
            assert (await asyncio.to_thread(status_of, endpoints[1])).pid != before
            return found

    assert [texts for texts, _ in asyncio.run(main())] == expected[-3:]


async def raw_stream(service, fields):
    """The text of a streamed request with one choice, its finish reason and its number of events,
    by a connection of its own: a thousand of them cost little."""
    body = json.dumps({**fields, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    reader, writer = await asyncio.open_connection(*service.address)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read()
    text, reason, num_events = "", None, 0
    while (line := await reader.readline()) != b"data: [DONE]\n":
        assert line, "the stream was cut off"
        if line.startswith(b"data: "):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            text, reason, num_events = (
                text + choice["text"],
                choice["finish_reason"],
                num_events + 1,
            )
    writer.close()
    return text, reason, num_events


@contextlib.contextmanager
def descriptors(number):
    """Allow so many in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(number, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("num_streams", "num_waves"), [(100, 2), pytest.param(1000, 4, marks=pytest.mark.exhaustive)]
)
def test_many_streams_at_once(num_streams, num_waves, kept_service, endpoints, model, directory):
    """On one daemon: none is lost, each text is that of the same request alone, and memory does not
    grow. A client that never reads what is sent to it is there all the time."""
    kept_service.stop()
    words = SENTENCES.split()
    cases = [
        completion(" ".join(words[number:][:3]), max_tokens=4 + number // 2, ignore_eos=True)
        for number in range(12)
    ]
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(SENTENCES)[:400]
    tokenizer.close()
    large = completion(ids, echo=True, logprobs=20, max_tokens=4, n=4, stream=True)
    named = ("--endpoints", endpoints[0], "--model", str(model), "--reload")
    named += ("--num-gpu-blocks", "256")  # a cache whose memory is all in use soon
    sizes = ("--max-num-seqs", "64", "--max-queue", str(num_streams), "--write-timeout", "300")

    async def wave(service):
        return await asyncio.gather(*(raw_stream(service, case) for case in asked(cases)))

    def asked(each):
        return itertools.islice(itertools.cycle(each), num_streams)

    async def main(service, processes):
        async with service.client() as client:
            alone = [(await whole(client, case))[0] for case in cases]
            slow = raw_client(service, json.dumps(large).encode())
            while not (await health(client))["running"]:
                await asyncio.sleep(0.01)
            waves, sizes = [], []
            for _ in range(num_waves):
                waves.append(await wave(service))
                sizes.append([each.memory_info().rss for each in processes])
            assert (await health(client))["running"], "the slow client was left"
            slow.close()
            await until_idle(client)
            return alone, waves, np.array(sizes) / 2**20

    with descriptors(num_streams + 256), running(directory, *named, *sizes) as service:
        pids = service.process.pid, status_of(endpoints[0]).pid
        alone, waves, sizes = asyncio.run(main(service, [psutil.Process(pid) for pid in pids]))
    for found in waves:
        assert [(text, reason) for text, reason, _ in found] == [*asked(alone)]
        assert sum(number for *_, number in found) > 3 * num_streams, "they were not streamed"
    # A leak shows in every wave; once, a wave may have more in memory at a time than those before.
    server, daemon = np.diff(sizes, axis=0).min(axis=0)
    assert server < 4 and daemon < 24, sizes


def test_sigterm_lets_requests_end(service, endpoints, cases, expected):
    """New requests are refused meanwhile: a daemon stands until one was."""
    pid = status_of(endpoints[1]).pid

    async def main():
        async def be_refused():
            try:
                async with service.client() as client:
                    while (await health(client))["state"] == "serving":
                        await asyncio.sleep(0.01)
                    return await client.post(PATH, json=completion("a", max_tokens=1))
            finally:
                os.kill(pid, signal.SIGCONT)

        tasks = []

        def terminate():
            stop_process(pid)
            service.process.send_signal(signal.SIGTERM)
            tasks.append(asyncio.create_task(be_refused()))

        async with service.client() as client:
            found, _ = await streamed(client, long_case(5, 400), terminate)
            refused = await tasks[0]
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            await asyncio.to_thread(service.process.wait, LIMIT_S)
            assert service.process.returncode == 0
            with pytest.raises(httpx2.ConnectError):
                await health(client)
            return found

    ((_, reason),) = asyncio.run(main())
    assert reason == "length"
    wait_until(lambda: status_of(endpoints[0]).lease.state == "free", "it has given back its lease")
    assert status_of(endpoints[0]).load == "READY", "the daemons keep the model"


def test_a_signal_ends_a_server_that_loads(model, directory):
    words = [*CLIENT, "serve", "--endpoints", f"ipc://{directory}/none", "--model", str(model)]
    process = subprocess.Popen(
        [*words, "--wait", "100", "--port", "0"], env=environment(directory),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stderr.readline().startswith("serve: loading")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT


def test_daemons_of_its_own_are_restarted_and_end_with_it(model, directory, cases, expected):
    """A stream goes on with the same tokens when a daemon is killed, and its adapter is loaded
    again; without requests it is restarted too. A second signal ends the server at once, as
    `kill -9` would: no process is left behind."""
    own = directory / "own"
    own.mkdir()
    write_adapter(model, own / "adapters" / "first", rank=4, seed=1)
    adapters = ("--lora-root", str(own / "adapters"), "--max-loras", "1", "--lora", "first")
    with running(own, "--model", str(model), "--device", "cpu", *adapters) as service:

        def daemons():
            return [each for each in processes_of(own) if "worker_daemon" in each.cmdline()]

        async def restart_idle_one():
            (killed,) = daemons()
            killed.kill()
            async with asyncio.timeout(LIMIT_S):
                while not [each for each in daemons() if each != killed]:
                    await asyncio.sleep(0.05)

        (daemon,) = daemons()

        async def main():
            async with service.client() as client:
                listed = (await client.get("/v1/models")).json()["data"]
                assert [(each["id"], each["parent"]) for each in listed] == [
                    ("served", None),
                    ("first", "served"),
                ]
                adapted = {**cases[-1], "model": "first"}
                before = await post(client, adapted)
                found, _ = await streamed(client, cases[-1], daemon.kill)
                after = await post(client, adapted)
                assert before["model"] == after["model"] == "first"
                await restart_idle_one()
                meanwhile = await post(client, adapted)
                assert before["choices"] == after["choices"] == meanwhile["choices"]
                assert before["choices"][0]["text"] != found[0][0]
                stream = events(client, long_case(0))
                await anext(stream)
                service.process.send_signal(signal.SIGTERM)
                while (await health(client))["state"] == "serving":
                    await asyncio.sleep(0.01)
                assert any("worker_daemon" in each.cmdline() for each in processes_of(own))
                service.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(httpx2.HTTPError):
                    async for _ in stream:
                        pass
                return found

        assert asyncio.run(main()) == expected[-1]
        assert service.process.wait(LIMIT_S) == 128 + signal.SIGTERM
        wait_until(lambda: not processes_of(own), "all processes have ended")
        wait_until(lambda: not [*own.glob("wd-*")], "their directory is removed")


def test_the_example_that_embeds_a_driver(endpoints, model, kept_service):
    """It loads the model anew, on one daemon."""
    kept_service.stop()
    prompts = ["The driver", "A request gets"]
    with WorkerGroup(endpoints, ParallelConfig(pipeline_parallel_size=2)) as group:
        group.attach(force=True)
        group.reset("CREATED")
        group.detach()
    texts = asyncio.run(embedded_driver.serve(endpoints[:1], model, prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) > 20 and prompt + text in SENTENCES.replace("\n", " ")
