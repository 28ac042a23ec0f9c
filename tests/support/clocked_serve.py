"""`python -m tests.support.clocked_serve FILE ARGS`: the daemon's real command line around the fake
worker, on a host whose clocks a test sets: FILE holds two numbers: the seconds by which the wall
clock is wrong, and those for which the host has been suspended."""

import sys
import time
from pathlib import Path

import pytest

from tests.unit.server.fake_serve import FakeRendezvous
from tests.unit.server.fake_worker import make_fake_worker
from worker_daemon.cli import app
from worker_daemon.server import assembly


def main() -> None:
    """Serve."""
    file = Path(sys.argv.pop(1))
    wall, wall_ns, gettime = time.time, time.time_ns, time.clock_gettime

    def offsets() -> tuple[float, float]:
        wrong, suspended = file.read_text().split()
        return float(wrong), float(suspended)

    def get(clock: int) -> float:
        return gettime(clock) + (offsets()[1] if clock == time.CLOCK_BOOTTIME else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + offsets()[0])
        patch.setattr(time, "time_ns", lambda: wall_ns() + int(offsets()[0] * 1e9))
        patch.setattr(time, "clock_gettime", get)
        patch.setattr(assembly, "make_worker", make_fake_worker)
        patch.setattr(assembly, "open_rendezvous", FakeRendezvous)
        app()


if __name__ == "__main__":
    main()
