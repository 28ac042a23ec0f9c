"""python -m tests.support.rerun, which .ci/run uses, on small suites: which failures a second run
excuses, what is printed and written, and what its rules say about the files of this repository."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rerun.excuses import never_excused
from tests.support.rerun.flaky_list import (
    WINDOW,
    Entry,
    MalformedList,
    format_entry,
    is_barred,
    parse,
)

ROOT = Path(__file__).parents[2]
PASSES = "def test_passes(): pass\n"
ONCE = """
import pathlib
def test_once{number}():
    mark = pathlib.Path(__file__).with_suffix(".{number}")
    seen = mark.exists()
    mark.touch()
    assert seen, "the first time"
"""
ALWAYS = "def test_always(): assert False, 'every time'\n"
LEFT = """
import pathlib, pytest
@pytest.fixture
def leaving():
    yield
    mark = pathlib.Path(__file__).with_suffix(".left")
    seen = mark.exists()
    mark.touch()
    assert seen, "something is there still"
def test_leaves(leaving): pass
"""
UNREADY = LEFT.replace("    yield\n", "").replace("test_leaves", "test_unready")
CRASH = "import os\ndef test_crash(): os._exit(3)\n"
CLOSING = re.compile(r"=+ (.*) in \d+\.\d\ds =+")


def git(directory: Path, *words: str) -> None:
    own = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *words], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def suite(tmp_path):
    """suite(texts of files by path, *arguments) -> the process that ran them with the module."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")

    def run(files: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [sys.executable, "-m", "tests.support.rerun", "-p", "xdist.plugin", *arguments]
        kept = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        environment = {**kept, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def closing(done: subprocess.CompletedProcess[str]) -> str:
    """The counts in the last line."""
    match = CLOSING.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout + done.stderr
    return match[1]


def flaky(directory: Path) -> list[str]:
    """What build/flaky.json names; nothing if it is not there."""
    path = directory / "build" / "flaky.json"
    return json.loads(path.read_text()) if path.exists() else []


def test_up_to_three_that_fail_once_are_excused_and_written_down(suite, tmp_path):
    number = random.randint(1, 3)
    text = PASSES + "".join(ONCE.format(number=index) for index in range(number))
    names = [f"unit/test_a.py::test_once{index}" for index in range(number)]
    done = suite({"unit/test_a.py": text}, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert closing(done) == f"{number + 1} passed"
    assert done.stdout.count("first: failed: ") == done.stdout.count("again: passed") == number
    assert sorted(flaky(tmp_path)) == names
    written = (tmp_path / "build" / "flaky.md").read_text()
    assert sorted(parse(written)) == [Entry(name, 1, False) for name in names]
    assert written.strip() in done.stdout
    assert "AssertionError: the first time" in written
    done = suite({})
    assert done.returncode == 0
    assert not flaky(tmp_path)  # of an earlier run
    assert not (tmp_path / "build" / "flaky.md").exists()


def test_a_fixture_that_fails_once_before_its_test_is_excused(suite, tmp_path):
    done = suite({"unit/test_a.py": PASSES + UNREADY})
    assert done.returncode == 0, done.stdout + done.stderr
    assert closing(done) == "2 passed"
    assert flaky(tmp_path) == ["unit/test_a.py::test_unready"]


def test_a_second_failure_fails_the_run(suite, tmp_path):
    done = suite({"unit/test_a.py": PASSES + ALWAYS + ONCE.format(number=0)})
    assert done.returncode == 1
    assert closing(done) == "1 failed, 2 passed"
    assert "FAILS the run: failed again" in done.stdout
    assert flaky(tmp_path) == ["unit/test_a.py::test_once0"]


FINAL = [
    ("tests/faults/test_{}.py", "", "a test of faults"),
    ("tests/arch/test_{}.py", "", "a static check"),
    ("unit/test_{}.py", '"""Each step is executed exactly once."""\n', "exactly-once"),
    ("unit/test_{}.py", '"""The same tokens however they are split."""\n', "token equality"),
    ("unit/test_{}.py", '"""Descriptors do not leak."""\n', "leaks"),
]


def test_what_must_hold_every_time_is_not_excused(suite, tmp_path):
    chosen = random.sample(FINAL, 3)
    texts = {
        name.format(i): extra + ONCE.format(number=0) for i, (name, extra, _) in enumerate(chosen)
    }
    done = suite({"unit/test_passes.py": PASSES, **texts})
    assert done.returncode == 1
    assert closing(done) == "3 failed, 1 passed"
    assert done.stdout.count("again: passed") == 3
    for _, _, reason in chosen:
        assert re.search(rf"FAILS the run: .*{reason}", done.stdout)
    assert not flaky(tmp_path)


def test_a_failure_at_the_end_of_a_test_is_not_excused(suite, tmp_path):
    done = suite({"unit/test_a.py": LEFT})
    assert done.returncode == 1
    assert closing(done) == "1 passed, 1 error"
    assert "where leaks are noticed" in done.stdout
    assert not flaky(tmp_path)


def test_four_failures_fail_at_once(suite, tmp_path):
    done = suite({"unit/test_a.py": "".join(ONCE.format(number=i) for i in range(4))}, "-n", "2")
    assert done.returncode == 1
    assert closing(done) == "4 failed"
    assert "no test runs once more: 4 tests failed" in done.stdout
    assert not flaky(tmp_path)


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        (CRASH, ["-n", "1"], "process gw. ended"),
        (CRASH, [], "ended before its tests"),
        ("1 / 0\n", ["-n", "1"], "cannot be collected"),
        (ONCE.format(number=0), ["-p", "timeout", "--session-timeout", "0.001"], "session-timeout"),
    ],
)
def test_a_run_that_broke_down_fails_at_once(suite, tmp_path, text, arguments, reason):
    done = suite({"unit/test_a.py": PASSES + text}, *arguments)
    assert done.returncode != 0
    assert re.search(f"no test runs once more: .*{reason}", done.stdout), done.stdout + done.stderr
    assert not flaky(tmp_path)


def test_a_test_that_is_listed_already_fails_the_run(suite, tmp_path):
    text = ONCE.format(number=0) + ONCE.format(number=1)
    listed, mended = (f"unit/test_a.py::test_once{index}" for index in range(2))
    entries = [format_entry(test, 1, "2026-01-31", "E  too late") for test in (listed, mended)]
    entries[1] = entries[1].replace("Mended: no", "Mended: waits for the event")
    done = suite({"unit/test_a.py": text, "tests/flaky.md": "# Flaky\n\n" + "\n".join(entries)})
    assert done.returncode == 1
    assert closing(done) == "1 failed, 1 passed"
    assert "FAILS the run: tests/flaky.md has it already, not mended" in done.stdout
    assert sorted(flaky(tmp_path)) == [listed, mended]  # both failed once


def test_two_entries_bar_a_test_for_good_and_one_for_twenty_runs():
    now = random.randint(5 * WINDOW, 10 * WINDOW)
    old, older = Entry("t", now - WINDOW, False), Entry("t", now - 2 * WINDOW, False)
    assert not is_barred("t", [], now)
    assert not is_barred("t", [old, older, Entry("u", now, False)], now)
    assert is_barred("t", [Entry("t", now - WINDOW + 1, False)], now)
    assert is_barred("t", [Entry("t", now, False)], now)
    assert is_barred("t", [older, Entry("t", older.commit + 1, False)], now)
    assert not is_barred("t", [older, Entry("t", older.commit + 1, True)], now)
    assert is_barred("t", [older], None)  # a shallow clone does not know how long ago that was
    assert is_barred("t", [Entry("t", None, False)], now)


def test_the_committed_list_can_be_read():
    text = (ROOT / "tests" / "flaky.md").read_text()
    parse(text)
    with pytest.raises(MalformedList, match="- Mended: no"):
        parse(text + "\n## unit/test_a.py::test_a\n\nwithout the lines\n")


def test_long_texts_are_cut_and_cannot_be_taken_for_entries():
    failure = "\n".join(["## unit/test_b.py::test_b", "", "y" * 999, *["- Mended: yes"] * 99])
    entry = format_entry("unit/test_a.py::test_a[## c]", 7, "2026-01-31", failure)
    assert len(entry) < 40 * 165 + 300
    assert parse(entry + "\n" + entry) == 2 * [Entry("unit/test_a.py::test_a[## c]", 7, False)]


E2E_WITHOUT_TOKENS = {
    "test_devices.py",
    "test_documented_commands.py",
    "test_trace.py",
    "test_up_vllm.py",
    "test_uploads.py",
}
"""Of real daemons, but not of their tokens. A new file of tests/e2e that says nothing of tokens is
either added here, or it needs one of the signs in tests/support/rerun/excuses.py."""


def test_which_files_are_never_excused():
    call = frozenset({"call"})
    excusable = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if never_excused(ROOT, f"{path.relative_to(ROOT)}::test_a", call) is None
    }
    assert {path.name for path in excusable if path.parent.name == "e2e"} == E2E_WITHOUT_TOKENS
    names = {path.name for path in excusable}
    assert not [name for name in names if re.search("parity|exactly_once|leak|token", name)]
    assert {"test_launcher.py", "test_sequence_gate.py", "test_sleep_memory.py"}.isdisjoint(names)
    assert {"test_transport.py", "test_patience.py", "test_compile_server.py"} <= names
