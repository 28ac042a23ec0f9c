"""A daemon's device option, and its number of CPU threads."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.support.command_line import COMMAND_LIMIT_S, DAEMON, environment, short_directory
from tests.support.serving import connect, worker_config
from worker_client.launcher import LocalDaemons
from worker_daemon.device.threads import usable_cores
from worker_host.exit_codes import ExitCode


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


def test_device_that_is_not_here_ends_the_start_and_names_those_that_are(directory):
    endpoint = f"ipc://{directory}/e/w"
    done = subprocess.run(
        [*DAEMON, "serve", "--endpoint", endpoint, "--device", "cuda:99", "--share-gpu"],
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        env=environment(directory),
        check=False,
    )
    assert done.returncode == ExitCode.CONFIG
    assert "no such device; field device = 'cuda:99'; fix: use one of ['cpu'" in done.stderr
    assert "serving" not in done.stderr and "Traceback" not in done.stderr
    assert not (directory / "e").exists()


@pytest.fixture
def unset_threads(monkeypatch):
    """Like a user's environment; the tests' environment sets both."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")


@pytest.mark.usefixtures("unset_threads")
def test_threads_share_the_cores_and_sleep_unless_the_user_says_otherwise(checkpoint, model_root):
    """Threads that spin between operations take the cores that driver and daemon need: steps took
    5 to 9 times as long on two cores."""

    def command(endpoint: str, device: str, pipe: int) -> list[str]:
        own = ["OMP_NUM_THREADS=3", "OMP_WAIT_POLICY=ACTIVE"] if endpoint.endswith("w1") else []
        words = ("--endpoint", endpoint, "--device", device, "--model-root", str(model_root))
        serve = (sys.executable, "-m", "worker_daemon", "serve", *words)
        return ["env", *own, *serve, "--exit-with-parent-fd", str(pipe)]

    config = worker_config(checkpoint().path)
    with LocalDaemons(["cpu", "cpu"], model_root, command=command) as daemons:
        for rank, (threads, spins) in enumerate([(usable_cores(), False), (3, True)]):
            with connect([daemons.endpoints[rank]], config) as (group, _):
                assert group.get_status()[0].providers["threads"] == str(threads)
            log = (daemons.directory / f"w{rank}.log").read_text()
            assert f"torch computes with {threads} threads (" in log
            (spin_count,) = set(re.findall(r"GOMP_SPINCOUNT = '(\d+|INFINITE)'", log))
            assert (spin_count != "0") == spins
