"""What became of a run, as the plugin writes it down for the process that started the run."""

import json
from pathlib import Path
from typing import NamedTuple


class Failure(NamedTuple):
    """A failed part of a test."""

    test: str
    when: str
    """setup, call or teardown; "???" if its process ended."""
    text: str


class Outcomes(NamedTuple):
    """What became of a run."""

    exit_code: int
    seconds: float
    counts: dict[str, int]
    """By pytest's words: passed, failed, error, skipped, deselected and so on."""
    failures: list[Failure]
    passed: list[str]
    broken: list[str]
    """Why the run says nothing about single tests: files that cannot be collected, processes that
    ended, a run that was stopped."""

    def failed_tests(self) -> list[str]:
        """Return each test once, in the order of their failures."""
        return list(dict.fromkeys(failure.test for failure in self.failures))


def read_outcomes(path: Path) -> Outcomes | None:
    """Return what a run wrote; None if it ended before it could."""
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    fields["failures"] = [Failure(*failure) for failure in fields["failures"]]
    return Outcomes(**fields)
