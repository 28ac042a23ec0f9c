"""Runs pytest, and once more the tests that failed if they are few; exits with 0 if only excused
ones failed. Writes build/flaky.json and build/flaky.md, and ends with a line like pytest's."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.rerun.excuses import never_excused
from tests.support.rerun.flaky_list import Entry, count_commits, format_entry, is_barred, parse
from tests.support.rerun.outcomes import Outcomes, read_outcomes

MAX_FAILED = 3
TESTS_FAILED = 1
"""pytest's exit code; importing pytest takes longer than a small suite."""
PLUGIN = "tests.support.rerun.plugin"
WIDTH = 80
CLOSING_WORDS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error")


class Verdict(NamedTuple):
    """What a test's two outcomes mean."""

    test: str
    first: str
    """Text of the first failure."""
    passed_again: bool
    final: str | None
    """Why it fails the run; None if it is excused."""
    flaky: bool
    """Belongs into tests/flaky.md."""


class Paths(NamedTuple):
    """The files that a run reads and writes."""

    root: Path

    @property
    def committed(self) -> Path:
        """Return the list of flaky tests."""
        return self.root / "tests" / "flaky.md"

    def built(self, name: str) -> Path:
        """Return a file of this run."""
        return self.root / "build" / name


def main() -> None:
    """Exit with 0 or with pytest's code."""
    paths = Paths(Path.cwd())
    paths.built("").mkdir(exist_ok=True)
    for name in ("flaky.json", "flaky.md", "first-run.json", "second-run.json"):
        paths.built(name).unlink(missing_ok=True)
    entries = parse(paths.committed.read_text()) if paths.committed.exists() else []
    sys.exit(run(paths, entries, sys.argv[1:]))


def run(paths: Paths, entries: Sequence[Entry], arguments: Sequence[str]) -> int:
    """Run the tests once or twice, print and write what became of them; return the exit code."""
    code, first = run_pytest([*arguments], paths.built("first-run.json"))
    if code == 0:
        return 0
    if (reason := not_repeated(code, first)) is not None or first is None:
        sys.stdout.write(f"no test runs once more: {reason}\n")
        if first is not None:
            sys.stdout.write(closing_line(first.counts, first.seconds))
        return code
    title(f"once more, alone: {', '.join(first.failed_tests())}")
    again = ["-n", "0", "--only-failures-of", str(paths.built("first-run.json"))]
    _, second = run_pytest([*arguments, *again], paths.built("second-run.json"))
    verdicts = judge(paths.root, first, second, entries)
    report(paths, verdicts)
    counts, seconds = total(first, second, verdicts)
    sys.stdout.write(closing_line(counts, seconds))
    return code if any(verdict.final for verdict in verdicts) else 0


def run_pytest(arguments: Sequence[str], log: Path) -> tuple[int, Outcomes | None]:
    """Return pytest's exit code and, unless it broke down, what became of the tests."""
    own = ["-p", PLUGIN, "--outcomes", str(log)]
    code = subprocess.call([sys.executable, "-m", "pytest", *arguments, *own])
    return code, read_outcomes(log)


def not_repeated(code: int, first: Outcomes | None) -> str | None:
    """Return why a failed run is final as it is; None if its tests may run once more."""
    if first is None:
        return "pytest ended before its tests"
    if first.broken:
        return "; ".join(first.broken)
    if code != TESTS_FAILED or not first.failures:
        return f"pytest ended with code {code}"
    if (number := len(first.failed_tests())) > MAX_FAILED:
        return f"{number} tests failed, more than {MAX_FAILED}"
    return None


def judge(
    root: Path, first: Outcomes, second: Outcomes | None, entries: Sequence[Entry]
) -> list[Verdict]:
    """Return what becomes of each test that failed at first."""
    passed: set[str] = set()
    if second is not None and not second.broken:
        passed = set(second.passed) - set(second.failed_tests())
    now = count_commits(root)
    verdicts = []
    for test in first.failed_tests():
        failures = [failure for failure in first.failures if failure.test == test]
        final = never_excused(root, test, frozenset(failure.when for failure in failures))
        flaky = test in passed and final is None
        if test not in passed:
            final = "failed again"
        elif flaky and is_barred(test, entries, now):
            final = "tests/flaky.md has it already, not mended"
        verdicts.append(Verdict(test, failures[0].text, test in passed, final, flaky))
    return verdicts


def report(paths: Paths, verdicts: Iterable[Verdict]) -> None:
    """Print both outcomes of each test, and write what a developer is to commit."""
    title("failed, and ran once more")
    for test, first, passed_again, final, _ in verdicts:
        last = first.strip().splitlines()[-1:] or ["no text"]
        sys.stdout.write(f"{test}\n  first: failed: {last[0]}\n")
        sys.stdout.write(f"  again: {'passed' if passed_again else 'failed'}\n")
        sys.stdout.write(f"  {f'FAILS the run: {final}' if final else 'excused'}\n")
    flaky = [verdict for verdict in verdicts if verdict.flaky]
    if not flaky:
        return
    commit, date = count_commits(paths.root), time.strftime("%Y-%m-%d", time.gmtime())
    text = "\n".join(format_entry(found.test, commit, date, found.first) for found in flaky)
    paths.built("flaky.md").write_text("\n" + text)
    paths.built("flaky.json").write_text(json.dumps([found.test for found in flaky]) + "\n")
    title("to commit: cat build/flaky.md >>tests/flaky.md")
    sys.stdout.write(text)


def total(
    first: Outcomes, second: Outcomes | None, verdicts: Iterable[Verdict]
) -> tuple[Counter[str], float]:
    """Return the counts and the seconds of both runs; an excused test has passed."""
    counts = Counter(first.counts)
    excused = {verdict.test for verdict in verdicts if verdict.final is None}
    for failure in first.failures:
        if failure.test in excused:
            counts["error" if failure.when == "setup" else "failed"] -= 1
            counts["passed"] += 1
    return counts, first.seconds + (second.seconds if second is not None else 0.0)


def closing_line(counts: Counter[str] | dict[str, int], seconds: float) -> str:
    """Return a line like pytest's last one."""
    found = [(counts[word], word) for word in CLOSING_WORDS if counts.get(word)]
    words = [f"{number} {word}" + "s" * (word == "error" and number > 1) for number, word in found]
    return f" {', '.join(words)} in {seconds:.2f}s ".center(WIDTH, "=") + "\n"


def title(text: str) -> None:
    """Print a headline; what pytest prints comes after it."""
    sys.stdout.write(f" {text} ".center(WIDTH, "=") + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
