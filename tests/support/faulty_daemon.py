"""`python -m tests.support.faulty_daemon FAULT_FILE serve ...`: the real daemon, whose worker fails
as a file tells it. Without a fault it is the unmodified daemon."""

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

from tests.support.forked_daemons import ForkedDaemons
from worker_client.launcher import READY_TIMEOUT_S
from worker_daemon.__main__ import main as run_command_line
from worker_daemon.contracts.hub import HubSettings
from worker_daemon.contracts.uploads import FindUpload
from worker_daemon.device.gpu_faults import Fault as GpuFault
from worker_daemon.device.gpu_faults import fault_of
from worker_daemon.phases import SetPhase
from worker_daemon.server import assembly
from worker_daemon.server.events import Events

HANG_S = 3600.0
INJECTED = "an injected fault"


@dataclass(frozen=True)
class Fault:
    """A fault, on entry to a function of the worker."""

    where: Literal[
        "make_worker",
        "load_model",
        "forward",
        "argmax_tokens",
        "execute_model",
        "sample_tokens",
        "send",
        "publish_heartbeat",
        "exchange",
    ]
    """send: activations to the next stage; publish_heartbeat: on the event loop's thread; exchange:
    experts between ranks, once before they move, then for each batch, then once after them."""
    what: Literal["raise", "memory", "hang", "hold", "kill", "lost", "assert", "skip"]
    """memory: torch's error for a full device; hold: hang with the GIL held, so that no thread of
    the daemon runs, until end_hold(); lost: torch's error for a lost device; assert: a real
    device-side assert, which appears later; skip: the call is skipped."""
    calls_before: int = 0
    """Successful calls before the fault."""
    seconds: float = HANG_S
    """Duration of a hang. A hold lasts until end_hold()."""
    times: int = 1
    """Number of times that it strikes."""
    is_ended_by_test: bool = False
    """After its duration, it goes on until FaultFile.end_hang()."""


class InjectedError(Exception):
    """An exception that the daemon does not expect."""


class FaultFile:
    """The mailbox between a test and one daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nvml_lost = path.with_suffix(".nvml-lost")
        self._holding = path.with_suffix(".holding")
        self._hang_is_over = path.with_suffix(".hang-is-over")
        self.throttle = path.with_suffix(".throttle")
        """NVML's throttle reasons, as a number; none if the file is missing."""

    def put(self, fault: Fault) -> None:
        """Arm a fault."""
        if fault.what == "hold" and not self._holding.exists():
            os.mkfifo(self._holding)
        self._write(self.path, json.dumps(asdict(fault)))

    @property
    def xids(self) -> Path:
        """File in which the daemon looks for its GPU's XIDs."""
        return self.path.with_suffix(".xid")

    def end_hang(self) -> None:
        """End a hang that waits for it."""
        self._hang_is_over.touch()

    def end_hold(self) -> None:
        """Let the daemon give up the GIL; wait until it holds it, if it does not yet."""
        self._holding.open("wb").close()

    def put_xid(self, xid: int) -> None:
        """Make the GPU report this XID; the daemon removes the file."""
        self._write(self.xids, str(xid))

    def put_throttle(self, reasons: int) -> None:
        """Make NVML report these reasons."""
        self._write(self.throttle, str(reasons))

    def _write(self, path: Path, text: str) -> None:
        """Write atomically, since the daemon may read at any time."""
        draft = path.with_suffix(f"{path.suffix}-draft")
        draft.write_text(text)
        draft.rename(path)

    @property
    def armed(self) -> bool:
        """Return True if a fault still waits for its call."""
        return self.path.exists()

    def strike(self, where: str) -> bool:
        """Fail if a fault is armed for this call of `where`; return True if the call must be
        skipped."""
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
        if fault.what in ("memory", "lost"):
            import torch  # the daemon has loaded it

            full = torch.OutOfMemoryError(f"{INJECTED} in {where}")
            lost = torch.AcceleratorError("CUDA error: device-side assert triggered", 710)
            raise full if fault.what == "memory" else lost
        if fault.what == "assert":
            import torch  # the daemon has loaded it

            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
            return False
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.what == "hold":
            # Opening a FIFO waits for its writer, here without giving up the GIL.
            ctypes.PyDLL(None).open(os.fsencode(self._holding), os.O_RDONLY)
            self._holding.unlink()
        elif fault.what == "hang":
            time.sleep(fault.seconds)
            while fault.is_ended_by_test and not self._hang_is_over.exists():
                time.sleep(0.01)
            self._hang_is_over.unlink(missing_ok=True)
        return fault.what == "skip"


class LosableNvml:
    """Real NVML, unless a file says that it is lost or that the device is throttled."""

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


class FaultyDaemons(ForkedDaemons):
    """Local daemons with a fault file each."""

    def __init__(
        self,
        num_daemons: int,
        model_root: Path,
        faults_dir: Path,
        first_fault: Fault | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        device: str | Sequence[str] = "cpu",
    ) -> None:
        """Start them on one device, or on one each. first_fault is armed for all before they
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
        """Restart daemons that exit, as a supervisor does; yield the first processes."""
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
    """A fault watch that reads XIDs from a file."""

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
        """Report as on a GPU whose NVML is lost, once a file says so."""
        from worker_daemon.device.health import check_nvml_device  # torch is loaded now

        return check_nvml_device(LosableNvml(self._faults), "GPU-0")

    def execute_model(self, message: object, arrays: Sequence[bytes]) -> object:
        self._faults.strike("execute_model")
        return self._worker.execute_model(message, arrays)

    def sample_tokens(self, message: object, arrays: Sequence[bytes]) -> object:
        self._faults.strike("sample_tokens")
        return self._worker.sample_tokens(message, arrays)


def faulty(function: Callable[..., object], faults: FaultFile) -> Callable[..., object]:
    """Return `function` with faults striking before it."""

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
        compiler: None,
        hub: HubSettings,
        max_kv_host_bytes: int | None,
        kv_host_dir: Path | None,
        kv_file_dir: Path | None,
        kv_file_bytes: int,
    ) -> object:
        faults.strike("make_worker")
        worker = make_worker(
            device, model_roots, set_phase, find_upload, save_root, profile_dir, lora_roots
        )
        from worker_daemon.distributed.peer_channel import PeerChannel
        from worker_daemon.distributed.pp import StageOutbound  # torch is loaded here, not before
        from worker_daemon.models.decoder import DecoderStage

        for name in ("forward", "argmax_tokens"):
            patch.setattr(DecoderStage, name, faulty(getattr(DecoderStage, name), faults))
        patch.setattr(StageOutbound, "send", faulty(StageOutbound.send, faults))
        patch.setattr(PeerChannel, "exchange", faulty(PeerChannel.exchange, faults))
        return FaultyWorker(worker, faults)

    patch.setattr(assembly, "make_worker", make_faulty)
    patch.setattr(assembly, "open_fault_watch", lambda device: FileWatch(faults.xids))
    patch.setattr(Events, "publish_heartbeat", faulty(Events.publish_heartbeat, faults))
    run_command_line()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        main(monkeypatch)
