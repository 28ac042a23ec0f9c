"""Whatever hangs in a daemon, with the interpreter's lock or without it: a second SIGTERM or SIGINT
ends it (row 33 of the fault matrix). A first one alone ends nothing that only takes long."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.faulty_daemon import Fault, FaultFile
from tests.support.waiting import wait_until
from tests.unit.server.driver import DaemonProcess, Driver
from worker_host.exit_codes import ExitCode

LIMIT_S = 5.0
BETWEEN_S = 0.3
"""From the first signal to the second, for the first to be delivered."""


class Daemons:
    """A daemon with a real worker, its fault file, and a driver."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.faults = FaultFile(directory / "w.fault")
        self._daemon: DaemonProcess | None = None
        self._driver: Driver | None = None

    def start(self, fault: Fault | None = None, prefix: tuple[str, ...] = ()) -> DaemonProcess:
        """Start it with an armed fault; return once it listens. prefix: of its command."""
        if fault is not None:
            self.faults.put(fault)
        entry = (sys.executable, "-m", "tests.support.faulty_daemon", str(self.faults.path))
        serve = (*prefix, *entry, "serve", "--device", "cpu", "--model-root", str(self._directory))
        self._daemon = DaemonProcess(self._directory / "d", serve=serve)
        return self._daemon

    def driver(self) -> Driver:
        """Return an attached driver, with a device."""
        assert self._daemon is not None
        self._driver = Driver(self._daemon.endpoint)
        self._driver.attach()
        self._driver.init_device()
        return self._driver

    def start_load(self, what: str) -> tuple[DaemonProcess, Driver]:
        """Start one whose step thread hangs in LoadModel."""
        daemon = self.start(Fault("load_model", what))
        driver = self.driver()
        driver.send_load(str(self._directory))
        self.wait_for_strike()
        return daemon, driver

    def stall_loop(self, what: str = "hold") -> None:
        """Let the event loop hang."""
        self.faults.put(Fault("publish_heartbeat", what))
        self.wait_for_strike()

    def wait_for_strike(self) -> None:
        wait_until(lambda: not self.faults.armed, "the fault struck", 60.0)
        time.sleep(0.1)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
        if self._daemon is not None:
            self._daemon.stop()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    yield made
    made.close()


@pytest.fixture
def end_by_two(detection) -> Callable[[DaemonProcess, str, int], int]:
    """end_by_two(daemon, name, number): send a signal twice; return the exit status."""

    def end(daemon: DaemonProcess, name: str, number: int) -> int:
        daemon.process.send_signal(number)
        time.sleep(BETWEEN_S)
        return end_by_second(daemon, name, number)

    def end_by_second(daemon: DaemonProcess, name: str, number: int) -> int:
        began = time.monotonic()
        daemon.process.send_signal(number)
        status = daemon.wait(60)
        detection(33, f"the second signal: {name}", LIMIT_S, time.monotonic() - began, "kernel")
        return status

    end.by_second = end_by_second
    return end


def a_signal() -> int:
    return random.choice((signal.SIGTERM, signal.SIGINT))


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("make_worker", marks=LONG),
        "load_model",
        pytest.param("publish_heartbeat", marks=LONG),
    ],
)
def test_lock_held_before_the_first_signal(daemons, end_by_two, where):
    if where == "load_model":
        daemon, _ = daemons.start_load("hold")
    else:
        daemon = daemons.start(Fault(where, "hold"))
        daemons.wait_for_strike()
    number = a_signal()
    assert end_by_two(daemon, f"the lock is held in {where}", number) == -number


@LONG
def test_event_loop_blocked_without_the_lock(daemons, end_by_two):
    daemon = daemons.start(Fault("publish_heartbeat", "hang"))
    daemons.wait_for_strike()
    number = a_signal()
    assert end_by_two(daemon, "the event loop is blocked", number) == -number


def test_load_that_hangs_without_the_lock(daemons, end_by_two):
    daemon, _ = daemons.start_load("hang")
    number = a_signal()
    assert end_by_two(daemon, "LoadModel hangs", number) == 128 + number
    assert not (Path(daemon.endpoint.removeprefix("ipc://"))).exists()


@pytest.mark.parametrize("wait_s", [0.0, pytest.param(3.0, marks=LONG)])
def test_lock_held_between_the_signals(daemons, end_by_two, wait_s):
    daemon, driver = daemons.start_load("hang")
    number = a_signal()
    daemon.process.send_signal(number)
    wait_until(lambda: driver.status().serving == "DRAINING", "it drains", 30.0)
    daemons.stall_loop()
    time.sleep(wait_s)
    name = f"the lock is held since {wait_s} s"
    assert end_by_two.by_second(daemon, name, number) == -number


def test_one_signal_ends_nothing_that_takes_long(daemons):
    daemon, driver = daemons.start_load("hang")
    daemon.process.send_signal(a_signal())
    wait_until(lambda: driver.status().serving == "DRAINING", "it drains", 30.0)
    for _ in range(2):
        daemons.stall_loop()
        time.sleep(2.5)  # longer than the loop may stall before a second signal passes it by
        assert daemon.process.poll() is None
        daemons.faults.end_hold()
        assert driver.status().serving == "DRAINING"
    assert daemon.wait(60) == ExitCode.OK


def test_signals_while_torch_is_imported(daemons, end_by_two):
    number = a_signal()
    assert end_by_two(daemons.start(), "torch is imported", number) in (0, -number, 128 + number)


def has_namespaces() -> bool:
    command = ["unshare", "--map-root-user", "--pid", "--fork", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("what", ["hold", pytest.param("hang", marks=LONG)])
def test_first_process_of_a_container(daemons, detection, what):
    if not has_namespaces():
        pytest.skip("this host lets users make no namespaces")
    prefix = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
    daemon = daemons.start(Fault("load_model", what), prefix)
    driver = daemons.driver()
    driver.send_load("/m")
    daemons.wait_for_strike()
    [first] = psutil.Process(daemon.process.pid).children()
    first.terminate()
    time.sleep(BETWEEN_S)
    began = time.monotonic()
    first.terminate()
    assert daemon.wait(60) == 128 + signal.SIGTERM
    detection(33, f"as PID 1: {what}", LIMIT_S, time.monotonic() - began, "kernel")


def test_first_process_of_a_container_drains_at_one_signal(daemons):
    if not has_namespaces():
        pytest.skip("this host lets users make no namespaces")
    prefix = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
    daemon = daemons.start(prefix=prefix)
    daemons.driver()
    [first] = psutil.Process(daemon.process.pid).children()
    first.terminate()
    assert daemon.wait(60) == ExitCode.OK
