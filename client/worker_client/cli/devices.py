"""The devices that commands can start daemons on."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Final

from rpc_schema.config import ParallelConfig
from worker_client.errors import config_error

MAX_LOCAL_RANKS: Final = 256


class Device(StrEnum):
    """Device of local daemons."""

    CPU = "cpu"
    CUDA = "cuda"


def default_device() -> Device:
    """Return cuda if there is an NVIDIA device node."""
    found = any(Path("/dev").glob("nvidia[0-9]*"))
    return Device.CUDA if found else Device.CPU


def cuda_devices() -> list[str]:
    """Return the GPUs that daemons can be started on. Raises ClientConfigError: there is none."""
    found = _num_gpus()
    if not found:
        fix = "give --device cpu, or make the GPU visible (CUDA_VISIBLE_DEVICES, /dev/nvidia0)"
        raise config_error("device", Device.CUDA.value, "there is no GPU", fix)
    return [f"cuda:{index}" for index in range(found)]


def chosen_devices(device: Device, gpus: str | None) -> list[str]:
    """Return the devices that daemons can be started on: the GPUs that were named (`0,1`), or all,
    or the CPU. Raises ClientConfigError."""
    if device is Device.CPU:
        if gpus is not None:
            fix = "leave out --gpus, or --device cpu"
            raise config_error("gpus", gpus, "the device is the CPU", fix)
        return ["cpu"]
    if gpus is not None:
        names = [name.strip() for name in gpus.split(",")]
        if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
            fix = "give their indices, each once, as in 0,1"
            raise config_error("gpus", gpus, "these are no GPUs", fix)
        return [f"cuda:{name}" for name in names]
    return cuda_devices()


def default_devices(device: Device, parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the device of each rank's daemon where none was chosen: GPUs in order, or the CPU.
    Raises ClientConfigError: they are too many."""
    cuda, num_ranks = device is Device.CUDA, parallel.world_size_across_dp
    if num_ranks > MAX_LOCAL_RANKS:
        sizes = (
            parallel.data_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.tensor_parallel_size,
        )
        problem = f"one host has no devices for {num_ranks} ranks"
        fix = f"use at most {MAX_LOCAL_RANKS}, or --endpoints of daemons on several hosts"
        raise config_error("parallel", sizes, problem, fix)
    return tuple(f"cuda:{index}" if cuda else "cpu" for index in range(num_ranks))


def placed_ranks(device: Device, gpus: str | None, num_ranks: int) -> tuple[str, ...]:
    """Return the device of each rank's daemon. Raises ClientConfigError: there are too few."""
    found = chosen_devices(device, gpus)
    if device is Device.CPU:
        return ("cpu",) * num_ranks
    if num_ranks > len(found):
        problem = f"{num_ranks} ranks need as many GPUs, and there are {len(found)}"
        fix = "use smaller parallel sizes, or --endpoints of daemons on several hosts"
        raise config_error("gpus", gpus, problem, fix)
    return tuple(found[:num_ranks])


def _num_gpus() -> int:
    """Return the number of GPUs that processes of ours can use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = [name.strip() for name in visible.split(",")]
    wrong = [place for place, name in enumerate(names) if name in ("", "-1")]
    return wrong[0] if wrong else len(names)
