"""Host values on their way to the device: one packed int32 buffer and one copy a step. Knows
nothing of what they mean."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker_daemon.runner.request_state import Int32s
from worker_daemon.runner.step_layout import StepColumns, StepShape, packed_size, split_columns


class Packed(Protocol):
    """One step's buffer: fill the host's columns, then upload them."""

    holds: object
    """What the columns were filled for when this buffer was used last with these sizes, as its user
    noted it; None if they hold nothing of use."""

    @property
    def host(self) -> StepColumns[Int32s]:
        """Columns to fill: all of them, unless `holds` says what they hold already."""

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

    def __init__(self) -> None:
        self._last = _HostPacked(StepShape(0, 0, 0, 0, 0))

    def open(self, shape: StepShape) -> Packed:
        if self._last.shape != shape:
            self._last = _HostPacked(shape)
        return self._last

    def keep(self, shapes: Iterable[StepShape]) -> None:
        return None


class _HostPacked:
    def __init__(self, shape: StepShape) -> None:
        values = np.empty(packed_size(shape), np.int32)
        tensor = torch.from_numpy(values)
        self.shape = shape
        self.holds: object = None
        self.host: StepColumns[Int32s] = split_columns(shape, lambda a, b: values[a:b])
        self._on_device: StepColumns[Tensor] = split_columns(shape, lambda a, b: tensor[a:b])

    def upload(self) -> StepColumns[Tensor]:
        return self._on_device


class CudaStaging:
    """Rotating pinned buffers and one device buffer at a fixed address, which captured graphs read.

    A pinned buffer is written again only after its copy to the device is done. Steps run on one
    stream, so the device buffer is overwritten only behind the step that read it.
    """

    def __init__(self, capacity: int, device: torch.device, depth: int) -> None:
        """capacity: int32 values of the largest step; depth: steps in flight."""
        self._on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._buffers = deque(_PinnedBuffer(self._on_device) for _ in range(depth))

    def open(self, shape: StepShape) -> Packed:
        self._buffers.rotate(-1)
        return self._buffers[0].open(shape)

    def keep(self, shapes: Iterable[StepShape]) -> None:
        for shape in shapes:
            for buffer in self._buffers:
                buffer.keep(shape)


class _PinnedBuffer:
    """One pinned buffer, and its views by shape."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self.pinned = torch.empty(on_device.shape, dtype=torch.int32, pin_memory=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._kept: dict[StepShape, _PinnedPacked] = {}
        self._last: _PinnedPacked | None = None

    def open(self, shape: StepShape) -> Packed:
        """Return the views for a shape; waits until the last copy is done."""
        self.copied.synchronize()
        packed = self._kept.get(shape) or _PinnedPacked(self, shape)
        if self._last is not None and self._last is not packed:
            self._last.holds = None  # its columns are about to be overwritten
        self._last = packed
        return packed

    def keep(self, shape: StepShape) -> None:
        """Make a shape's views now."""
        self._kept[shape] = _PinnedPacked(self, shape)


class _PinnedPacked:
    def __init__(self, buffer: _PinnedBuffer, shape: StepShape) -> None:
        values: Int32s = buffer.pinned.numpy()
        size = packed_size(shape)
        self.holds: object = None
        self.host: StepColumns[Int32s] = split_columns(shape, lambda a, b: values[a:b])
        self._on_device: StepColumns[Tensor] = split_columns(
            shape, lambda a, b: buffer.on_device[a:b]
        )
        self._source, self._target = buffer.pinned[:size], buffer.on_device[:size]
        self._copied = buffer.copied

    def upload(self) -> StepColumns[Tensor]:
        self._target.copy_(self._source, non_blocking=True)
        self._copied.record()
        return self._on_device


def staging(capacity: int, device: torch.device, depth: int) -> Staging:
    """Return the staging for a device. Sizes are CudaStaging's."""
    return CudaStaging(capacity, device, depth) if device.type == "cuda" else HostStaging()
