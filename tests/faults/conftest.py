"""Shared by the fault tests: checkpoints, daemons that a test may kill and restart, and the record
of detection times. `--fault-report FILE` writes that record as JSON; the table is printed at the
end of every run of these tests."""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.conftest import checkpoint, model_root
from tests.support.command_line import short_directory
from tests.support.supervised import Supervised
from tests.support.waiting import slowness

__all__ = ["checkpoint", "model_root"]

GENEROUS = 5.0
"""Multiple of its target that a detection time must exceed to fail a test; others are only
recorded."""
STALL_S = 4.0
"""For which a busy host may keep any process from running; what notices a fault where the fastest
signal fails takes longer than that (FENCE_AFTER_S)."""

_DETECTIONS = pytest.StashKey[list["Detection"]]()


class Detection(NamedTuple):
    """Detection time and signal of a fault."""

    row: int
    fault: str
    target_s: float
    measured_s: float
    signal: str
    injected: bool
    """True if the fault's source was replaced, because it cannot be induced here."""


class Recorder:
    """Takes the times of one test's fault."""

    def __init__(self, detections: list[Detection]) -> None:
        self._detections = detections

    def __call__(
        self,
        row: int,
        fault: str,
        target_s: float,
        measured_s: float,
        signal: str = "",
        *,
        injected: bool = False,
    ) -> None:
        """Record a detection; fails only if it took GENEROUS times the target, and a stall, times
        the slowness of the host."""
        self._detections.append(Detection(row, fault, target_s, measured_s, signal, injected))
        limit_s = GENEROUS * target_s + STALL_S
        if measured_s > limit_s:
            limit_s *= slowness()
        assert measured_s <= limit_s, f"row {row} was noticed after {measured_s:.3f} s"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-report", type=Path, help="write the detection times there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash.setdefault(_DETECTIONS, [])


@pytest.fixture
def detection(request: pytest.FixtureRequest) -> Recorder:
    """detection(row, fault, target_s, measured_s, signal): see Recorder."""
    return Recorder(request.config.stash[_DETECTIONS])


@pytest.fixture
def supervised(model_root: Path) -> Iterator[Callable[[int], Supervised]]:
    """supervised(count) -> that many CPU daemons, each of which can be started again."""
    made: list[Supervised] = []
    directories: list[Path] = []

    def start(count: int) -> Supervised:
        directories.append(short_directory())
        made.append(Supervised(count, model_root, directories[-1]))
        return made[-1]

    yield start
    for daemons in made:
        daemons.close()
    for directory in directories:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def two_supervised(model_root: Path) -> Iterator[Supervised]:
    """Two CPU daemons for the tests of a module; revive() starts the dead ones again."""
    directory = short_directory()
    daemons = Supervised(2, model_root, directory)
    yield daemons
    daemons.close()
    shutil.rmtree(directory)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    detections = sorted(config.stash[_DETECTIONS])
    if not detections:
        return
    terminalreporter.section("faults noticed")
    for line in table(detections):
        terminalreporter.write_line(line)
    path = config.getoption("--fault-report", default=None)
    if path is not None:
        path.write_text(json.dumps(report(detections), indent=1) + "\n")


def table(detections: list[Detection]) -> list[str]:
    """The detections as a table of Markdown."""
    lines = ["| row | fault | target s | measured s | signal |", "|---|---|---|---|---|"]
    for entry in detections:
        signal = entry.signal + (" (injected)" if entry.injected else "")
        times = f"{entry.target_s:.2f} | {entry.measured_s:.3f}"
        lines.append(f"| {entry.row} | {entry.fault} | {times} | {signal} |")
    return lines


def report(detections: list[Detection]) -> dict[str, object]:
    """The same for machines, with what it was measured on."""
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "time": time.time()}
    return {"machine": machine, "detections": [entry._asdict() for entry in detections]}
