"""The server with two replicas, one of which is killed: its requests go on in the other with the
same tokens, and what administrators do is done to both, to a lost one once it is back."""

import asyncio
import contextlib
import random

import httpx2
import numpy as np
import pytest
import safetensors.numpy
from msgspec.structs import replace

from examples.lora_adapter import write_adapter
from rpc_schema.config import LoraConfig
from tests.e2e.test_service_metrics import ours, scrape
from tests.support.serving import worker_config
from tests.support.waiting import PATIENCE_S
from worker_client.cli.demo_model import SENTENCES, make_demo_model
from worker_client.driven_group import DrivenGroup
from worker_client.inputs.model_source import ModelSource
from worker_client.service.access import KeyCheck
from worker_client.service.admission import Admission
from worker_client.service.app import make_app
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine
from worker_client.service.settings import ServiceSettings
from worker_host import exposition

KEY, ADMIN_KEY = "of clients", "of administrators"


@pytest.fixture(scope="module")
def model(model_root):
    path = model_root / "replicated"
    make_demo_model(path)
    write_adapter(path, model_root / "lent", rank=4, seed=2)
    return path


@pytest.fixture(scope="module")
def other_weights(model, model_root):
    """A checkpoint of the same model with other weights."""
    path, rng = model_root / "other-weights", np.random.default_rng(3)
    make_demo_model(path)
    file = path / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    for each in weights.values():
        each += rng.normal(0, 0.2 * each.std(), each.shape).astype(each.dtype)
    safetensors.numpy.save_file(weights, file, {"format": "pt"})
    return path


@contextlib.asynccontextmanager
async def serving(model, endpoints):
    """Yield the engine of a server with two replicas, and a client of its application."""
    settings = ServiceSettings(names=("demo",), api_keys=(KEY,), admin_keys=(ADMIN_KEY,))
    lora = LoraConfig(max_loras=2, max_lora_rank=8)
    config = worker_config(model, lora=lora, enable_sleep_mode=True)
    config = replace(config, parallel=replace(config.parallel, data_parallel_size=2))
    plan = DrivenGroup(ModelSource.of(model), config, endpoints=tuple(endpoints), reload=True)
    engine = Engine(plan, settings)
    access = KeyCheck(settings.api_keys, settings.admin_keys)
    context = ServiceContext(settings, engine, access, Admission())
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(make_app(context)),
        base_url="http://service",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=PATIENCE_S,
    )
    with contextlib.closing(engine):
        async with engine, client:
            context.admission.open(engine.max_unfinished)
            yield engine, client


async def ok(client, path, body=None, **options):
    """The answer to a request that is served."""
    method = "GET" if body is None else "POST"
    options.setdefault("headers", {"Authorization": f"Bearer {ADMIN_KEY}"})
    answer = await client.request(method, path, json=body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def texts_of(client, bodies):
    """The texts of requests that run at the same time."""
    asked = (ok(client, "/v1/completions", body, headers=client.headers) for body in bodies)
    return [each["choices"][0]["text"] for each in await asyncio.gather(*asked)]


async def until(condition):
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)


def random_bodies(rng, *models):
    words = SENTENCES.split()
    for number in range(8):
        first = rng.randrange(len(words) - 3)
        body = {
            "prompt": " ".join(words[first : first + 3]),
            "max_tokens": rng.randint(40, 90),
            "ignore_eos": True,
            "temperature": rng.choice([0, 1.0]),
            "seed": number,
            "model": rng.choice(models),
        }
        yield body


