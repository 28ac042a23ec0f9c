"""Why a vLLM server cannot have its daemons: vLLM's own options as fixes, in the last line."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import worker_client
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import WorkerDaemonError
from worker_client.errors import (
    ClientError,
    ConfigMismatchError,
    NothingListens,
    UntrustedEndpointError,
    remote_error,
)
from worker_client.vllm.refusals import unusable
from worker_client.wire.keys import NO_KEYS, read_keys

OPTION = re.compile(r"--[a-z][a-z-]+")
OF_OTHERS = (
    *("worker-daemon serve --", "worker-client drain --"),
    *("its --authorized-keys", "the daemon's --authorized-keys"),
)
"""Beginnings of other programs' options, which texts may name as theirs."""
LIBRARY = Path(worker_client.__file__).parent
PROGRAMS = {"cli", "service", "vllm", "__main__.py", "launcher.py", "request_parser.py"}
"""Parts of the package that are programs, or start some."""


def caught(call, *arguments):
    with pytest.raises(WorkerDaemonError) as error:
        call(*arguments)
    return error.value


def held():
    """Return a daemon's refusal, with a traceback."""
    text = "host:12 (driver 9af) holds the lease; fix: wait until it is free, or attach by force"
    reply = ControlErrorReply(call=1, code="LEASE_HELD", scope="request", message=text)
    return remote_error(reply, rank=0, endpoint="ipc:///w0")


ERRORS = {
    "force": held(),
    "reload": ConfigMismatchError(["model.dtype: 'float32' != 'bfloat16'"]),
    "wait_s": NothingListens(0, "ipc:///w0", "no such file"),
    "key_file": UntrustedEndpointError("ipc:///w0", "the directory is /tmp"),
    "known_daemons": caught(NO_KEYS.lock, "tcp://a:1"),
    "known_daemons ": caught(read_keys, "key", None),
}


@pytest.mark.parametrize("setting", ERRORS)
def test_fixes_are_options_of_vllm(setting):
    line = str(unusable(ERRORS[setting]))
    assert setting.strip() in line.rpartition("fix: ")[2]
    assert {*OPTION.findall(line)} <= {"--additional-config", "--endpoint"}


def test_reason_is_one_line():
    error = ClientError("rank 0 failed\nTraceback\n  File")
    assert str(unusable(error)) == "rank 0 failed"


def texts():
    """Yield the texts of the driver library that name options, with their places."""
    for path in sorted(LIBRARY.rglob("*.py")):
        if {*path.relative_to(LIBRARY).parts} & PROGRAMS:
            continue
        tree = ast.parse(path.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in alone:
                text = ast.unparse(node) if isinstance(node, ast.JoinedStr) else str(node.value)
                if OPTION.search(text):
                    yield f"{path.name}:{node.lineno}", text


def test_no_text_of_the_library_names_an_option_that_vllm_lacks():
    found = dict(texts())
    assert len(found) > 5
    left = {}
    for place, text in found.items():
        line = str(unusable(ClientError(text.replace("\\n", " "))))
        for known in OF_OTHERS:
            line = line.replace(known, "")
        if {*OPTION.findall(line)} - {"--additional-config"}:
            left[place] = line
    assert left == {}


SERVER = """
import multiprocessing, sys
from worker_client.errors import ClientError
from worker_client.vllm.refusals import end_with_reason, leave_reason

def engine():
    end_with_reason()
    leave_reason(ClientError("the daemons are taken; fix: stop that driver"))

if __name__ == "__main__":
    end_with_reason()
    end_with_reason()
    process = multiprocessing.get_context(sys.argv[1]).Process(target=engine)
    process.start()
    process.join()
    if sys.argv[2] == "fails":
        raise RuntimeError("the engine has failed")
"""


@pytest.mark.parametrize(
    ("method", "end", "last"),
    [
        ("fork", "fails", "the daemons are taken; fix: stop that driver"),
        ("spawn", "fails", "the daemons are taken; fix: stop that driver"),
        ("fork", "goes on", ""),
    ],
)
def test_reason_is_the_last_line_of_a_server_that_fails(tmp_path, monkeypatch, method, end, last):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    (tmp_path / "files").mkdir()
    (tmp_path / "server.py").write_text(SERVER)
    done = subprocess.run(
        [sys.executable, tmp_path / "server.py", method, end],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr.splitlines() or [""])[-1] == last
    assert done.stderr.count("the daemons are taken") == bool(last)
    assert not list((tmp_path / "files").iterdir())


def test_reason_is_not_left_to_another_process(tmp_path, monkeypatch):
    """One that started this server, and is a server too."""
    outer = tmp_path / "outer"
    outer.write_text("")
    monkeypatch.setenv("WORKER_CLIENT_REASON", f"1:{outer}")
    (tmp_path / "server.py").write_text(SERVER)
    done = subprocess.run(
        [sys.executable, tmp_path / "server.py", "spawn", "fails"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.endswith("fix: stop that driver\n")
    assert outer.read_text() == ""
