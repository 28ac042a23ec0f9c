"""Metrics and probes of a server, whose application runs in this process on a real daemon. Texts
are read by prometheus-client's parser, and compared with what the answers say."""

import asyncio
import contextlib
import json
import math
import traceback

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rpc_schema.config import SpeculativeConfig
from tests.support.serving import worker_config
from tests.support.waiting import PATIENCE_S
from worker_client.cli.demo_model import make_demo_model
from worker_client.driven_group import DrivenGroup
from worker_client.inputs.model_source import ModelSource
from worker_client.scheduler.drafting.payoffs import DraftingChange
from worker_client.service.access import KeyCheck
from worker_client.service.admission import Admission
from worker_client.service.app import make_app
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine
from worker_client.service.metrics.table import SERVICE_METRICS, VLLM_METRICS
from worker_client.service.settings import ServiceSettings
from worker_host import exposition
from worker_host.metrics import MetricKind

KEY = "a-key-of-the-tests"
VLLM = {"model_name": "demo", "engine": "0"}


@pytest.fixture(scope="module")
def model(model_root):
    path = model_root / "measured"
    make_demo_model(path)
    return path


@contextlib.contextmanager
def service(model, endpoints):
    """Yield the context of a server that is not started, and a client of its application."""
    settings = ServiceSettings(names=("demo",), api_keys=(KEY,))
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
    config = worker_config(model, speculative=drafts)
    plan = DrivenGroup(ModelSource.of(model), config, endpoints=tuple(endpoints), reload=True)
    engine = Engine(plan, settings)
    context = ServiceContext(settings, engine, KeyCheck((KEY,), ()), Admission())
    transport = httpx2.ASGITransport(make_app(context))
    try:
        yield (
            context,
            httpx2.AsyncClient(
                transport=transport,
                base_url="http://service",
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=PATIENCE_S,
            ),
        )
    finally:
        engine.close()


async def scrape(client):
    """Return the families of a scrape by name."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families, name, **labels):
    samples = [each for family in families.values() for each in family.samples]
    found = [each.value for each in samples if each.name == name and each.labels == labels]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def ours(families, name, **labels):
    return value(families, f"worker_service_{name}", **labels)


def vllms(families, name, **labels):
    return value(families, f"vllm:{name}", **VLLM, **labels)


async def complete(client, **fields):
    answer = await client.post("/v1/completions", json={"model": "demo", **fields})
    return answer.status_code, answer.json()


def test_scrapes_count_what_clients_were_answered(model, daemons, monkeypatch):
    monkeypatch.setattr(exposition, "FRESH_S", 0.0)

    async def run():
        with service(model, daemons.endpoints(1)) as (context, client):
            assert (await client.get("/livez")).status_code == 200
            starting = await client.get("/startupz", headers={"Authorization": ""})
            assert starting.status_code == 503
            assert "being loaded" in starting.json()["reasons"][0]
            before = await scrape(client)
            assert ours(before, "ready") == 0
            async with context.engine:
                context.admission.open(64)
                assert (await client.get("/readyz")).json() == {"status": "ok", "reasons": []}
                asked = (greedy, repeated, repeated, sampled, streamed)
                used = [await ask(client) for ask in asked]
                assert (await complete(client, prompt="a", max_tokens=-1))[0] == 400
                assert (await client.get("/nowhere")).status_code == 404
                await leave(client)
                context.engine.note_drafting(DraftingChange(None, False, 0.1))
                context.engine.note_drafting(DraftingChange("a", False, 0.1))
                after = await scrape(client)
            assert (await client.get("/livez")).status_code == 503
            await client.aclose()
            return used, after

    used, seen = asyncio.run(run())
    prompts = sum(use["prompt_tokens"] for use in used)
    tokens = sum(use["completion_tokens"] for use in used)
    num_samples = len(used) + 2  # one of the requests has three
    assert ours(seen, "ready") == 1 and ours(seen, "startup_seconds") > 0
    for count in ("_count", "_bucket"):
        labels = {"le": "+Inf"} if count == "_bucket" else {}
        assert ours(seen, f"request_seconds{count}", **labels) == num_samples
        assert vllms(seen, f"e2e_request_latency_seconds{count}", **labels) == num_samples
    ended = [ours(seen, "requests_total", outcome=each) for each in ("stop", "length")]
    assert sum(ended) == num_samples and ended[1] >= 1
    assert ours(seen, "requests_total", outcome="abort") == 1
    assert vllms(seen, "request_success_total", finished_reason="length") == ended[1]
    # One more was left, after a token at least: its tokens are not in an answer.
    first = ours(seen, "time_to_first_token_seconds_count")
    assert first == vllms(seen, "time_to_first_token_seconds_count") == num_samples + 1
    left_prompt = ours(seen, "prompt_tokens_total") - prompts
    assert 1 <= left_prompt <= 8
    generated = ours(seen, "generation_tokens_total")
    assert generated == vllms(seen, "generation_tokens_total") > tokens
    assert ours(seen, "inter_token_seconds_count") == generated - first
    assert vllms(seen, "request_generation_tokens_sum") == tokens
    cached = sum(use["prompt_tokens_details"]["cached_tokens"] for use in used)
    assert ours(seen, "cached_prompt_tokens_total") >= cached > 0
    assert vllms(seen, "prefix_cache_hits_total") <= vllms(seen, "prefix_cache_queries_total")
    assert ours(seen, "http_responses_total", path="/v1/completions", code="400") == 1
    assert ours(seen, "http_responses_total", path="other", code="404") == 1
    assert ours(seen, "rank_state", rank="0", state="alive") == 1
    drafted, rows = ours(seen, "draft_tokens_total"), ours(seen, "drafted_rows_total")
    assert drafted == vllms(seen, "spec_decode_num_draft_tokens_total") >= rows > 0
    assert rows == vllms(seen, "spec_decode_num_drafts_total")
    accepted = [ours(seen, "accepted_draft_tokens_total", position=each) for each in "01"]
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert accepted == [vllms(seen, name, position=each) for each in "01"]
    assert sum(accepted) == vllms(seen, "spec_decode_num_accepted_tokens_total") <= drafted
    changes = [ours(seen, "drafting_changes_total", change=c) for c in ("stopped", "resumed")]
    assert changes == [1, 0]  # those of single requests are logged only
    assert value(seen, "vllm:cache_config_info", **seen["vllm:cache_config_info"].samples[0].labels)
    assert vllms(seen, "kv_cache_usage_perc") == ours(seen, "kv_usage_ratio") <= 1
    assert_tables_hold(seen)


async def greedy(client):
    _, body = await complete(client, prompt="The driver", max_tokens=5, temperature=0)
    assert body["choices"][0]["finish_reason"] == "length"
    return body["usage"]


async def repeated(client):
    """Ask what fills several blocks, which the second one finds in the prefix cache."""
    _, body = await complete(client, prompt="The driver " * 8, max_tokens=5)
    return body["usage"]


async def sampled(client):
    _, body = await complete(client, prompt="A request", max_tokens=4, n=3, seed=1)
    return body["usage"]


async def streamed(client):
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "demo", "prompt": "Each stage", "max_tokens": 6, **fields}
    answer = await client.post("/v1/completions", json=body)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1])["usage"]


async def leave(client):
    """Begin a long request, and leave after its first tokens."""
    body = {"model": "demo", "prompt": "The", "max_tokens": 900, "ignore_eos": True}
    first_tokens = "time_to_first_token_seconds_count"
    before = ours(await scrape(client), first_tokens)
    waiting = asyncio.create_task(client.post("/v1/completions", json=body))
    while ours(await scrape(client), first_tokens) == before:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    while ours(await scrape(client), "requests_running") > 0:
        await asyncio.sleep(0.01)


def assert_tables_hold(families):
    """Every metric of the tables is there, as it says, and no other but those of the process."""
    left = dict(families)
    for metric in (*SERVICE_METRICS, *VLLM_METRICS):
        counted = metric.kind is MetricKind.COUNTER
        family = left.pop(metric.name.removesuffix("_total") if counted else metric.name)
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.name in metric.series
            assert set(sample.labels) - {"le"} == set(metric.labels)
            assert not math.isnan(sample.value)
    assert all(name.startswith("process_") for name in left)


def test_metrics_need_a_key_and_probes_none(model, daemons):
    async def run():
        with service(model, daemons.endpoints(1)) as (_, client):
            paths = ("/metrics", "/livez", "/readyz", "/startupz", "/health")
            none = {"Authorization": ""}
            async with client:
                return [(await client.get(path, headers=none)).status_code for path in paths]

    assert asyncio.run(run()) == [401, 200, 503, 503, 503]


SECRET = "zebrafish quartz oligarchy"
WRONG_KEY = "a-wrong-key-of-an-intruder"


def test_logs_have_no_prompt_token_or_key(model, daemons, caplog):
    """Neither the server's, at its most talkative, nor the daemon's."""
    caplog.set_level("DEBUG")

    async def run():
        with service(model, daemons.endpoints(1)) as (context, client):
            async with client, context.engine:
                context.admission.open(64)
                await complete(client, prompt=SECRET, max_tokens=2, stop=[SECRET], user=SECRET)
                for wrong in ({"temperature": SECRET}, {"stop": [SECRET] * 99}, {SECRET: 1}):
                    assert (await complete(client, prompt=SECRET, **wrong))[0] == 400
                intruder = {"Authorization": f"Bearer {WRONG_KEY}"}
                body = {"prompt": SECRET}
                refused = await client.post("/v1/completions", json=body, headers=intruder)
                assert refused.status_code == 401
                tokens = str(list(context.engine.tokenizer.encode(SECRET)))[1:-1]
                context.engine.tokenizer.encode = None  # an error within the server
                with pytest.raises(TypeError) as failed:  # uvicorn logs it
                    await client.post("/v1/completions", json={"prompt": SECRET})
                lines = "".join(traceback.format_exception(failed.value))
                return tokens, lines, await scrape(client)

    tokens, lines, scraped = asyncio.run(run())
    of_daemon = daemons.log_tails(1)
    assert "(detached)" in of_daemon, "what it has logged of this server"
    shown = caplog.text + of_daemon + lines
    for secret in (*SECRET.split(), KEY, WRONG_KEY, tokens):
        assert secret not in shown and secret not in str(scraped)
