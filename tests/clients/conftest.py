"""Clients of OpenAI's API before `worker-client serve`. They run in an environment of their own;
the server, and the training of its model, in the one that SERVER_PYTHON names."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
}

import pytest

ROOT = Path(__file__).parents[2]
SERVER_PYTHON = str(ROOT / os.environ.get("SERVER_PYTHON", ".venv/bin/python"))
KEY = "key-of-clients"


class Server(NamedTuple):
    """A server that runs."""

    url: str
    """Base of OpenAI's API."""
    directory: Path


def pytest_configure(config: pytest.Config) -> None:
    """Clients warn of much, for good reasons of their own."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of the trained model, on a daemon that it starts."""
    directory = tmp_path_factory.mktemp("models")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    with subprocess.Popen(
        [SERVER_PYTHON, "-m", "tests.clients.served_model", str(directory)],
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield Server(f"{_url(process)}/v1", directory)
        finally:
            process.send_signal(signal.SIGTERM)


def _url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        found = re.search(r"serve: serving \S+ at (http://\S+)", line)
        if found:
            return found[1]
    raise AssertionError("".join(said))
