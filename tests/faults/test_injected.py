"""Rows 13, 19, 34 and 35 of the fault matrix, which most machines cannot induce: the OOM killer, a
process that no signal ends, clock jumps, a suspended host. Their sources are replaced; everything
else is real."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import LeaseExpiredError
from tests.support.leased_driver import admit, decode, make_ready
from tests.support.waiting import wait_until
from tests.unit.server.driver import DaemonProcess
from worker_client.errors import Unkillable, WorkerDied
from worker_client.launcher import LocalDaemons
from worker_client.wire import processes
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

TTL_S = 20.0
HOUR_S = 3600.0
FAKE_DAEMON = (sys.executable, "-m", "tests.support.serve_fake")


def group_on(daemon):
    return WorkerGroup([daemon.endpoint], ParallelConfig(), lease=LeaseTerms(ttl_s=TTL_S))


def write_oom_kills(events, count):
    events.write_text(f"low 0\nhigh 7\nmax 9\noom 3\noom_kill {count}\noom_group_kill 0\n")


class Memory:
    """A cgroup of one daemon's own."""

    def __init__(self, root, pid):
        (root / "proc" / str(pid)).mkdir(parents=True)
        (root / "proc" / str(pid) / "cgroup").write_text("1:name=systemd:/x\n0::/daemons/one\n")
        (root / "cgroup" / "daemons" / "one").mkdir(parents=True)
        self.events = root / "cgroup" / "daemons" / "one" / "memory.events"
        write_oom_kills(self.events, 2)


