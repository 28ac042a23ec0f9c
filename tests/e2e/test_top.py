"""`worker-client top` as a user runs it: on a terminal of 80x24 and into a pipe."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time

import pytest

from rpc_schema import lifecycle as lc
from tests.support.command_line import CLIENT, environment, run_client, short_directory
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.server.driver import DaemonProcess, Driver

ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
ROWS, COLUMNS = 24, 80


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def daemon(directory):
    """With the fake worker, and a driver that has had three tokens of it."""
    daemon = DaemonProcess(directory / "d", "--state-dir", str(directory / "s"))
    wait_until(lambda: (directory / "d" / "w0.events").exists(), "it listens", 20.0)
    driver = Driver(daemon.endpoint)
    driver.attach()
    driver.make_ready()
    for _ in range(3):
        driver.fault()
    yield daemon
    driver.close()
    daemon.stop()


def test_once_prints_a_frame_of_those_that_answer_and_those_that_do_not(directory, daemon):
    nobody = f"ipc://{directory}/n/w1"
    endpoints = ("--endpoints", f"{daemon.endpoint},{nobody}")
    done = run_client(directory, "top", "--once", *endpoints, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 daemons")
    assert " ".join(lines[1].split()) == "rank state req steps/s tokens/s ms/step gpu temp power kv"
    rank, serving, load, requests, steps, tokens, *_ = lines[2].split()
    assert (rank, serving, load, requests) == ("0", "SERVING", "READY", "0")
    assert (steps, tokens) == ("0.0", "0.0")
    text = "\n".join(lines)
    assert "IDLE for" in text and f"{daemon.endpoint}, pid {daemon.process.pid}, cpu" in text
    assert f"{nobody}: nothing listens there: the socket is missing" in text
    assert "\x1b" not in text


class Terminal:
    """A process on a pseudo-terminal of 80x24, and all that it wrote."""

    def __init__(self, directory, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.written = b""
        own = environment(directory, TERM="xterm-256color")
        self.process = subprocess.Popen(
            [*CLIENT, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={name: own[name] for name in own if name not in ("COLUMNS", "LINES")},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def read_until(self, content: bytes, limit_s: float = 60.0) -> None:
        until = time.monotonic() + limit_s
        while content not in self.written:
            assert time.monotonic() < until, self.written
            if select.select([self._ours], [], [], 0.1)[0]:
                self.written += os.read(self._ours, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.mark.parametrize(("ending", "exit_code"), [("q", 0), ("ctrl-c", 0), ("term", 143)])
def test_terminal_is_as_it_was_however_it_ends(directory, daemon, ending, exit_code):
    terminal = Terminal(directory, "top", "--endpoints", daemon.endpoint)
    try:
        terminal.read_until(b"SERVING READY")
        assert terminal.written.index(ENTER_SCREEN) < terminal.written.index(b"SERVING READY")
        assert terminal.settings != terminal.before
        if ending == "term":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.type(b"xq" if ending == "q" else b"\x03")
        terminal.read_until(LEAVE_SCREEN)
        assert terminal.process.wait(PATIENCE_S) == exit_code
        assert terminal.settings == terminal.before
        home = terminal.written.replace(b"\x1b[H", b"\n")
        shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", home).decode()
        assert max(map(len, re.split(r"[\r\n]+", shown))) <= COLUMNS
        assert re.search(r"tokens/s .*requests .*KV used .*total +0 tokens in ", shown, re.DOTALL)
    finally:
        terminal.close()


def test_frames_follow_what_happens(directory, daemon):
    """Into a pipe: a frame a second, until the reader has enough."""
    words = ("top", "--endpoints", daemon.endpoint)
    command = subprocess.Popen(
        [*CLIENT, *words], stdout=subprocess.PIPE, env=environment(directory), text=True
    )
    try:
        assert any("SERVING READY" in line for line in iter(command.stdout.readline, ""))
        driver = Driver(daemon.endpoint)
        driver.call(lc.Drain)
        assert any("DRAINING READY" in line for line in iter(command.stdout.readline, ""))
        assert any("(drain)" in line for line in iter(command.stdout.readline, ""))
        driver.call(lc.Drain, undo=True)
        driver.close()
    finally:
        command.send_signal(signal.SIGINT)
        assert command.wait(PATIENCE_S) == 0
        command.stdout.close()
