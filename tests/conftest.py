"""Applies to every test: one torch thread per process, little garbage to collect, and a check that
no process is left. Decides which files run first."""

import gc
import os
import signal

import psutil
import pytest
from hypothesis import settings

from tests.support.forked_processes import end_fork_server
from tests.support.left_running import own_programs
from tests.support.waiting import PATIENCE_S

# Before torch is loaded, and for daemons as well: they share two cores and must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Of a shell's background job; what the tests start would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is collected: its many objects stay

settings.register_profile("any host", deadline=None)  # a busy one is no failure
settings.load_profile("any host")

pytest_plugins = ["tests.support.cpu_report", "tests.support.exhaustive"]

_LEFT_TIMEOUT_S = PATIENCE_S


def pytest_collection_finish() -> None:
    """Freeze imported objects: workers in this process collect garbage often."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, in their order, so that no process ends long after the
    others (with --dist loadfile --no-loadscope-reorder)."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_unconfigure() -> None:
    """At exit, extension modules check for leaked objects."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running():
    """Daemons that a session started must be gone at its end."""
    before = set(own_programs())
    yield
    end_fork_server()
    left = [process for process in own_programs() if process not in before]
    _, alive = psutil.wait_procs(left, timeout=_LEFT_TIMEOUT_S)
    assert not alive, f"left running: {alive}"
