"""The example of an HTTP service, as its users run it: a process of its own on real daemons, with
many clients at once. Texts are those of `worker-client generate`."""

import asyncio
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import httpx2
import pytest

from benchmarks.demo_model import SENTENCES, make_demo_model
from tests.support.command_line import environment, run_client, short_directory, status_of
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.inputs.chat_template import load_chat_template
from worker_client.inputs.tokenizer import load_tokenizer

SEED = random.randrange(10**6)
MAX_REQUESTS = 32
LONG = 900
"""Tokens of requests that are left before their end."""
LIMIT_S = PATIENCE_S
BOMBS = {
    "power": "{{ message.n ** (message.n ** 8) }}",
    "filler": "{{ lipsum(n=200000) }}",
    "loops": "{% for a in range(message.n ** 4) %}{% for b in range(message.n ** 4) %}"
    "{% endfor %}{% endfor %}",
    "format": "{{ '%1000000000d' | format(message.n) }}",
    "output": "{% for a in range(message.n ** 4) %}{{ 'x' * message.n ** 4 }}{% endfor %}",
}
"""What the template does for a message that names it."""
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('the system speaks first') }}
    {%- endif %}
    {%- if message.bomb is defined %}
        {{- '' }}BOMBS
    {%- endif %}
    {{- message.content | trim + ('\\n' if not loop.last else '') }}
{%- endfor %}
"""


class Case(NamedTuple):
    """A request, by its path and fields."""

    path: str
    fields: dict

    @property
    def is_chat(self):
        return "chat" in self.path


def completion(prompt, **fields):
    return Case("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})


def chat(*contents, **fields):
    messages = [{"role": "user", "content": content} for content in contents]
    return Case("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})


def random_cases(rng):
    """Greedy and sampled requests; most have stop strings from the middle of the text to come."""
    lines = SENTENCES.splitlines()
    for _ in range(8):
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
        yield rng.choice([completion, chat])(start, **fields)
    yield chat(lines[0], lines[1][:20], max_tokens=12)
    sampled = {"temperature": 1.0, "seed": rng.randrange(1000), "n": 3, "max_tokens": 12}
    yield completion("The", **sampled)
    yield chat("The", **sampled, stop=["e", " s"])


def long_case(number, max_tokens=LONG):
    words = SENTENCES.split()
    return completion(" ".join(words[number:][:3]), max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def model(model_root):
    """The demo model, with a chat template."""
    path = model_root / "chatty"
    make_demo_model(path)
    bombs = "".join(f"{{%- if message.bomb == '{k}' %}}{v}{{%- endif %}}" for k, v in BOMBS.items())
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("BOMBS", bombs))
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
    return (*named, "--pipeline-parallel-size", "2", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def cases():
    rng = random.Random(SEED)
    lengths = (40, 40, 160)  # the last one goes on while a daemon is killed
    return [*random_cases(rng), *(long_case(*each) for each in enumerate(lengths))]


@pytest.fixture(scope="module")
def expected(cases, model, options, directory):
    """The texts of each case, by the command."""
    template, tokenizer = load_chat_template(model), load_tokenizer(model)
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    with source.open("w") as file:
        for number, case in enumerate(cases):
            fields = {**case.fields, "id": number}
            if case.is_chat:
                prompt = template.render(fields.pop("messages"))
                ids = tokenizer.encode(prompt, add_special_tokens=False)
                fields["prompt_token_ids"] = ids
            file.write(json.dumps(fields) + "\n")
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

    def client(self):
        return httpx2.AsyncClient(base_url=self.url, timeout=LIMIT_S)


@contextlib.contextmanager
def running(options, directory):
    words = [sys.executable, "-m", "examples.openai_service", *options]
    words += ["--port", "0", "--max-requests", str(MAX_REQUESTS)]
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=environment(directory),
    )  # fmt: skip
    try:
        for line in process.stderr:
            found = re.search(r"running on (http://\S+)", line)
            if found:
                break
        else:
            pytest.fail(f"the service ended with {process.wait()}")
        yield Running(process, found[1])
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


@pytest.fixture(scope="module")
def service(expected, options, directory):
    with running(options, directory) as service:
        yield service


async def whole(client, case):
    """The texts of a request, with their finish reasons, by index."""
    answer = await client.post(case.path, json=case.fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["usage"]["completion_tokens"] > 0
    texts = []
    for index, choice in enumerate(body["choices"]):
        assert choice["index"] == index
        text = choice["message"]["content"] if case.is_chat else choice["text"]
        texts.append((text, choice["finish_reason"]))
    return texts


async def events(client, case):
    """The events of a streamed request."""
    async with client.stream("POST", case.path, json={**case.fields, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line:
                yield line.removeprefix("data: ")


async def streamed(client, case, on_first=lambda: None):
    """The same texts as of `whole`, joined; and the number of events."""
    texts, reasons, num_events = {}, {}, 0
    async for event in events(client, case):
        if event == "[DONE]":
            break
        (choice,) = json.loads(event)["choices"]
        index = choice["index"]
        if case.is_chat:
            assert ("role" in choice["delta"]) == (index not in texts)
        text = choice["delta"]["content"] if case.is_chat else choice["text"]
        texts[index] = texts.get(index, "") + text
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
            asked = [whole(client, case) for case in cases]
            found = asyncio.gather(*(streamed(client, case) for case in cases[: MAX_REQUESTS // 2]))
            return (
                await asyncio.gather(*asked[: MAX_REQUESTS // 2]),
                await found,
                [await each for each in asked[MAX_REQUESTS // 2 :]],
            )

    wholes, streams, rest = asyncio.run(main())
    assert [*wholes, *rest] == expected, f"seed {SEED}"
    assert [texts for texts, _ in streams] == expected[: len(streams)], f"seed {SEED}"
    assert sum(number for _, number in streams) > 4 * len(streams), "they were not streamed"
    reasons = {reason for texts in expected for _, reason in texts}
    assert reasons == {"stop", "length"}


BAD = [
    (completion("a", max_tokens=0), "max_tokens"),
    (completion("a", temperature="hot"), "temperature"),
    (completion("a", logprobs=3), "logprobs"),
    (completion("a", model="another"), "model"),
    (completion("a", stop=["x"] * 17), "stop"),
    (completion("a", n=65), "n"),
    (completion(5), "prompt"),
    (completion(None), "prompt"),
    (completion([10**6]), "prompt"),
    (completion("a", priority=1.5), "priority"),
    (completion("The driver " * 800), "prompt"),
    (completion("The driver " * 800, stream=True), "prompt"),
    (chat("The driver " * 800), "messages"),
    (chat("a", max_tokens="x"), "max_tokens"),
    (completion("a", stream=1), "stream"),
    (chat(), "messages"),
    (chat("a", max_completion_tokens="x"), "max_completion_tokens"),
    *((chat("a", tools=value), "tools") for value in ("look", 0, False, {})),
    (chat("a", tools=[0]), "tools[0]"),
    (chat("a", messages=0), "messages"),
    (chat("a", messages=[{"role": "judge", "content": "a"}]), "messages[0].role"),
    (chat("a", messages=[{"role": r, "content": "a"} for r in ("user", "system")]), "messages"),
]


BODIES = [
    *((body, 400, "body") for body in (b"{", b"[]", b"\xff", b"[" * 100_000, b"", b"9" * 5000)),
    (b'{"prompt": "x", "\\ud800": 1}', 400, r"\ud800"),
    (b'{"prompt": "\\ud800"}', 400, "prompt"),
    (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}', 400, "max_tokens"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": "x", "max_tokens": 1e999}', 400, "max_tokens"),
    (b'{"prompt": "x", "seed": %s}' % (b"9" * 400), 400, "seed"),
    (b'{"prompt": "x", "stop": {"a": 1}}', 400, "stop"),
    (b'{"prompt": "%s"}' % (b"x" * (5 << 20)), 413, "body"),
]
"""Bodies, each with the status of its answer and the field in its error."""


def test_bad_requests_name_their_field_and_do_no_harm(service, cases, expected):
    async def main():
        async with service.client() as client:
            good = asyncio.create_task(streamed(client, cases[0]))
            for case, field in BAD:
                answer = await client.post(case.path, json=case.fields)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, field), error
                assert field.split("[")[0] in error["message"]
            for body, status, field in BODIES:
                answer = await client.post("/v1/completions", content=body)
                assert answer.headers["Content-Type"] == "application/json"
                assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
            again = await whole(client, cases[0])
            assert (await until_idle(client))["state"] == "serving"
            return again, await good

    again, (texts, _) = asyncio.run(main())
    assert again == texts == expected[0]


def bomb(name):
    message = {"role": "user", "content": "x", "bomb": name, "n": 10}
    return Case("/v1/chat/completions", {"messages": [message], "max_tokens": 4})


COSTLY = [
    *((bomb(name), "messages") for name in BOMBS),
    (completion("The driver " * 200_000), "prompt"),
    (chat("The driver " * 200_000), "messages"),
]


def test_prompts_that_cost_too_much_hold_up_nobody(service, cases, expected):
    """Beside each of them, and beside many at once, a stream goes on and another chat is served."""

    async def refused(client, case, field):
        answer = await client.post(case.path, json=case.fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        return True

    async def tokens_until(client, number, ended):
        """Start long requests one after the other; return the number of events until then."""
        num_events = 0
        while not ended.is_set():
            async for _ in events(client, long_case(number)):
                num_events += 1
                if ended.is_set():
                    break
        return num_events

    async def main():
        async with service.client() as client:
            short = next(n for n, case in enumerate(cases) if case.is_chat)
            for bad in ([each] for each in COSTLY), [COSTLY * 3]:
                for costly in bad:
                    ended = asyncio.Event()
                    beside = asyncio.create_task(tokens_until(client, 3, ended))
                    found = [asyncio.create_task(refused(client, *each)) for each in costly]
                    assert await whole(client, cases[short]) == expected[short]
                    assert all(await asyncio.gather(*found))
                    assert (await health(client))["state"] == "serving"
                    ended.set()
                    counts.append(await beside)
            return await whole(client, cases[0])

    counts = []
    assert asyncio.run(main()) == expected[0]
    assert min(counts[0], counts[2]) > 10, counts  # of those that take their whole time


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_abort_their_requests(service, is_streamed):
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
        async with (
            service.client() as client,
            httpx2.AsyncClient(base_url=service.url, timeout=LIMIT_S, limits=limits) as leaving,
        ):
            before = (await until_idle(client))["daemons"][0]["step"]
            tasks = [
                asyncio.create_task(leave(leaving, number, begun)) for number in range(MAX_REQUESTS)
            ]
            for _ in tasks:
                await begun.acquire()
            while (await health(client))["running"] < MAX_REQUESTS:
                await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json={"prompt": "The", "max_tokens": 1})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            after = (await until_idle(client))["daemons"][0]["step"]
            assert after - before < LONG, "they ran to their ends"
            assert len(await whole(client, completion("The", max_tokens=1))) == 1

    asyncio.run(main())


def test_streams_go_on_when_a_daemon_is_killed(service, daemons, cases, expected):
    async def main():
        begun = asyncio.Semaphore(0)
        async with service.client() as client:
            before = (await health(client))["daemons"][1]["pid"]
            tasks = [
                asyncio.create_task(streamed(client, case, begun.release)) for case in cases[-3:]
            ]
            for _ in tasks:
                await begun.acquire()
            daemons.kill(1)
            await asyncio.to_thread(daemons.restart_dead)
            found = await asyncio.gather(*tasks)
            state = await health(client)
            assert [each["serving"] for each in state["daemons"]] == ["SERVING"] * 2
            assert state["daemons"][1]["pid"] != before
            return found

    assert [texts for texts, _ in asyncio.run(main())] == expected[-3:]


def test_sigterm_lets_requests_end(service, endpoints, cases, expected):
    """The last test of the service."""

    async def main():
        async with service.client() as client:
            terminate = lambda: service.process.send_signal(signal.SIGTERM)  # noqa: E731
            found, _ = await streamed(client, cases[-1], terminate)
            await asyncio.to_thread(service.process.wait, LIMIT_S)
            assert service.process.returncode in (0, -signal.SIGTERM)
            with pytest.raises(httpx2.ConnectError):
                await health(client)
            return found

    assert asyncio.run(main()) == expected[-1]
    wait_until(lambda: status_of(endpoints[0]).lease.state == "free", "it has given back its lease")
