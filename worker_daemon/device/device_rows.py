"""Rows of a host tier in a GPU's memory: an allocation of their own, outside torch's allocator and
arenas, so that processes of this host can map it, and nothing else with it."""

import logging
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from rpc_schema.errors import TransferError
from worker_daemon.device.cuda_pages import CudaArray
from worker_daemon.device.host_rows import PinProgress
from worker_daemon.device.ipc_driver import IpcDriver

_LOG = logging.getLogger(__name__)


class DeviceRows:
    """See TierRows. Its memory is freed with the last reference to rows."""

    def __init__(self, num_rows: int, row_bytes: int, device: torch.device) -> None:
        """Raises CapacityError: the device has too little memory."""
        self.size_bytes = num_rows * row_bytes
        memory = _Allocation(self.size_bytes, device)
        self.handle: Final = memory.handle
        array = CudaArray(memory.address, self.size_bytes, owner=memory)
        self.rows: Tensor = torch.as_tensor(array, device=device).view(num_rows, row_bytes)
        self.rows.zero_()
        self.rows_per_piece = num_rows
        self.pinning = PinProgress(num_rows, num_rows)

    def pin_ahead(self) -> None:
        """See TierRows."""

    def stop_pinning(self) -> None:
        """See TierRows."""

    def close(self) -> None:
        """See TierRows."""


class _Allocation:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # the driver's calls need the thread's context
        torch.cuda.empty_cache()
        self._driver = IpcDriver()
        self._context = self._driver.context()
        self.address = self._driver.allocate(num_bytes)
        self.handle = b""
        try:
            self.handle = self._driver.export(self.address)
        except TransferError as error:
            _LOG.warning("other processes cannot map the host tier: %s", error)

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be shutting down
            self._driver.free(self.address, self._context)
