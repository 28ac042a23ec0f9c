"""The server's engine on a driver that is made up: what becomes of a request's results."""

import asyncio
import contextlib
import json
import time

import numpy as np
import pytest

from rpc_schema.config import ModelConfig, ParallelConfig, WorkerConfig
from worker_client.cli.demo_model import make_demo_model
from worker_client.driven_group import DrivenGroup
from worker_client.errors import ClientConfigError, RequestError, request_error
from worker_client.inputs.model_source import ModelSource
from worker_client.request_stream import RequestProgress
from worker_client.requests import (
    GenerationRequest,
    Reports,
    RequestOutput,
    SamplingParams,
    failed_request,
)
from worker_client.scheduler.reference import OVERDUE
from worker_client.scheduler_output import Logprobs
from worker_client.service.engine import Engine, Model
from worker_client.service.errors import HttpError
from worker_client.service.fields import BodyFields
from worker_client.service.generation_defaults import NAMES, sampling_defaults
from worker_client.service.options import take_options
from worker_client.service.settings import ServiceSettings
from worker_client.service.streaming import Usage


class MadeUpDriver:
    """Yields given progress for each request."""

    def __init__(self, progress):
        """progress: function from a request to its progress."""
        self.requests = []
        self.num_open = 0
        self._progress = progress

    async def generate(self, request):
        self.requests.append(request)
        self.num_open += 1
        try:
            for each in self._progress(request):
                await asyncio.sleep(0)
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.num_open -= 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "named"
    make_demo_model(path)
    config = WorkerConfig(parallel=ParallelConfig(), model=ModelConfig(model=str(path)))
    settings = ServiceSettings(request_s=60.0)
    with contextlib.closing(Engine(DrivenGroup(ModelSource.of(path), config), settings)) as made:
        yield made


