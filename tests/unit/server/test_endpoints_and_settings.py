"""Endpoints, locks, epochs and settings, without a process."""

import os
from pathlib import Path

import pytest

from worker_daemon.errors import ConfigError
from worker_daemon.server.endpoints import (
    MAX_PATH_BYTES,
    Endpoint,
    EndpointInUseError,
    EndpointLock,
    prepare_directory,
)
from worker_daemon.server.epochs import EpochFile
from worker_daemon.settings import load_settings, prepare_environment, read_environment, read_file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://127.0.0.1:5555", "tcp://ADDRESS:PORT"),
        ("ipc://relative/w0", "absolute path"),
        ("ipc://@abstract", "absolute path"),
        ("ipc:///", "absolute path"),
        ("inproc://w0", "absolute path"),
        ("/tmp/w0", "absolute path"),
        ("", "absolute path"),
    ],
)
def test_bad_endpoint_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Endpoint.parse(text)


def test_path_limit_is_exact() -> None:
    longest = "ipc:///" + "d" * (MAX_PATH_BYTES - 1 - len(".results"))
    assert len(str(Endpoint.parse(longest).socket_path("results"))) == MAX_PATH_BYTES
    with pytest.raises(ConfigError, match="108 bytes"):
        Endpoint.parse(longest + "d")


def test_addresses() -> None:
    endpoint = Endpoint.parse("ipc:///run/x/w.0")
    assert endpoint.address("control") == "ipc:///run/x/w.0"
    assert endpoint.address("step") == "ipc:///run/x/w.0.step"
    assert endpoint.lock_path == Path("/run/x/w.0.lock")


def test_directory_is_made_private_and_an_open_one_refused(tmp_path: Path) -> None:
    made = tmp_path / "a"
    prepare_directory(made)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 0700"):
        prepare_directory(made)


def test_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        prepare_directory(tmp_path)


def test_second_lock_names_the_holder_and_release_frees(tmp_path: Path) -> None:
    endpoint = Endpoint.parse(f"ipc://{tmp_path}/w0")
    lock = EndpointLock(endpoint)
    with pytest.raises(EndpointInUseError, match=f"pid {os.getpid()}"):
        EndpointLock(endpoint)
    lock.release()
    assert not endpoint.lock_path.exists()
    EndpointLock(endpoint).release()


def test_epochs_survive_and_are_told_apart_by_endpoint(tmp_path: Path) -> None:
    first = Endpoint.parse("ipc:///run/a/w0")
    second = Endpoint.parse("ipc:///run/b/w0")
    EpochFile(tmp_path, first).record(41)
    assert EpochFile(tmp_path, first).last == 41
    assert EpochFile(tmp_path, second).last == 0


def test_unreadable_epoch_is_not_taken_for_zero(tmp_path: Path) -> None:
    endpoint = Endpoint.parse("ipc:///run/a/w0")
    epochs = EpochFile(tmp_path, endpoint)
    epochs.record(3)
    epochs.path.write_text("x")
    with pytest.raises(ConfigError, match="does not hold a number"):
        EpochFile(tmp_path, endpoint)


def test_epoch_that_cannot_be_written_is_not_granted(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path / "state", Endpoint.parse("ipc:///run/a/w0"))
    (tmp_path / "state").rmdir()
    with pytest.raises(ConfigError, match="cannot be recorded"):
        epochs.record(1)
    assert epochs.last == 0


def test_command_line_beats_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "d.toml"
    file.write_text('endpoint = "ipc:///f/w"\ndevice = "cuda:1"\nlog-level = "error"\n')
    monkeypatch.setenv("WORKER_DAEMON_DEVICE", "cuda:2")
    monkeypatch.setenv("WORKER_DAEMON_ENDPOINT", "ipc:///e/w")
    settings = load_settings({"endpoint": "ipc:///c/w", "device": None}, file)
    assert (settings.endpoint, settings.device) == ("ipc:///c/w", "cuda:2")
    assert settings.log_level == "error"
    assert settings.model_roots == (Path.cwd(),)


def test_unknown_key_in_the_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text("devise = 'cpu'\n")
    with pytest.raises(ConfigError, match="devise"):
        read_file(file)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cpu"}, "endpoint"),
        ({"endpoint": "ipc:///a/b"}, "device"),
        ({"endpoint": "ipc:///a/b", "device": "gpu"}, "use cpu or cuda:N"),
        ({"endpoint": "ipc:///a/b", "device": "cuda"}, "use cpu or cuda:N"),
        ({"endpoint": "ipc:///a/b", "device": "cpu", "log-level": "x"}, "log-level"),
        ({"endpoint": "ipc:///a/b", "device": "cpu", "model-root": ["/none"]}, "model-root"),
        ({"endpoint": "ipc:///a/b", "device": "cpu", "exit-with-parent-fd": -1}, "descriptor"),
    ],
)
def test_bad_setting_names_its_field(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(given, None)


def test_model_roots_come_from_the_environment_too(tmp_path: Path) -> None:
    given = read_environment({"WORKER_DAEMON_MODEL_ROOT": f"{tmp_path}:/tmp"})
    assert given == {"model-root": [str(tmp_path), "/tmp"]}


def test_environment_keeps_an_interface_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth7"})
    prepare_environment()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
