"""vLLM's /health with fake daemons: it is 200 only if each daemon would run a step."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from rpc_schema.weight_transfer import WeightsStatus
from tests.support.waiting import PATIENCE_S
from worker_client.vllm.health import DaemonsHealth

DIRTY = WeightsStatus(
    state="dirty",
    num_tensors=2,
    version=1,
    num_dirty=1,
    dirty=("a",),
    num_missing=1,
    missing=(),
)


class Engine:
    """vLLM's client of its engine: records the operations that it is asked for."""

    def __init__(self):
        self.asked = []
        self.answer = asyncio.Event()

    async def collective_rpc(self, method):
        self.asked.append(method)
        await self.answer.wait()
        raise RuntimeError("no successor came")


async def server(scope, receive, send):
    """Answers 200 to all."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b""})


async def ask(health, engine=None):
    """Return status and reports of GET /health."""
    sent = []

    async def send(message):
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    await health({"type": "http", "path": "/health", "app": app}, None, send)
    return sent[0]["status"], json.loads(dict(sent[0]["headers"])[b"worker-daemons"])


@pytest.fixture
def group(fakes, monkeypatch):
    """Two fake daemons that would run steps."""
    group = fakes(2)
    for daemon in group.daemons:
        daemon.load, daemon.link_state = "READY", "up"
    monkeypatch.setattr("worker_client.vllm.health.ANSWER_S", PATIENCE_S)
    monkeypatch.setenv("WORKER_DAEMON_ENDPOINTS", ",".join(group.endpoints))
    return group


def test_a_group_that_can_serve_is_healthy(group):
    status, reports = asyncio.run(ask(DaemonsHealth(server)))
    assert status == 200
    assert [each["endpoint"] for each in reports] == list(group.endpoints)
    assert all(each["healthy"] and not each["why"] for each in reports)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"load": "CREATED", "link_state": "none"}, "CREATED"),
        ({"load": "DEVICE_READY"}, "DEVICE_READY"),
        ({"load": "MODEL_LOADED"}, "MODEL_LOADED"),
        ({"load": "KV_READY"}, "KV_READY"),
        ({"link_state": "broken"}, "broken"),
        ({"serving": "DRAINING"}, "DRAINING"),
        ({"memory_tags": {"weights": "asleep", "kv_cache": "awake"}}, "weights asleep"),
        ({"memory_tags": {"weights": "lost", "kv_cache": "awake"}}, "weights lost"),
        ({"weights": DIRTY}, "dirty"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_daemon_that_would_run_no_step_is_not_healthy(group, monkeypatch, state, reason):
    daemon = group.daemons[1]
    changed = msgspec.structs.replace(daemon.status(), **state)
    monkeypatch.setattr(daemon, "status", lambda: changed)
    status, reports = asyncio.run(ask(DaemonsHealth(server)))
    assert status == 503
    assert reports[0]["healthy"]
    assert not reports[1]["healthy"]
    assert reason in reports[1]["why"]


def test_after_a_503_the_engine_is_asked_once_to_replace_dead_daemons(group):
    """An idle engine would not notice the death before a request, and a balancer sends none."""
    group.daemons[1].load = "CREATED"

    async def probe():
        health, engine = DaemonsHealth(server), Engine()
        for _ in range(3):
            assert (await ask(health, engine))[0] == 503
            await asyncio.sleep(0)
        assert engine.asked == ["replace_dead"]
        engine.answer.set()  # it fails
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await ask(health, engine))[0] == 503
        await asyncio.sleep(0)
        assert engine.asked == ["replace_dead"] * 2
        group.daemons[1].load = "READY"
        assert (await ask(health, engine))[0] == 200
        assert len(engine.asked) == 2

    asyncio.run(probe())
