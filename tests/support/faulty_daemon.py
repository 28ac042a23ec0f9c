"""`python -m tests.support.faulty_daemon FAULT_FILE serve ...`: the real daemon, whose worker fails
where and when a file tells it to. Without a fault it is the daemon as shipped."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Literal

import pytest

from worker_client.launcher import LocalDaemons
from worker_daemon.cli import app
from worker_daemon.contracts.uploads import FindUpload
from worker_daemon.device.gpu_faults import Fault as GpuFault
from worker_daemon.device.gpu_faults import fault_of
from worker_daemon.phases import SetPhase
from worker_daemon.server import assembly

HANG_S = 3600.0
INJECTED = "an injected fault"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where: on entry to a function of the worker."""

    where: Literal[
        "make_worker",
        "load_model",
        "forward",
        "likeliest_tokens",
        "execute_model",
        "sample_tokens",
        "send",
    ]
    """send: activations to the next stage."""
    what: Literal["raise", "hang", "hold", "kill", "lost", "assert", "skip"]
    """hold: hang with the interpreter's lock held, so that no thread of the daemon runs; lost: as
    torch says that the device is; assert: a GPU's own, which is found out later; skip: it is not
    done."""
    calls_before: int = 0
    """Calls that go well first."""
    seconds: float = HANG_S
    """How long a hang takes."""
    times: int = 1
    """How often it strikes."""


class InjectedError(Exception):
    """Nothing that the daemon could have foreseen."""


class FaultFile:
    """The mailbox between a test and one daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nvml_lost = path.with_suffix(".nvml-lost")
        self.throttle = path.with_suffix(".throttle")
        """NVML's reasons, a number; none while it is not there."""

    def put(self, fault: Fault) -> None:
        """Arm a fault."""
        self._write(self.path, json.dumps(asdict(fault)))

    @property
    def xids(self) -> Path:
        """Where the daemon looks for XIDs of its GPU."""
        return self.path.with_suffix(".xid")

    def put_xid(self, xid: int) -> None:
        """Have the GPU report this; the daemon takes it away."""
        self._write(self.xids, str(xid))

    def put_throttle(self, reasons: int) -> None:
        """Have NVML name these reasons."""
        self._write(self.throttle, str(reasons))

    def _write(self, path: Path, text: str) -> None:
        """At once: the daemon reads whatever is there."""
        draft = path.with_suffix(f"{path.suffix}-draft")
        draft.write_text(text)
        draft.rename(path)

    @property
    def armed(self) -> bool:
        """Whether a fault still waits for its call."""
        return self.path.exists()

    def strike(self, where: str) -> bool:
        """Fail, if a fault is armed for a call of `where` and this is the one; tell whether the
        call is to be left out."""
        if not self.path.exists():
            return False
        fault = Fault(**json.loads(self.path.read_text()))
        if fault.where != where:
            return False
        if fault.calls_before:
            self.put(replace(fault, calls_before=fault.calls_before - 1))
            return False
        if fault.times > 1:
            self.put(replace(fault, times=fault.times - 1))
        else:
            self.path.unlink()
        if fault.what == "raise":
            raise InjectedError(f"{INJECTED} in {where}")
        if fault.what == "lost":
            import torch  # the daemon has loaded it

            raise torch.AcceleratorError("CUDA error: device-side assert triggered", 710)
        if fault.what == "assert":
            import torch  # the daemon has loaded it

            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
            return False
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.what == "hold":
            ctypes.PyDLL(None).usleep(int(fault.seconds * 1e6))
        elif fault.what == "hang":
            time.sleep(fault.seconds)
        return fault.what == "skip"


class LosableNvml:
    """NVML, until a file says that it is lost, or that the device is throttled."""

    class NVMLError(Exception):
        pass

    def __init__(self, faults: FaultFile) -> None:
        self._lost = faults.nvml_lost
        self._throttle = faults.throttle

    def nvmlInit(self) -> None:
        if self._lost.exists():
            raise self.NVMLError("Failed to initialize NVML: Unknown Error")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: object) -> object:
        return handle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:
        return int(self._throttle.read_text()) if self._throttle.exists() else 0