@pytest.mark.parametrize("killed_by_kernel", [True, False])
def test_row_13_kill_for_want_of_memory_is_named(
    tmp_path, monkeypatch, detection, killed_by_kernel
):
    daemon = DaemonProcess(tmp_path / "d")
    memory = Memory(tmp_path, daemon.process.pid)
    monkeypatch.setattr(processes, "PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(processes, "CGROUPS", tmp_path / "cgroup")
    try:
        with group_on(daemon) as group:
            group.attach()
            group.look()
            killed_at = time.monotonic()
            if killed_by_kernel:
                write_oom_kills(memory.events, 3)
            daemon.process.kill()
            with pytest.raises(WorkerDied) as died:
                while True:
                    group.look()
                    time.sleep(0.005)
            noticed_s = time.monotonic() - killed_at
    finally:
        daemon.stop()
    assert ("the kernel has killed for lack of memory" in died.value.detail) == killed_by_kernel
    if killed_by_kernel:
        source = "connection, then memory.events"
        detection(13, "killed for lack of memory: named", 0.1, noticed_s, source, injected=True)


class Stuck:
    """A process that waits in the kernel for its device."""

    returncode = None

    def __init__(self, process) -> None:
        self._process = process
        self.pid = process.pid
        self.signals = []

    def send_signal(self, number) -> None:
        self.signals.append(number)

    def poll(self):
        return None

    def wait(self, timeout):
        time.sleep(timeout)
        raise subprocess.TimeoutExpired("daemon", timeout)


def test_row_19_process_that_no_signal_ends_is_reported_with_its_device(detection, monkeypatch):
    monkeypatch.setattr("worker_client.launcher.TERMINATE_TIMEOUT_S", 0.1)
    devices = iter(("cuda:0", "cuda:1"))

    def command(endpoint, device, pipe):
        assert device == next(devices)
        return (*FAKE_DAEMON, endpoint, str(pipe), "serve")

    daemons = LocalDaemons(["cuda:0", "cuda:1"], Path("/"), command=command)
    processes = [daemon.process for daemon in daemons._daemons]
    stuck = Stuck(processes[1])
    daemons._daemons[1] = replace(daemons._daemons[1], process=stuck)
    began = time.monotonic()
    with pytest.raises(Unkillable, match="UNKILLABLE") as reported:
        daemons.stop(timeout_s=0.2, kill_limit_s=0.5)
    took_s = time.monotonic() - began
    assert dict(reported.value.devices) == {stuck.pid: "cuda:1"}
    assert "do not use the device" in str(reported.value) and "0.5 s" in str(reported.value)
    assert stuck.signals == [15, 9]
    assert processes[0].wait(5) is not None, "the others have ended"
    processes[1].kill()
    processes[1].wait(5)
    daemons.stop()
    detection(19, "no end after SIGKILL (30 s scaled to 0.5)", 1.5, took_s, "pid", injected=True)


class SlowToEnd:
    """A process that takes a second to end once it was killed."""

    def __init__(self, process) -> None:
        self._process = process
        self.pid = process.pid
        self.returncode = None

    def poll(self):
        return self.returncode

    def wait(self, timeout):
        if timeout < 1.0:
            time.sleep(timeout)
            raise subprocess.TimeoutExpired("daemon", timeout)
        self.returncode = self._process.wait(timeout)
        return self.returncode


def test_killed_process_that_is_slow_to_end_has_a_successor():
    """It must not be taken for a living one: nobody would start it again."""

    def command(endpoint, device, pipe):
        return (*FAKE_DAEMON, endpoint, str(pipe), "serve")

    with LocalDaemons(["cpu"] * 2, Path("/"), command=command) as daemons:
        before = daemons.pids
        first = daemons._daemons[0]
        daemons._daemons[0] = replace(first, process=SlowToEnd(first.process))
        first.process.kill()
        daemons.restart_dead()
        assert first.process.returncode == -signal.SIGKILL
        assert daemons.pids[0] != before[0] and daemons.pids[1] == before[1]


class Clocks:
    """Of the daemon's host."""

    def __init__(self, file):
        self.file = file
        self.set(0.0, 0.0)

    def set(self, wrong_s, suspended_s):
        draft = self.file.with_suffix(".draft")
        draft.write_text(f"{wrong_s} {suspended_s}")
        draft.rename(self.file)


@pytest.fixture
def clocks(tmp_path):
    return Clocks(tmp_path / "clocks")


@pytest.fixture
def clocked(tmp_path, clocks):
    """A daemon on that host."""
    module = ("-m", "tests.support.clocked_serve", str(clocks.file), "serve", "--device", "cpu")
    daemon = DaemonProcess(tmp_path / "d", serve=(sys.executable, *module))
    yield daemon
    daemon.stop()


def is_alive(group):
    """Return True if the group suspects nobody, after the news that are here."""
    group.look()
    return group.watch.liveness == ["alive"]


def test_row_34_wall_clock_that_jumps_changes_nothing(clocked, clocks, monkeypatch):
    """The daemon's, and then the driver's."""
    true_time = time.time
    with group_on(clocked) as group:
        group.attach()
        make_ready(group)
        last = admit(group)
        for wrong_s in (HOUR_S, -HOUR_S, 0.0):
            clocks.set(wrong_s, 0.0)
            monkeypatch.setattr(time, "time", lambda wrong_s=wrong_s: true_time() - wrong_s)
            time.sleep(0.6)  # for two heartbeats, which look at the lease
            last += 1
            assert decode(group) == last
            status = group.get_status()[0]
            assert status.lease.state == "held"
            assert TTL_S * 0.5 < status.lease.remaining_ms / 1000 <= TTL_S
            group.look()
        assert not [event for event in group.watch.events if event.kind == "dead"]
        wait_until(lambda: is_alive(group), "its heartbeats are heard")


def test_row_35_suspended_host_lets_no_driver_step_that_it_knew_before(clocked, clocks, detection):
    with group_on(clocked) as group:
        group.attach()
        make_ready(group)
        last = admit(group)
        group._channel.lease.stop()  # a renewal would be refused as well
        clocks.set(0.0, TTL_S - 5.0)
        assert group.get_status()[0].lease.state == "held"
        clocks.set(0.0, TTL_S + 10.0)
        resumed_at = time.monotonic()
        assert group.get_status()[0].lease.state == "orphan", "the first question finds it so"
        with pytest.raises(LeaseExpiredError):
            while True:
                last = decode(group)
        expired_s = time.monotonic() - resumed_at
        group.attach(wait_for_lease_s=0)
        assert admit(group) == last + 1
        assert group.get_status()[0].lease.state == "held"
    detection(
        35, "suspended for 30 s: steps refused", 0.25, expired_s, "CLOCK_BOOTTIME", injected=True
    )
