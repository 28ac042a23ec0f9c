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
_LAUNCHES: Final = ("cuMemcpyAsync", "cuMemcpy2DAsync_v2")
_UNIFIED: Final = 4
"""CU_MEMORYTYPE_UNIFIED: the driver knows an address's device."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_uint),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_uint),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


class _IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


_SIGNATURES: Final[Mapping[str, Sequence[type[Any]]]] = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
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
            # They keep the interpreter, which other threads would take after each of many copies.
            self._functions |= {name: launcher[name] for name in _LAUNCHES}
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
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def copy_columns(
        self, target: int, source: int, pitch: int, num_bytes: int, num_rows: int, stream: int
    ) -> None:
        """Start to copy so many bytes of each of some rows on a stream; pitch: from a row to the
        next, on both sides. Raises TransferError."""
        made = _Copy2D(
            srcMemoryType=_UNIFIED,
            srcDevice=source,
            srcPitch=pitch,
            dstMemoryType=_UNIFIED,
            dstDevice=target,
            dstPitch=pitch,
            WidthInBytes=num_bytes,
            Height=num_rows,
        )
        self._call("cuMemcpy2DAsync_v2", byref(made), stream)

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, self._functions[name](*arguments))


def _check(name: str, code: int) -> None:
    if code:
        fix = "both processes on one host, each seeing the other's GPU"
        raise TransferError(f"{name}: CUDA error {code}", fix=fix)
