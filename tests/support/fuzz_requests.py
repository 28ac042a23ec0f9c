"""Requests of every kind, wrongly and rightly typed, for a real AsyncDriver over a tiny daemon on
the CPU: GenerationRequests, and bodies for the HTTP service, which shares the driver.
Healthy requests run beside them, and must get the tokens that they get alone, without a stall."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import httpx2
import numpy as np

from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import EmbeddedRange, PromptEmbeds
from rpc_schema.sampling import LogprobsWanted, RandomSampling, StopTokens
from rpc_schema.structured import StructuredOutput
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import worker_config
from worker_client.cli.demo_model import SENTENCES, VOCAB_SIZE, make_demo_model
from worker_client.driven_group import DrivenGroup
from worker_client.driver import Driver
from worker_client.driver_parts.request_uploads import RequestUploads, UploadsPart
from worker_client.errors import RequestError
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.model_source import ModelSource
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.service.access import KeyCheck
from worker_client.service.admission import Admission
from worker_client.service.app import make_app
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine
from worker_client.service.settings import MAX_BODY_BYTES, ServiceSettings

MAX_STALL_S = 1.0
NUM_HEALTHY = 3
HEALTHY_TOKENS = 24
AT_ONCE = 8
TEMPLATE = "{%- for message in messages %}{{- message.content }}{%- endfor %}"
HIDDEN = 512


class Raising:
    """A value whose methods raise."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def fail(self, *_: object) -> None:
        raise self.error("from a value")

    __len__ = __iter__ = __eq__ = __repr__ = __array__ = __index__ = __float__ = __bool__ = fail
    __hash__ = __getitem__ = __lt__ = __gt__ = __le__ = __ge__ = __str__ = fail


class Listed(list):
    """A list whose methods raise."""

    def __iter__(self) -> Iterator[object]:
        raise KeyError("from a list")

    __len__ = __iter__  # type: ignore[assignment]  # a wrong one


class Number(int):
    """A number of its own type."""


class Named(GenerationRequest):
    """A request of another class."""


