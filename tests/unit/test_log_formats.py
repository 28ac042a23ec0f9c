"""Log records as JSON and as entries of systemd's journal, whose native protocol is read here as
https://systemd.io/JOURNAL_NATIVE_PROTOCOL describes it."""

import ast
import io
import json
import logging
import socket
import struct
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rpc_schema.errors import ConfigError
from worker_client.errors import ClientConfigError
from worker_client.service.logs import configure_logs as configure_service_logs
from worker_daemon import logs
from worker_daemon.cli import app as daemon_app
from worker_host import log_lines
from worker_host.exit_codes import ExitCode
from worker_host.log_lines import JournalHandler, JsonLines, event_of, set_shown_rank

ROOT = Path(__file__).parents[2]
HOSTILE = 'a"\x1b[31m\r\n{"level": "info"}\x85\u2028\ud800\nPRIORITY=0\n'
METHODS = {"debug", "info", "warning", "error", "critical", "exception"}


def record_of(message, *values, level=logging.WARNING, failure=None, **extra):
    info = (type(failure), failure, failure.__traceback__) if failure else None
    made = logging.LogRecord("a.b", level, "f.py", 1, message, values, info, "_do_it")
    made.__dict__.update(extra)
    return made


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize(
    ("record", "event"),
    [
        (record_of("the link cannot be aborted"), "link_cannot_be_aborted"),
        (record_of("draining: %s", "SIGTERM"), "draining"),
        (
            record_of("%d bad frames, the last at the %s socket: %s", 1, "x", "y"),
            "bad_frames_last_at_socket",
        ),
        (record_of("%.2f of %5d %-3s GB/s", 1.0, 2, "x"), "gb_s"),
        (record_of("%s", "x -> y"), "do_it"),
        (record_of("what %s", "x", event="chosen"), "chosen"),
    ],
)
def test_event_is_the_message_without_its_values(record, event):
    assert event_of(record) == event


def test_hostile_text_stays_in_its_json_line():
    formatter = JsonLines()
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        line = formatter.format(record_of("said %s", HOSTILE, failure=error))
    assert line.isascii() and line.isprintable()
    fields = json.loads(line)
    assert fields["message"] == f"said {HOSTILE}"
    assert HOSTILE in fields["traceback"]
    assert (fields["level"], fields["event"], fields["rank"]) == ("warning", "said", None)
    assert datetime.fromisoformat(fields["time"]).tzinfo is not None


def test_each_line_of_a_json_log_is_an_object_with_the_rank(monkeypatch, root_logger):
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    logs.configure_logs("info", log_format="json")
    root_logger.info("one")
    set_shown_rank(3)
    root_logger.error("two\nlines")
    root_logger.debug("not shown")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert (first["rank"], second["rank"]) == (None, 3)
    assert second["message"] == "two\nlines"


def fields_of(entry):
    """Parse an entry; every field has its length."""
    found = {}
    while entry:
        name, _, rest = entry.partition(b"\n")
        (length,) = struct.unpack_from("<Q", rest)
        found[name.decode()] = rest[8 : 8 + length].decode()
        assert rest[8 + length : 9 + length] == b"\n"
        entry = rest[9 + length :]
    return found


@pytest.fixture
def journal(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.settimeout(5)
        yield listener


def test_journal_gets_fields_that_no_text_can_forge(journal, tmp_path, monkeypatch, root_logger):
    monkeypatch.setattr(log_lines, "JOURNAL_SOCKET", tmp_path / "socket")
    monkeypatch.setattr(JournalHandler.__init__, "__defaults__", (tmp_path / "socket",))
    logs.configure_logs("info", log_format="journald")
    logs.set_rank(2)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("a.b").exception("said %s", HOSTILE)
    found = fields_of(journal.recv(1 << 20))
    assert found["PRIORITY"] == "3" and found["RANK"] == "2" and found["EVENT"] == "said"
    assert found["SYSLOG_IDENTIFIER"] == "worker-daemon" and found["LOGGER"] == "a.b"
    assert found["MESSAGE"].startswith("said a") and "ValueError: boom" in found["MESSAGE"]
    root_logger.info("x" * (1 << 20))
    assert len(fields_of(journal.recv(1 << 20))["MESSAGE"]) == log_lines.MAX_ENTRY_BYTES


def test_journal_that_takes_nothing_holds_nobody_up(journal, tmp_path, capsys):
    handler = JournalHandler("x", tmp_path / "socket")
    for number in range(5000):  # more than its queue has places
        handler.emit(record_of("number %d", number))
    handler.close()
    assert "<4>WARNING a.b: number 4999" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("configure", "error"),
    [
        (lambda: logs.configure_logs("info", log_format="journald"), ConfigError),
        (lambda: configure_service_logs("journald"), ClientConfigError),
    ],
)
def test_missing_journal_is_one_error_with_the_fix(configure, error, tmp_path, monkeypatch):
    monkeypatch.setattr(JournalHandler.__init__, "__defaults__", (tmp_path / "none",))
    with pytest.raises(error, match=r"journal cannot be reached.*use text or json"):
        configure()


@pytest.mark.parametrize(
    ("words", "code", "field"),
    [
        (("--log-format", "journald"), ExitCode.CONFIG, "log-format"),
        (("--log-format", "xml", "--endpoint", "ipc:///x/y"), ExitCode.CONFIG, "log-format"),
        (("--log-format", "json"), ExitCode.CONFIG, "endpoint"),
    ],
)
def test_daemon_refuses_a_wrong_setting_in_one_line_of_its_format(
    words, code, field, tmp_path, monkeypatch, root_logger
):
    monkeypatch.setattr(JournalHandler.__init__, "__defaults__", (tmp_path / "none",))
    done = CliRunner().invoke(daemon_app, ["serve", "--device", "cpu", *words])
    assert done.exit_code == code
    (line,) = done.stderr.splitlines()
    assert f"field {field}" in line and "fix:" in line
    if "json" in words:
        found = json.loads(line)
        assert (found["level"], found["event"]) == ("error", "refused")


def test_unknown_format_of_a_server_is_refused(root_logger):
    with pytest.raises(ClientConfigError, match=r"log_format.*text, json, journald"):
        configure_service_logs("xml")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_server_tells_its_operator_in_the_format(log_format, monkeypatch, root_logger):
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_service_logs(log_format)
    server = logging.getLogger("worker_client.service.server")
    server.info("serving %s at %s", "m\x1b", "http://x")
    logging.getLogger("others").info("not shown")
    line = written.getvalue()
    if log_format == "json":
        assert json.loads(line)["event"] == "serving_at"
    else:
        assert line == "serve: serving m\\x1b at http://x\n"


def template_of(node):
    """Return the message of a call, which may be the first of `*(message, value, ...)`."""
    if isinstance(node, ast.Starred):
        node = node.value.elts[0]
    return ast.literal_eval(node)


def logged():
    """Yield (module, template, event) of every record that the packages log."""
    for package in ("worker_daemon", "worker_host", "client"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner = ast.unparse(node.func.value)
                is_logger = owner in ("logger", "_LOG") or "getLogger" in owner
                if is_logger and node.func.attr in METHODS and node.args:
                    template = template_of(node.args[0])
                    yield path.name, template, event_of(record_of(template))


def test_every_message_is_a_template_with_an_event_of_its_own():
    templates = defaultdict(set)
    found = list(logged())
    assert len(found) > 60
    for module, template, event in found:
        assert event.isascii() and event.replace("_", "").isalnum(), (module, template)
        if event != "do_it":  # named by its function
            templates[module, event].add(template)
    assert not {key: texts for key, texts in templates.items() if len(texts) > 1}
