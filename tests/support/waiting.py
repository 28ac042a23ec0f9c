"""Polls for a condition, instead of sleeping; how long tests wait; how slow the host is."""

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""How long a test waits for what must happen; it ends hung tests only. At 40 % of the usual speed
and a load of 8, what takes seconds takes a minute."""
ORDINARY_S = 0.015
"""What the loop of slowness() takes on an ordinary host."""


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until condition() returns a true value; fail with `what` after the time limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def slowness() -> float:
    """Return how many times longer than on an ordinary idle host things take here and now: by the
    time of a loop, whether the host is slow or busy. At least 1; takes a third of a second, or so
    many times that."""
    began = time.monotonic()
    num_rounds = 20
    for _ in range(num_rounds):
        sum(number * number for number in range(300_000))
    return max(1.0, (time.monotonic() - began) / (num_rounds * ORDINARY_S))