def odd_value(rng: random.Random, depth: int = 0) -> object:
    """Return a value of any kind."""
    if depth < 3 and rng.random() < 0.35:
        inner = [odd_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
        return rng.choice((list, tuple, Listed, lambda each: (own for own in each), _mapping))(
            inner
        )
    return rng.choice(ODD)(rng)


def _mapping(values: list[object]) -> object:
    with contextlib.suppress(Exception):
        return dict(zip(values, reversed(values), strict=True))
    return MappingProxyType({5: values})


ODD: tuple[Callable[[random.Random], object], ...] = (
    lambda _: None,
    lambda rng: rng.choice((True, False, np.True_)),
    lambda rng: rng.choice((0, 1, -1, 5, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**5000)),
    lambda rng: rng.choice((0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-9, 1e300, 5e-324)),
    lambda rng: rng.choice((float("nan"), float("inf"), -float("inf"), 1j)),
    lambda rng: rng.choice((np.int64(3), np.uint8(7), np.float32(0.5), np.float64("nan"))),
    lambda rng: rng.choice(("", "1", "x", "\ud800", "a\udc80b", "\0", "é" * 200, "x" * 10_000)),
    lambda rng: rng.choice((b"", b"1", bytearray(b"ab"), memoryview(b"ab"))),
    lambda rng: np.array(rng.choice(([1.5], [1, 2], [[1, 2]], 7, [], ["a"], [None], [True]))),
    lambda rng: np.zeros(rng.choice((0, 3, (2, HIDDEN), (1, 3))), rng.choice("fdeilBO?")),
    lambda rng: np.array([5, rng.choice((-1, 2**31, VOCAB_SIZE))]),
    lambda _: np.array([2**64 - 1], np.uint64),
    lambda rng: Raising(rng.choice((ValueError, MemoryError, KeyError, RecursionError))),
    lambda rng: Number(rng.randrange(9)),
    lambda rng: {rng.choice((1, "1", None, 2.5)): rng.choice((1.0, "1", None, float("nan")))},
    lambda rng: {rng.randrange(9), 5},
    lambda _: range(3),
    lambda _: object(),
    lambda _: GenerationRequest,
    lambda rng: StructuredOutput(
        kind=rng.choice(("json", "x", 5)), text=rng.choice(("{}", 5, "\ud800"))
    ),
    lambda rng: PoolingParams(
        task=rng.choice(("embed", "x", 5)),
        dimensions=rng.choice((0, "1", -1)),
        second_start=rng.choice((None, 0, 3, "1", -1)),
    ),
    lambda rng: (
        LoraRequest(
            name=rng.choice(("a", "\ud800", "", 5)),
            lora_id=rng.choice((1, 0, "x")),
            version=rng.choice((1, 0, None)),
        ),
    ),
    lambda rng: (
        PromptEmbeds(
            content_hash=rng.randbytes(32),
            dtype="float32",
            width=HIDDEN,
            ranges=(EmbeddedRange(start=0, length=2),),
        ),
    ),
    lambda rng: (PoolingParams(task=rng.choice(("embed", "classify", "x"))),),
    lambda rng: (StructuredOutput(kind="regex", text=rng.choice(("[ab]+", "("))),),
    lambda rng: (RandomSampling(temperature=rng.choice((0.5, "1", float("nan"), None))),),
    lambda rng: (StopTokens(token_ids=rng.choice(((1,), "ab", None, (10**9,))), min_tokens=0),),
    lambda rng: (LogprobsWanted(count=rng.choice((1, -1, Number(2), "x"))),),
    lambda rng: HostTensor(
        rng.choice(("float32", 5)),
        rng.choice(((1, 2), "ab", 5)),
        rng.choice((None, memoryview(b"abcdefgh"))),
        rng.choice((b"x" * 32, None)),
    ),
)
"""Makers of values."""

RIGHT: MappingProxyType[str, Callable[[random.Random], object]] = MappingProxyType(
    {
        "prompt": lambda rng: rng.choice((list, tuple, np.array))(
            [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        ),
        "max_tokens": lambda rng: rng.choice((1, 5, 40, np.int32(3))),
        "temperature": lambda rng: rng.choice((0, 0.0, 1.0, np.float32(0.5))),
        "top_p": lambda _: 0.9,
        "top_k": lambda _: 5,
        "min_p": lambda _: 0.1,
        "seed": lambda rng: rng.choice((None, 5, 2**63 - 1)),
        "min_tokens": lambda _: 1,
        "ignore_eos": lambda rng: rng.choice((True, False)),
        "stop_token_ids": lambda rng: rng.choice(([5], (5, 6), np.array([7]), ())),
        "logprobs": lambda rng: rng.choice((0, 3, None)),
        "presence_penalty": lambda _: 0.5,
        "frequency_penalty": lambda _: -1,
        "repetition_penalty": lambda _: 1.5,
        "logit_bias": lambda _: {3: 1, 4: -2.5},
        "allowed_token_ids": lambda rng: rng.choice(([5, 6], None)),
        "bad_words": lambda _: [[3, 4], (5,)],
        "logprob_token_ids": lambda _: [3],
        "prompt_logprobs": lambda rng: rng.choice((0, 2)),
        "output_token_ids": lambda rng: rng.choice(([5, 6], np.array([7]), (8,) * 5)),
        "full_logprobs": lambda rng: rng.choice((True, False)),
        "n": lambda rng: rng.choice((1, 3)),
        "index": lambda rng: rng.choice((None, 0, 1)),
        "stop": lambda rng: rng.choice((["and"], ("e", " "))),
        "include_stop_str_in_output": lambda _: True,
        "prompt_embeds": lambda rng: np.array(
            rng.choices((-1.0, 1.0), k=2 * HIDDEN), np.float32
        ).reshape(2, HIDDEN),
        "id": lambda rng: rng.choice(("a", "a#0", "x#1", "é", "y" * 300)),
        "priority": lambda rng: rng.choice((-5, 0, np.int64(3))),
        "deadline": lambda rng: rng.choice((0, 1e9, np.float32(0.5), float(2**40))),
    }
)
"""Makers of values that a field may have."""


def odd_request(rng: random.Random) -> object:
    """Return a request of which some fields are odd, or something else."""
    if rng.random() < 0.02:
        return odd_value(rng)
    own: dict[str, object] = {"id": "r", "prompt": [1, 2, 3], "max_tokens": 4}
    options: dict[str, object] = {}
    sampling = SamplingParams.__struct_fields__
    names = [*(field.name for field in fields(GenerationRequest)), *sampling]
    for name in rng.sample(sorted(RIGHT), rng.choice((0, 1, 2, 4))):
        (options if name in sampling else own)[name] = RIGHT[name](rng)
    if rng.random() < 0.8:
        for name in rng.sample(names, rng.choice((1, 1, 1, 2))):
            (options if name in sampling else own)[name] = odd_value(rng)
    own.setdefault("sampling", SamplingParams(**options))  # type: ignore[arg-type]  # on purpose
    return rng.choice((GenerationRequest, GenerationRequest, Named))(**own)  # type: ignore[arg-type]  # on purpose


def odd_json(rng: random.Random, depth: int = 0) -> str:
    """Return JSON of any kind, some of it wrong."""
    if depth < 3 and rng.random() < 0.35:
        inner = [odd_json(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 4)))]
        if rng.random() < 0.5:
            return f"[{','.join(inner)}]"
        keys = (
            rng.choice(('"1"', '"x"', '"json"', '"task"', '"role"', '"content"', '"\\ud800"'))
            for _ in inner
        )
        return "{" + ",".join(f"{key}:{own}" for key, own in zip(keys, inner, strict=True)) + "}"
    return rng.choice(
        (
            *("null", "true", "0", "1", "-1", "5", "1.5", "1e300", "1e999", "NaN", "-Infinity"),
            *('""', '"x"', '"\\ud800"', '"\\u0000"', '"1"', '"embed"', '"user"', "[1,2,3]"),
            *(
                "9" * 400,
                "9" * 5000,
                "[" * 3000,
                "{}",
                '{"role":"user","content":"a"}',
                "2147483648",
            ),
        )
    )


