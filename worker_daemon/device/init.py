"""Making the device usable: the context, its numerics and threads. Knows no group and no model."""

import os

import torch

from worker_daemon.errors import ConfigError


def open_device(name: str, local_world_size: int, max_threads: int) -> torch.device:
    """Create the device's context and settle what torch does on the calling thread.

    local_world_size is the number of daemons that share this host's cores; max_threads bounds
    torch's threads besides, as OMP_NUM_THREADS does.

    Raises:
        ConfigError: there is no such device here.
    """
    share = len(os.sched_getaffinity(0)) // local_world_size
    torch.set_num_threads(max(1, min(share, max_threads)))
    torch.set_float32_matmul_precision("highest")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_such_device(name) from None
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise _no_such_device(name)
        torch.cuda.set_device(device)
        _create_library_handles(device)
    elif device.type != "cpu":
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
    return ConfigError("no such device", field="device", value=name, fix=f"one of {known}")
