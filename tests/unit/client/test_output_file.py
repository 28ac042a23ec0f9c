"""Output that cannot be written: a typed error, an exit code, and nothing lost."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import resource
import stat
import subprocess
from pathlib import Path

import pytest

from rpc_schema.errors import DeviceError
from tests.support.command_line import CLIENT
from tests.support.waiting import PATIENCE_S
from tests.unit.client.conftest import options
from worker_client.cli.output_file import OutputFile, output_error
from worker_client.cli.trace import _write as write_trace
from worker_client.errors import OutputError
from worker_client.tracing.observer import Recorded
from worker_host.exit_codes import ExitCode

LINE = '{{"id": "r{}", "prompt_token_ids": [1, 2, {}], "max_tokens": 8, "ignore_eos": true}}\n'


@contextlib.contextmanager
def file_size_limit(num_bytes: int):
    """The disk is full for a file that gets longer: part of a write succeeds, then none (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def words(fakes, directory):
    source = directory / "in.jsonl"
    source.write_text("".join(LINE.format(index, index) for index in range(6)))
    return [*options(fakes(1), directory), "--input", source]


@pytest.mark.parametrize(
    ("command", "old"), [("generate", True), ("bench", True), ("generate", False)]
)
def test_full_disk_leaves_an_old_output_and_whole_lines_of_the_new(
    directory, run, words, command, old
):
    target = directory / "out" / "out.jsonl"
    target.parent.mkdir()
    if old:
        target.write_text("of another run\n")
    with file_size_limit(300):
        code, _, errors = run(command, *words, "--output", target)
    assert code == ExitCode.OUTPUT
    assert "OutputError: it cannot be written: File too large" in errors
    assert "field output" in errors and "fix: make room" in errors
    assert target.read_text() == "of another run\n" if old else not target.exists()
    part = target.with_name("out.jsonl.part")
    if command == "generate":
        assert str(part) in errors
        assert [json.loads(line)["id"] for line in part.read_text().split("\n")[:-1]] == [
            "r0",
            "r1",
        ]
    assert run(command, *words, "--output", target)[0] == 0
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == [
        f"r{index}" for index in range(6)
    ]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_run_that_is_complete_succeeds_whatever_becomes_of_the_daemon(
    fakes, directory, run, command, monkeypatch
):
    def fail(epoch: int) -> None:
        raise DeviceError("it fell off the bus")

    group = fakes(1)
    (daemon,) = group.daemons
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("".join(LINE.format(index, index) for index in range(6)))
    words = [*options(group, directory), "--input", source]
    monkeypatch.setattr(daemon.lease, "release", fail)
    code, _, errors = run(command, *words, "--output", target)
    assert "Detach" in daemon.operations
    assert (code, len(target.read_text().splitlines())) == (0, 6), errors


@pytest.mark.parametrize("command", ["generate", "bench", "trace"])
@pytest.mark.parametrize("name", ["", "missing/out.jsonl", "/proc/out.jsonl", "f/out.jsonl"])
def test_what_cannot_be_a_file_is_told_before_anything_is_loaded(
    fakes, directory, run, words, command, name
):
    (directory / "f").touch()
    target = directory / name
    given = ["--output", target]
    if command == "trace":
        words, given = words[:2], ["--out", target]
    code, _, errors = run(command, *words, *given)
    assert code == ExitCode.OUTPUT
    assert "OutputError: it cannot be written" in errors and str(target) in errors
    assert len(errors.splitlines()) == 1 and "; fix: " in errors
    assert not [path for path in directory.iterdir() if path.name.endswith((".new", ".part"))]


def make_link(target):
    target.with_name("real").write_text("old\n")
    target.symlink_to("real")


@pytest.mark.parametrize("command", ["generate", "embed", "trace"])
@pytest.mark.parametrize("make", [make_link, os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_told_and_left(directory, run, words, command, make):
    target = directory / "out"
    make(target)
    before = target.lstat()
    words = {
        "generate": [*words, "--output", target],
        "embed": [*words, "--format", "npy", "--output", target],
        "trace": [*words[:2], "--out", target],
    }[command]
    code, _, errors = run(command, *words)
    assert code == ExitCode.OUTPUT
    assert "it is a link, a directory, a pipe or a device" in errors
    assert f"{target}" in errors and "fix: name a regular file" in errors
    assert os.path.samestat(before, target.lstat())
    assert make is not make_link or target.read_text() == "old\n"


def test_link_that_is_planted_during_a_run_is_replaced_and_not_followed(directory):
    target, mine = directory / "out.jsonl", directory / "mine"
    mine.write_text("mine\n")
    file = OutputFile(target)
    file.write(['{"id": "a"}'])
    target.symlink_to(mine)
    file.finish()
    file.close()
    assert (target.read_text(), mine.read_text()) == ('{"id": "a"}\n', "mine\n")


def test_lines_for_standard_output_are_printed(run, words):
    code, printed, _ = run("generate", *words, "--output", "/dev/stdout")
    assert code == 0
    assert [json.loads(line)["id"] for line in printed.splitlines()] == [
        f"r{index}" for index in range(6)
    ]


@pytest.mark.parametrize("command", ["embed", "trace"])
def test_standard_output_takes_no_arrays_and_traces(run, words, command):
    """They would be mixed with the lines that the command prints."""
    words = {
        "embed": [*words, "--format", "npy", "--output", "/dev/stdout"],
        "trace": [*words[:2], "--out", "/dev/stdout"],
    }[command]
    code, printed, errors = run(command, *words)
    assert (code, printed) == (ExitCode.OUTPUT, "")
    assert "/dev/stdout" in errors and "fix: name a regular file" in errors


def test_standard_output_that_is_full_is_an_error(fakes):
    (endpoint,) = fakes(1).endpoints
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*CLIENT, "status", "--endpoints", endpoint],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == ExitCode.OUTPUT, done.stderr
    assert done.stderr.startswith("error: OutputError: ") and done.stderr.count("\n") == 1
    assert "standard output" in done.stderr


def test_results_are_on_the_disk_before_success_is_claimed(directory, run, words, monkeypatch):
    """Of the old file and of a new one: fsync after the last byte, then the name."""
    target = directory / "out.jsonl"
    target.write_text("old\n")
    seen, fsync = [], os.fsync

    def record(file):
        fsync(file)
        seen.append((str(Path(f"/proc/self/fd/{file}").readlink()), target.read_text() == "old\n"))

    monkeypatch.setattr(os, "fsync", record)
    assert run("generate", *words, "--output", target)[0] == 0
    assert seen[-2:] == [(f"{target}.part", True), (str(directory), False)]


def test_second_run_to_an_output_is_refused(directory, run, words):
    target = directory / "out.jsonl"
    first = OutputFile(target)
    first.write(['{"id": "first"}'])
    code, _, errors = run("generate", *words, "--output", target)
    assert code == ExitCode.OUTPUT
    assert "another run writes to it" in errors and "fix: wait until that run" in errors
    with pytest.raises(OutputError, match="another run"):
        OutputFile(target)
    first.finish()
    first.close()
    assert target.read_text() == '{"id": "first"}\n'
    assert run("generate", *words, "--output", target)[0] == 0
    assert len(target.read_text().splitlines()) == 6


def test_lines_that_another_run_publishes_meanwhile_stay(directory, monkeypatch):
    """Between the opening of NAME.part and the lock."""
    target, part = directory / "out.jsonl", directory / "out.jsonl.part"
    part.write_text('{"id": "theirs"}\n')
    flock = fcntl.flock

    def publish_and_lock(*arguments):
        monkeypatch.undo()
        part.rename(target)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", publish_and_lock)
    with contextlib.closing(OutputFile(target)) as file:
        file.write(['{"id": "ours"}'])
        assert target.read_text() == '{"id": "theirs"}\n'
    assert part.read_text() == '{"id": "ours"}\n'


def test_lines_of_an_interrupted_run_stay_if_they_cannot_be_copied(directory):
    target, part = directory / "out.jsonl", directory / "out.jsonl.part"
    lines = [f'{{"id": "{index}"}}' for index in range(40)]
    part.write_text("".join(f"{line}\n" for line in lines))
    before = part.read_text()
    with file_size_limit(300), pytest.raises(OutputError, match="File too large"):
        OutputFile(target, lines)
    assert (list(directory.iterdir()), part.read_text()) == ([part], before)


@pytest.mark.parametrize("part", ["mine", "link", "fifo"])
def test_files_of_others_beside_an_output_stay(directory, run, words, part):
    target = directory / "out.jsonl"
    target.write_text("old\n")
    new, beside, mine = (directory / name for name in ("out.jsonl.new", "out.jsonl.part", "mine"))
    new.write_text("mine\n")
    mine.write_text("mine\n")
    if part == "mine":
        mine.rename(beside)
    elif part == "link":
        beside.symlink_to(mine)
    else:
        os.mkfifo(beside)
    code, _, errors = run("generate", *words, "--output", target)
    assert code == ExitCode.OUTPUT
    assert f"{beside} is in the way" in errors and "fix: move it away" in errors
    assert target.read_text() == "old\n"
    assert part == "fifo" or beside.read_text() == "mine\n"
    beside.unlink()
    assert run("generate", *words, "--output", target)[0] == 0
    assert new.read_text() == "mine\n"


def test_replaced_file_keeps_its_mode(directory, run, words):
    target = directory / "out.jsonl"
    target.write_text("old\n")
    target.chmod(0o600)
    assert run("generate", *words, "--output", target)[0] == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_trace_replaces_a_file(directory):
    target = directory / "trace.json.gz"
    target.write_text("old\n")
    target.chmod(0o640)
    write_trace(Recorded([], [], 0), target)
    assert json.loads(gzip.decompress(target.read_bytes()))
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(directory.iterdir()) == [target]


def test_mount_point_is_told_before_anything_is_loaded(directory):
    """A file of another file system, as a container gets it."""
    target = directory / "out.jsonl"
    (directory / "other").mkdir()
    target.write_text("old\n")
    line = (
        'cd "$0" && mount -t tmpfs none other && touch other/file && '
        'mount --bind other/file out.jsonl && exec "$@" --output "$0/out.jsonl"'
    )
    apart = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    command = [*CLIENT, "generate", "--model", directory, "--prompt", "a", "--device", "cpu"]
    done = subprocess.run(
        [*apart, "sh", "-c", line, directory, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == ExitCode.OUTPUT, done.stderr
    assert "it is a mount point" in done.stderr and "fix: mount the directory" in done.stderr
    assert target.read_text() == "old\n"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOENT, "that exists"),
        (errno.EACCES, "that you may write"),
        (errno.EROFS, "that you may write"),
        (errno.EBUSY, "mount the directory"),
        (errno.EDQUOT, "make room"),
        (errno.EIO, "another file"),
    ],
)
def test_fix_goes_by_what_is_wrong(number, words):
    fix = output_error(Path("out"), OSError(number, os.strerror(number))).fix
    assert words in fix and (number == errno.ENOENT or "exists" not in fix)
