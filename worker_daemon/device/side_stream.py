"""Device work of a thread beside the steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """Belongs to one thread. In this class, for the CPU, all is done when a call returns."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread's device work in the block. It is ordered with no other: begin with what
        is known to be there, and settle() before others may read."""
        yield

    def to_host(self, values: Tensor) -> Tensor:
        """Copy a device's values to host memory, and wait for them."""
        return values

    def to_device(self, values: Tensor) -> Tensor:
        """Copy host values to the device."""
        return values

    def settle(self) -> None:
        """Wait until all is done."""


class CudaSideStream(SideStream):
    """For CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        torch.cuda.set_device(self._device)  # the current device is per thread
        # Streams of one priority share hardware queues: copies would wait behind steps there.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            # A launch makes the context current, which set_device does not do for a first device:
            # calls of CUDA's driver need it.
            torch.zeros(1, device=self._device)
            yield

    def to_host(self, values: Tensor) -> Tensor:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        self.settle()
        return pinned

    def to_device(self, values: Tensor) -> Tensor:
        return values.to(self._device)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def open_side_stream(device: torch.device) -> SideStream:
    """Return that of a device."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()