JSON_FIELDS = (
    *("prompt", "messages", "tools", "model", "stream", "max_completion_tokens", "\\ud800", "x"),
    *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "stop", "seed", "n", "id"),
    *("include_stop_str_in_output", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_token_ids"),
    *("priority", "logprobs", "echo", "best_of", "suffix", "stream_options", "response_format"),
    *(
        "full_logprobs",
        "structured_outputs",
        "bad_words",
        "allowed_token_ids",
        "add_special_tokens",
        "user",
    ),
)


def odd_body(rng: random.Random) -> bytes:
    """Return the body of an HTTP request."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.randrange(60))
    if kind < 0.07:
        return rng.choice(
            (b"[" * 100_000, b"{" * 9, b"\xef\xbb\xbf{}", b" " * (MAX_BODY_BYTES + 1))
        )
    given = {"max_tokens": "4", "prompt": '"The driver"'}
    if rng.random() < 0.5:
        given = {"max_tokens": "4", "messages": '[{"role":"user","content":"The"}]'}
    for name in rng.sample(JSON_FIELDS, rng.choice((0, 1, 1, 2))):
        given[name] = odd_json(rng)
    pairs = [f'"{name}":{value}' for name, value in given.items()]
    if rng.random() < 0.05:
        pairs.append(pairs[0])
    body = ("{" + ",".join(pairs) + "}").encode()
    if rng.random() < 0.1:
        place = rng.randrange(len(body))
        body = body[:place] + rng.randbytes(1) + body[place + 1 :]
    return body


class OpenedEngine(Engine):
    """The service's engine, with its driver at hand."""

    opened: Driver

    @contextlib.contextmanager
    def _open_driver(self) -> Iterator[Driver]:
        with super()._open_driver() as driver:
            self.opened = driver
            yield driver


def waited_s(pids: Sequence[int]) -> float:
    """Return the time that threads of processes have waited for a core of a busy host."""
    waited_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


