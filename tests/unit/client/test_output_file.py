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
import threading
from pathlib import Path

import pytest

from rpc_schema.errors import DeviceError
from rpc_schema.exit_codes import ExitCode
from tests.support.command_line import CLIENT
from tests.support.waiting import PATIENCE_S
from tests.unit.client.conftest import options
from worker_client.cli.output_file import OutputFile, check_output, is_special, output_error
from worker_client.cli.trace import _write as write_trace
from worker_client.errors import OutputError
from worker_client.tracing.observer import Recorded

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


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_full_disk_leaves_an_old_output_and_whole_lines_of_the_new(directory, run, words, command):
    target = directory / "out" / "out.jsonl"
    target.parent.mkdir()
    target.write_text("of another run\n")
    with file_size_limit(300):
        code, _, errors = run(command, *words, "--output", target)
    assert code == ExitCode.OUTPUT
    assert "OutputError: it cannot be written: File too large" in errors
    assert "field output" in errors and "fix: make room" in errors
    assert target.read_text() == "of another run\n"
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


def test_new_output_has_whole_lines_as_they_come(directory, run, words):
    target = directory / "out.jsonl"
    with file_size_limit(300):
        code, _, errors = run("generate", *words, "--output", target)
    assert code == ExitCode.OUTPUT
    assert f"the lines finished before are in {target}" in errors
    assert [json.loads(line)["id"] for line in target.read_text().split("\n")[:-1]] == ["r0", "r1"]


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


def test_device_that_is_full_is_an_error(run, words):
    code, _, errors = run("generate", *words, "--output", "/dev/full")
    assert code == ExitCode.OUTPUT
    assert "No space left on device" in errors
    assert run("generate", *words, "--output", "/dev/null")[0] == 0


def test_link_stays_and_its_file_is_replaced(directory, run, words):
    real, link = directory / "real", directory / "link"
    real.write_text("old\n")
    link.symlink_to(real)
    assert run("generate", *words, "--output", link)[0] == 0
    assert link.is_symlink() and len(real.read_text().splitlines()) == 6


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
    assert (f"{target}.part", True) in seen
    assert seen[-1] == (str(directory), False)


@pytest.mark.parametrize("old", [None, "old\n"])
def test_second_run_to_an_output_is_refused(directory, run, words, old):
    target = directory / "out.jsonl"
    if old is not None:
        target.write_text(old)
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


def test_output_that_another_run_makes_meanwhile_is_refused(directory, monkeypatch):
    """Between the look for an old file and the making of a new one."""
    target, part = directory / "out.jsonl", directory / "out.jsonl.part"
    part.write_text('{"id": "left"}\n')
    flock = fcntl.flock

    def make_and_lock(*arguments):
        target.touch()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", make_and_lock)
    with pytest.raises(OutputError, match="another run"):
        OutputFile(target)
    assert (target.read_text(), part.read_text()) == ("", '{"id": "left"}\n')


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


def test_descriptor_is_written_to_as_it_is(directory, run, words):
    """Its file is not replaced, nothing in it is lost, and the position is shared."""
    target = directory / "out.txt"
    file = os.open(target, os.O_RDWR | os.O_CREAT)
    name = f"/dev/fd/{file}"
    try:
        os.write(file, b"before\n")
        with file_size_limit(300):
            assert run("generate", *words, "--output", name)[0] == ExitCode.OUTPUT
        assert target.read_text().startswith('before\n{"id": "r0"')
        os.ftruncate(file, 7)
        os.lseek(file, 7, os.SEEK_SET)
        assert run("generate", *words, "--output", name)[0] == 0
        os.write(file, b"after\n")
    finally:
        os.close(file)
    lines = target.read_text().splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("before", 8, "after")
    assert [path.name for path in directory.iterdir() if "out" in path.name] == ["out.txt"]


def test_descriptor_that_does_not_wait_is_waited_for():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    line, seen = "x" * 500_000, []

    def read():
        with os.fdopen(reading, "rb") as pipe:
            seen.append(pipe.read())

    reader = threading.Thread(target=read)
    file = OutputFile(Path(f"/dev/fd/{writing}"))
    os.close(writing)
    reader.start()
    file.write([line])
    file.close()
    reader.join(PATIENCE_S)
    assert seen == [f"{line}\n".encode()]


def test_trace_replaces_no_descriptor(directory):
    target, link = directory / "file", directory / "link"
    file = os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        link.symlink_to(f"/dev/fd/{file}")
        os.write(file, b"before")
        write_trace(Recorded([], None, 0), link)
        assert link.is_symlink()
        assert json.loads(gzip.decompress(target.read_bytes().removeprefix(b"before")))
    finally:
        os.close(file)


def test_descriptors_are_known_by_any_name(directory):
    link, file = directory / "link", os.open("/dev/null", os.O_RDONLY)
    try:
        link.symlink_to(f"/proc/self/fd/{file}")
        assert is_special(link) and is_special(Path("/dev/stdout"))
        with pytest.raises(OutputError, match="open for writing"):
            check_output(link)
    finally:
        os.close(file)


def test_mount_point_is_told_before_anything_is_loaded(directory):
    """Bound on itself: st_dev does not tell."""
    target = directory / "out.jsonl"
    target.write_text("old\n")
    line = 'mount --bind "$0" "$0" && exec "$@" --output "$0"'
    apart = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    command = [*CLIENT, "generate", "--model", directory, "--prompt", "a", "--device", "cpu"]
    done = subprocess.run(
        [*apart, "sh", "-c", line, target, *command],
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
