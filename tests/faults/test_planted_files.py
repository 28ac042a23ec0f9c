"""Files that other users planted or removed in a daemon's directories: endpoint, state, cache and
locks. Real processes around the fake worker, real links, FIFOs, locks and mounts."""

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from rpc_schema.errors import ConfigError
from tests.support.command_line import ask_status, short_directory
from tests.support.stopping import stop_process
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.server.driver import SERVE, DaemonProcess
from worker_daemon.server.gpu_lock import GpuInUseError, GpuLock
from worker_daemon.server.runtime_files import RuntimeFiles
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.wire.endpoints import IpcEndpoint
from worker_daemon.settings import ProcessSettings, build_settings, prepare_kernel_cache
from worker_host.exit_codes import ExitCode

UUID = "GPU-11111111-2222-3333-4444-555555555555"
NOBODY = 65534
NOTICE_LIMIT_S = PATIENCE_S
START_LIMIT_S = PATIENCE_S

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users' files")


@pytest.fixture
def directory():
    made = short_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(directory):
    """Start daemons at the endpoint DIR/d/w0."""
    started: list[DaemonProcess] = []

    def start_one(*options: str) -> DaemonProcess:
        started.append(DaemonProcess(directory / "d", "--log-level", "info", *options))
        return started[-1]

    yield start_one
    for daemon in started:
        daemon.stop()


def settings(directory: Path) -> ProcessSettings:
    return build_settings({"endpoint": f"ipc://{directory}/d/w0", "device": "cpu"})


def serves(daemon: DaemonProcess) -> None:
    wait_until(
        lambda: daemon.process.poll() is not None or ask_status(daemon.endpoint) is not None,
        "it serves",
        START_LIMIT_S,
    )
    assert daemon.process.poll() is None, daemon.stderr()


