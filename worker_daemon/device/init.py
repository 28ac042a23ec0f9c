"""Making the device usable: the context, its numerics and threads. Knows no group and no model."""

import torch

from worker_daemon.device.threads import Threads, use_threads
from worker_daemon.errors import ConfigError


def open_device(name: str, threads: Threads) -> torch.device:
    """Create the device's context and settle what torch does on the calling thread.

    Raises:
        ConfigError: there is no such device here.
    """
    use_threads(threads)
    torch.set_float32_matmul_precision("highest")
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _create_library_handles(device)
    return device


def find_device(name: str) -> torch.device:
    """Return a device that is here; nothing is created on it.

    Raises:
        ConfigError: there is no such device here; names those that there are.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_such_device(name) from None
    is_here = device.type == "cpu" or (
        device.type == "cuda"
        and torch.cuda.is_available()
        and (device.index or 0) < torch.cuda.device_count()
    )
    if not is_here:
        raise _no_such_device(name)
    return device


def _create_library_handles(device: torch.device) -> None:
    """Make cuBLAS take its workspace now, so that it counts to the baseline and not to the KV
    cache."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones((16, 16), dtype=dtype, device=device)
        torch.mm(square, square)
    torch.cuda.synchronize(device)


def open_capture_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream on which all graphs are captured, None on the CPU.

    To be opened once a process: cuBLAS has a workspace for it as long as that lives. It has it from
    now on: else the first capture would take it into its graphs' memory, and keep that from being
    given back when the graphs go.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        _create_library_handles(device)
    return stream


def device_name(device: torch.device) -> str:
    """Return what the vendor calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the device computes in dtype."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def _no_such_device(name: str) -> ConfigError:
    count = torch.cuda.device_count()
    known = ["cpu", *(f"cuda:{index}" for index in range(count))]
    built = "" if torch.version.cuda else "; this torch is built without CUDA"
    return ConfigError(
        "no such device", field="device", value=name, fix=f"use one of {known}{built}"
    )
