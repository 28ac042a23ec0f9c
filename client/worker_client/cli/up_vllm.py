"""`worker-client up-vllm`: local daemons and vLLM's server as their driver, in one command.
Restarts any process that exits; the others keep their state."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from worker_client.cli.devices import Device, default_device
from worker_client.errors import LaunchError
from worker_client.launcher import LocalDaemons
from worker_client.vllm.settings import ENDPOINTS_VARIABLE

HEALTH: Final = "worker_client.vllm.health.DaemonsHealth"
DEFAULT_ENVIRONMENT: Final = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""Defaults of the server's environment variables. A forked engine process need not import vLLM
again. `vllm serve` spawns it by default, as CUDA cannot be used after a fork; here it uses none."""
POLL_S: Final = 0.2
SHUTDOWN_S: Final = "10"
"""Seconds for running requests after SIGTERM. Without any, vLLM kills its engine before that gives
the lease back."""
STOP_S: Final = 30.0
"""Time for the server to end after SIGTERM."""
SOON_S: Final = 30.0
MAX_SOON: Final = 3
"""Ends within SOON_S of the start, in a row, after which the server is given up: a wrong option
does not go away by itself."""


def up_vllm(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory, Hugging Face format; as typed, its name in requests."
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options for `vllm serve`.")
    ] = None,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks of a stage.")] = 1,
    device: Annotated[Device | None, typer.Option(help="Default: cuda if there is a GPU.")] = None,
    lora_root: Annotated[Path | None, typer.Option(help="Directory of LoRA adapters.")] = None,
    vllm: Annotated[
        str, typer.Option(help="vLLM's program, perhaps of another environment.")
    ] = "vllm",
) -> None:
    """Start local daemons, and `vllm serve` with them as its workers."""
    kind = default_device() if device is None else device
    size = pipeline_parallel_size * tensor_parallel_size
    devices = [f"cuda:{i}" if kind is Device.CUDA else "cpu" for i in range(size)]
    directory = Path(model).resolve()
    words = [vllm, "serve", str(directory), "--served-model-name", model]
    words += ["--pipeline-parallel-size", str(pipeline_parallel_size)]
    words += ["--tensor-parallel-size", str(tensor_parallel_size), "--middleware", HEALTH]
    words += ["--shutdown-timeout", SHUTDOWN_S, *(options or ())]
    with LocalDaemons(devices, directory, lora_root=lora_root) as daemons:
        _supervise(words, daemons)


def _supervise(words: list[str], daemons: LocalDaemons) -> None:
    """Run the server until it ends without an error, or is given up."""
    num_soon = 0
    while True:
        began = time.monotonic()
        code = _run_server(words, daemons)
        if code == 0:
            return
        num_soon = num_soon + 1 if time.monotonic() - began < SOON_S else 0
        if num_soon == MAX_SOON:
            _say(f"the server has ended {MAX_SOON} times within {SOON_S:g} s of its start")
            raise typer.Exit(code if code > 0 else 128 - code)
        _say(f"the server has ended ({_ending(code)}): starting it again; the daemons stay warm")


def _run_server(words: list[str], daemons: LocalDaemons) -> int:
    """Run the server, restarting daemons that die meanwhile; return its exit code."""
    endpoints = {ENDPOINTS_VARIABLE: ",".join(daemons.endpoints)}
    environment = DEFAULT_ENVIRONMENT | os.environ | endpoints
    try:
        server = subprocess.Popen(words, env=environment)
    except OSError as error:
        problem = f"{words[0]}: {error.strerror}; fix: pip install 'worker-daemon[vllm]', or --vllm"
        raise LaunchError(problem, exit_code=None, log_tail="") from None
    _say(f"server: process {server.pid}; {_places(daemons)}")
    try:
        while (code := server.poll()) is None:
            _restart_dead(daemons)
            time.sleep(POLL_S)
        return code
    finally:
        _stop(server)


def _restart_dead(daemons: LocalDaemons) -> None:
    try:
        daemons.check_alive()
    except LaunchError as dead:
        _say(f"{str(dead).splitlines()[0]}: starting its successor")
        daemons.restart_dead()
        _say(_places(daemons))


def _stop(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _places(daemons: LocalDaemons) -> str:
    """Return the process and endpoint of each daemon, for operators."""
    pairs = zip(daemons.pids, daemons.endpoints, strict=True)
    return "daemons: " + ", ".join(f"process {pid} at {endpoint}" for pid, endpoint in pairs)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _say(text: str) -> None:
    sys.stderr.write(f"up-vllm: {text}\n")
