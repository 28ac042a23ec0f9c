"""Local daemons: ready or refused in time, and nothing is left, however they or their driver
end."""

import gc
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from rpc_schema.config import ParallelConfig
from tests.support.waiting import wait_until
from worker_client.errors import LaunchError, WorkerDied
from worker_client.launcher import LocalDaemons
from worker_client.worker_group import WorkerGroup

ROOT = Path(__file__).parents[3]


def command(mode):
    def build(endpoint, device, fd):
        return [sys.executable, "-m", "tests.support.serve_fake", endpoint, str(fd), mode]

    return build


def test_daemons_become_ready_and_leave_nothing(monkeypatch):
    monkeypatch.chdir(ROOT)
    gc.collect()  # what other tests have left
    before = {child.pid for child in psutil.Process().children()}
    fds = psutil.Process().num_fds()
    monkeypatch.setattr("worker_client.launcher.STOP_TIMEOUT_S", 1)
    started = []

    def start(*words, **how):
        started.append(subprocess.Popen(*words, **how))
        return started[-1]

    how = {"command": command("serve"), "start_process": start}
    with LocalDaemons(["cpu", "cpu"], ROOT, **how) as daemons:
        assert daemons.pids == [process.pid for process in started]
        assert daemons.directory.stat().st_mode & 0o777 == 0o700
        assert daemons.seconds.keys() == {"spawn", "import"}
        assert min(daemons.seconds.values()) > 0
        with WorkerGroup(daemons.endpoints, ParallelConfig(pipeline_parallel_size=2)) as group:
            assert [status.load for status in group.attach()] == ["CREATED", "CREATED"]
        daemons.check_alive()
        os.kill(daemons.pids[1], signal.SIGKILL)
        # A process is a zombie before the last of its threads is gone and it can be waited for.
        os.waitid(os.P_PID, daemons.pids[1], os.WEXITED | os.WNOWAIT)
        with pytest.raises(LaunchError, match=r"exit code 137: it was killed \(SIGKILL\)"):
            daemons.check_alive()
        daemons.stop(timeout_s=0.2)
    assert not daemons.directory.exists()
    assert {child.pid for child in psutil.Process().children()} == before
    assert psutil.Process().num_fds() == fds


def test_successor_that_dies_before_it_answers_has_one_too(monkeypatch):
    monkeypatch.chdir(ROOT)
    with LocalDaemons(["cpu"], ROOT, command=command("serve")) as daemons:
        with daemons.kept_alive():
            for _ in range(2):
                before = daemons.pids
                os.kill(before[0], signal.SIGKILL)
                wait_until(partial(have_changed, daemons, before), "it has a successor")
            with WorkerGroup(daemons.endpoints, ParallelConfig()) as group:
                (status,) = group.attach(wait_s=60.0)
        assert status.load == "CREATED"
        (last,) = daemons.pids
        os.kill(last, signal.SIGKILL)
        os.waitid(os.P_PID, last, os.WEXITED | os.WNOWAIT)
        assert daemons.pids == [last], "nobody watches it any more"


def have_changed(daemons, before):
    return daemons.pids != before


def test_what_keeps_a_successor_from_starting_is_raised(monkeypatch):
    monkeypatch.chdir(ROOT)
    asked = threading.Event()

    def start_none(*_, **__):
        asked.set()
        raise OSError("no processes")

    def lose(daemons):
        with daemons.kept_alive():
            monkeypatch.setattr(daemons, "_start_process", start_none)
            os.kill(daemons.pids[0], signal.SIGKILL)
            assert asked.wait(60.0)
            raise LaunchError("it does not answer", exit_code=None, log_tail="")

    with LocalDaemons(["cpu"], ROOT, command=command("serve")) as daemons:
        with pytest.raises(OSError, match="no processes"):
            lose(daemons)
        with pytest.raises(LaunchError, match="has exited"):
            daemons.check_alive()
        (daemons.directory / "w0.log").write_text("line\nno memory is left\n")
        pattern = r"(?s)gone.*log ends with.*no memory is left"
        with pytest.raises(WorkerDied, match=pattern), daemons.naming_causes():
            raise WorkerDied(0, daemons.endpoints[0], "gone")


@pytest.mark.parametrize(
    ("mode", "message"), [("exit", r"exit code 1\)\nno such device"), ("silent", "within 1 s")]
)
def test_daemons_that_do_not_get_ready(monkeypatch, mode, message):
    monkeypatch.chdir(ROOT)
    before = {child.pid for child in psutil.Process().children()}
    timeout_s = 1 if mode == "silent" else 20
    monkeypatch.setattr("worker_client.launcher.STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(LocalDaemons.stop, "__defaults__", (0.2,))
    with pytest.raises(LaunchError, match=message):
        LocalDaemons(["cpu"], ROOT, ready_timeout_s=timeout_s, command=command(mode))
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_killed_launcher_takes_its_daemons_and_files_along():
    script = (
        "import sys, time; from pathlib import Path\n"
        "from worker_client.launcher import LocalDaemons\n"
        "from tests.unit.client.test_launcher import command\n"
        "daemons = LocalDaemons(['cpu'], Path('.'), command=command('serve'))\n"
        "print(daemons.directory, *daemons.pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    with launcher:
        directory, pid = launcher.stdout.readline().decode().split()
        assert Path(directory).is_dir() and psutil.pid_exists(int(pid))
        launcher.kill()
    wait_until(lambda: not psutil.pid_exists(int(pid)), "the daemon has ended")
    wait_until(lambda: not Path(directory).exists(), "its directory is gone")
