"""CUDA's driver by ctypes, for memory that processes share (CUDA driver API, "Interprocess
communication"): plain allocations, whose handles are plain bytes.

The calling thread has the device's context current, unless a function says otherwise.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, Final

from rpc_schema.errors import CapacityError, TransferError

HANDLE_BYTES: Final = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_LAUNCH = "cuMemcpyAsync"


class _IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


_SIGNATURES: Final[Mapping[str, Sequence[type[Any]]]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    _LAUNCH: (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
}


class IpcDriver:
    """Functions of the driver. Any thread may call them."""

    def __init__(self) -> None:
        """Raises TransferError if CUDA's driver is missing."""
        try:
            library, launcher = ctypes.CDLL(_LIBRARY), ctypes.PyDLL(_LIBRARY)
            self._functions = {name: library[name] for name in _SIGNATURES}
            # It keeps the interpreter, which other threads would take after each of many copies.
            self._functions[_LAUNCH] = launcher[_LAUNCH]
        except (OSError, AttributeError) as error:
            problem = f"memory cannot be shared with other processes: {error}"
            raise TransferError(
                problem, fix="CUDA's driver, or a host tier in host memory"
            ) from error
        for name, arguments in _SIGNATURES.items():
            self._functions[name].argtypes = arguments

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory. Raises CapacityError: the device has too little."""
        address = c_uint64()
        code = self._functions["cuMemAlloc_v2"](byref(address), num_bytes)
        if code == _OUT_OF_MEMORY:
            problem = f"the device has no {num_bytes} bytes left in one piece"
            raise CapacityError(
                problem, fix="a smaller kv_host_memory_bytes, or a smaller KV cache"
            )
        _check("cuMemAlloc_v2", code)
        return address.value

    def context(self) -> int:
        """Return the thread's context, for free()."""
        found = c_void_p()
        self._call("cuCtxGetCurrent", byref(found))
        return found.value or 0

    def free(self, address: int, context: int) -> None:
        """Free what allocate() gave in this context, on any thread. Waits for the device."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call("cuMemFree_v2", address)
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def export(self, address: int) -> bytes:
        """Return the handle of what allocate() gave. Raises TransferError: it cannot be shared."""
        handle = _IpcMemHandle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map another process's allocation, of any device that this one reaches; return its address
        here and its size. Raises TransferError."""
        address, start, size = c_uint64(), c_uint64(), c_size_t()
        copied = _IpcMemHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), copied, _LAZY_PEER_ACCESS)
        self._call("cuMemGetAddressRange_v2", byref(start), byref(size), address)
        return address.value, size.value

    def close(self, address: int) -> None:
        """Unmap what open() gave. No copy is in progress."""
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Start a copy on a stream. Raises TransferError."""
        self._call(_LAUNCH, target, source, num_bytes, stream)

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, self._functions[name](*arguments))


def _check(name: str, code: int) -> None:
    if code:
        fix = "both processes on one host, each seeing the other's GPU"
        raise TransferError(f"{name}: CUDA error {code}", fix=fix)
