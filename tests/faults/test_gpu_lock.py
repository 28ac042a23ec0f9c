"""Two daemons on one GPU: the second refuses to start, unless it is started with --share-gpu (row
28 of the fault matrix). The GPU's UUID is injected."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from rpc_schema.errors import ConfigError
from tests.support.command_line import ask_status, environment, short_directory
from tests.support.waiting import PATIENCE_S, wait_until
from worker_daemon.device.nvml import CudaDevice, find_uuid
from worker_daemon.server.gpu_lock import GpuInUseError, GpuLock, lock_directory
from worker_host.exit_codes import ExitCode

UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
START_LIMIT_S = PATIENCE_S


class Host:
    """Daemons on GPUs of one host."""

    def __init__(self) -> None:
        self.directory = short_directory()
        self.locks = self.directory / "locks"
        self.locks.mkdir()
        self._started: list[subprocess.Popen[str]] = []

    def start(self, name: str, uuid: str, *options: str) -> "subprocess.Popen[str]":
        serve = (sys.executable, "-m", "tests.support.locked_serve", uuid, "serve")
        own = ("--device", "cpu", "--endpoint", f"ipc://{self.directory}/{name}/w0")
        kept = ("--state-dir", str(self.directory / "state"), "--gpu-lock-dir", str(self.locks))
        self._started.append(
            subprocess.Popen(
                [*serve, *own, *kept, *options],
                stderr=subprocess.PIPE,
                text=True,
                env=environment(self.directory),
            )
        )
        return self._started[-1]

    def serves(self, name: str) -> None:
        endpoint = f"ipc://{self.directory}/{name}/w0"
        wait_until(lambda: ask_status(endpoint) is not None, f"{name} serves", START_LIMIT_S)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(PATIENCE_S)
            process.stderr.close()
        shutil.rmtree(self.directory)


@pytest.fixture
def host():
    made = Host()
    yield made
    made.close()


def test_second_daemon_on_a_gpu_refuses_to_start_and_names_the_first(host, detection):
    first = host.start("a", UUID)
    host.serves("a")
    (lock,) = host.locks.iterdir()
    assert (lock.name, lock.read_text()) == (f"worker-daemon-{UUID}.lock", f"{first.pid}\n")
    began = time.monotonic()
    second = host.start("b", UUID)
    sharing = host.start("d", UUID, "--share-gpu")
    _, said = second.communicate(timeout=START_LIMIT_S)
    detection(28, "second daemon on a GPU", 5.0, time.monotonic() - began, "flock")
    assert second.returncode == ExitCode.IN_USE
    assert f"pid {first.pid} has the GPU {UUID}" in said and "--share-gpu" in said
    assert not (host.directory / "b").exists()
    host.serves("d")
    assert (first.poll(), sharing.poll()) == (None, None)
    first.kill()
    first.wait(PATIENCE_S)
    third = host.start("b", UUID)
    host.serves("b")
    assert lock.read_text() == f"{third.pid}\n"
    third.send_signal(signal.SIGTERM)
    assert third.wait(START_LIMIT_S) == 0
    assert not lock.exists()


def test_lock_that_is_let_go_soon_is_waited_for(tmp_path):
    held = GpuLock(UUID, tmp_path)
    GpuLock(UUID.replace("4f087", "00000"), tmp_path).release()
    with pytest.raises(GpuInUseError, match=f"pid {os.getpid()} has the GPU"):
        GpuLock(UUID, tmp_path)
    held.release()
    GpuLock(UUID, tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_link_is_not_followed_and_nothing_is_written_through_it(tmp_path):
    target = tmp_path / "precious"
    target.write_text("as it was")
    (tmp_path / f"worker-daemon-{UUID}.lock").symlink_to(target)
    with pytest.raises(ConfigError, match="gpu-lock-dir"):
        GpuLock(UUID, tmp_path)
    assert target.read_text() == "as it was"


def test_directory_is_the_chosen_one_or_one_that_all_may_write(tmp_path):
    assert lock_directory(tmp_path) == tmp_path
    assert lock_directory(None) in (Path("/run/lock"), Path("/tmp"))
    with pytest.raises(ConfigError, match="gpu-lock-dir"):
        lock_directory(tmp_path / "none")


class FakeNvml:
    NVMLError = pynvml.NVMLError

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle


@pytest.mark.parametrize(
    ("device", "visible", "uuid"),
    [
        ("cuda:1", None, "GPU-1"),
        ("cuda:0", "1", "GPU-1"),
        ("cuda:0", "MIG-7", "MIG-7"),
        ("cuda:5", None, ""),
        ("cuda:2", "0,1", ""),
    ],
)
def test_uuid_is_that_of_the_device(device, visible, uuid):
    assert find_uuid(FakeNvml(), CudaDevice(device, visible)) == uuid
