"""Classifies exceptions of torch, Triton and the host about memory and devices, and converts them
to the daemon's typed errors.

An error of the device itself is sticky: every later call fails too, and only the end of the process
frees the device. A lack of memory is not sticky.
"""

import re
import traceback
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

import torch

from rpc_schema.errors import DeviceError, OutOfMemoryError
from worker_daemon.device.host_limits import MEMINFO, STATUS, read_sizes

STEP_FIX: Final = "smaller steps, or less of the memory for the KV cache"

_OUT_OF_MEMORY_CODE: Final = 2
_HARMLESS_CODES: Final = frozenset((1, 9, 98, 209, 701, 801, *range(900, 910)))
"""CUDA errors of one call, after which the next may succeed: an invalid value or configuration, a
kernel that the device lacks or cannot launch, and the errors of graph capture."""

_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_LOST: Final = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "misaligned address",
    "an illegal instruction was encountered",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
)
"""Messages of sticky errors, from CUDA's runtime (cudaGetErrorString) and its libraries."""

_ASKED: Final = re.compile(r"ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_FREE: Final = re.compile(r"of which ([\d.]+) (bytes|[KMGT]iB) is free")
_UNITS: Final = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


class FailureKind(Enum):
    """The kinds of exceptions."""

    OUT_OF_MEMORY = 0
    LOST = 1
    OTHER = 2


def failure_kind(error: BaseException) -> FailureKind:
    """Classify an exception."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemoryError):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, DeviceError):
        return FailureKind.LOST
    return _kind_by_text(error) if isinstance(error, RuntimeError) else FailureKind.OTHER


def _kind_by_text(error: RuntimeError) -> FailureKind:
    """Classify an exception of torch or Triton by its text, as it has no specific class."""
    text = str(error)
    code = _cuda_code(error)
    if code == _OUT_OF_MEMORY_CODE or any(words in text for words in _OUT_OF_MEMORY):
        return FailureKind.OUT_OF_MEMORY
    if any(words in text for words in _LOST):
        return FailureKind.LOST
    # torch's class for device errors: unless known to be harmless, the error counts as sticky.
    if isinstance(error, torch.AcceleratorError) and code not in _HARMLESS_CODES:
        return FailureKind.LOST
    return FailureKind.OTHER


def typed_device_error(error: Exception, fix: str = STEP_FIX) -> Exception:
    """Return OutOfMemoryError for a lack of memory, DeviceError for a lost device, and any other
    error unchanged. fix: the advice for a lack of memory."""
    if isinstance(error, OutOfMemoryError | DeviceError):
        return error
    kind = failure_kind(error)
    if kind is FailureKind.OUT_OF_MEMORY:
        return out_of_memory(error, fix)
    if kind is FailureKind.LOST:
        return DeviceError(f"the device is lost: {_first_line(error)}")
    return error


def out_of_memory(error: Exception, fix: str, what: str = "out of memory") -> OutOfMemoryError:
    """Return the typed error for an exception of kind OUT_OF_MEMORY, with the bytes that were asked
    for and those that were free."""
    if isinstance(error, OutOfMemoryError):
        return OutOfMemoryError(
            what, needed_bytes=error.needed_bytes, free_bytes=error.free_bytes, fix=fix
        )
    text = str(error)
    free = _bytes(_FREE, text)
    if free is None and not _is_of_cuda(error):
        free = _free_host_bytes()
    detail = f": {_first_line(error)}" if text else ""
    problem = f"{what}{detail}"
    return OutOfMemoryError(problem, needed_bytes=_bytes(_ASKED, text), free_bytes=free, fix=fix)


def drop_scratch(error: BaseException) -> None:
    """Free the tensors that the exception's frames still hold, and empty the allocator's cache. Not
    for a lost device."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _cuda_code(error: RuntimeError) -> int | None:
    """Return the error number of an AcceleratorError."""
    code = getattr(error, "error_code", None)
    if code is None and isinstance(error, torch.AcceleratorError) and len(error.args) > 1:
        code = error.args[1]
    return code if isinstance(code, int) else None


def _is_of_cuda(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "CU" in str(error)


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found[1]) * (1 << _UNITS[found[2]]))


def _free_host_bytes() -> int | None:
    """Return what this process could still allocate: of the host's memory, and of its own limits;
    None if Linux reports neither."""
    figures: list[int] = []
    with suppress(OSError, KeyError):
        figures.append(read_sizes(MEMINFO)["MemAvailable"])
    with suppress(OSError):
        limits, sizes = Path("/proc/self/limits").read_text("ascii"), read_sizes(STATUS)
        for name, used in (("Max address space", "VmSize"), ("Max data size", "VmData")):
            limit = re.search(rf"{name}\s+(\d+)", limits)
            if limit is not None and used in sizes:
                figures.append(max(0, int(limit[1]) - sizes[used]))
    return min(figures, default=None)


def _first_line(error: Exception) -> str:
    """Return the first line: torch's messages continue with advice for debugging."""
    return next(iter(str(error).splitlines()), type(error).__name__)
