"""Runs the commands as a user does, in processes of their own (forks: forked_processes.py) and in a
separate temporary directory."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import zmq

from rpc_schema.errors import WorkerDaemonError
from rpc_schema.lifecycle import Status
from tests.support.forked_processes import ForkedPopen
from tests.support.waiting import PATIENCE_S
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.worker_client import WorkerClient

CLIENT = (sys.executable, "-m", "worker_client")
PROBE = (sys.executable, "-m", "worker_client.cli.probe")
DAEMON = (sys.executable, "-m", "worker_daemon")
COMMAND_LIMIT_S = PATIENCE_S
"""Above the default step deadline, 60 s: after the death of a driver, a rank on a CPU may wait that
long for a peer that never got the step."""


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """Return our environment, with temporary files in `directory`, and with these variables."""
    own = {"TMPDIR": str(directory), "XDG_CACHE_HOME": str(directory), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **variables}


def short_directory() -> Path:
    """Make a directory with a path short enough for a socket's name."""
    return Path(tempfile.mkdtemp(prefix="cl-"))


def run_client(
    directory: Path, *words: str, check: bool = True, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run `worker-client WORDS` to its end. check: require success."""
    done = _run(directory, (*CLIENT, *words), **variables)
    assert done.returncode == 0 or not check, done.stderr
    return done


def _run(
    directory: Path, words: Sequence[str], **variables: str
) -> "subprocess.CompletedProcess[str]":
    with _start(directory, words, **variables) as process:
        try:
            stdout, stderr = process.communicate(timeout=COMMAND_LIMIT_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def probe(
    directory: Path, endpoint: str, what: str, *options: str
) -> "subprocess.CompletedProcess[str]":
    """Probe a daemon for liveness or readiness, as a supervisor does."""
    return _run(directory, (*PROBE, what, "--endpoints", endpoint, *options))


def start_client(directory: Path, *words: object, **variables: str) -> "subprocess.Popen[str]":
    """Start `worker-client WORDS`."""
    return _start(directory, [*CLIENT, *map(str, words)], **variables)


def _start(directory: Path, words: Sequence[str], **variables: str) -> "subprocess.Popen[str]":
    return ForkedPopen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(directory, **variables),
    )


def start_daemon(
    directory: Path,
    *words: str,
    within: Sequence[str] = (),
    python: str = sys.executable,
    start: type["subprocess.Popen[bytes]"] = subprocess.Popen,
    **variables: str,
) -> "subprocess.Popen[bytes]":
    """Start `worker-daemon serve WORDS` through the command `within`, which execs it. start:
    ForkedPopen where the start is not the subject."""
    with (directory / "daemon.log").open("ab") as log:
        return start(
            [*within, python, *DAEMON[1:], "serve", *words],
            stdout=log,
            stderr=log,
            env=environment(directory, **variables),
        )


def ask_status(endpoint: str, timeout_s: float = 0.5) -> Status | None:
    """Return a daemon's status; None if it does not answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = WorkerClient(context, parse_endpoint(endpoint), 0, new_driver_id())
    try:
        return client.get_status(timeout_s)
    except WorkerDaemonError:
        return None
    finally:
        client.close()
        context.term()


def status_of(endpoint: str) -> Status:
    """Return the status of a living daemon, with a limit for a busy host."""
    status = ask_status(endpoint, COMMAND_LIMIT_S)
    assert status is not None, f"{endpoint} does not answer"
    return status


def wait_for_daemons(
    endpoints: Sequence[str], processes: Sequence["subprocess.Popen[bytes]"]
) -> None:
    """Wait until all daemons answer."""
    deadline = time.monotonic() + COMMAND_LIMIT_S
    for endpoint, process in zip(endpoints, processes, strict=True):
        while ask_status(endpoint) is None:
            assert process.poll() is None, f"{endpoint} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{endpoint} does not answer"
            time.sleep(0.05)


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return processes with the directory on their command line or as TMPDIR."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("TMPDIR", "")]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if any(str(directory) in word for word in words):
            found.append(process)
    return found
