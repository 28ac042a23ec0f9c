"""Opens a device: its context, numerics and threads."""

from typing import Final

import torch

from rpc_schema.errors import ConfigError
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.device.threads import Threads
from worker_daemon.errors import config_error

_FIRST_WITH_FP8: Final = (8, 9)
_FIRST_WITH_FP8_KERNELS: Final = (9, 0)
"""The first compute capability with conversions from and to float8_e4m3fn."""


def open_device(name: str, threads: Threads) -> torch.device:
    """Create the device's context, and set torch's precision and the calling thread's threads.

    Raises:
        ConfigError: there is no such device here.
    """
    torch.set_num_threads(threads.num)
    torch.set_float32_matmul_precision("highest")
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _create_library_handles(device)
    return device


def find_device(name: str) -> torch.device:
    """Return a device of this host; creates nothing on it.

    Raises:
        ConfigError: there is no such device here; the message lists the devices.
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
    """Make cuBLAS allocate its workspace now, so that the memory baseline includes it."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones((16, 16), dtype=dtype, device=device)
        torch.mm(square, square)
    torch.cuda.synchronize(device)


def open_capture_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream on which all graphs are captured; None on the CPU.

    Open it once per process: cuBLAS keeps a workspace for each stream until the process ends. The
    workspace is allocated here; otherwise the first capture would allocate it in the graphs' memory
    pool, which could then not be freed with the graphs.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        _create_library_handles(device)
    return stream


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the device computes in dtype, or converts it if it is of eight bits."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cuda" and dtype is FP8:
        return torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8
    return True


def computes_in_fp8(device: torch.device) -> bool:
    """Return True if our kernels multiply in FP8 there: it is a GPU with Hopper's products."""
    is_cuda = device.type == "cuda"
    return is_cuda and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8_KERNELS


def _no_such_device(name: str) -> ConfigError:
    count = torch.cuda.device_count()
    known = ["cpu", *(f"cuda:{index}" for index in range(count))]
    built = "" if torch.version.cuda else "; this torch is built without CUDA"
    return config_error("device", name, "no such device", f"use one of {known}{built}")
