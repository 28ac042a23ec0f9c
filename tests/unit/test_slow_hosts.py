"""What stands for a slow host in tests, and how they tell one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARE = """
import time
began, spent = time.monotonic(), time.process_time()
while time.process_time() - spent < 0.5:
    pass
print((time.process_time() - spent) / (time.monotonic() - began))
"""


SLOWNESS = "from tests.support.waiting import slowness; print(slowness())"


def run_at(speed: float, code: str) -> float:
    """Return what the code prints, run at a part of the host's speed."""
    command = [sys.executable, "-m", "tests.support.stalls", "--speed", str(speed), "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    printed, stops = done.stdout.splitlines()
    assert stops.endswith(" stops")
    return float(printed)


def test_stalls_at_a_speed_leave_a_process_that_part_of_the_time():
    assert 0 < run_at(0.4, SHARE) < 0.6


def test_slowness_is_that_of_the_host_now():
    assert run_at(0.1, SLOWNESS) > 2.0
