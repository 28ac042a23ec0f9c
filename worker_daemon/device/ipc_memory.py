"""CUDA memory of another process, opened by a 64-byte handle and mapped here until closed.

Uses CUDA's driver (CUDA driver API, "Interprocess communication"): the handle is plain bytes, made
by cuIpcGetMemHandle in the other process.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, Final

import torch
from torch import Tensor

from rpc_schema.errors import TransferError
from worker_daemon.device.cuda_pages import CudaArray

HANDLE_BYTES: Final = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1


class _IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


_SIGNATURES: Final[Mapping[str, Sequence[type[Any]]]] = {
    "cuIpcOpenMemHandle_v2": (c_void_p, _IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
}


class ImportedMemory:
    """Allocations of another process, each opened once. Belongs to the step thread, whose device is
    current; no tensor of them may be used after close()."""

    def __init__(self, device: torch.device) -> None:
        """Raises TransferError if CUDA's driver is missing."""
        try:
            library = ctypes.CDLL(_LIBRARY)
            self._functions = {name: library[name] for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            problem = f"no memory of other processes can be mapped: {error}"
            raise TransferError(problem, field="engine", fix="use gloo, nccl or disk") from error
        for name, arguments in _SIGNATURES.items():
            self._functions[name].argtypes = arguments
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
            self._call("cuIpcCloseMemHandle", self._addresses.pop())

    def _open(self, handle: bytes) -> Tensor:
        """Return an allocation."""
        if handle not in self._allocations:
            address, start, size = c_uint64(), c_uint64(), c_size_t()
            copied = _IpcMemHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", byref(address), copied, _LAZY_PEER_ACCESS)
            self._addresses.append(address.value)
            self._call("cuMemGetAddressRange_v2", byref(start), byref(size), address)
            place = address.value, size.value
            array = self._arrays.setdefault(place, CudaArray(*place))
            self._allocations[handle] = torch.as_tensor(array, device=self._device)
        return self._allocations[handle]

    def _call(self, name: str, *arguments: object) -> None:
        code = self._functions[name](*arguments)
        if code:
            fix = "trainer and worker must be on one host and see each other's GPU"
            raise TransferError(f"{name}: CUDA error {code}", field="handles", fix=fix)
