"""Checks docker/ against the daemon that it starts, and the unit's sandbox against systemd's
assessment. tests/faults/test_systemd_units.py runs the unit."""

import ast
import importlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from worker_client.vllm.settings import read_endpoints, read_settings
from worker_daemon.settings import ENV_PREFIX, KEYS, build_settings, read_environment
from worker_host.exit_codes import ExitCode

DOCKER = Path(__file__).resolve().parents[2] / "docker"
UNIT = DOCKER / "systemd" / "worker-daemon@.service"


@pytest.fixture(scope="module")
def values():
    """Return {directive: its values, in order}, for GPU 3."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value.replace("%i", "3"))
    return found


def settings_of(environment):
    """Return a daemon's settings for an environment whose model directory exists."""
    ours = {name for name in environment if name.startswith(ENV_PREFIX)}
    assert ours <= {ENV_PREFIX + key.upper().replace("-", "_") for key in KEYS}
    return build_settings(read_environment(environment) | {"model-root": ["/"]})


def test_its_environment_is_what_the_daemon_reads(values):
    environment = dict(setting.split("=", 1) for setting in values["Environment"])
    settings = settings_of(environment)
    assert (settings.endpoint, settings.device) == (
        "ipc:///run/worker-daemon/3/worker",
        "cuda:3",
    )
    (state,) = values["StateDirectory"]
    assert settings.state_dir == Path("/var/lib") / state
    (runtime,) = values["RuntimeDirectory"]
    assert settings.endpoint.startswith(f"ipc:///run/{runtime}/")
    assert str(settings.gpu_lock_dir) in values["ReadWritePaths"]
    (cache,) = values["CacheDirectory"]
    assert environment["TRITON_CACHE_DIR"].startswith(f"/var/cache/{cache}/")


def test_what_starting_again_cannot_mend_is_not_started_again(values):
    (codes,) = values["RestartPreventExitStatus"]
    expected = {ExitCode.KEY_REFUSED, ExitCode.CONFIG, ExitCode.GPU_LOST}
    assert {int(code) for code in codes.split()} == expected


