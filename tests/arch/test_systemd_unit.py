"""The unit of docker/systemd against the daemon that it starts, and against systemd's own judgement
of its sandbox. tests/faults/test_systemd_units.py runs it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rpc_schema.exit_codes import ExitCode
from worker_daemon.settings import ENV_PREFIX, KEYS, build_settings, read_environment

UNIT = Path(__file__).resolve().parents[2] / "docker" / "systemd" / "worker-daemon@.service"


@pytest.fixture(scope="module")
def values():
    """{directive: its values, in order}, for GPU 3."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value.replace("%i", "3"))
    return found


def test_its_environment_is_what_the_daemon_reads(values):
    environment = dict(setting.split("=", 1) for setting in values["Environment"])
    ours = {name for name in environment if name.startswith(ENV_PREFIX)}
    assert ours <= {ENV_PREFIX + key.upper().replace("-", "_") for key in KEYS}
    given = read_environment(environment)
    given["model-root"] = ["/"]  # one that is there
    settings = build_settings(given)
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


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_rates_its_exposure_as_low():
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", "--no-pager"]
    done = subprocess.run([*command, UNIT], capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("needs systemd-analyze 250")
    assert "Overall exposure level" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout
