"""A pipeline of two real daemons on tcp, with keys: it generates what it should, its ranks' own
data stays on the interface that was named, nothing is unpickled, and no name leads out of the
models' directory."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from client.errors import RemoteConfigError
from client.worker_group import WorkerGroup
from tests.e2e.conftest import checkpoint, model_root
from tests.support.checkpoints import decisive_prompts
from tests.support.command_line import environment
from tests.support.secured import KeyRing, answers, free_port, wait_until
from tests.support.serving import assert_greedy, generate, greedy_request, worker_config

__all__ = ["checkpoint", "model_root"]


@pytest.fixture(scope="module")
def directory():
    path = Path(tempfile.mkdtemp(prefix="sg-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ring(directory):
    return KeyRing(directory / "keys")


@pytest.fixture(scope="module")
def daemons(directory, ring, model_root):
    """Endpoints, processes and the files of what was unpickled."""
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    ring.trust(dict.fromkeys(endpoints, ring.public["daemon"]))
    files = [directory / f"unpickled{index}" for index in range(2)]
    serve = (sys.executable, "-m", "tests.support.audited_serve")
    tcp = ("--model-root", str(model_root), "--data-interface", "lo", "--device", "cpu")
    options = ("--state-dir", str(directory / "state"), *tcp, *ring.serve_options())
    log = (directory / "log").open("wb")
    processes = [
        subprocess.Popen(
            [*serve, str(file), "serve", "--endpoint", endpoint, *options],
            stdout=log,
            stderr=log,
            env=environment(directory),
        )
        for endpoint, file in zip(endpoints, files, strict=True)
    ]
    log.close()
    for endpoint in endpoints:
        wait_until(lambda endpoint=endpoint: answers(endpoint, ring.keys("observer")), 60)
    yield endpoints, processes, files
    for process in processes:
        process.kill()
        process.wait(10)


def listening(process):
    """Addresses at which a process listens."""
    connections = psutil.Process(process.pid).net_connections("inet")
    return [entry.laddr for entry in connections if entry.status == psutil.CONN_LISTEN]


def test_secured_group_serves_and_nothing_else_gets_in(daemons, ring, checkpoint):
    endpoints, processes, files = daemons
    model = checkpoint("LlamaForCausalLM", seed=9)
    prompts = decisive_prompts(model, 7, [5, 11], 8)
    requests = [greedy_request(f"r{index}", prompt, 8) for index, prompt in enumerate(prompts)]
    config = worker_config(model.path, 2)
    with WorkerGroup(endpoints, config.parallel, ring.keys("driver")) as group:
        group.attach()
        loaded = group.prepare(config, num_gpu_blocks=64)
        run = generate(group, loaded, requests)
        assert_greedy(run, model, requests)

        for endpoint, process in zip(endpoints, processes, strict=True):
            ports = range(int(endpoint.rsplit(":")[-1]), int(endpoint.rsplit(":")[-1]) + 4)
            addresses = listening(process)
            assert {address.ip for address in addresses} == {"127.0.0.1"}
            assert {address.port for address in addresses} > set(ports)  # the tensor plane's too
        with pytest.raises(RemoteConfigError):
            group.prepare(worker_config(Path("../secret"), 2), num_gpu_blocks=64, reload=True)
    for file in files:
        assert file.read_text() == "collections.OrderedDict\n"
    assert all(process.poll() is None for process in processes)
