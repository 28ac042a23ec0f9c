"""An observer that floods the control socket keeps no driver from attaching, and no other observer
from its answers."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rpc_schema.config import ParallelConfig
from tests.support.command_line import short_directory
from tests.support.secured import KeyRing, SecuredDaemon, ask
from tests.support.waiting import wait_until
from worker_client.worker_group import WorkerGroup

ATTACHES = 6
ROUNDS = 5


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ring(directory: Path) -> KeyRing:
    return KeyRing(directory / "keys")


@pytest.fixture(scope="module")
def daemon(directory: Path, ring: KeyRing) -> Iterator[SecuredDaemon]:
    endpoint = f"ipc://{directory}/s/w0"
    ring.trust({endpoint: ring.public["daemon"]})
    daemon = SecuredDaemon(directory, endpoint, *ring.serve_options(), keys=ring.keys("driver"))
    yield daemon
    daemon.stop()


@contextmanager
def flooding(daemon: SecuredDaemon, ring: KeyRing, request: str, connections: int):
    """A flood that has begun."""
    words = (ring.directory, daemon.endpoint, request, str(connections))
    before = sum(daemon.decoded)
    process = subprocess.Popen([sys.executable, "-m", "tests.support.observer_flood", *words])
    try:
        wait_until(lambda: sum(daemon.decoded) - before > 500, "the flood has begun", 60.0)
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(10)


def attach(daemon: SecuredDaemon, ring: KeyRing) -> float:
    """Attach and detach; return the seconds that it took."""
    began = time.monotonic()
    group = WorkerGroup([daemon.endpoint], ParallelConfig(), ring.keys("driver"))
    try:
        group.attach()
        group.detach()
    finally:
        group.close()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("request_name", "connections"),
    [
        ("Hello", 20),
        pytest.param("Hello", 1, marks=pytest.mark.exhaustive),
        ("GetStatus", 20),
        pytest.param("CheckHealth", 20, marks=pytest.mark.exhaustive),
    ],
)
def test_flood_of_an_observer_costs_only_its_key(
    daemon, ring, detection, request_name, connections
):
    with flooding(daemon, ring, request_name, connections):
        for _ in range(ATTACHES):
            name = f"attach beside {connections} connections of {request_name}"
            detection(37, name, 1.0, attach(daemon, ring), "reply")
        for _ in range(ROUNDS):
            other = ring.keys("spare")
            assert ask(daemon.endpoint, other, lambda client: client.get_status()) is not None
        decoded, began = daemon.decoded[0], time.monotonic()
        time.sleep(1.0)
        rate = (daemon.decoded[0] - decoded) / (time.monotonic() - began)
        assert rate < 800, f"{rate:.0f} requests a second were decoded"
    wait_until(lambda: attach(daemon, ring) < 5.0, "it attaches afterwards", 30.0)