class Watch:
    """Gaps between the tokens of healthy requests: less what a busy host adds to them, and of this
    process's CPU time."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.longest_s = self.longest_cpu_s = 0.0
        self._pids = pids
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        return time.monotonic() - waited_s(self._pids), time.process_time()

    def progress(self) -> None:
        now = self._now()
        self.longest_s = max(self.longest_s, now[0] - self._last[0])
        self.longest_cpu_s = max(self.longest_cpu_s, now[1] - self._last[1])
        self._last = now


class Fuzzer:
    """One run."""

    def __init__(
        self, engine: OpenedEngine, client: httpx2.AsyncClient, pids: Sequence[int], seed: int
    ) -> None:
        self.engine = engine
        self.pids = (os.getpid(), *pids)
        self.client = client
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.watch = Watch(self.pids)
        words = SENTENCES.split()
        self.prompts = [
            engine.tokenizer.encode(" ".join(words[n:][:3])) for n in range(NUM_HEALTHY)
        ]
        self.expected: list[list[int]] = []
        self.is_over = False

    async def healthy(self, number: int) -> list[int]:
        request = GenerationRequest(
            "healthy",
            self.prompts[number],
            HEALTHY_TOKENS,
            sampling=SamplingParams(ignore_eos=True),
        )
        async for progress in self.engine.driver.generate(request):
            self.watch.progress()
            if progress.output is not None:
                return progress.output.token_ids
        raise AssertionError("it has no end")

    async def keep_healthy(self, number: int) -> None:
        while not self.is_over:
            tokens = await self.healthy(number)
            assert tokens == self.expected[number], "a healthy request has got other tokens"
            self.counts["healthy"] += 1

    async def attack(self) -> None:
        if self.rng.random() < 0.5:
            await self._post(
                self.rng.choice(("completions", "chat/completions")), odd_body(self.rng)
            )
        else:
            await self._generate(odd_request(self.rng), self.rng.choice((1, 10**6)))

    async def _generate(self, request: object, most: int) -> None:
        """Serve a request; leave after so many pieces of its output."""
        try:
            async with contextlib.aclosing(self.engine.driver.generate(request)) as stream:  # type: ignore[arg-type]  # on purpose
                for _ in range(most):
                    progress = await anext(stream, None)
                    if progress is None:
                        break
            self.counts["served"] += 1
        except RequestError as error:
            assert error.field and error.fix and str(error).encode(errors="strict")
            self.counts["refused"] += 1
            self.counts["refused without a field"] += error.field == "request"

    async def _post(self, path: str, body: bytes) -> None:
        kind = self.rng.choice(("application/json", "text/plain", "multipart/form-data", "x"))
        answer = await self.client.post(f"/v1/{path}", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (200, 400, 404, 413, 503), (body[:500], answer.text[:500])
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (404, 503) or error["param"], (body[:500], error)
            assert error["message"], (body[:500], error)
        self.counts[f"HTTP {answer.status_code}"] += 1

    async def run(self, is_enough: Callable[[int], bool]) -> None:
        self.expected = [await self.healthy(number) for number in range(NUM_HEALTHY)]
        healthy = [asyncio.create_task(self.keep_healthy(n)) for n in range(NUM_HEALTHY)]
        self.watch = Watch(self.pids)
        numbers = itertools.count()

        async def attack_on() -> None:
            while not is_enough(next(numbers)):
                await self.attack()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(attack_on())
        finally:
            self.is_over = True
            await asyncio.gather(*healthy)


async def _fuzz(
    engine: OpenedEngine, pids: Sequence[int], is_enough: Callable[[int], bool], seed: int
) -> Fuzzer:
    settings, admission = ServiceSettings(), Admission()
    context = ServiceContext(settings, engine, KeyCheck((), ()), admission)
    transport = httpx2.ASGITransport(make_app(context), raise_app_exceptions=True)
    async with (
        engine,
        httpx2.AsyncClient(transport=transport, base_url="http://fuzz", timeout=60) as client,
    ):
        admission.open(64)
        driver, fuzzer = engine.opened, Fuzzer(engine, client, pids, seed)
        num_free = driver.scheduler.num_free_blocks
        await fuzzer.run(is_enough)
        async with asyncio.timeout(60):
            while driver.busy:
                await asyncio.sleep(0.01)
        assert engine.driver.error is None and not admission.num_taken
        assert driver.scheduler.num_free_blocks == num_free, "blocks are lost"
        assert not driver._times._added and not _uploads_of(driver)._needs
        return fuzzer


def _uploads_of(driver: Driver) -> RequestUploads:
    (part,) = [part for part in driver._parts._all if isinstance(part, UploadsPart)]
    return part._uploads


def fuzz_count(is_enough: Callable[[int], bool], seed: int) -> dict[str, object]:
    """Send requests until is_enough(number of requests); return the counts.

    Raises AssertionError: a request had another end than a result or its own error, a healthy one
    got other tokens, or something of a request was left behind."""
    directory = Path(tempfile.mkdtemp(prefix="fr-"))
    try:
        model = directory / "model"
        make_demo_model(model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        with ForkedDaemons(["cpu"], directory) as daemons:
            config = worker_config(model, max_model_len=128)
            plan = DrivenGroup(ModelSource.of(model), config, tuple(daemons.endpoints))
            with contextlib.closing(OpenedEngine(plan, ServiceSettings())) as engine:
                fuzzer = asyncio.run(_fuzz(engine, daemons.pids, is_enough, seed))
    finally:
        shutil.rmtree(directory)
    watch = fuzzer.watch
    stalls = {
        "longest_stall_s": round(watch.longest_s, 3),
        "longest_stall_cpu_s": round(watch.longest_cpu_s, 3),
    }
    return {"seed": seed, **sorted_counts(fuzzer.counts), **stalls}


def sorted_counts(counts: Counter[str]) -> dict[str, object]:
    return dict(sorted(counts.items()))


def fuzz(seconds: float, seed: int) -> dict[str, object]:
    """Send requests for so long; return the counts. Raises as fuzz_count does, and for a stall of a
    healthy request over MAX_STALL_S."""
    began: list[float] = []

    def is_enough(number: int) -> bool:
        if not began:  # daemon and model are there
            began.append(time.monotonic())
        return time.monotonic() > began[0] + seconds

    summary = fuzz_count(is_enough, seed)
    stall_s = summary["longest_stall_s"]
    assert isinstance(stall_s, float) and stall_s <= MAX_STALL_S, json.dumps(summary)
    return summary
