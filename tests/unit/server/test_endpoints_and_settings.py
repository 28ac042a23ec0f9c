"""Endpoints, locks, epochs and settings, without a process."""

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from rpc_schema.errors import ConfigError
from rpc_schema.lifecycle import MAX_EPOCH_STEP
from worker_daemon.directories import claim_directory
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.wire.endpoints import (
    CLOSED_TO_OTHERS,
    MAX_PATH_BYTES,
    RESERVED_SUFFIXES,
    EndpointInUseError,
    EndpointLock,
    IpcEndpoint,
    SocketFiles,
)
from worker_daemon.settings import (
    build_settings,
    load_settings,
    prepare_environment,
    read_environment,
    read_file,
)


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
        IpcEndpoint.parse(text)


def test_path_limit_is_exact() -> None:
    longest = "ipc:///" + "d" * (MAX_PATH_BYTES - 1 - len(".results"))
    assert len(str(IpcEndpoint.parse(longest).socket_path("results"))) == MAX_PATH_BYTES
    with pytest.raises(ConfigError, match="108 bytes"):
        IpcEndpoint.parse(longest + "d")


def test_addresses() -> None:
    endpoint = IpcEndpoint.parse("ipc:///run/x/w.0")
    assert endpoint.address("control") == "ipc:///run/x/w.0"
    assert endpoint.address("step") == "ipc:///run/x/w.0.step"
    assert endpoint.lock_path == Path("/run/x/w.0.lock")


def claim(directory: Path) -> Path:
    """As a daemon claims its endpoint's directory."""
    return claim_directory(directory, "the endpoint", "endpoint", forbidden=CLOSED_TO_OTHERS)


@pytest.mark.parametrize("suffix", RESERVED_SUFFIXES)
def test_name_that_a_file_of_another_endpoint_may_have_is_refused(suffix: str) -> None:
    with pytest.raises(ConfigError, match=r"files of other endpoints.*w0.*does not end in"):
        IpcEndpoint.parse(f"ipc:///run/x/w0{suffix}")


def test_directory_is_made_private_and_an_open_one_refused(tmp_path: Path) -> None:
    made = tmp_path / "a"
    claim(made)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 0700"):
        claim(made)


def test_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        claim(tmp_path)


def test_second_lock_names_the_holder_and_release_frees(tmp_path: Path) -> None:
    endpoint = IpcEndpoint.parse(f"ipc://{tmp_path}/w0")
    lock = EndpointLock(endpoint)
    with pytest.raises(EndpointInUseError, match=f"pid {os.getpid()}"):
        EndpointLock(endpoint)
    lock.release()
    assert not endpoint.lock_path.exists()
    EndpointLock(endpoint).release()


def test_epochs_survive_and_are_told_apart_by_endpoint(tmp_path: Path) -> None:
    first = IpcEndpoint.parse("ipc:///run/a/w0")
    second = IpcEndpoint.parse("ipc:///run/b/w0")
    EpochFile(tmp_path, first).record(41)
    assert EpochFile(tmp_path, first).last == 41
    assert EpochFile(tmp_path, second).last == 0


def test_unreadable_epoch_is_not_taken_for_zero(tmp_path: Path) -> None:
    endpoint = IpcEndpoint.parse("ipc:///run/a/w0")
    epochs = EpochFile(tmp_path, endpoint)
    epochs.record(3)
    epochs.path.write_text("x")
    with pytest.raises(ConfigError, match="does not hold a number"):
        EpochFile(tmp_path, endpoint)


@pytest.mark.parametrize("text", ["", "x", "-1", str(2**62 + 1), "9" * 10_000])
def test_unusable_epoch_names_its_reset_and_is_reset_on_demand(tmp_path: Path, text: str) -> None:
    endpoint = IpcEndpoint.parse("ipc:///run/a/w0")
    stored = EpochFile(tmp_path, endpoint).path
    stored.write_text(text)
    with pytest.raises(ConfigError, match="--reset-epoch"):
        EpochFile(tmp_path, endpoint)
    assert stored.read_text() == text
    last = EpochFile(tmp_path, endpoint, reset=True).last
    assert abs(last - time.time() / 60) < 10
    assert EpochFile(tmp_path, endpoint).last == last


@pytest.mark.parametrize(("stored", "stays"), [(7, True), (2**32, True), (2**32 + 1, False)])
def test_only_an_epoch_that_nobody_counted_up_to_is_reset(
    tmp_path: Path, stored: int, stays: bool
) -> None:
    endpoint = IpcEndpoint.parse("ipc:///run/a/w0")
    EpochFile(tmp_path, endpoint).path.write_text(f"{stored}\n")
    assert EpochFile(tmp_path, endpoint).last == stored
    assert (EpochFile(tmp_path, endpoint, reset=True).last == stored) == stays


