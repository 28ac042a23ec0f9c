"""Page-locked host memory, and copies between it and a device, concurrent with the device's other
work. On the CPU both are plain memory and plain copies."""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpc_schema.errors import CapacityError


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy host values to the device without waiting for it: on CUDA from a pinned copy, which
    torch keeps until the device has read it."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_rows(
    values: npt.NDArray[np.int32], indices: npt.NDArray[np.int64], device: torch.device
) -> Tensor:
    """Copy these rows of int32 [M, W] to the device, as upload does: they are copied once on the
    host, into pinned memory."""
    shape = (indices.size, values.shape[1])
    staged = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    np.take(values, indices, axis=0, out=staged.numpy(), mode="clip")  # "raise" would copy twice
    return staged.to(device, non_blocking=True)


def download(column: Tensor) -> Tensor:
    """Copy device values to page-locked host memory without waiting for them; values on the host
    are returned as they are."""
    if column.device.type == "cpu":
        return column
    pinned = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return pinned.copy_(column, non_blocking=True)


class PinnedBuffer:
    """Host memory that a device reads at full speed: mapped, touched and registered, which takes
    half as long as allocating it by the driver. Page-locked until release()."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises CapacityError if the host cannot lock that much memory."""
        try:
            self._map = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise CapacityError(f"{num_bytes} bytes of host memory cannot be allocated") from error
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages uses small ones
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        """The bytes, writable, for readers of files."""
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8).zero_()
        """The same bytes as a tensor [num_bytes]."""
        self._registered = device.type == "cuda"
        if self._registered:
            page_lock(self.bytes)

    def release(self) -> None:
        """Unlock the memory. No copy from it may be in progress. Idempotent."""
        if self._registered:
            self._registered = False
            page_unlock(self.bytes)


def page_lock(data: Tensor) -> None:
    """Lock host memory for copies by the current device. Raises CapacityError if the host cannot
    lock that much."""
    code = int(_cuda_runtime().cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if code:
        problem = f"{data.numel()} bytes of host memory cannot be page-locked (CUDA error {code})"
        raise CapacityError(problem, fix="raise the limit of locked memory (ulimit -l)")


def page_unlock(data: Tensor) -> None:
    """Unlock what page_lock has locked."""
    _cuda_runtime().cudaHostUnregister(data.data_ptr())


def _cuda_runtime() -> Any:
    """Return the CUDA runtime, which torch exposes without types."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class DeviceCopier:
    """Copies between host memory and a device's tensors, in the order of the calls. In this class,
    for the CPU, a copy is done when the call returns."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy host memory [...] to a device's target [...], converting, or a device's source to
        host memory of its dtype. Until a mark set after this call has passed, source must not
        change and target is not ready."""
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until every copy so far is done."""
        return self.settle

    def settle(self) -> None:
        """Wait for all copies; work that is queued on the device afterwards sees them."""


class CudaCopier(DeviceCopier):
    """Copies on a separate stream, after the work queued on the current stream at construction."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            same_type = source.dtype == target.dtype
            local = source if same_type else source.to(target.device, non_blocking=True)
            target.copy_(local, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize

    def settle(self) -> None:
        self._stream.synchronize()


def open_uploads(device: torch.device) -> DeviceCopier:
    """Return the copier for a device."""
    return CudaCopier(device) if device.type == "cuda" else DeviceCopier()