def test_it_is_bound_in_what_it_takes_and_leaves_no_core(values):
    assert values["LimitCORE"] == ["0"]
    assert values["MemoryMax"][0].endswith("%")
    assert int(values["TasksMax"][0]) >= 1024, "torch and NCCL start some hundred threads"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_rates_its_exposure_as_low():
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", "--no-pager"]
    done = subprocess.run([*command, UNIT], capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("needs systemd-analyze 250")
    assert "Overall exposure level" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout


def test_composed_daemons_share_what_they_must():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    daemons = [services[name] for name in ("w0", "w1")]
    settings = [settings_of(daemon["environment"]) for daemon in daemons]
    assert [found.device for found in settings] == ["cuda:0", "cuda:1"]
    for field in ("endpoint", "state_dir"):
        assert len({getattr(found, field) for found in settings}) == 2
    kept = {volume.split(":")[1] for volume in daemons[0]["volumes"]}
    for daemon, found in zip(daemons, settings, strict=True):
        assert daemon["volumes"] == daemons[0]["volumes"]
        assert daemon["network_mode"] == daemon["ipc"] == "service:namespaces"
        assert str(found.gpu_lock_dir) in kept
        assert str(found.state_dir.parent) in kept


def test_composed_daemons_are_probed_where_they_listen(tmp_path):
    """By the words that compose.yaml gives the image's shell."""
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("w0", "w1"):
        kind, line = services[name]["healthcheck"]["test"]
        command, *options = shlex.split(line.replace("$$", "$"))
        module, _, function = project["scripts"][command].partition(":")
        assert (kind, function) == ("CMD-SHELL", "main")
        own = f"ipc://{tmp_path}/{name}"
        environment = {**os.environ, "WORKER_DAEMON_ENDPOINT": own}
        words = " ".join([sys.executable, "-m", module, *options])
        done = subprocess.run(
            words, shell=True, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert own in done.stderr and "NothingListens" in done.stderr


@pytest.mark.parametrize(
    ("file", "digest"), [("compose.yaml", "BASE_DIGEST"), ("compose.vllm.yaml", "VLLM_DIGEST")]
)
def test_composed_services_are_bound_in_what_they_take_and_leave_no_core(file, digest):
    composed = yaml.safe_load((DOCKER / file).read_text())
    for service in composed["services"].values():
        assert service["mem_limit"]
        assert service["pids_limit"] > 0
        assert service["ulimits"]["core"] == 0
        assert service["restart"]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert digest in service["build"]["args"]


@pytest.fixture(scope="module")
def composed():
    """Return the services of both files together."""
    files = [DOCKER / name for name in ("compose.yaml", "compose.vllm.yaml")]
    first, second = (yaml.safe_load(file.read_text())["services"] for file in files)
    assert not first.keys() & second.keys(), "the second file changes no service of the first"
    return first | second


def test_composed_server_has_all_daemons_in_rank_order(composed):
    daemons = [service for name, service in composed.items() if re.fullmatch("w[0-9]+", name)]
    server = composed["vllm"]
    endpoints = [daemon["environment"]["WORKER_DAEMON_ENDPOINT"] for daemon in daemons]
    assert read_endpoints(server["environment"]) == tuple(endpoints)
    options = server_options(server)
    sizes = ("--pipeline-parallel-size", "--tensor-parallel-size")
    assert math.prod(int(options.get(name, 1)) for name in sizes) == len(daemons)
    shared = {volume for daemon in daemons for volume in daemon["volumes"]}
    assert {*server["volumes"]} <= shared
    assert {"/run/worker-daemon", "/models"} == {
        v.split(":")[-1 - v.endswith(":ro")] for v in server["volumes"]
    }
    assert server["depends_on"].keys() == composed.keys() - {"vllm", "namespaces"}
    assert all(each == {"condition": "service_healthy"} for each in server["depends_on"].values())


def test_composed_server_is_asked_for_what_it_has(composed):
    server = composed["vllm"]
    options = server_options(server)
    module, _, name = options["--middleware"].rpartition(".")
    assert inspect.isclass(getattr(importlib.import_module(module), name))
    assert read_settings(json.loads(options["--additional-config"])).reload
    words = server["healthcheck"]["test"]
    assert words[:3] == ["CMD", "python3", "-c"]
    ast.parse(words[3])
    assert f":{options['--port']}/health" in words[3]
    assert server["ports"] == [f"${{LISTEN:-127.0.0.1:8000}}:{options['--port']}"]
    assert int(options["--shutdown-timeout"]) < int(server["stop_grace_period"].removesuffix("s"))


def test_composed_server_has_no_gpu_and_is_the_daemons_user(composed):
    """The image that it is made of asks for all GPUs where the runtime heeds that."""
    assert not {"deploy", "devices", "gpus", "runtime", "privileged"} & composed["vllm"].keys()
    lines = [(DOCKER / name).read_text() for name in ("Dockerfile", "Dockerfile.vllm")]
    assert "NVIDIA_VISIBLE_DEVICES=void" in lines[1]
    users = [re.findall("^USER (.*)$", text, re.MULTILINE) for text in lines]
    assert users[0] == users[1] == ["10001:10001"]


def server_options(service):
    """Return the options of vLLM's command, by name."""
    _, *words = service["command"]
    return dict(word.split("=", 1) for word in words)


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.vllm"])
def test_image_has_every_package(file):
    copied = {
        line.split()[1]
        for line in (DOCKER / file).read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
    }
    ignored = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    names = {path.parent.name for path in DOCKER.parent.glob("*/__init__.py")}
    packages = names - {"tests", "benchmarks"}
    assert packages <= copied
    assert {f"!{name}" for name in packages} <= set(ignored)
