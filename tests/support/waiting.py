"""Polls for a condition, instead of sleeping."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll until condition() returns a true value; fail with `what` after the time limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
