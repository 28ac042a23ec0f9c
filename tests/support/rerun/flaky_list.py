"""tests/flaky.md: tests that failed and then passed, with the first failure's text. Owns the form
of an entry, and the rule that says when an entry bars a test from being excused again."""

import itertools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COMMITS_PER_RUN = 25
"""Commits that go into one run of CI, about: git knows commits, not runs."""
NUM_RUNS = 20
WINDOW = NUM_RUNS * COMMITS_PER_RUN
MAX_LINES = 40
MAX_COLUMNS = 160

_HEADING = re.compile(r"^## ", re.MULTILINE)
_ENTRY = re.compile(
    r"^## (?P<test>.+)\n\n"
    r"- Run: commit (?P<commit>\d+|unknown), \d{4}-\d\d-\d\d\n"
    r"- Cause: .+\n(?:  .*\n)*"
    r"- Mended: (?P<mended>.+)$",
    re.MULTILINE,
)
_FORM = """- Run: commit {commit}, {date}
- Cause: not known yet
- Mended: no"""


class MalformedList(Exception):
    """The file has a section that is no entry."""


class Entry(NamedTuple):
    """A failure that was excused, or would have been."""

    test: str
    commit: int | None
    """How many commits there were then; None: unknown."""
    mended: bool


def parse(text: str) -> list[Entry]:
    """Return the entries of a tests/flaky.md. Raises MalformedList."""
    entries = [
        Entry(
            match["test"],
            None if match["commit"] == "unknown" else int(match["commit"]),
            not match["mended"].startswith("no"),
        )
        for match in _ENTRY.finditer(text)
    ]
    if len(entries) != len(_HEADING.findall(text)):
        raise MalformedList(f"tests/flaky.md: after '## TEST' and an empty line comes\n{_FORM}")
    return entries


def format_entry(test: str, commit: int | None, date: str, failure: str) -> str:
    """Return the section to add for a failure; of a long text, its end."""
    lines = [line[:MAX_COLUMNS].rstrip() for line in failure.splitlines()][-MAX_LINES:]
    form = _FORM.format(commit="unknown" if commit is None else commit, date=date)
    quoted = "\n".join(f"    {line}" if line else "" for line in lines)
    return f"## {test}\n\n{form}\n\n{quoted}\n"


def is_barred(test: str, entries: Sequence[Entry], now: int | None) -> bool:
    """Say whether a failure after `now` commits makes two within NUM_RUNS runs, or two were there
    before. An unknown number may be any."""
    listed = [entry.commit for entry in entries if entry.test == test and not entry.mended]
    if now is None or None in listed:
        return bool(listed)
    return any(
        later - earlier < WINDOW
        for earlier, later in itertools.pairwise(sorted([*filter(None, listed), now]))
    )


def count_commits(root: Path) -> int | None:
    """Return the number of commits up to this one; None if the clone does not have them."""
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return None
    number = _git(root, "rev-list", "--count", "HEAD")
    return int(number) if number else None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()
