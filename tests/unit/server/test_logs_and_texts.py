"""Texts from peers: stored, logged and displayed."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from rpc_schema.lifecycle import Status
from tests.contract.random_messages import fixed_example
from worker_client.cli.control import _block
from worker_client.cli.top_frame import Sample, Seen, frame
from worker_daemon import logs
from worker_host.exit_codes import ExitCode
from worker_host.log_lines import TextLines
from worker_host.plain_text import bounded, one_line, printable

HOSTILE = "a\x1b[31m\r\nb\x00\x85\u2028\u202e\ud800\x7f"


def test_what_is_not_printable_is_escaped() -> None:
    assert printable(HOSTILE) == r"a\x1b[31m\r\nb\x00\x85\u2028\u202e\ud800\x7f"
    assert printable("pl\u00e4in \U0001f600") == "pl\u00e4in \U0001f600"


@pytest.mark.parametrize("text", ["", "x" * 100, "\U0001f600" * 100, HOSTILE * 20, "\u00e4" * 51])
def test_text_is_cut_in_bytes(text: str) -> None:
    for kept in (bounded(text, 100), one_line(text, 100)):
        assert len(kept.encode()) <= 100
    if len(text.encode(errors="replace")) <= 100:
        assert bounded(text, 100) == text
    else:
        assert bounded(text, 100).endswith("...")


def test_peer_cannot_forge_a_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(TextLines("%(levelname)s %(message)s"))
    try:
        raise ValueError(f"boom {HOSTILE}")
    except ValueError as error:
        record = logging.LogRecord(
            "x", 30, "f", 1, "said %s", (HOSTILE,), (type(error), error, error.__traceback__)
        )
    handler.emit(record)
    lines = written.getvalue().splitlines()
    assert len(lines) > 2
    assert all(line.startswith("    ") for line in lines[1:])
    assert all(line.isprintable() for line in lines)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize("is_journal", [True, False])
def test_lines_in_systemds_journal_have_priorities(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    root_logger: logging.Logger,
    is_journal: bool,
) -> None:
    """sd-daemon(3): "<N>" before each line, where JOURNAL_STREAM (systemd.exec(5)) is stderr."""
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        inode = os.fstat(stderr.fileno()).st_ino + (not is_journal)
        logs.configure_logs("debug", f"{os.fstat(stderr.fileno()).st_dev}:{inode}")
        root_logger.debug("a")
        logs.set_rank(3)
        root_logger.info("b")
        root_logger.warning("c")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            root_logger.exception("d")
        root_logger.critical("e")
        stderr.seek(0)
        lines = stderr.read().splitlines()
    assert "rank 3" in lines[1] and len(lines) > 7
    found = [int(line[1]) if line[0] == "<" and line[2] == ">" else None for line in lines]
    expected = [7, 6, 4, *[3] * (len(lines) - 4), 2]
    assert found == (expected if is_journal else [None] * len(lines))


def test_daemon_under_systemd_tells_the_journal_its_errors(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stderr:
        status = os.fstat(stderr.fileno())
        done = subprocess.run(
            [sys.executable, "-m", "worker_daemon", "serve", "--device", "none"],
            stderr=stderr,
            env={**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"},
            check=False,
        )
    assert done.returncode == ExitCode.CONFIG
    assert (tmp_path / "stderr").read_text().startswith("<3>2")


def test_status_and_top_show_no_escape_sequences() -> None:
    example = fixed_example(Status)
    lease = structs.replace(example.lease, state="held", holder_name=HOSTILE)
    status = structs.replace(example, lease=lease, failure=HOSTILE, phase=HOSTILE, device=HOSTILE)
    seen = Seen("ipc:///x", last=Sample(status, 1.0), event=HOSTILE)
    shown = [line.text for line in frame([seen], 2.0, 500, None)] + _block(status).splitlines()
    assert any("b" in text for text in shown)
    assert all(text.isprintable() for text in shown)
