"""However a daemon ends, nothing of it is left: no process, socket, lock or shared memory (rows 28,
32 and 33 of the fault matrix)."""

import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpc_schema import lifecycle as lc
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.step import ModelRunnerOutput
from tests.e2e.conftest import checkpoint, model_root
from tests.support.command_line import start_daemon, wait_for_daemons
from tests.support.driving import random_cases
from tests.support.serving import connect, greedy_request, scheduler_limits, worker_config
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.server.driver import DaemonProcess
from tests.unit.server.driver import Driver as BareDriver
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler
from worker_host.exit_codes import ExitCode

__all__ = ["checkpoint", "model_root"]

DRAIN_S = 10.0
SHARED_MEMORY = Path("/dev/shm")


class Home:
    """A directory for daemons with a fake worker, their parent's pipe, and what was there before
    them."""

    def __init__(self, path: Path) -> None:
        self.sockets = path / "d"
        self.state = path / "s"
        self.step_over = path / "over"
        """The step that a busy daemon runs ends once this is there."""
        self._shared = shared_memory()
        self._daemons: list[DaemonProcess] = []
        self._drivers: list[BareDriver] = []
        self._read_end, self.parent = os.pipe()

    def start(self, *options: str) -> DaemonProcess:
        """A daemon that is starting."""
        daemon = DaemonProcess(
            self.sockets,
            *("--state-dir", str(self.state), "--exit-with-parent-fd", str(self._read_end)),
            *options,
            pass_fds=(self._read_end,),
        )
        self._daemons.append(daemon)
        return daemon

    def serve(self, *, busy: bool) -> tuple[DaemonProcess, BareDriver]:
        """A daemon that serves, and may be in a step."""
        daemon = self.start()
        wait_until(lambda: (self.sockets / "w0").exists(), "the daemon listens", 20.0)
        driver = BareDriver(daemon.endpoint)
        self._drivers.append(driver)
        driver.attach()
        if busy:
            driver.make_ready()
            driver.send_step_until(self.step_over)
        return daemon, driver

    def check_nothing_is_left(self) -> None:
        assert not self.sockets.exists(), list(self.sockets.iterdir())
        kept = {path.name for path in self.state.iterdir()} if self.state.exists() else set()
        assert kept <= {"kernels"}
        wait_until(lambda: shared_memory() <= self._shared, "what other processes share is gone")
        for daemon in self._daemons:
            assert not psutil.pid_exists(daemon.process.pid)

    def close(self) -> None:
        for driver in self._drivers:
            driver.close()
        for daemon in self._daemons:
            daemon.stop()


def shared_memory() -> set[str]:
    """The names in /dev/shm that are this user's."""
    return {path.name for path in SHARED_MEMORY.iterdir() if path.lstat().st_uid == os.geteuid()}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def terminate(daemon: DaemonProcess, driver: BareDriver, home: Home) -> None:
    daemon.process.terminate()


def terminate_and_end_the_step(daemon: DaemonProcess, driver: BareDriver, home: Home) -> None:
    daemon.process.terminate()
    wait_until(lambda: driver.status().serving == "DRAINING", "it drains")
    assert not driver.results.poll(0)
    home.step_over.touch()
    assert isinstance(driver.reply(), ModelRunnerOutput)


def terminate_twice(daemon: DaemonProcess, driver: BareDriver, home: Home) -> None:
    daemon.process.terminate()
    wait_until(lambda: driver.status().serving == "DRAINING", "it drains")
    daemon.process.terminate()


def interrupt_twice(daemon: DaemonProcess, driver: BareDriver, home: Home) -> None:
    daemon.process.send_signal(signal.SIGINT)
    wait_until(lambda: driver.status().serving == "DRAINING", "it drains")
    daemon.process.send_signal(signal.SIGINT)


def close_pipe(daemon: DaemonProcess, driver: BareDriver, home: Home) -> None:
    os.close(home.parent)


def ask(daemon: DaemonProcess, driver: BareDriver, home: Home) -> None:
    assert isinstance(driver.call(lc.Shutdown), lc.Acknowledged)


