"""Pages of a GPU's memory, for arenas: CUDA's driver maps physical memory into a reserved range of
addresses and unmaps it (CUDA driver API, "Virtual Memory Management"). torch's allocator is not
involved.

The calling thread has the device's context current. cuda-bindings comes with torch's CUDA builds
and is imported only when an arena is made on a GPU.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from rpc_schema.errors import CapacityError, ConfigError, DeviceError
from worker_daemon.errors import config_error

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
_NOT_SUPPORTED: Final = 801


class CudaPages:
    """A GPU's counterpart of HostPages. Every map() is one physical allocation."""

    def __init__(self, num_bytes: int, device: torch.device, driver: Any = None) -> None:
        """Reserve addresses, rounded up to the driver's granularity. driver: the bindings to use
        instead of the installed module.

        Raises:
            ConfigError: there are no bindings here, or the device does not support this.
            CapacityError: the addresses cannot be reserved.
        """
        self._driver = _bindings() if driver is None else driver
        self._device = device
        ordinal = device.index or 0
        self._properties = self._describe(ordinal)
        self._access = self._grant(ordinal)
        kinds = self._driver.CUmemAllocationGranularity_flags
        (granularity,) = _call(
            self._driver.cuMemGetAllocationGranularity,
            self._properties,
            kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self.granularity = int(granularity)
        self.size_bytes = max(1, -(-num_bytes // self.granularity)) * self.granularity
        self._blocks: dict[int, tuple[int, Any]] = {}
        """Offset -> (size, physical allocation) of each mapping."""
        self._address = 0
        (address,) = _call(self._driver.cuMemAddressReserve, self.size_bytes, 0, 0, 0)
        self._address = int(address)

    def map(self, offset: int, num_bytes: int) -> None:
        """See HostPages."""
        address = self._address + offset
        (block,) = _call(self._driver.cuMemCreate, num_bytes, self._properties, 0)
        try:
            _call(self._driver.cuMemMap, address, num_bytes, 0, block, 0)
        except BaseException:
            _call(self._driver.cuMemRelease, block)
            raise
        self._blocks[offset] = (num_bytes, block)
        try:
            _call(self._driver.cuMemSetAccess, address, num_bytes, [self._access], 1)
        except BaseException:
            self.unmap(offset, num_bytes)
            raise

    def unmap(self, offset: int, num_bytes: int) -> None:
        """See HostPages."""
        stop = offset + num_bytes
        going = [start for start in sorted(self._blocks) if offset <= start < stop]
        assert sum(self._blocks[start][0] for start in going) == num_bytes, "what map() gave"
        _call(self._driver.cuMemUnmap, self._address + offset, num_bytes)
        for start in going:
            _, block = self._blocks.pop(start)
            _call(self._driver.cuMemRelease, block)

    def tensor(self) -> Tensor:
        """See HostPages. All of it must be mapped: torch looks up the memory's owner in the
        driver."""
        memory = CudaArray(self._address, self.size_bytes, owner=self)
        return torch.as_tensor(memory, device=self._device)

    def zero(self, memory: Tensor) -> None:
        """See HostPages; eight bytes at a time."""
        memory.view(torch.int64).zero_()

    def close(self) -> None:
        """See HostPages."""
        for offset, (size, _) in tuple(self._blocks.items()):
            self.unmap(offset, size)

    def _describe(self, ordinal: int) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        return properties

    def _grant(self, ordinal: int) -> Any:
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be shutting down
            self.close()
            if self._address:
                _call(self._driver.cuMemAddressFree, self._address, self.size_bytes)


class CudaArray:
    """Bytes on a GPU for torch.as_tensor, through the CUDA array interface. Keeps `owner` alive."""

    def __init__(self, address: int, num_bytes: int, owner: object = None) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _unusable(f"cuda-bindings cannot be imported ({error})") from None
    return driver


def _call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Call the driver; return its results without the error code."""
    code, *values = function(*arguments)
    if int(code) == _SUCCESS:
        return tuple(values)
    what = f"{function.__name__}: CUDA error {int(code)}"
    if int(code) == _OUT_OF_MEMORY:
        fix = "free memory that other processes hold, or plan a smaller KV cache"
        raise CapacityError(f"the device has too little memory left ({what})", fix=fix)
    if int(code) == _NOT_SUPPORTED:
        raise _unusable(what)
    raise DeviceError(what)


def _unusable(why: str) -> ConfigError:
    problem = f"this device's memory cannot be unmapped and mapped again: {why}"
    return config_error("enable_sleep_mode", True, problem, "load without it")
