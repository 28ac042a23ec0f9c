"""Models and adapters by their repositories' names, from a stand-in of the hub: the same tokens as
from the directories, on daemons that are started and on those that run already."""

import json
import re
import shutil
import urllib.request

import pytest

from tests.support.command_line import (
    processes_of,
    run_client,
    short_directory,
    start_client,
    start_daemon,
    status_of,
    wait_for_daemons,
)
from tests.support.forked_processes import ForkedPopen
from tests.support.hub_server import GOOD_TOKEN, HubServer
from tests.support.lora_adapters import make_adapter
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.cli.demo_model import make_demo_model

SMALL = ("--device", "cpu", "--num-gpu-blocks", "128", "--max-num-batched-tokens", "256")
PROMPTS = ([5, 17, 3, 88], [90, 2, 41])


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    for process in processes_of(path):
        process.kill()
    shutil.rmtree(path)


@pytest.fixture
def hub():
    server = HubServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def checkpoints(checkpoint):
    """Two of one shape, and thus two commits of one repository."""
    return [checkpoint("LlamaForCausalLM", seed=seed) for seed in (61, 62)]


class Client:
    """Runs commands as a user with a hub cache."""

    def __init__(self, hub, directory, cache="driver"):
        self.directory = directory
        self.cache = directory / cache / "hub"
        self.variables = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(directory / cache),
            "HF_HUB_CACHE": "",
            "HF_TOKEN": GOOD_TOKEN,
        }

    def run(self, *words, **variables):
        return run_client(self.directory, *words, check=False, **self.variables, **variables)

    def tokens(self, *options, lora=None, **variables):
        """Greedy tokens of PROMPTS."""
        source, target = self.directory / "in.jsonl", self.directory / "out.jsonl"
        lines = [
            {"prompt_token_ids": each, "max_tokens": 6, "temperature": 0.0} for each in PROMPTS
        ]
        lines = [line if lora is None else {**line, "lora": lora} for line in lines]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = ("--input", str(source), "--output", str(target))
        done = self.run("generate", *SMALL, *options, *files, **variables)
        assert done.returncode == 0, done.stderr
        found = {line["id"]: line for line in map(json.loads, target.read_text().splitlines())}
        return [found[id]["token_ids"] for id in sorted(found)]


@pytest.fixture
def daemons(directory):
    """daemons(user, options of serve): start one, and wait until it answers."""
    started = []

    def start(user, *words):
        process = start_daemon(directory, *words, start=ForkedPopen, **user.variables)
        started.append(process)
        wait_for_daemons([words[1]], [process])

    yield start
    for process in started:
        process.kill()
        process.wait()


def greedy(model):
    return [model.greedy(prompt, 6) for prompt in PROMPTS]


def test_local_daemons(hub, directory, checkpoints):
    client, repository = Client(hub, directory), hub.repository("org/tiny")
    old, new = checkpoints
    first = repository.commit(old.path, **{"pytorch_model.bin": b"not needed"})
    hub.cuts["model.safetensors"] = 1
    assert client.tokens("--model", "org/tiny") == greedy(old)
    assert not hub.cuts["model.safetensors"] and "pytorch_model.bin" not in hub.downloaded()
    repository.commit(new.path)
    assert client.tokens("--model", "org/tiny") == greedy(new)
    hub.requests.clear()
    offline = client.tokens("--model", f"org/tiny@{first}", HF_HUB_OFFLINE="1")
    assert offline == greedy(old) and not hub.requests
    shown = client.run("config", "show", "generate", "--model", "org/tiny")
    assert shown.returncode == 0 and not hub.requests, "nothing is downloaded to show settings"