@pytest.mark.parametrize(
    ("end", "busy", "exit_code", "limit_s"),
    [
        pytest.param(terminate, False, ExitCode.OK, 2.0, marks=pytest.mark.exhaustive),
        (terminate_and_end_the_step, True, ExitCode.OK, DRAIN_S),
        pytest.param(
            terminate_twice, True, ExitCode.TERMINATED_TWICE, 1.0, marks=pytest.mark.exhaustive
        ),
        (interrupt_twice, True, ExitCode.INTERRUPTED_TWICE, 1.0),
        (close_pipe, True, ExitCode.OK, 2.0),
        pytest.param(ask, False, ExitCode.OK, 2.0, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_nothing_is_left_whoever_ends_it(home, detection, end, busy, exit_code, limit_s):
    daemon, driver = home.serve(busy=busy)
    began = time.monotonic()
    end(daemon, driver, home)
    assert daemon.wait(PATIENCE_S) == exit_code
    row = 33 if "twice" in end.__name__ else 32
    detection(row, end.__name__, limit_s, time.monotonic() - began, "process end")
    home.check_nothing_is_left()


@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        (("--device", "cuda:9"), ExitCode.CONFIG),
        (("--exit-with-parent-fd", "987"), ExitCode.CONFIG),
    ],
)
def test_nothing_is_left_of_a_failed_start(home, options, exit_code):
    assert home.start(*options).wait(PATIENCE_S) == exit_code
    home.check_nothing_is_left()


def test_second_daemon_on_an_endpoint_is_refused_and_leaves_the_first_alone(home, detection):
    daemon, driver = home.serve(busy=False)
    before = sorted(home.sockets.iterdir())
    began = time.monotonic()
    second = home.start()
    assert second.wait(PATIENCE_S) == ExitCode.IN_USE
    detection(28, "second daemon on an endpoint", 5.0, time.monotonic() - began, "flock")
    assert f"pid {daemon.process.pid} serves this endpoint" in second.stderr()
    assert sorted(home.sockets.iterdir()) == before
    assert driver.status().pid == daemon.process.pid


@pytest.mark.parametrize("same_endpoint", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_what_a_killed_daemon_leaves_goes_with_the_next_start(home, same_endpoint):
    daemon, _ = home.serve(busy=True)
    daemon.process.kill()
    assert daemon.wait(PATIENCE_S) == -signal.SIGKILL
    left = {path.name for path in home.sockets.iterdir()}
    assert left == {"w0", "w0.step", "w0.results", "w0.events", "w0.lock"}
    other = () if same_endpoint else ("--endpoint", f"ipc://{home.sockets}/w1")
    following = home.start(*other)
    name = "w0" if same_endpoint else "w1"
    wait_until(lambda: (home.sockets / f"{name}.lock").exists(), "the next one has begun", 20.0)
    driver = BareDriver(f"ipc://{home.sockets}/{name}")
    assert driver.status().pid == following.process.pid
    now = {path.name for path in home.sockets.iterdir()}
    assert now == {name, f"{name}.step", f"{name}.results", f"{name}.events", f"{name}.lock"}
    driver.close()
    following.process.terminate()
    assert following.wait(PATIENCE_S) == 0
    assert not home.sockets.exists()


def test_real_daemon_that_is_told_to_end_under_load_ends_its_step_first(
    model_root, checkpoint, tmp_path, detection
):
    """Its driver hears of the end, and gets no token that is not the request's."""
    directory = tmp_path
    endpoint = f"ipc://{directory}/d/w"
    shared = shared_memory()
    options = ("--endpoint", endpoint, "--device", "cpu", "--model-root", str(model_root))
    process = start_daemon(directory, *options)
    cases = random_cases(checkpoint(), seed=8, count=6, max_tokens=100)
    tokens: dict[str, list[int]] = defaultdict(list)
    try:
        wait_for_daemons([endpoint], [process])
        with connect([endpoint], worker_config(checkpoint().path)) as (group, loaded):
            driver = Driver(
                group,
                Scheduler(scheduler_limits(group, loaded)),
                lambda result: [tokens[n].append(t) for n, t in result.sampled.items()] and None,
            )
            for request in cases.requests:
                driver.add_request(request)
            for _ in range(20):
                driver.step()
            began = time.monotonic()
            process.terminate()
            with pytest.raises(WorkerDaemonError):
                for number in itertools.count():  # until the end, however late the signal is heard
                    list(driver.run())
                    driver.add_request(greedy_request(f"more {number}", [1, 2, 3], 20))
        assert process.wait(PATIENCE_S) == 0
        detection(32, "SIGTERM under load", DRAIN_S, time.monotonic() - began, "process end")
    finally:
        process.kill()
        process.wait()
    (epoch,) = (directory / "d").iterdir()  # the next daemon here must grant a higher one
    assert epoch.suffix == ".epoch"
    wait_until(lambda: shared_memory() <= shared, "what other processes share is gone")
    for name, expected in cases.expected.items():
        got = tokens[name]
        assert got and got == expected[: len(got)]
