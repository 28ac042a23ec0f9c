"""Host values on their way to the device: one packed int32 buffer and one copy a step. Knows
nothing of what they mean."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_daemon.runner.request_state import Int32s
from worker_daemon.runner.step_layout import StepColumns, StepShape, packed_size, split_columns


def upload(values: npt.NDArray[np.int64] | npt.NDArray[np.bool_], device: torch.device) -> Tensor:
    """Copy host values to the device without waiting for it: on CUDA from a pinned copy, which
    torch keeps until the device has read it."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Packed(Protocol):
    """One step's buffer: fill the host's columns, then upload them."""

    @property
    def host(self) -> StepColumns[Int32s]:
        """Columns to fill, all of them: what they held before is undefined."""

    def upload(self) -> StepColumns[Tensor]:
        """Start the copy; return the device's columns, valid until the next step's upload."""


class Staging(Protocol):
    """Gives out one packed buffer a step."""

    def open(self, shape: StepShape) -> Packed:
        """Return a buffer for columns of these sizes."""

    def keep(self, shapes: Iterable[StepShape]) -> None:
        """Make the views of these shapes ahead: they will come back again and again."""


class HostStaging:
    """The staging of a device that is the host: the buffer is the copy."""

    def open(self, shape: StepShape) -> Packed:
        return _HostPacked(shape)

    def keep(self, shapes: Iterable[StepShape]) -> None:
        return None


class _HostPacked:
    def __init__(self, shape: StepShape) -> None:
        self._shape = shape
        self._values = np.empty(packed_size(shape), np.int32)
        self.host: StepColumns[Int32s] = split_columns(shape, lambda a, b: self._values[a:b])

    def upload(self) -> StepColumns[Tensor]:
        values = torch.from_numpy(self._values)
        return split_columns(self._shape, lambda a, b: values[a:b])


class CudaStaging:
    """Rotating pinned buffers and one device buffer at a fixed address, which captured graphs read.

    A pinned buffer is written again only after its copy to the device is done. Steps run on one
    stream, so the device buffer is overwritten only behind the step that read it.
    """

    def __init__(self, capacity: int, device: torch.device, depth: int) -> None:
        """capacity: int32 values of the largest step; depth: steps in flight."""
        self._on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._buffers = deque(_PinnedBuffer(capacity) for _ in range(depth))
        self._kept: dict[StepShape, StepColumns[Tensor]] = {}

    def open(self, shape: StepShape) -> Packed:
        self._buffers.rotate(-1)
        buffer = self._buffers[0]
        return _PinnedPacked(
            buffer,
            buffer.columns(shape),
            self._device_columns(shape),
            self._on_device[: packed_size(shape)],
        )

    def keep(self, shapes: Iterable[StepShape]) -> None:
        for shape in shapes:
            self._kept[shape] = self._device_columns(shape)
            for buffer in self._buffers:
                buffer.keep(shape)

    def _device_columns(self, shape: StepShape) -> StepColumns[Tensor]:
        kept = self._kept.get(shape)
        return kept or split_columns(shape, lambda a, b: self._on_device[a:b])


class _PinnedBuffer:
    def __init__(self, capacity: int) -> None:
        self.pinned = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._values: Int32s = self.pinned.numpy()
        self._kept: dict[StepShape, StepColumns[Int32s]] = {}

    def columns(self, shape: StepShape) -> StepColumns[Int32s]:
        """Views of the buffer; waits until its last copy is done."""
        self.copied.synchronize()
        return self._kept.get(shape) or self._split(shape)

    def keep(self, shape: StepShape) -> None:
        self._kept[shape] = self._split(shape)

    def _split(self, shape: StepShape) -> StepColumns[Int32s]:
        return split_columns(shape, lambda a, b: self._values[a:b])


class _PinnedPacked:
    def __init__(
        self,
        buffer: _PinnedBuffer,
        host: StepColumns[Int32s],
        on_device: StepColumns[Tensor],
        target: Tensor,
    ) -> None:
        self.host = host
        self._buffer = buffer
        self._on_device = on_device
        self._target = target

    def upload(self) -> StepColumns[Tensor]:
        size = self._target.shape[0]
        self._target.copy_(self._buffer.pinned[:size], non_blocking=True)
        self._buffer.copied.record()
        return self._on_device


def staging(capacity: int, device: torch.device, depth: int) -> Staging:
    """Return the staging for a device. Sizes are CudaStaging's."""
    return CudaStaging(capacity, device, depth) if device.type == "cuda" else HostStaging()
