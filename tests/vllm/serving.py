"""Runs `vllm serve` as a user does, on daemons of this tree. vLLM and the tests run in one
environment, the daemons in another (DAEMON_PYTHON)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from worker_client.launcher import LocalDaemons
from worker_client.vllm.settings import ENDPOINTS_VARIABLE, SECTION

ROOT = Path(__file__).parents[2]
DAEMON_PYTHON = str(ROOT / os.environ.get("DAEMON_PYTHON", ".venv/bin/python"))
"""The interpreter of the daemons' environment."""

VLLM = (sys.executable, "-m", "tests.vllm.watched_serve")
MODEL_NAME = "demo"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
READY_LIMIT_S = 300.0
ANSWER_LIMIT_S = 120.0
END_LIMIT_S = 60.0
_POLL_S = 0.1

SMALL = {
    "--dtype": "float32",
    "--max-num-seqs": "16",
    "--max-num-batched-tokens": "64",
    "--kv-cache-memory-bytes": str(32 << 20),
}
"""Options of a small server."""


def vllm_environment(endpoints: Sequence[str], **variables: str) -> dict[str, str]:
    """Return the environment of a vLLM process on these daemons. A forked engine core
    need not import vLLM again."""
    own = {
        ENDPOINTS_VARIABLE: ",".join(endpoints),
        "CUDA_VISIBLE_DEVICES": "",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    return {**os.environ, **own, **variables}


def start_daemons(count: int, root: Path) -> LocalDaemons:
    """Start daemons on CPUs, whose models and adapters are below `root`."""

    def command(endpoint: str, device: str, pipe: int) -> list[str]:
        state = Path(endpoint.removeprefix("ipc://")).parent
        options = {
            "--endpoint": endpoint,
            "--device": device,
            "--model-root": str(root),
            "--lora-root": str(root),
            "--profile-dir": str(state / "profiles"),
            "--exit-with-parent-fd": str(pipe),
        }
        words = [word for option in options.items() for word in option]
        return [DAEMON_PYTHON, "-m", "worker_daemon", "serve", *words]

    return LocalDaemons(["cpu"] * count, root, command=command)


def free_port() -> int:
    """Return a TCP port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """A `vllm serve` process group, and a client of it."""

    process: "subprocess.Popen[bytes]"
    url: str
    log_file: Path
    cuda_calls: Path
    """Has a stack for each time that torch was asked to initialize CUDA."""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)  # uvicorn closes them after an error
        self.client = httpx.Client(
            base_url=self.url, timeout=ANSWER_LIMIT_S, limits=limits, trust_env=False
        )

    def log(self) -> str:
        """Return what the server has logged."""
        return self.log_file.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Wait until the server answers. A server that ends fails the test with its log."""
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log()[-6000:]
            assert time.monotonic() < deadline, self.log()[-6000:]
            time.sleep(_POLL_S)

    def post(self, path: str, body: object = None, **more: object) -> httpx.Response:
        """Send a POST with a JSON body."""
        return self.client.post(path, json=body, **more)

    def try_to_complete(self, prompt: object, **fields: object) -> httpx.Response:
        """Ask for a completion, greedy unless `fields` say otherwise."""
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0.0, **fields}
        headers = body.pop("headers", {})
        return self.post("/v1/completions", body, headers=headers)

    def complete(self, prompt: object, **fields: object) -> dict:
        """Return a completion; it must succeed."""
        response = self.try_to_complete(prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt: object, **fields: object) -> str:
        """Return a completion's text."""
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def stream(self, prompt: object, **fields: object) -> Iterator[dict]:
        """Yield a completion's events."""
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0.0, "stream": True, **fields}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def wait_for_the_end(self) -> None:
        """Wait until the server has ended by itself."""
        self.process.wait(END_LIMIT_S)

    def kill(self) -> None:
        """Kill -9 the server and its engine core."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM, as a supervisor does, and wait for the end."""
        self.process.terminate()
        self.process.wait(END_LIMIT_S)

    def close(self) -> None:
        """End the server if it runs."""
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_LIMIT_S)
        self.kill()

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes: HTTP and engine core."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


def start_server(
    endpoints: Sequence[str],
    model: Path,
    directory: Path,
    *words: str,
    options: Mapping[str, str] = SMALL,
    settings: Mapping[str, object] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Server:
    """Start `vllm serve`; return before it answers. settings: of additional_config."""
    port = free_port()
    given = {
        **options,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--served-model-name": MODEL_NAME,
        "--additional-config": json.dumps({SECTION: {**(settings or {})}}),
    }
    pairs = [word for option in given.items() for word in option]
    log_file = directory / f"vllm-{port}.log"
    cuda_calls = directory / f"cuda-{port}.txt"
    own = {"CUDA_CALLS": str(cuda_calls)}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*VLLM, "serve", str(model), *pairs, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=vllm_environment(endpoints, **own, **(variables or {})),
            cwd=ROOT,
            start_new_session=True,
        )
    return Server(process, f"http://127.0.0.1:{port}", log_file, cuda_calls)


@contextlib.contextmanager
def serving(*args: object, **kwargs: object) -> Iterator[Server]:
    """Start a server as start_server does, wait until it answers, and end it."""
    server = start_server(*args, **kwargs)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()
