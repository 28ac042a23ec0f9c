"""Pages of the host's memory, for arenas on the CPU: an anonymous mapping whose pages are unmapped
and mapped again at the same address. Linux only.

An unmapped part is protected: touching it ends the process, as it does on a GPU.
"""

import ctypes
import mmap
import os
from contextlib import suppress
from ctypes import c_int, c_long, c_size_t, c_void_p
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.errors import CapacityError

_FIXED: Final = 0x10
_NO_RESERVE: Final = 0x4000
"""MAP_FIXED and MAP_NORESERVE of Linux; Python names them only on some builds."""
_UNTOUCHABLE: Final = 0
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_FAILED: Final = c_void_p(-1).value


class HostPages:
    """A reserved range of addresses, parts of which are mapped, of anonymous memory. Offsets and
    sizes are multiples of granularity, in bytes; size_bytes is the whole range's."""

    granularity = mmap.PAGESIZE

    def __init__(self, num_bytes: int) -> None:
        """Reserve addresses, rounded up to whole pages. Raises CapacityError."""
        self.size_bytes = max(1, -(-num_bytes // self.granularity)) * self.granularity
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = c_void_p
        self._libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_long)
        self._libc.mprotect.argtypes = (c_void_p, c_size_t, c_int)
        self._libc.munmap.argtypes = (c_void_p, c_size_t)
        self._address = 0
        self._address = self._protect(None, self.size_bytes)

    def map(self, offset: int, num_bytes: int) -> None:
        """Map a part, with undefined content. Raises CapacityError if there is no memory; the part
        then stays unmapped."""
        if self._libc.mprotect(self._address + offset, num_bytes, _READ_WRITE):
            raise _no_memory(num_bytes)

    def unmap(self, offset: int, num_bytes: int) -> None:
        """Unmap exactly the range of one map(), or of several adjacent ones. Nothing may use it."""
        self._protect(self._address + offset, num_bytes)

    def tensor(self) -> Tensor:
        """Return the range as uint8 [size_bytes]. It keeps the addresses reserved for as long as
        there are views of it; an unmapped part must not be touched."""
        return torch.from_numpy(np.asarray(_HostArray(self, self._address, self.size_bytes)))

    def zero(self, memory: Tensor) -> None:
        """Set a part that was just mapped to zero, in stream order: fresh anonymous memory is zero
        already."""

    def close(self) -> None:
        """Unmap everything for good. Idempotent."""
        self._protect(self._address, self.size_bytes)

    def _protect(self, address: int | None, num_bytes: int) -> int:
        """Map the range without access, at this address or anywhere; the memory that was mapped
        there is freed."""
        flags = _RESERVED if address is None else _RESERVED | _FIXED
        mapped: int | None = self._libc.mmap(address, num_bytes, _UNTOUCHABLE, flags, -1, 0)
        if mapped is None or mapped == _FAILED:
            raise _no_memory(num_bytes)
        return mapped

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be shutting down
            if self._address:
                self._libc.munmap(self._address, self.size_bytes)


class _HostArray:
    """Host bytes for numpy.asarray, through the array interface. Keeps the reservation."""

    def __init__(self, owner: HostPages, address: int, num_bytes: int) -> None:
        self.owner = owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _no_memory(num_bytes: int) -> CapacityError:
    why = os.strerror(ctypes.get_errno())
    problem = f"{num_bytes} bytes of host memory cannot be allocated ({why})"
    return CapacityError(problem, fix="free memory, or ask for less")