def test_requests_go_on_and_administrators_reach_both_replicas(daemons, model, monkeypatch):
    monkeypatch.setattr(exposition, "FRESH_S", 0.0)
    endpoints, rng = daemons.endpoints(2), random.Random()
    lost = rng.randrange(2)

    async def main():
        async with serving(model, endpoints) as (engine, client):
            await ok(client, "/v1/load_lora_adapter", {"lora_name": "lent"})
            bodies = [*random_bodies(rng, "demo", "lent")]
            before = await texts_of(client, bodies)
            assert len(set(before)) == len(before)
            asked = asyncio.create_task(texts_of(client, bodies))

            async def runs():
                return ours(await scrape(client), "requests_running") > 4

            await until(runs)
            daemons.kill(lost)
            assert await asked == before
            assert (await ok(client, "/health"))["state"] == "serving"
            assert engine.driver.drivers[lost].loss is not None, "there is no successor yet"
            assert await texts_of(client, bodies[:3]) == before[:3]
            daemons.restart_dead()

            async def is_back():
                return engine.driver.drivers[lost].loss is None

            await until(is_back)
            assert await texts_of(client, bodies) == before, "its adapter is there again"
            families = await scrape(client)
            for rank in "01":
                assert ours(families, "rank_state", rank=rank, state="alive") == 1

            paused = await ok(client, "/pause", {})
            asked = asyncio.create_task(texts_of(client, bodies[:4]))
            await asyncio.sleep(0.1)
            assert paused == await ok(client, "/is_paused") == {"is_paused": True}
            assert not asked.done()
            await ok(client, "/resume", {})
            assert await asked == before[:4]

            assert await ok(client, "/sleep", {}) == {"is_sleeping": True}
            statuses = await engine.ask(lambda driver: driver.group.get_status())
            assert {each.memory_tags["weights"] for own in statuses for each in own} == {"asleep"}
            assert await ok(client, "/wake_up", {}) == {"is_sleeping": False}
            version = (await ok(client, "/update_weights", {}))["version"]
            versions = await engine.ask(lambda driver: driver.group.weights.version.number)
            assert versions == [version] * 2
            assert await texts_of(client, bodies[:4]) == before[:4]
            await ok(client, "/v1/unload_lora_adapter", {"lora_name": "lent"})
            known = await engine.ask(lambda driver: [*driver.group.loras.known])
            assert known == [[], []]

    asyncio.run(main())


def end(driver):
    """Let a driver end with its next step, or its next look."""

    def fail():
        raise ArithmeticError("a fault of the test")

    driver.step = driver.look = fail


def test_what_a_lost_replica_misses_is_done_before_it_serves(
    daemons, model, other_weights, monkeypatch
):
    monkeypatch.setattr("worker_client.service.engine.REOPEN_S", 0.1)
    endpoints, rng = daemons.endpoints(2), random.Random()
    lost = rng.randrange(2)

    async def main():
        async with serving(model, endpoints) as (engine, client):

            async def is_lost():
                return engine.driver.drivers[lost].loss is not None

            async def is_back():
                return engine.driver.drivers[lost].loss is None and not engine.operations.missing

            async def changed(path, body=None):
                """An answer without the lost replica."""
                answer = await ok(client, path, body or {})
                assert [*answer.pop("missing_replicas")] == [str(lost)]
                return answer

            bodies = [*random_bodies(rng, "demo", "lent")]
            await ok(client, "/v1/load_lora_adapter", {"lora_name": "lent"})
            before = await texts_of(client, bodies)
            await ok(client, "/v1/unload_lora_adapter", {"lora_name": "lent"})
            daemons.kill(lost)
            await until(is_lost)
            await changed("/v1/load_lora_adapter", {"lora_name": "lent"})
            assert await texts_of(client, bodies) == before
            assert await changed("/sleep") == {"is_sleeping": True}
            assert await changed("/wake_up") == {"is_sleeping": False}
            version = (await changed("/update_weights", {"path": str(other_weights)}))["version"]
            after = await texts_of(client, bodies)
            assert after != before
            assert await changed("/pause") == {"is_paused": True}
            daemons.restart_dead()
            await until(is_back)
            assert await ok(client, "/is_paused") == {"is_paused": True}
            asked = asyncio.create_task(texts_of(client, bodies))
            await asyncio.sleep(0.1)
            assert not asked.done()
            await ok(client, "/resume", {})
            assert await asked == after
            versions = await engine.ask(lambda driver: driver.group.weights.version.number)
            assert versions == [version] * 2

            daemons.kill(lost)  # its successor reads the new weights, and has the adapter
            await until(is_lost)
            daemons.restart_dead()
            await until(is_back)
            assert await texts_of(client, bodies) == after
            own = engine.driver.drivers[lost]
            await own.call(end)  # its daemon lives; it is opened again

            async def is_another():
                return engine.driver.drivers[lost] is not own

            await until(is_another)
            await until(is_back)
            assert await texts_of(client, bodies) == after
            versions = await engine.ask(lambda driver: driver.group.weights.version.number)
            assert versions == [version] * 2

            assert await ok(client, "/sleep", {}) == {"is_sleeping": True}
            daemons.kill(lost)
            await until(is_lost)
            daemons.restart_dead()
            await until(is_back)
            statuses = await engine.ask(lambda driver: driver.group.get_status())
            assert {each.memory_tags["weights"] for own in statuses for each in own} == {"asleep"}
            assert await ok(client, "/wake_up", {}) == {"is_sleeping": False}
            assert await texts_of(client, bodies) == after

    asyncio.run(main())