def test_daemons_that_run_already(hub, directory, daemons, checkpoints):
    """The daemon has a cache of its own, as on another host."""
    client, repository = Client(hub, directory), hub.repository("org/tiny")
    old, new = checkpoints
    first = repository.commit(old.path)
    theirs = Client(hub, directory, "daemon")
    theirs.cache.mkdir(parents=True)
    endpoints = {name: f"ipc://{directory}/{name}" for name in ("may", "not")}
    common = ("--device", "cpu", "--model-root", str(theirs.cache))
    daemons(theirs, "--endpoint", endpoints["may"], *common, "--allow-download")
    daemons(theirs, "--endpoint", endpoints["not"], *common)

    def words(which, model="org/tiny"):
        return ("--model", model, "--endpoints", endpoints[which])

    refused = client.run("generate", *SMALL, *words("not"), *inputs(directory))
    assert refused.returncode == 2 and "CheckpointError" in refused.stderr, refused.stderr
    command = f"hf download org/tiny --revision {first} --cache-dir {theirs.cache}"
    assert command in refused.stderr and "--allow-download" in refused.stderr
    assert "Traceback" not in refused.stderr
    hub.stalls.add("model.safetensors")
    options = (*SMALL, *words("may"), *inputs(directory))
    with start_client(directory, "generate", *options, **client.variables) as waiting:
        show = lambda: status_of(endpoints["may"]).phase.startswith("DOWNLOADING ")  # noqa: E731
        wait_until(show, "the download's phase")
        waiting.kill()
        waiting.communicate(timeout=PATIENCE_S)
    hub.stalls.clear()  # the first connection goes on in silence: the next driver ends it
    assert client.tokens(*words("may")) == greedy(old)
    status = status_of(endpoints["may"])
    assert status.config.model.model == f"org/tiny@{first}"
    assert client.tokens(*words("not")) == greedy(old), "the other daemon has filled their cache"
    assert not list(client.cache.rglob("*.safetensors")), "the driver reads no weights"

    second = repository.commit(new.path)
    changed = client.run("generate", *SMALL, *words("may"), *inputs(directory))
    assert changed.returncode == 2 and "ConfigMismatchError" in changed.stderr
    assert first in changed.stderr and second in changed.stderr
    assert client.tokens(*words("may"), "--reload") == greedy(new)
    assert client.tokens(*words("may")) == greedy(new)

    blob = (theirs.cache / f"models--org--tiny/snapshots/{first}/model.safetensors").resolve()
    with blob.open("r+b") as file:
        file.truncate(blob.stat().st_size - 1)
    damaged = client.run(
        "generate", *SMALL, *words("may", f"org/tiny@{first}"), "--reload", *inputs(directory)
    )
    assert damaged.returncode == 2 and "not those that the driver's hub has" in damaged.stderr
    log = (directory / "daemon.log").read_text()
    assert f"downloading org/tiny@{first}" in log and GOOD_TOKEN not in log


def inputs(directory):
    source = directory / "in.jsonl"
    source.write_text(json.dumps({"prompt_token_ids": PROMPTS[0], "max_tokens": 1}) + "\n")
    return ("--input", str(source))


def test_adapters(hub, directory, daemons, checkpoint):
    base = checkpoint("LlamaForCausalLM", seed=31)
    merged = make_adapter(base, "by-name", seed=5)
    hub.repository("org/adapter").commit(merged.path)
    client = Client(hub, directory)
    options = ("--model", str(base.path), "--max-loras", "1")
    assert client.tokens(*options, lora="org/adapter") == greedy(merged)
    theirs = Client(hub, directory, "daemon")
    theirs.cache.mkdir(parents=True)
    endpoint = f"ipc://{directory}/a"
    roots = ("--model-root", str(base.path.parent), "--lora-root", str(theirs.cache))
    daemons(theirs, "--endpoint", endpoint, "--device", "cpu", *roots, "--allow-download")
    running = (*options, "--endpoints", endpoint)
    assert client.tokens(*running, lora="org/adapter@main") == greedy(merged)
    added = client.run("lora", "list", "--endpoints", endpoint)
    assert re.search(r"org/adapter@[0-9a-f]{40}: id ", added.stdout), added.stderr


def test_server_serves_under_the_repositorys_name(hub, directory):
    make_demo_model(directory / "demo")
    hub.repository("org/demo").commit(directory / "demo")
    client = Client(hub, directory)
    text = client.run("generate", "--model", str(directory / "demo"), *SMALL, "--prompt", "No")
    words = ("serve", "--model", "org/demo", *SMALL, "--port", "0")
    with start_client(directory, *words, **client.variables) as server:
        try:
            check_server(server, text.stdout)
        finally:
            server.terminate()


def check_server(server, generated):
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"serve: serving (\S+) at (http://\S+)", line):
            break
    else:
        pytest.fail(f"the server has ended: {said}")
    with urllib.request.urlopen(f"{found[2]}/v1/models", timeout=60) as answer:
        models = json.load(answer)["data"]
    assert [each["id"] for each in models] == ["org/demo"]
    body = {"model": "org/demo", "prompt": "No", "max_tokens": 64, "temperature": 0}
    asked = urllib.request.Request(
        f"{found[2]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        served = json.load(answer)["choices"][0]["text"]
    assert served and generated == f"0: {served}\n"


def test_an_error_is_one_line(hub, directory):
    done = Client(hub, directory).run("bench", "--model", "org/absent", *SMALL, *inputs(directory))
    assert done.returncode == 2 and "no such repository" in done.stderr
    assert done.stderr.count("\n") == 1 and "fix: " in done.stderr
    assert "field model = 'org/absent'" in done.stderr and GOOD_TOKEN not in done.stderr
