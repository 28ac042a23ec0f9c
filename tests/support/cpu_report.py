"""A pytest plugin, `--cpu-report FILE`: the CPU seconds of each test file, of its process and of
all that it started, as JSON, and the folders' sums at the end of the run. Unlike time, they hardly
depend on what else a host does."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ELSEWHERE = "start, collection and end"
"""The name under which the report counts what no test did."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-report", type=Path, help="write each file's CPU seconds there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-report") is not None:
        config.pluginmanager.register(CpuReport(config.getoption("--cpu-report")))


class CpuReport:
    """Measures in the processes that run tests; in the one that the user started, also sums up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._measured_s = 0.0
        self._files: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self._measured_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        report.cpu_s = 0.0  # xdist sends a report's attributes on
        if report.when == "teardown":
            before_s, self._measured_s = self._measured_s, cpu_s()
            report.cpu_s = self._measured_s - before_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.partition("::")[0]] += report.cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Only the process that the user started has a terminal."""
        self._files[ELSEWHERE] = cpu_s() - self._files.total()
        files = {name: round(spent_s, 2) for name, spent_s in self._files.most_common()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(files, indent=1) + "\n")
        terminalreporter.section("CPU seconds")
        for folder, spent_s in folders(self._files).most_common():
            terminalreporter.write_line(f"{spent_s:8.1f}  {folder}")
        terminalreporter.write_line(f"{self._files.total():8.1f}  in all")


def folders(files: Counter[str]) -> Counter[str]:
    """Sum up the seconds of files by their folders."""
    sums: Counter[str] = Counter()
    for name, spent_s in files.items():
        sums[str(Path(name).parent) if name != ELSEWHERE else name] += spent_s
    return sums


def cpu_s() -> float:
    """The CPU seconds of this process, of its descendants and of those that it has waited for.
    What a process did whose parent ended first is missing."""
    spent_s = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):  # it ends just now: its parent has its seconds
            spent_s += sum(psutil.Process(pid).cpu_times()[:4])
    return spent_s


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one; psutil would look at all of the host's."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                yield int(child)
                yield from descendants(int(child))
