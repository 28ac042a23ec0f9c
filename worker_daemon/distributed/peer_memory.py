"""Shares device memory with other processes, by file descriptors of CUDA's driver.

The physical memory exists until the last process unmaps it, so the death of a peer does not remove
memory that a kernel uses (CUDA driver API, "Virtual Memory Management").
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Final

_LIBRARY = "libcuda.so.1"
_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
_RECOMMENDED_GRANULARITY = 1


class PeerMemoryError(Exception):
    """The driver cannot share memory here; the device is not at fault."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_metadata", c_void_p),
        ("compression", c_ubyte),
        ("direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_Scalar = type[c_void_p] | type[c_int] | type[c_uint] | type[c_size_t] | type[c_uint64]

_SIGNATURES: Final[Mapping[str, Sequence[_Scalar]]] = {
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (c_void_p, c_void_p, c_int),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemsetD32_v2": (c_uint64, c_uint, c_size_t),
}


class CudaDriver:
    """The functions of CUDA's driver that this module uses. The calling thread has a current
    context."""

    def __init__(self) -> None:
        """Raise PeerMemoryError if there is no such driver."""
        try:
            library = ctypes.CDLL(_LIBRARY)
            self._functions = {name: library[name] for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise PeerMemoryError(f"{_LIBRARY}: {error}") from error
        for name, arguments in _SIGNATURES.items():
            self._functions[name].argtypes = arguments

    def call(self, name: str, *arguments: object) -> None:
        """Call the function; raise PeerMemoryError with its name and error code on failure."""
        code = self._functions[name](*arguments)
        if code:
            raise PeerMemoryError(f"{name}: CUDA error {code}")


class MappedBlock:
    """One block of physical memory, of this process or a peer's, mapped here until `release`."""

    def __init__(self, driver: CudaDriver, handle: int, num_bytes: int, device: int) -> None:
        """Take ownership of the handle. device: ordinal of the device that will read and write."""
        self._driver = driver
        self._handle = handle
        self.num_bytes = num_bytes
        self.address = 0
        self._is_mapped = False
        try:
            self._map(device)
        except PeerMemoryError:
            self.release()
            raise

    def _map(self, device: int) -> None:
        address = c_uint64()
        self._driver.call("cuMemAddressReserve", byref(address), self.num_bytes, 0, 0, 0)
        self.address = address.value
        self._driver.call("cuMemMap", self.address, self.num_bytes, 0, self._handle, 0)
        self._is_mapped = True
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._driver.call("cuMemSetAccess", self.address, self.num_bytes, byref(access), 1)

    def fill(self, word: int) -> None:
        """Set every 4-byte word; enqueued on the default stream."""
        self._driver.call("cuMemsetD32_v2", self.address, word, self.num_bytes // 4)

    def export(self) -> int:
        """Return a new file descriptor of the physical memory; the caller closes it."""
        descriptor = c_int()
        self._driver.call(
            "cuMemExportToShareableHandle", byref(descriptor), self._handle, _FILE_DESCRIPTOR, 0
        )
        return descriptor.value

    def release(self) -> None:
        """Unmap and release the memory. Nothing on the device may use the address any more.
        Idempotent."""
        if self._is_mapped:
            self._is_mapped = False
            self._driver.call("cuMemUnmap", self.address, self.num_bytes)
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemAddressFree", address, self.num_bytes)
        if self._handle:
            handle, self._handle = self._handle, 0
            self._driver.call("cuMemRelease", handle)


def allocate(driver: CudaDriver, num_bytes: int, device: int) -> MappedBlock:
    """Map at least num_bytes of new memory of a device, which can be exported.

    Raises:
        PeerMemoryError: it cannot be allocated.
    """
    properties = _Properties()
    properties.type = _PINNED
    properties.handle_types = _FILE_DESCRIPTOR
    properties.location = _Location(_ON_DEVICE, device)
    granularity, handle = c_size_t(), c_uint64()
    driver.call(
        "cuMemGetAllocationGranularity",
        byref(granularity),
        byref(properties),
        _RECOMMENDED_GRANULARITY,
    )
    size = -(-num_bytes // granularity.value) * granularity.value
    driver.call("cuMemCreate", byref(handle), size, byref(properties), 0)
    return MappedBlock(driver, handle.value, size, device)


def adopt(driver: CudaDriver, descriptor: int, num_bytes: int, device: int) -> MappedBlock:
    """Map a peer's exported block, of the same num_bytes. The caller closes the descriptor.

    Raises:
        PeerMemoryError: device cannot reach it.
    """
    handle = c_uint64()
    driver.call("cuMemImportFromShareableHandle", byref(handle), descriptor, _FILE_DESCRIPTOR)
    return MappedBlock(driver, handle.value, num_bytes, device)