def test_epoch_goes_up_by_bounded_steps(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path, IpcEndpoint.parse("ipc:///run/a/w0"))
    with pytest.raises(ConfigError, match=r"epoch = 1048577; fix: ask for one of 1 to 1048576"):
        epochs.record(MAX_EPOCH_STEP + 1)
    assert epochs.last == 0
    epochs.record(MAX_EPOCH_STEP)
    assert EpochFile(tmp_path, IpcEndpoint.parse("ipc:///run/a/w0")).last == MAX_EPOCH_STEP


def test_epoch_that_cannot_be_written_is_not_granted(tmp_path: Path) -> None:
    epochs = EpochFile(tmp_path / "state", IpcEndpoint.parse("ipc:///run/a/w0"))
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
        *(
            ({"endpoint": "ipc:///a/b", "device": "cpu", key: value}, f"field {key}")
            for key, value in (
                *((key, "") for key in ("key-file", "save-root", "data-interface", "state-dir")),
                *((key, [""]) for key in ("model-root", "lora-root")),
            )
        ),
        *(
            (
                {"endpoint": "ipc:///a/b", "device": "cpu", "upload-memory-bytes": value},
                "field upload-memory-bytes",
            )
            for value in ("0", -1, "2 GiB", True, 1 << 62)
        ),
    ],
)
def test_bad_setting_names_its_field(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(given, None)


@pytest.mark.parametrize(("given", "expected"), [({}, 2 << 30), (4096, 4096), ("4096", 4096)])
def test_memory_for_uploads_is_a_number_of_bytes(given: object, expected: int) -> None:
    settings = {"endpoint": "ipc:///a/b", "device": "cpu"}
    if given:
        settings["upload-memory-bytes"] = given  # type: ignore[assignment]
    assert build_settings(settings).upload_memory_bytes == expected


def test_model_roots_come_from_the_environment_too(tmp_path: Path) -> None:
    given = read_environment({"WORKER_DAEMON_MODEL_ROOT": f"{tmp_path}:/tmp"})
    assert given == {"model-root": [str(tmp_path), "/tmp"]}


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("WORKER_DAEMON_MODEL_ROOTS", "use WORKER_DAEMON_MODEL_ROOT"),
        ("WORKER_DAEMON_LOGLEVEL", "use WORKER_DAEMON_LOG_LEVEL"),
        ("WORKER_DAEMON_Device", "WORKER_DAEMON_DEVICE"),
        ("WORKER_DAEMON_XYZZY", "WORKER_DAEMON_ENDPOINT or WORKER_DAEMON_DEVICE or"),
        ("WORKER_DAEMON_PORT_RANGE", "unset it"),
    ],
)
def test_a_misspelt_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, fix: str
) -> None:
    monkeypatch.setattr(os, "environ", {name: "x"})
    with pytest.raises(ConfigError, match=fix) as caught:
        load_settings({"endpoint": "ipc:///a/b", "device": "cpu"}, None)
    assert (caught.value.field, caught.value.value) == (name, "x")


def test_variables_that_others_set_are_ignored() -> None:
    # Of vLLM as a driver, and of Kubernetes' services "worker-daemon" and "worker-daemon-a".
    names = [
        *("ENDPOINTS", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_CONTROL", "PORT"),
        *("PORT_5600_TCP", "PORT_5600_TCP_ADDR", "A_PORT_5600_UDP_PROTO", "A_SERVICE_HOST"),
    ]
    environment = {f"WORKER_DAEMON_{name}": "x" for name in names}
    assert read_environment(environment | {"WORKER_DAEMON_MODEL_ROT": ""}) == {}


def test_environment_keeps_an_interface_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth7"})
    prepare_environment()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_files_of_a_successor_stay_even_if_they_have_our_inodes() -> None:
    """A file system gives the number of a closed socket's inode to the next file."""

    def bind(path: Path) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(path))
        return bound

    with tempfile.TemporaryDirectory() as directory:
        endpoint = IpcEndpoint(Path(directory) / "w0")
        files = SocketFiles(endpoint)
        ours = [bind(path) for path in endpoint.socket_paths]
        files.are_bound()
        assert not files.missing()
        for path, each in zip(endpoint.socket_paths, ours, strict=True):
            path.unlink()
            each.close()
        time.sleep(0.02)  # longer than a tick of the file system's clock
        theirs = [bind(path) for path in endpoint.socket_paths]
        assert files.missing() == list(endpoint.socket_paths)
        files.remove()
        assert all(path.is_socket() for path in endpoint.socket_paths)
        for each in theirs:
            each.close()
