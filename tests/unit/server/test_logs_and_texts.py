"""Texts from peers: stored, logged and displayed."""

import io
import logging

import pytest
from msgspec import structs

from rpc_schema.lifecycle import Status
from rpc_schema.plain_text import bounded, one_line, printable
from tests.contract.random_messages import fixed_example
from worker_client.cli.control import _block
from worker_client.cli.top_frame import Sample, Seen, frame
from worker_daemon import logs

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
    handler.setFormatter(logs._formatter("0"))
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


def test_status_and_top_show_no_escape_sequences() -> None:
    example = fixed_example(Status)
    lease = structs.replace(example.lease, state="held", holder_name=HOSTILE)
    status = structs.replace(example, lease=lease, failure=HOSTILE, phase=HOSTILE, device=HOSTILE)
    seen = Seen("ipc:///x", last=Sample(status, 1.0), event=HOSTILE)
    shown = [line.text for line in frame([seen], 2.0, 500, None)] + _block(status).splitlines()
    assert any("b" in text for text in shown)
    assert all(text.isprintable() for text in shown)