def refused(*words: str, within: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run a daemon that ends as it starts; it says why in one line."""
    done = subprocess.run(
        [*within, *SERVE, *words], capture_output=True, text=True, timeout=START_LIMIT_S
    )
    assert "Traceback" not in done.stderr
    assert "fix: " in done.stderr, done
    return done


# Directories that others can change.


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def of_another_user(path: Path) -> None:
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)


def behind_a_link(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))


def below_another_user_s(path: Path) -> None:
    of_another_user(path.parent)
    path.mkdir(0o700)


def below_one_of_another_group(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path.parent, -1, NOBODY)
    path.parent.chmod(0o770)


PLANTED = [
    pytest.param(open_to_all, "mode 0777", id="open"),
    pytest.param(of_another_user, f"belongs to user {NOBODY}", id="foreign", marks=needs_root),
    pytest.param(behind_a_link, "a link", id="link"),
    pytest.param(below_another_user_s, f"user {NOBODY}", id="below", marks=needs_root),
    pytest.param(below_one_of_another_group, f"group {NOBODY}", id="below-group", marks=needs_root),
]


@pytest.mark.parametrize(("plant", "words"), PLANTED)
def test_state_directory_that_others_can_change_is_refused(directory, plant, words):
    state = directory / "a" / "state"
    if plant is not below_another_user_s:
        state.parent.mkdir()
    plant(state)
    with pytest.raises(ConfigError, match=f"{words}.*state-dir.*fix: "):
        EpochFile(state, IpcEndpoint.parse("ipc:///run/a/w0"))
    assert not list(state.iterdir())


@pytest.mark.parametrize(
    "variable",
    ["TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "CUTE_DSL_CACHE_DIR"],
)
@pytest.mark.parametrize(("plant", "words"), PLANTED)
def test_kernel_cache_that_others_can_change_is_refused(
    directory, monkeypatch, plant, words, variable
):
    cache = directory / "a" / "kernels"
    if plant is not below_another_user_s:
        cache.parent.mkdir()
    plant(cache)
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(directory / "ours")})
    monkeypatch.setenv(variable, str(cache))
    on_a_gpu = build_settings({"endpoint": "ipc:///a/b", "device": "cuda:0"})
    with pytest.raises(ConfigError, match=f"{words}.*{variable}.*fix: "):
        prepare_kernel_cache(on_a_gpu)


def test_daemon_with_an_open_state_directory_ends_with_78(directory):
    open_to_all(directory / "state")
    endpoint = ("--endpoint", f"ipc://{directory}/d/w0")
    done = refused(*endpoint, "--state-dir", str(directory / "state"))
    assert done.returncode == ExitCode.CONFIG
    assert "mode 0777" in done.stderr


@needs_root
@pytest.mark.parametrize(("group", "mode"), [(0, 0o770), (NOBODY, 0o1770)])
def test_directory_below_a_private_group_s_or_a_sticky_one_is_taken(directory, group, mode):
    parent = directory / "a"
    parent.mkdir()
    os.chown(parent, -1, group)
    parent.chmod(mode)
    EpochFile(parent / "state", IpcEndpoint.parse("ipc:///run/a/w0")).record(7)


# Files in the places of our own.


def test_planted_links_are_neither_followed_nor_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    state = tmp_path / "state"
    epochs = EpochFile(state, IpcEndpoint.parse("ipc:///run/a/w0"))
    for scratch in (epochs.path.with_suffix(".tmp"), Path(f"{epochs.path}.tmp")):
        scratch.symlink_to(precious)
    epochs.record(7)
    assert (precious.read_text(), epochs.path.read_text()) == ("as it was", "7\n")
    epochs.path.unlink()
    epochs.path.symlink_to(precious)
    with pytest.raises(ConfigError, match="epoch file cannot be read"):
        EpochFile(state, IpcEndpoint.parse("ipc:///run/a/w0"))


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_gpu_lock_that_is_no_file_ends_the_start_at_once(tmp_path, make):
    make(tmp_path / f"worker-daemon-{UUID}.lock")
    with pytest.raises(ConfigError, match=r"gpu-lock-dir.*fix: remove the file"):
        GpuLock(UUID, tmp_path)


def test_pid_that_a_squatter_wrote_is_not_reported(tmp_path):
    lock = tmp_path / f"worker-daemon-{UUID}.lock"
    lock.write_text("1\n")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(GpuInUseError, match="no other users may write") as raised:
            GpuLock(UUID, tmp_path)
    assert "daemon with pid" not in str(raised.value)
    assert f"the process with pid {os.getpid()}" in str(raised.value)


def test_gpu_lock_that_was_removed_is_made_again_or_missed(tmp_path):
    lock = tmp_path / f"worker-daemon-{UUID}.lock"
    held = GpuLock(UUID, tmp_path)
    lock.unlink()
    held.keep()
    with pytest.raises(GpuInUseError, match=f"daemon with pid {os.getpid()}"):
        GpuLock(UUID, tmp_path)
    lock.unlink()
    other = GpuLock(UUID, tmp_path)
    with pytest.raises(GpuInUseError):
        held.keep()
    held.release()
    assert lock.exists()
    other.release()


@pytest.mark.parametrize(
    "block", [Path.touch, lambda path: path.symlink_to(path)], ids=["file", "loop"]
)
def test_gpu_lock_that_cannot_be_reached_for_a_while_is_kept(tmp_path, block):
    directory = tmp_path / "locks"
    directory.mkdir()
    held = GpuLock(UUID, directory)
    directory.rename(tmp_path / "away")
    block(directory)
    held.keep()
    directory.unlink()
    (tmp_path / "away").rename(directory)
    held.keep()
    with pytest.raises(GpuInUseError, match=f"daemon with pid {os.getpid()}"):
        GpuLock(UUID, directory)
    held.release()
    assert not list(directory.iterdir())


def test_daemon_of_a_launcher_leaves_the_other_one_s_epoch_and_stacks(directory):
    with Path(os.devnull).open() as parent:
        given = {"endpoint": f"ipc://{directory}/d/w0", "device": "cpu"}
        first = RuntimeFiles(build_settings({**given, "exit-with-parent-fd": parent.fileno()}), str)
    (directory / "d" / "w0.lock").unlink()
    second = RuntimeFiles(settings(directory), str)
    second.epochs.record(7)
    first.leave()
    assert second.epochs.path.read_text() == "7\n"
    assert second.hang_reports.path.exists()
    second.leave()


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["w0", "w0.results", "w0.lock"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, Path.touch])
def test_what_is_in_the_place_of_our_files_is_named_and_left(directory, name, make):
    path = directory / "d" / name
    path.parent.mkdir(0o700)
    make(path)
    if name == "w0.lock" and make is Path.touch:
        RuntimeFiles(settings(directory), str).leave()  # a lock that nobody holds
        return
    with pytest.raises(ConfigError, match=rf"{path}.*fix: remove {path}"):
        RuntimeFiles(settings(directory), str)
    assert path.exists()


# A host without room.


@needs_root
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("size=64k,nr_inodes=1", ExitCode.RETRY_LATER),
        ("size=64k,nr_inodes=3", ExitCode.RETRY_LATER),
        ("size=64k,ro", ExitCode.CONFIG),
    ],
)
def test_endpoint_directory_without_room_says_so(directory, options, code):
    mounted = directory / "d"
    mounted.mkdir()
    mount = f'mount -t tmpfs -o mode=0700,{options} tmpfs "$0" && exec "$@"'
    within = ("unshare", "--mount", "sh", "-c", mount, str(mounted))
    done = refused("--endpoint", f"ipc://{mounted}/w0", within=within)
    assert done.returncode == code, done.stderr


def test_too_few_file_descriptors_end_with_78(directory):
    within = ("sh", "-c", 'ulimit -n 31 && exec "$@"', "sh")
    done = refused("--endpoint", f"ipc://{directory}/d/w0", within=within)
    assert done.returncode == ExitCode.CONFIG
    assert "LimitNOFILE" in done.stderr


def test_least_number_of_file_descriptors_is_enough(directory):
    command = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *SERVE)
    daemon = DaemonProcess(directory / "d", serve=command)
    try:
        serves(daemon)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
    finally:
        daemon.stop()


# Files that are removed while a daemon serves.


def ends_in_use(daemon: DaemonProcess) -> None:
    assert daemon.process.wait(NOTICE_LIMIT_S) == ExitCode.IN_USE, daemon.stderr()
    assert "Traceback" not in daemon.stderr()


def test_sighup_without_keys_ends_nothing(start):
    daemon = start()
    serves(daemon)
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: "nothing to reload" in daemon.stderr(), "the signal was heard", NOTICE_LIMIT_S
    )
    serves(daemon)


def test_sighup_while_a_daemon_starts_ends_nothing(directory):
    """From the moment on when it has made its directory until its last socket is there."""
    endpoint = f"ipc://{directory}/d/w0"
    process = subprocess.Popen([*SERVE, "--endpoint", endpoint])
    try:
        give_up = time.monotonic() + START_LIMIT_S
        while process.poll() is None and not (directory / "d" / "w0.events").exists():
            assert time.monotonic() < give_up
            if (directory / "d").exists():
                process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: process.poll() is not None or ask_status(endpoint) is not None, "it serves"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_removed_lock_file_is_made_again_and_keeps_others_off(start, directory):
    daemon = start()
    serves(daemon)
    lock = directory / "d" / "w0.lock"
    lock.unlink()
    wait_until(lock.exists, "the lock is there again", NOTICE_LIMIT_S)
    second = start()
    assert second.wait() == ExitCode.IN_USE
    assert f"the daemon with pid {daemon.process.pid} serves" in second.stderr()
    serves(daemon)


def test_removed_directory_is_left_to_the_next_daemon(start, directory):
    first = start()
    serves(first)
    # Stopped, so that it makes no new lock in the meantime.
    stop_process(first.process.pid)
    shutil.rmtree(directory / "d")
    first.process.send_signal(signal.SIGCONT)
    second = start()
    ends_in_use(first)
    serves(second)
    assert {path.name for path in (directory / "d").iterdir()} >= {
        *("w0", "w0.step", "w0.results", "w0.events", "w0.lock")
    }


def test_daemon_that_was_replaced_leaves_the_other_one_s_files(start, directory):
    """Both locks and sockets are the other's before the first can look again: it is stopped."""
    first = start()
    serves(first)
    stop_process(first.process.pid)
    (directory / "d" / "w0.lock").unlink()
    second = start()
    wait_until(lambda: ask_status(second.endpoint) is not None, "the second", START_LIMIT_S)
    first.process.send_signal(signal.SIGCONT)
    ends_in_use(first)
    serves(second)
    sockets = [directory / "d" / name for name in ("w0", "w0.step", "w0.results", "w0.events")]
    assert all(stat.S_ISSOCK(path.lstat().st_mode) for path in sockets)
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(path))
