"""Host values on their way to the device: one packed int32 buffer and one copy a step. Knows
nothing of what they mean."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[np.int64] | npt.NDArray[np.bool_], device: torch.device) -> Tensor:
    """Copy host values to the device without waiting for it: on CUDA from a pinned copy, which
    torch keeps until the device has read it."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostStaging:
    """Rotating host buffers: a buffer is written again only after its copy to the device is done.

    On CUDA the buffers are pinned and copies asynchronous; on the CPU a copy keeps the device's
    view apart from the buffer.
    """

    def __init__(self, capacity: int, device: torch.device, depth: int) -> None:
        """capacity: int32 values of the largest step; depth: steps in flight."""
        self._device = device
        self._buffers: deque[_PinnedBuffer] | None = None
        if device.type == "cuda":
            self._buffers = deque(_PinnedBuffer(capacity) for _ in range(depth))

    def upload(self, columns: Sequence[npt.NDArray[np.int32]]) -> tuple[Tensor, ...]:
        """Copy int32 columns to the device at once; return a device view of each, in order."""
        sizes = [column.size for column in columns]
        if self._buffers is None:
            return torch.split(torch.from_numpy(np.concatenate(columns)), sizes)
        self._buffers.rotate(-1)
        return torch.split(self._buffers[0].upload(columns, sum(sizes), self._device), sizes)


class _PinnedBuffer:
    def __init__(self, capacity: int) -> None:
        self._pinned = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self._values: npt.NDArray[np.int32] = self._pinned.numpy()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(
        self, columns: Sequence[npt.NDArray[np.int32]], size: int, device: torch.device
    ) -> Tensor:
        self._copied.synchronize()
        np.concatenate(columns, out=self._values[:size])
        on_device = self._pinned[:size].to(device, non_blocking=True)
        self._copied.record()
        return on_device