class FaultyDaemons(LocalDaemons):
    """Local daemons with a fault file each."""

    def __init__(
        self,
        num_daemons: int,
        model_root: Path,
        faults_dir: Path,
        first_fault: Fault | None = None,
        ready_timeout_s: float = 60.0,
        device: str | Sequence[str] = "cpu",
    ) -> None:
        """Start them on a device, or on one each. first_fault is armed for all of them before they
        start."""
        self.faults = [FaultFile(faults_dir / f"{rank}.fault") for rank in range(num_daemons)]
        if first_fault is not None:
            for file in self.faults:
                file.put(first_fault)

        def command(endpoint: str, device: str, pipe: int) -> Sequence[str]:
            file = self.faults[int(endpoint.rpartition("/w")[2])]
            entry = (sys.executable, "-m", "tests.support.faulty_daemon", str(file.path))
            options = ("serve", "--endpoint", endpoint, "--device", device)
            roots = ("--model-root", str(model_root), "--exit-with-parent-fd", str(pipe))
            return (*entry, *options, *roots)

        devices = [device] * num_daemons if isinstance(device, str) else device
        super().__init__(devices, model_root, command=command, ready_timeout_s=ready_timeout_s)

    @contextmanager
    def kept_alive(self) -> "Iterator[list[subprocess.Popen[bytes]]]":
        """Start those again that end, as a supervisor does; yields the processes that were there
        first."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(0.1):
                self.restart_dead()

        thread = threading.Thread(target=keep)
        first = [daemon.process for daemon in self._daemons]
        thread.start()
        try:
            yield first
        finally:
            over.set()
            thread.join()


class FileWatch:
    """A GPU's faults, out of a file with an XID in it."""

    is_on = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def wait(self, timeout_ms: int) -> GpuFault | None:
        deadline = time.monotonic() + timeout_ms / 1000
        while time.monotonic() < deadline:
            if self._path.exists():
                xid = int(self._path.read_text())
                self._path.unlink()
                return fault_of(xid)
            time.sleep(0.02)
        return None

    def close(self) -> None:
        return None


class FaultyWorker:
    """A worker behind a fault file."""

    def __init__(self, worker: object, faults: FaultFile) -> None:
        self._worker = worker
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def load_model(self, message: object) -> object:
        self._faults.strike("load_model")
        return self._worker.load_model(message)

    def check_device(self) -> str:
        """As on a GPU whose NVML is lost as soon as there is a file that says so."""
        from worker_daemon.device.health import check_nvml_device  # torch is loaded by now

        return check_nvml_device(LosableNvml(self._faults), "GPU-0")

    def execute_model(self, message: object, arrays: Sequence[bytes]) -> object:
        self._faults.strike("execute_model")
        return self._worker.execute_model(message, arrays)

    def sample_tokens(self, message: object, arrays: Sequence[bytes]) -> object:
        self._faults.strike("sample_tokens")
        return self._worker.sample_tokens(message, arrays)


def faulty(function: Callable[..., object], faults: FaultFile) -> Callable[..., object]:
    """Return `function`, with a fault to strike before it."""

    @wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        if faults.strike(function.__name__):
            return None
        return function(*args, **kwargs)

    return wrapper


def main(patch: pytest.MonkeyPatch) -> None:
    """Run the daemon's own command line around the faulty worker."""
    faults = FaultFile(Path(sys.argv.pop(1)))
    make_worker = assembly.make_worker

    def make_faulty(
        device: str,
        model_roots: Sequence[Path],
        set_phase: SetPhase,
        find_upload: FindUpload,
        save_root: Path | None,
        profile_dir: Path | None,
        lora_roots: Sequence[Path],
    ) -> object:
        faults.strike("make_worker")
        worker = make_worker(
            device, model_roots, set_phase, find_upload, save_root, profile_dir, lora_roots
        )
        from worker_daemon.distributed.pp import StageOutbound  # torch is loaded here, not before
        from worker_daemon.models.decoder import DecoderStage

        for name in ("forward", "likeliest_tokens"):
            patch.setattr(DecoderStage, name, faulty(getattr(DecoderStage, name), faults))
        patch.setattr(StageOutbound, "send", faulty(StageOutbound.send, faults))
        return FaultyWorker(worker, faults)

    patch.setattr(assembly, "make_worker", make_faulty)
    patch.setattr(assembly, "open_fault_watch", lambda device: FileWatch(faults.xids))
    app()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        main(monkeypatch)