FILES = {
    "none": {},
    "of transformers": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "other fields": {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 3, "pad": None},
    "integers": {"temperature": 1, "top_p": 1, "eos_token_id": [1, 2]},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize("name", FILES)
def test_sampling_defaults_are_those_that_vllm_takes_of_transformers(tmp_path, name):
    """By the code of vLLM's ModelConfig.get_diff_sampling_param, without max_new_tokens."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "generation_config.json").write_text(json.dumps(FILES[name]))
    read = transformers.GenerationConfig.from_pretrained(tmp_path).to_diff_dict()
    expected = {each: read[each] for each in NAMES if read.get(each) is not None}
    assert sampling_defaults(tmp_path, "auto") == expected
    assert sampling_defaults(tmp_path, "none") == {}
    assert expected or name == "none"


def test_what_a_body_says_wins_over_defaults():
    defaults = {"temperature": 0.6, "top_k": 20}
    assert take_options(BodyFields({}), {}) == {"temperature": 1.0}
    assert take_options(BodyFields({"top_k": None}), defaults) == defaults
    body = {"temperature": 0, "top_k": -1, "top_p": 0.5}
    assert take_options(BodyFields(body), defaults) == {"temperature": 0, "top_k": 0, "top_p": 0.5}


@pytest.mark.parametrize(
    "text", ['{"temperature": "x"}', '{"top_p": 2}', '{"top_k": -2}', "[]", "{", "[" * 10**5]
)
def test_wrong_defaults_are_refused_with_the_fix(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ClientConfigError, match="--generation-config none") as refused:
        sampling_defaults(tmp_path, "auto")
    assert refused.value.field == "generation_config"
    assert sampling_defaults(tmp_path, "none") == {}
    with pytest.raises(ClientConfigError, match="auto, none"):
        sampling_defaults(tmp_path, "vllm")


def request(name, **sampling):
    return GenerationRequest(name, [1, 2], 4, sampling=SamplingParams(**sampling))


def ended(name, tokens, **fields):
    fields = {"num_prompt_tokens": 2, "num_cached_tokens": 0, "num_preemptions": 0, **fields}
    return RequestOutput(name, tokens, "length", logprobs=None, **fields)


def parts_of(engine, progress, *requests):
    """All parts, and the driver."""
    engine.driver = MadeUpDriver(progress)

    async def main():
        async with contextlib.aclosing(engine.parts(requests)) as parts:
            return [part async for part in parts]

    try:
        return asyncio.run(main()), engine.driver
    finally:
        assert engine.driver.num_open == 0, "a request was left open"


@pytest.mark.parametrize(
    ("output", "status", "code"),
    [
        (failed_request("a", OVERDUE), 504, "deadline"),
        (failed_request("a", "NaN"), 500, "request_failed"),
    ],
)
def test_a_failed_request_is_an_answer_of_its_kind(engine, output, status, code):
    began = time.monotonic()
    with pytest.raises(HttpError) as failed:
        parts_of(engine, lambda _: [RequestProgress("a", [], output)], request("a"))
    assert (failed.value.status, failed.value.code) == (status, code)
    (served,) = engine.driver.requests
    assert 60.0 <= served.deadline - began < 90.0


@pytest.mark.parametrize("is_late", [True, False])
def test_a_refused_request_ends_all_of_its_body_and_names_its_prompt(engine, is_late):
    """Before it is queued, or when its grammar has turned out to be wrong."""
    error = request_error("prompt", 5, "it is wrong", "mend it")

    def progress(own):
        if own.id != "b":
            return [RequestProgress(own.id, [3], None)] * 100
        if is_late:
            return [RequestProgress("b", [], failed_request("b", "x", refusal=error))]
        return [error]

    with pytest.raises(RequestError, match="it is wrong") as refused:
        parts_of(engine, progress, *map(request, "abc"))
    assert refused.value.field == "prompt[1]"
    error = request_error("lora", "x", "it is wrong", "mend it")
    with pytest.raises(RequestError) as refused:
        parts_of(engine, progress, *map(request, "abc"))
    assert refused.value.field == "model"


def test_samples_begin_with_the_prompts_reports_and_count_it_once(engine):
    entry = Logprobs(np.array([5], np.int32), np.array([-1.0], np.float32), 1)
    prompt = [None, entry]

    def progress(own):
        yield RequestProgress("a#1", [5], None, Reports([entry], None))
        yield RequestProgress("a#1", [6], None, Reports([entry], None))
        yield RequestProgress("a#0", [5], None, Reports([entry], prompt))
        last = ended("a#1", [5, 6, 7], num_cached_tokens=2)
        yield RequestProgress("a#1", [7], last, Reports([entry], None))
        yield RequestProgress("a#0", [6], ended("a#0", [5, 6]), Reports([entry], None))

    asked = request("a", n=2, temperature=1.0, seed=1, prompt_logprobs=1, logprobs=0)
    parts, _ = parts_of(engine, progress, asked)
    assert [(part.choice, part.token_ids) for part in parts] == [
        (1, [5]),
        (1, [6]),
        (0, [5]),
        (1, [7]),
        (0, [6]),
    ]
    assert [part.prompt_logprobs for part in parts] == [prompt, None, prompt, None, None]
    usage = Usage([asked])
    for part in parts:
        usage.take(part)
    assert usage.as_json() == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_servers_seed_gives_each_request_one(engine):
    """A run with the same seed gives the same ones; a request's own wins."""
    config, settings = engine.plan.config, ServiceSettings()
    options = {"temperature": 1.0}

    def seeds(seed):
        plan = DrivenGroup(engine.plan.model, config, seed=seed)
        with contextlib.closing(Engine(plan, settings)) as made:
            model = Model("named", None)
            found = [made.make(options, [1], model).sampling.seed for _ in range(3)]
            assert made.make({**options, "seed": 7}, [1], model).sampling.seed == 7
            return found

    assert seeds(5) == seeds(5) and len({*seeds(5)}) == 3
    assert seeds(None) != seeds(None)


def test_leaving_closes_every_request_of_a_body(engine):
    engine.driver = MadeUpDriver(lambda own: [RequestProgress(own.id, [3], None)] * 100)

    async def main():
        async with contextlib.aclosing(engine.parts([*map(request, "abc")])) as parts:
            await anext(parts)
            assert engine.driver.num_open
        await asyncio.sleep(0)
        return engine.driver.num_open

    assert asyncio.run(main()) == 0
