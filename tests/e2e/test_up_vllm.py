"""`worker-client up-vllm` with a stand-in for vLLM's program: what it is given, and who is started
again when it or a daemon dies."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.vllm.health import DaemonsHealth

SERVER = """#!{python}
import json, os, signal, sys, time
endpoints = os.environ["WORKER_DAEMON_ENDPOINTS"]
with open({log!r}, "a") as log:
    words = {{"pid": os.getpid(), "argv": sys.argv[1:], "endpoints": endpoints}}
    words["method"] = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    log.write(json.dumps(words) + "\\n")
if "--fail" in sys.argv:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while not os.path.exists({log!r} + ".end"):
    time.sleep(0.05)
"""


@pytest.fixture
def up(tmp_path, checkpoint):
    """Return a function that runs the command, and the file in which its server writes."""
    log, program = tmp_path / "log", tmp_path / "vllm"
    program.write_text(SERVER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    started = []

    def run(*options, **variables):
        path = checkpoint().path
        words = [sys.executable, "-m", "worker_client", "up-vllm", typed_name(path)]
        words += ["--device", "cpu", "--vllm", str(program), *options]
        own = {key: os.environ[key] for key in os.environ if not key.startswith("VLLM_")}
        environment = own | variables
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stderr=pipe, text=True, env=environment, cwd=path.parent)
        started.append(process)
        return started[-1]

    yield run, log
    for each in started:
        each.terminate()
        each.wait(PATIENCE_S)
        each.stderr.close()


def typed_name(path: Path) -> str:
    """Return a relative path of a model as somebody may type it."""
    return f"./{path.name}/"


def starts(log: Path) -> list[dict]:
    """Return what each start of the server has written."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def daemons_of(pid: int) -> dict[int, str]:
    """Return the endpoints of a process's daemons, by their ids."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_text().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and "--endpoint" in words:
                found[int(entry.name)] = words[words.index("--endpoint") + 1]
    return found


def described(daemons: dict[int, str]) -> str:
    """Return what the command says of its daemons."""
    by_rank = sorted(daemons.items(), key=lambda each: each[1])
    return ", ".join(f"process {pid} at {endpoint}" for pid, endpoint in by_rank)


def test_a_killed_server_and_a_killed_daemon_are_started_again(up, checkpoint):
    run, log = up
    command = run("--pipeline-parallel-size", "2", "--", "--port", "8000")
    wait_until(lambda: starts(log), "the server starts", 60.0)
    (first,) = starts(log)
    daemons = daemons_of(command.pid)
    model = str(checkpoint().path.resolve())
    shape = ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "1"]
    health = ["--middleware", "worker_client.vllm.health.DaemonsHealth"]
    timeout = ["--shutdown-timeout", "10"]
    name = ["--served-model-name", typed_name(checkpoint().path)]
    assert first["argv"] == ["serve", model, *name, *shape, *health, *timeout, "--port", "8000"]
    assert set(first["endpoints"].split(",")) == set(daemons.values()) and len(daemons) == 2
    assert first["method"] == "fork"

    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: len(starts(log)) == 2, "the server starts again", 60.0)
    assert starts(log)[1]["endpoints"] == first["endpoints"]
    assert daemons_of(command.pid) == daemons

    victim, survivor = daemons
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(daemons_of(command.pid).keys() - {victim}) == 2, "a successor", 60.0)
    after = daemons_of(command.pid)
    assert survivor in after and set(after.values()) == set(daemons.values())
    assert len(starts(log)) == 2

    Path(f"{log}.end").touch()
    assert command.wait(PATIENCE_S) == 0
    said = command.stderr.read()
    for line in (
        f"server: process {first['pid']}; daemons: {described(daemons)}",
        f"server: process {starts(log)[1]['pid']}; daemons: {described(daemons)}",
        f"up-vllm: daemons: {described(after)}",
    ):
        assert line in said
    assert not daemons_of(command.pid)


def test_health_tells_whether_the_group_can_serve(daemons, serve, checkpoint, monkeypatch):
    (endpoint,) = daemons.endpoints(1)
    missing = f"{endpoint}-missing"
    monkeypatch.setattr("worker_client.vllm.health.ANSWER_S", 30.0)

    def health(*endpoints):
        monkeypatch.setenv("WORKER_DAEMON_ENDPOINTS", ",".join(endpoints))
        status, headers = asyncio.run(ask_health())
        reports = json.loads(headers[b"worker-daemons"])
        assert [each["endpoint"] for each in reports] == list(endpoints)
        return status, [each["why"] for each in reports]

    with serve(checkpoint().path, enable_sleep_mode=True) as (group, _):
        assert health(endpoint) == (200, [""])
        status, (why, why_missing) = health(endpoint, missing)
        assert (status, why) == (503, "")
        assert "nothing listens" in why_missing
        group.memory.sleep()
        assert health(endpoint)[0] == 503
        group.memory.wake_up()
        assert health(endpoint)[0] == 200
        group.reset("CREATED")
        status, (why,) = health(endpoint)
        assert status == 503
        assert "CREATED" in why


async def ask_health():
    """Return status and headers of /health, from a server that answers 200 to all."""

    async def server(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    sent = []

    async def send(message):
        sent.append(message)

    await DaemonsHealth(server)({"type": "http", "path": "/health"}, None, send)
    return sent[0]["status"], dict(sent[0]["headers"])


def test_a_server_that_cannot_start_is_given_up(up):
    run, log = up
    command = run("--", "--fail", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    assert command.wait(PATIENCE_S) == 3
    assert [start["method"] for start in starts(log)] == ["spawn"] * 3
    assert "has ended 3 times" in command.stderr.read()
