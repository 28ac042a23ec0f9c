"""A fork is like the process that its command would have started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import probe, processes_of
from tests.support.forked_processes import ForkedPopen, end_fork_server, fork_server
from tests.support.left_running import own_programs
from tests.support.waiting import PATIENCE_S

SHOW = """
import json, os, sys, tempfile, threading
FILES = "/proc/self/fd"
def is_open(name):
    return os.path.exists(f"{FILES}/{name}")
json.dump({
    "argv": sys.argv[1:], "input": sys.stdin.read(), "parent": os.getppid(), "path": sys.path[:3],
    "variables": dict(os.environ), "directory": os.getcwd(), "temporary": tempfile.gettempdir(),
    "threads": threading.active_count(), "session": os.getsid(0) == os.getpid(),
    "files": sorted(map(int, filter(is_open, os.listdir(FILES)))), "name": __name__,
    "shown": [
        open(f"/proc/self/{name}").read().rstrip("\\0").split("\\0")
        for name in ("cmdline", "environ")
    ],
    "torch": "torch" in sys.modules,
}, sys.stdout)
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def ready() -> None:
    """Another test may have started the server in an environment of its own."""
    assert fork_server().is_ready(PATIENCE_S)
    if not fork_server().suits(os.environ):
        end_fork_server()
        assert fork_server().is_ready(PATIENCE_S)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "shown.py").write_text(SHOW)
    (tmp_path / "asleep.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)")
    return tmp_path


def show(start: type[subprocess.Popen], program: Path, **variables: str) -> dict:
    reader, writer = os.pipe()
    with (
        os.fdopen(reader),
        os.fdopen(writer),
        start(
            [sys.executable, "-m", "shown", "--a", str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(writer,),
            cwd=program,
            env={**os.environ, "TMPDIR": str(program), **variables},
            start_new_session=True,
            text=True,
        ) as process,
    ):
        shown, _ = process.communicate("some text")
    assert process.returncode == 7
    return json.loads(shown) | {"started_with": writer}


def test_a_fork_differs_from_an_executed_process_only_in_what_it_has_imported(
    program: Path,
) -> None:
    there = f"{program}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    forked = show(ForkedPopen, program, PYTHONPATH=there, OWN="1")
    executed = show(subprocess.Popen, program, PYTHONPATH=there, OWN="1")
    assert (forked.pop("torch"), executed.pop("torch")) == (True, False)
    assert forked == executed
    assert forked["parent"] == os.getpid()
    assert forked["files"] == [0, 1, 2, forked["started_with"]]


ENDING = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
print("main")
CODE
"""


@pytest.mark.parametrize("last", ["", "sys.exit()", "sys.exit(5)", "sys.exit('a word')", "1 / 0"])
def test_a_fork_ends_as_an_executed_process(program: Path, last: str) -> None:
    """What it says, after its threads and its exit handlers, and its code."""
    (program / "ending.py").write_text(ENDING.replace("CODE", last))
    outcomes = []
    for start in (ForkedPopen, subprocess.Popen):
        words = [sys.executable, "-m", "ending"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with start(words, cwd=program, text=True, **pipes) as process:
            out, errors = process.communicate(timeout=PATIENCE_S)
        outcomes.append((out, errors.splitlines()[-1:], process.returncode))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].split("\n")[:3] == ["main", "thread", "at exit"]


def test_a_command_does_not_wait_for_the_server(program: Path) -> None:
    end_fork_server()
    assert not show(ForkedPopen, program)["torch"]
    assert fork_server().is_ready(PATIENCE_S)
    assert show(ForkedPopen, program)["torch"]


def test_variables_that_libraries_read_when_they_are_loaded_need_a_new_process(
    program: Path,
) -> None:
    assert not show(ForkedPopen, program, OMP_NUM_THREADS="3")["torch"]


def test_signals_and_ends_are_its_own(program: Path) -> None:
    words = [sys.executable, "-m", "asleep"]
    with ForkedPopen(words, stdout=subprocess.PIPE, cwd=program, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        assert process.pid != fork_server().pid
        assert process.pid not in [program.pid for program in own_programs()]
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_one_left_running_is_noticed(program: Path) -> None:
    """As the check at a session's end does, by its command."""
    words = [sys.executable, "-m", "asleep", "worker_daemon"]
    with ForkedPopen(words, stdout=subprocess.PIPE, cwd=program, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        [found] = [program for program in own_programs() if program.pid == process.pid]
        assert [word for word in found.cmdline() if word] == words
        process.kill()
        process.wait()
        assert found not in own_programs()


def test_a_directory_s_processes_include_forks(program: Path) -> None:
    words = [sys.executable, "-m", "asleep"]
    variables = {**os.environ, "TMPDIR": str(program)}
    pipe = subprocess.PIPE
    with ForkedPopen(words, stdout=pipe, cwd=program, env=variables, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert process.pid in [found.pid for found in processes_of(program)]
        process.kill()


def test_a_command_that_was_imported_before_runs_as_any_other(tmp_path: Path) -> None:
    helped = probe(tmp_path, "ipc:///none", "live", "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout
