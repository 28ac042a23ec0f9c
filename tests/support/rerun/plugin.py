"""A pytest plugin: writes down what became of a run (`--outcomes FILE`), and runs again the tests
that failed in an earlier one (`--only-failures-of FILE`)."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.rerun.outcomes import Failure, Outcomes, read_outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write there what became of the tests, as JSON")
    parser.addoption("--only-failures-of", type=Path, help="run only what failed in that run")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # of xdist: the process that the user started hears of everything
    if (earlier := config.getoption("--only-failures-of")) is not None:
        tests = read_outcomes(earlier).failed_tests()
        config.args = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        config.pluginmanager.register(Only(frozenset(tests)))
    if (path := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Recorder(path))


class Only:
    """Drops all tests but these."""

    def __init__(self, tests: frozenset[str]) -> None:
        self._tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in self._tests])
        items[:] = [item for item in items if item.nodeid in self._tests]


class Recorder:
    """Writes Outcomes at the end of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = time.monotonic()
        self._failures: list[Failure] = []
        self._passed: list[str] = []
        self._broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(Failure(report.nodeid, report.when, report.longreprtext))
        elif report.when == "call" and report.passed:
            self._passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(f"{report.nodeid} cannot be collected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """A process of xdist ended, in error if it was not asked to."""
        if error:
            self._broken.append(f"process {node.gateway.id} ended: {error}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        stopped = session.shouldfail or session.shouldstop
        if stopped:
            self._broken.append(str(stopped))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        outcomes = Outcomes(
            int(exitstatus),
            time.monotonic() - self._started,
            counts(terminalreporter.stats),
            self._failures,
            self._passed,
            self._broken,
        )
        self._path.write_text(json.dumps(outcomes._asdict()))


def counts(stats: Mapping[str, list[object]]) -> dict[str, int]:
    """Return how many reports pytest counts in its closing line, by its words."""
    return {
        word: number
        for word, reports in stats.items()
        if word and (number := sum(getattr(r, "count_towards_summary", True) for r in reports))
    }
