"""Drivers that cannot run Python, that lose their connection, or that die: who has the lease then.
Rows 1, 5 and 7 of the fault matrix, on daemon processes with the fake worker."""

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import FencedError, LeaseHeldError
from tests.support.exhaustive import exhaustively
from tests.support.leased_driver import admit, decode, make_ready
from tests.support.relay import Relay
from tests.support.secured import KeyRing, SecuredDaemon, free_port
from tests.support.stopping import slowed_process, stop_process
from tests.support.troubled_driver import troubled_driver
from tests.support.waiting import wait_until
from tests.unit.server.driver import SERVE, DaemonProcess, Driver, wait_for
from worker_client.wire.keys import NO_KEYS
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

PARALLEL = ParallelConfig()
HOLD_S = 5.0
"""For which a driver holds its GIL: its lease once lasted 3 s. Renewals are due each 0.75 s."""
ATTACH_TARGET_S = 0.3
"""From kill -9 of a driver until the next one has attached."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path_factory.mktemp("lost") / "d", "--log-level", "info")
    yield process
    process.stop()


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lost-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def relay(daemon: DaemonProcess, directory: Path) -> Iterator[Relay]:
    with Relay(directory / "relay", daemon.endpoint) as relay:
        yield relay


def group_on(*endpoints: str, ttl_s: float = 30.0) -> WorkerGroup:
    size = ParallelConfig(pipeline_parallel_size=len(endpoints))
    return WorkerGroup(endpoints, size, lease=LeaseTerms(ttl_s=ttl_s))


@contextmanager
def observer_of(daemon: DaemonProcess) -> Iterator[Driver]:
    observer = Driver(daemon.endpoint)
    yield observer
    observer.close()


# A driver that lives.


@pytest.mark.parametrize("seconds", [HOLD_S, pytest.param(20.0, marks=pytest.mark.exhaustive)])
def test_driver_that_cannot_run_python_keeps_its_lease_and_loses_nothing(
    daemon: DaemonProcess, seconds: float
) -> None:
    with troubled_driver(daemon.endpoint) as first, observer_of(daemon) as observer:
        first.tell(f"hold {seconds}")
        first.await_line("holding")
        wait_until(lambda: observer.status().lease.silent_ms > 2500, "it does not renew")
        assert observer.status().lease.state == "held"
        with group_on(daemon.endpoint) as second, pytest.raises(LeaseHeldError, match="silent for"):
            second.attach(wait_for_lease_s=0)
        counts = [first.step() for _ in range(20)]
        assert counts == list(range(counts[0], counts[0] + 20))
        assert observer.status().lease.state == "held"


def test_connection_that_is_reset_while_no_python_runs_is_made_again(
    daemon: DaemonProcess, relay: Relay
) -> None:
    with troubled_driver(relay.endpoint) as first, observer_of(daemon) as observer:
        first.tell(f"hold {HOLD_S}")
        first.await_line("holding")
        for number in range(relay.num_made[".results"], relay.num_made[".results"] + 5):
            relay.cut(".results")
            is_back = partial(has_connected, relay, number)
            wait_until(is_back, "it connects again")
            wait_for(lambda: observer.status().lease.state == "held")
        counts = [first.step() for _ in range(20)]
        assert counts == list(range(counts[0], counts[0] + 20))


def has_connected(relay: Relay, number: int) -> bool:
    return relay.num_made[".results"] > number


def test_driver_that_is_cut_off_goes_on_once_it_is_back(
    daemon: DaemonProcess, relay: Relay
) -> None:
    with group_on(relay.endpoint) as group, observer_of(daemon) as observer:
        group.attach()
        make_ready(group)
        before = admit(group)
        relay.cut(".results", refuse=True)
        wait_for(lambda: observer.status().lease.state == "claimable")
        relay.restore()
        wait_for(lambda: observer.status().lease.state == "held")
        assert decode(group) == before + 1
        assert "is connected again" in daemon.stderr()


def test_slow_daemon_notices_the_end_of_a_connection_too(
    daemon: DaemonProcess, relay: Relay
) -> None:
    with (
        group_on(relay.endpoint) as group,
        observer_of(daemon) as observer,
        slowed_process(daemon.process.pid, runs_s=0.03, stands_s=0.07),
    ):
        group.attach()
        relay.cut(".results", refuse=True)
        wait_for(lambda: observer.status().lease.state == "claimable")


def test_lease_without_a_connection_is_another_driver_s_for_the_asking(
    daemon: DaemonProcess, relay: Relay
) -> None:
    """What comes back afterwards delivers nothing: the result of its last step least of all."""
    with troubled_driver(relay.endpoint) as first, group_on(daemon.endpoint) as second:
        first.tell(f"hold {HOLD_S}")
        first.await_line("holding")
        relay.cut(".results", refuse=True)
        second.attach()
        before = admit(second)
        relay.restore()
        assert first.process.wait(60) == 3
        assert first.rest() == ["FencedError"]
        assert decode(second) == before + 1


def test_group_of_which_one_rank_is_cut_off_stays_with_its_driver(
    daemon: DaemonProcess, relay: Relay, directory: Path
) -> None:
    other = DaemonProcess(directory / "other")
    try:
        with group_on(relay.endpoint, other.endpoint) as first, observer_of(daemon) as observer:
            first.attach()
            relay.cut(".results", refuse=True)
            wait_for(lambda: observer.status().lease.state == "claimable")
            with group_on(daemon.endpoint, other.endpoint) as second:
                with pytest.raises(LeaseHeldError) as caught:
                    second.attach(wait_for_lease_s=0)
                assert caught.value.rank == 1
            relay.restore()
            wait_for(lambda: observer.status().lease.state == "held")
            assert [status.epoch for status in first.get_status()] == [observer.status().epoch] * 2
            first.detach()
    finally:
        other.stop()


@pytest.mark.parametrize("kind", [exhaustively("ipc"), "tcp"])
def test_daemon_that_is_stopped_for_two_seconds_keeps_its_driver(
    directory: Path, kind: str
) -> None:
    ring, daemon = secured(directory, kind)
    try:
        with WorkerGroup([daemon.endpoint], PARALLEL, ring.keys("driver")) as group:
            group.attach()
            make_ready(group)
            before = admit(group)
            stop_process(daemon.process.pid)
            timer = threading.Timer(2.0, os.kill, (daemon.process.pid, signal.SIGCONT))
            timer.start()
            assert decode(group) == before + 1
            timer.join()
            with (
                WorkerGroup([daemon.endpoint], PARALLEL, ring.keys("driver")) as second,
                pytest.raises(LeaseHeldError),
            ):
                second.attach()
            assert decode(group) == before + 2
    finally:
        daemon.stop()


def secured(directory: Path, kind: str) -> tuple[KeyRing, SecuredDaemon]:
    """A daemon with keys."""
    ring = KeyRing(directory / "keys")
    is_tcp = kind == "tcp"
    endpoint = f"tcp://127.0.0.1:{free_port()}" if is_tcp else f"ipc://{directory}/e/w0"
    ring.trust({endpoint: ring.public["daemon"]})
    options = ("--model-root", str(directory), "--data-interface", "lo") if is_tcp else ()
    options = (*ring.serve_options(), *options)
    return ring, SecuredDaemon(directory, endpoint, *options, keys=ring.keys("driver"))


# A driver that has ended.


@pytest.mark.parametrize("num_drivers", [5, exhaustively(20)])
@pytest.mark.parametrize("kind", ["ipc", exhaustively("ipc without keys"), "tcp"])
def test_killed_driver_s_group_is_taken_at_once(
    daemon: DaemonProcess, directory: Path, detection: Callable, kind: str, num_drivers: int
) -> None:
    endpoint, keys, key_files, own = daemon.endpoint, NO_KEYS, (), None
    if kind != "ipc without keys":
        ring, own = secured(directory, kind)
        endpoint, keys = own.endpoint, ring.keys("driver")
        key_files = (str(ring.directory / "driver.key"), str(ring.known))
    try:
        times = []
        for _ in range(num_drivers):
            with (
                troubled_driver(endpoint, *key_files) as first,
                WorkerGroup([endpoint], PARALLEL, keys) as second,
            ):
                second.get_status()
                killed = time.monotonic()
                first.kill()
                second.attach()
                times.append(time.monotonic() - killed)
                admit(second)
        detection(1, f"{kind}: next attached", ATTACH_TARGET_S, statistics.median(times), "end")
    finally:
        if own is not None:
            own.stop()


def test_child_that_holds_the_connections_open_does_not_hide_the_death(
    daemon: DaemonProcess,
) -> None:
    with troubled_driver(daemon.endpoint) as first, observer_of(daemon) as observer:
        first.tell("fork")
        child = int(first.await_line("child").split()[1])
        try:
            first.kill()
            wait_for(lambda: observer.status().lease.state == "orphan")
        finally:
            os.kill(child, signal.SIGKILL)


def can_unshare() -> bool:
    words = ["unshare", "--pid", "--fork", "true"]
    return shutil.which("unshare") is not None and not subprocess.call(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_driver_whose_process_the_daemon_cannot_see_is_known_by_its_connection(
    directory: Path,
) -> None:
    """The daemon is in a pid namespace of its own, as in a container."""
    if not can_unshare():
        pytest.skip("no pid namespaces here")
    serve = ("unshare", "--pid", "--fork", "--kill-child", *SERVE)
    daemon = DaemonProcess(directory / "d", serve=serve)
    try:
        with troubled_driver(daemon.endpoint) as first, observer_of(daemon) as observer:
            first.kill()
            wait_for(lambda: observer.status().lease.state == "claimable")
            with group_on(daemon.endpoint) as second:
                second.attach()
                admit(second)
    finally:
        daemon.stop()


def test_driver_that_dies_with_a_step_in_flight_leaves_its_result(daemon: DaemonProcess) -> None:
    with troubled_driver(daemon.endpoint) as first, observer_of(daemon) as observer:
        last = first.step()
        first.tell(f"hold {HOLD_S}")
        while not (line := first.line()).startswith("holding"):
            last = int(line)
        seq = int(line.split()[1])
        wait_until(lambda: observer.status().last_seq >= seq, "the daemon has run the step")
        first.kill()
    with group_on(daemon.endpoint) as second:
        second.attach()
        assert admit(second) == last + 2


def test_driver_that_hangs_for_good_loses_its_lease_in_the_end(
    daemon: DaemonProcess,
) -> None:
    with troubled_driver(daemon.endpoint, ttl_s=2.0) as first:
        first.tell("hold 60")
        first.await_line("holding")
        with group_on(daemon.endpoint) as second:
            second.attach()
            admit(second)


# Races.


@pytest.mark.parametrize(("order", "num_races", "wait_s"), [(1, 100, 0.0), (-1, 5, 10.0)])
def test_of_two_polite_drivers_one_attaches_and_the_other_is_told_so(
    daemon: DaemonProcess, directory: Path, order: int, num_races: int, wait_s: float
) -> None:
    """If they ask the ranks in different orders, each may get the first one that it asks."""
    other = DaemonProcess(directory / "other")
    both = [daemon.endpoint, other.endpoint]
    try:
        with group_on(*both) as first, group_on(*both[::order]) as second:
            for _ in range(num_races):
                raced = attach_both(wait_s, first, second)
                assert sorted(raced.values()) == ["LeaseHeldError", "attached"], raced
                for group, outcome in raced.items():
                    if outcome == "attached":
                        group.detach()
    finally:
        other.stop()


def attach_both(wait_s: float, *groups: WorkerGroup) -> dict[WorkerGroup, str]:
    """Return what became of groups that attach at the same time."""
    outcomes: dict[WorkerGroup, str] = {}
    barrier = threading.Barrier(len(groups))

    def attach(group: WorkerGroup) -> None:
        barrier.wait()
        try:
            group.attach(wait_for_lease_s=wait_s)
            outcomes[group] = "attached"
        except Exception as error:
            outcomes[group] = type(error).__name__
        barrier.wait()  # the lease ends with the thread that has taken it

    threads = [threading.Thread(target=attach, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_race_between_a_driver_that_returns_and_one_that_claims(
    daemon: DaemonProcess, relay: Relay
) -> None:
    """Either goes on alone, and no step is lost or run twice."""
    with group_on(relay.endpoint) as first, group_on(daemon.endpoint) as second:
        wins = {"first": 0, "second": 0}
        away_s = 0.15
        for _ in range(40):
            first.attach(force=True)
            make_ready(first)
            before = admit(first)
            relay.cut(".results", refuse=True)
            timer = threading.Timer(away_s, relay.restore)
            timer.start()
            try:
                second.attach(wait_for_lease_s=away_s + 0.3)
                taken = True
            except LeaseHeldError:
                taken = False
            timer.join()
            if taken:
                wins["second"] += 1
                with pytest.raises(FencedError):
                    decode(first)
                assert admit(second) == before + 1
                second.detach()
            else:
                wins["first"] += 1
                assert decode(first) == before + 1
            away_s *= 0.8 if taken else 1.25  # stay where either may win, however slow the host is
        assert min(wins.values()) > 0, wins
