"""Python imports this when it starts a process under `make stalls` with --lines (module site). The
threads sleep before random lines of the project, each for itself, and so run in an order that the
kernel rarely gives them."""

import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[3]
CHANCES = {
    "tests/support": 0.02,
    "tests": 0.2,
    "client": 0.02,
    "worker_daemon/server": 0.02,
    "worker_daemon": 0.005,
}
"""Chance of a sleep before a line, by directory; the first that fits. Lines of tests run once."""
MAX_RUNS = 30
"""A line that has run this often does not sleep any more: loops would take forever."""
FREE_S = 0.5
SHARE = 0.2
"""Time that a process may sleep: FREE_S, and this share of its life."""


class LineTracer:
    """A trace function of sys.settrace."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._random = random.SystemRandom()
        self._num_runs: Counter[tuple[CodeType, int]] = Counter()
        self._chances: dict[str, float] = {}
        self.begin_process()
        os.register_at_fork(after_in_child=self.begin_process)

    def begin_process(self) -> None:
        """Count from here on: a forked process has not earned what its parent did not sleep."""
        self._began = time.monotonic()
        self._slept_s = 0.0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name == "<module>" or not self._chance(code.co_filename):
            return None
        return self._before_line

    def _before_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (frame.f_code, frame.f_lineno)
            self._num_runs[line] += 1
            may_sleep_s = FREE_S + SHARE * (time.monotonic() - self._began) - self._slept_s
            wants = self._random.random() < self._chance(frame.f_code.co_filename)
            if wants and may_sleep_s > 0 and self._num_runs[line] <= MAX_RUNS:
                seconds = self._random.uniform(0.01, self._longest_s)
                self._slept_s += seconds
                time.sleep(seconds)
        return self._before_line

    def _chance(self, file: str) -> float:
        if file not in self._chances:
            path = Path(file)
            inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path()
            fitting = (CHANCES[name] for name in CHANCES if inside.is_relative_to(name))
            self._chances[file] = next(fitting, 0.0)
        return self._chances[file]


tracer = LineTracer(float(os.environ["STALL_LONGEST_S"]))
threading.settrace(tracer)
if "serve" not in sys.orig_argv:  # importing torch takes a daemon too long if it is traced
    sys.settrace(tracer)
