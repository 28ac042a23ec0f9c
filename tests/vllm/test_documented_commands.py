"""The commands of docs/vllm.md, typed in their order in a checkout that has both environments. The
processes that they start run until the end; a free port stands for 8000."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import httpx
import psutil
import pytest
from packaging.requirements import Requirement

from tests.support.command_line import short_directory, status_of
from tests.support.documented import ROOT, commands
from tests.support.waiting import PATIENCE_S, wait_until
from tests.vllm.serving import DAEMON_PYTHON, free_port

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

SENTENCE = " nothing warm is lost: the daemon waits for another one."
"""How the demo's model continues the page's prompt."""
NEED_DOCKER = ("export BASE_DIGEST", "MODELS=")
"""Beginnings of commands for containers: tests/arch/test_deployment.py and test_compose.py check
what they start."""


@dataclass
class Started:
    """A process of the page's, in a session of its own."""

    process: "subprocess.Popen[bytes]"
    log_file: Path

    def log(self) -> str:
        """Return what it has printed."""
        return self.log_file.read_text(errors="replace")

    def stop(self) -> None:
        """End it, and what it has started."""
        self.process.terminate()
        try:
            self.process.wait(60.0)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Shell:
    """Types lines of the page. Lines that set variables, or enter an environment, hold from then
    on."""

    place: Path
    port: int
    variables: dict[str, str]
    entered: list[str] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)

    def run(self, line: str) -> str:
        """Type a command that ends; it must succeed. Return what it prints."""
        done = subprocess.run(self._words(line), **self._options(), capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        if "activate" in line:
            self.entered.append(line.rpartition("&& ")[2])
        elif re.match(r"(export )?\w+=\S*$", line):
            self.entered.append(line)
        return done.stdout

    def start(self, line: str) -> Started:
        """Type a command that goes on."""
        log_file = self.place / f"{len(self.started)}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                self._words(f"exec env {line.rstrip('& ')}"),
                **self._options(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(Started(process, log_file))
        return self.started[-1]

    def wait_until_healthy(self, started: Started) -> None:
        """Wait until the server answers that it can serve."""

        def is_healthy() -> bool:
            assert started.process.poll() is None, started.log()[-4000:]
            url = f"http://localhost:{self.port}/health"
            try:
                return httpx.get(url, trust_env=False, timeout=60.0).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_healthy, "the server is healthy")

    def _words(self, line: str) -> list[str]:
        # make would take the environments for out of date in a fresh checkout
        made = (".venv/.installed-worker", ".venv/.installed", "build/vllm-venv/.installed")
        line = line.replace("make ", " ".join(["make", *(f"-o {file}" for file in made), ""]))
        line = line.replace("8000", str(self.port))
        return ["bash", "-ec", "\n".join([*self.entered, line])]

    def _options(self) -> dict:
        return {"cwd": self.place, "env": {**os.environ, **self.variables}}


@pytest.fixture
def shell(tmp_path_factory):
    """A shell in a checkout, whose environments are those of this run."""
    place = tmp_path_factory.mktemp("checkout")
    for each in ROOT.iterdir():
        if each.name not in ("build", ".venv", ".git"):
            (place / each.name).symlink_to(each)
    (place / "build").mkdir()
    (place / ".venv").symlink_to(Path(DAEMON_PYTHON).parents[1])
    (place / "build" / "vllm-venv").symlink_to(sys.prefix)
    run_time = short_directory()
    variables = {
        "CUDA_VISIBLE_DEVICES": "",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_RUNTIME_DIR": str(run_time),
    }
    shell = Shell(place, free_port(), variables)
    yield shell
    for each in reversed(shell.started):
        each.stop()
    shutil.rmtree(run_time)


def test_every_command_of_the_page(shell):
    lines = commands("vllm.md")
    run, setup, up, curl, kill_server, kill_daemon, *by_hand = lines
    shell.run(run)
    shell.run(setup)
    upper = shell.start(up)
    shell.wait_until_healthy(upper)
    assert SENTENCE in shell.run(curl)

    said = re.findall(r"server: process (\d+); daemons: process (\d+) at (\S+)", upper.log())
    ((server, daemon, endpoint),) = said
    engine = psutil.Process(int(server)).children(recursive=True)
    shell.run(kill_server.replace("SERVER", server))
    psutil.wait_procs([*engine], PATIENCE_S)
    shell.wait_until_healthy(upper)
    assert SENTENCE in shell.run(curl)
    again = re.findall(r"server: process (\d+); daemons: process (\d+) at (\S+)", upper.log())
    assert again[1][1:] == (daemon, endpoint)
    assert status_of(endpoint).pid == int(daemon)

    shell.run(kill_daemon.replace("DAEMON", daemon))
    assert SENTENCE in shell.run(curl)
    assert status_of(endpoint).pid != int(daemon)
    shell.wait_until_healthy(upper)
    assert upper.log().count("server: process") == 2
    upper.stop()
    shell.started.remove(upper)

    for_docker = [line for line in by_hand if line.startswith(NEED_DOCKER)]
    assert len(for_docker) == 2
    for line in by_hand:
        if line in for_docker:
            continue
        if line.endswith("&") or "vllm serve" in line:
            last = shell.start(line)
        else:
            shell.run(line)
    shell.wait_until_healthy(last)
    assert SENTENCE in shell.run(curl)


def test_wheel_of_the_page_is_of_the_tested_version(shell):
    """Nothing is downloaded: gigabytes."""
    (shown,) = re.findall(r'`(pip install "\.\[vllm\]")`', (ROOT / "docs" / "vllm.md").read_text())
    without = "--dry-run --no-deps --no-index --no-build-isolation"
    shell.variables["PATH"] = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    assert "Would install worker-daemon" in shell.run(
        shown.replace("install", f"install {without}")
    )
    wanted = map(Requirement, metadata.requires("worker-daemon"))
    (vllm,) = (each for each in wanted if each.name == "vllm")
    assert vllm.specifier.contains(metadata.version("vllm"))
