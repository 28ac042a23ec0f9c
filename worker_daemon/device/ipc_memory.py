"""CUDA memory of another process, opened by a 64-byte handle and mapped here until closed.

The handle is plain bytes, made by cuIpcGetMemHandle in the other process.
"""

import torch
from torch import Tensor

from rpc_schema.errors import TransferError
from worker_daemon.device.cuda_pages import CudaArray
from worker_daemon.device.ipc_driver import IpcDriver


class ImportedMemory:
    """Allocations of another process, each opened once. Belongs to the step thread, whose device is
    current; no tensor of them may be used after close()."""

    def __init__(self, device: torch.device) -> None:
        """Raises TransferError if CUDA's driver is missing."""
        self._driver = IpcDriver()
        self._device = device
        self._addresses: list[int] = []
        """Addresses of what is mapped."""
        self._allocations: dict[bytes, Tensor] = {}
        """By handle, uint8 [size]."""
        self._arrays: dict[tuple[int, int], CudaArray] = {}
        """By address and size, also of what is unmapped: torch keeps references to parts of each
        one that it makes a tensor of, and addresses come again."""

    def view(
        self, handle: bytes, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor in the allocation of that handle, offset bytes from its start.

        Raises:
            TransferError: the handle cannot be opened here, or the tensor is outside its block.
        """
        allocation = self._open(handle)
        size = allocation.numel()
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        if offset + num_bytes > size or offset % dtype.itemsize:
            problem = f"a tensor of {num_bytes} bytes is outside the trainer's block of {size}"
            fix = "offsets count from the start of the allocation"
            raise TransferError(problem, field="offsets", value=offset, fix=fix)
        return allocation[offset : offset + num_bytes].view(dtype).view(shape)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._allocations.clear()
        while self._addresses:
            self._driver.close(self._addresses.pop())

    def _open(self, handle: bytes) -> Tensor:
        """Return an allocation."""
        if handle not in self._allocations:
            place = self._driver.open(handle)
            self._addresses.append(place[0])
            array = self._arrays.setdefault(place, CudaArray(*place))
            self._allocations[handle] = torch.as_tensor(array, device=self._device)
        return self._allocations[handle]
