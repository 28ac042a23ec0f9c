"""Assembles the daemon with its real worker. The only module that connects the server and torch.
Modules that load torch are imported on the step thread, after the sockets are bound."""

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from worker_daemon.contracts.hub import NO_HUB, HubSettings
from worker_daemon.contracts.uploads import FindUpload
from worker_daemon.device import fault_watch, gauges, nvml
from worker_daemon.device.fault_watch import FaultWatch
from worker_daemon.device.gauges import Gauges
from worker_daemon.device.kept_memory import KeptMemory
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.phases import SetPhase
from worker_daemon.runner.connectors.block_files import BlockFiles
from worker_daemon.server.daemon import serve
from worker_daemon.server.dispatch import RendezvousServerLike, WorkerLike
from worker_daemon.settings import (
    DEFAULT_KV_FILE_BYTES,
    ProcessSettings,
    hub_settings,
    prepare_environment,
    prepare_flight_recorder,
    prepare_waiting,
    prepared_kernel_cache,
    profile_directory,
    user_threads,
    visible_devices,
)


def run_daemon(settings: ProcessSettings) -> int:
    """Serve until the end; return the exit code. Raises as `daemon.serve` does."""
    prepare_environment(settings.data_interface or None)
    prepare_flight_recorder(settings)
    prepare_waiting(settings)
    with running_compiler(settings.device) as compiler:
        make = partial(
            make_worker,
            settings.device,
            settings.model_roots,
            save_root=settings.save_root,
            profile_dir=profile_directory(settings),
            lora_roots=settings.lora_roots,
            hub=hub_settings(settings),
            compiler=compiler,
            max_kv_host_bytes=settings.max_kv_host_memory_bytes,
            kv_host_dir=settings.kv_host_dir,
            kv_file_dir=settings.kv_file_dir,
            kv_file_bytes=settings.kv_file_bytes,
        )
        return serve(
            settings,
            make,
            open_rendezvous,
            partial(open_fault_watch, settings.device),
            partial(open_gauges, settings.device),
            partial(find_gpu, settings.device),
        )


@contextmanager
def running_compiler(device: str) -> Iterator[KernelCompiler | None]:
    """Yield the compiler of a GPU's kernels, whose server imports Triton while this process imports
    torch. Yield None on the CPU, which has no kernels to compile."""
    if device == "cpu":
        yield None
        return
    with KernelCompiler.start(prepared_kernel_cache()) as compiler:
        yield compiler


def make_worker(
    device: str,
    model_roots: Sequence[Path],
    set_phase: SetPhase,
    find_upload: FindUpload,
    save_root: Path | None,
    profile_dir: Path | None = None,
    lora_roots: Sequence[Path] = (),
    compiler: KernelCompiler | None = None,
    hub: HubSettings = NO_HUB,
    max_kv_host_bytes: int | None = None,
    kv_host_dir: Path | None = None,
    kv_file_dir: Path | None = None,
    kv_file_bytes: int = DEFAULT_KV_FILE_BYTES,
) -> WorkerLike:
    """Load torch and make the worker; called on the step thread. Raises ConfigError if there is no
    such device, or if the directory of KV blocks cannot be this daemon's own; StartLaterError if
    there is no room for it."""
    # While torch is imported, garbage collections take tenths of a second and find nothing.
    gc.disable()
    if device != "cpu":
        threading.Thread(target=_prepare_triton, name="triton", daemon=True).start()
    from worker_daemon.device.init import find_device  # torch takes seconds; sockets are bound
    from worker_daemon.runner.connectors.file_traffic import FileTraffic
    from worker_daemon.worker.worker import Worker

    gc.collect()
    gc.freeze()
    gc.enable()
    find_device(device)
    kept = None if kv_host_dir is None else KeptMemory(kv_host_dir)
    traffic = None if kv_file_dir is None else FileTraffic(BlockFiles(kv_file_dir, kv_file_bytes))
    return Worker(
        device,
        model_roots,
        set_phase,
        save_root,
        profile_dir,
        num_threads=user_threads(),
        lora_roots=lora_roots,
        find_upload=find_upload,
        compiler=compiler,
        hub=hub,
        max_kv_host_bytes=max_kv_host_bytes,
        kv_traffic=traffic,
        kept_memory=kept,
    )


def _prepare_triton() -> None:
    """Import Triton and hash its files, on a separate thread while torch is imported. This takes
    0.4 s, mostly without the interpreter's lock."""
    with suppress(ImportError):  # init_device raises the error
        from worker_daemon.kernels.triton_hash import hash_triton

        hash_triton()


def open_fault_watch(device: str) -> FaultWatch | None:
    """Watch a GPU for faults; called on the thread that waits for them."""
    if device == "cpu":
        return None
    return fault_watch.open_fault_watch(nvml.load_nvml(), _visible(device))


def find_gpu(device: str) -> str:
    """Return a GPU's UUID; empty for the CPU, or if NVML does not report it. Creates no context."""
    if device == "cpu":
        return ""
    return nvml.find_uuid(nvml.load_nvml(), _visible(device))


def open_gauges(device: str) -> Gauges | None:
    """Open a GPU's gauges; called on the thread that reads them."""
    if device == "cpu":
        return None
    return gauges.open_gauges(nvml.load_nvml(), _visible(device))


def _visible(device: str) -> nvml.CudaDevice:
    return nvml.CudaDevice(device, visible_devices())


def open_rendezvous(host: str, num_ranks: int) -> RendezvousServerLike:
    """Open a rendezvous server on `host`; called once the worker is ready, so torch is loaded."""
    from worker_daemon.distributed.rendezvous import RendezvousServer  # loads torch

    return RendezvousServer(host, num_ranks)
