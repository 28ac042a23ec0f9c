"""Host memory that keeps an arena's content while the arena sleeps: page-locked once, ahead of the
first sleep, and reused by every later one.

Page-locking a large model takes seconds, so a separate thread does it, without touching device
memory. It stops before the host runs out of memory.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch

from rpc_schema.errors import CapacityError
from worker_daemon.device.host_limits import MEMINFO, own_cgroups, read_sizes
from worker_daemon.device.pinned import PinnedBuffer

RESERVE_BYTES: Final = 1 << 30
"""Host memory that a backup leaves to other processes."""

logger = logging.getLogger(__name__)


class HostBackup:
    """Owns one buffer for each chunk of an arena. Used on the step thread; prepare_ahead() starts
    another thread."""

    def __init__(
        self, sizes: Sequence[int], device: torch.device, host_room: Callable[[], int] | None = None
    ) -> None:
        """Allocates nothing yet. sizes: bytes; host_room: returns the free bytes of host memory, by
        default host_room_bytes."""
        self._sizes = sizes
        self._device = device
        self._host_room = host_room or host_room_bytes
        self._buffers: list[PinnedBuffer] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def held_bytes(self) -> int:
        """Host memory held now."""
        return sum(len(buffer.view) for buffer in self._buffers)

    def prepare_ahead(self) -> None:
        """Start to allocate the memory on a thread. A failure is only logged: buffers() tries
        again."""
        if self._buffers or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._try_ahead, name="backup", daemon=True)
        self._thread.start()

    def buffers(self) -> Sequence[PinnedBuffer]:
        """Return the buffers, in the order of the sizes; waits until they are allocated.

        Raises:
            CapacityError: the host cannot lock that much memory; none is held then.
        """
        self._join()
        if not self._buffers:
            self._take_all()
        return self._buffers

    def stop(self) -> None:
        """Stop the thread of prepare_ahead(). Idempotent."""
        self._stopping.set()
        self._join()

    def close(self) -> None:
        """Free all memory; no copy may be in progress. Idempotent."""
        self.stop()
        self._release()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try_ahead(self) -> None:
        try:
            if self._device.type == "cuda":  # the current device is per thread
                torch.cuda.set_device(self._device)
            self._take_all()
        except CapacityError as error:
            logger.warning("no host memory is ready for sleep: %s", error)

    def _take_all(self) -> None:
        try:
            for size in self._sizes:
                if self._stopping.is_set():
                    self._release()
                    return
                self._buffers.append(self._take(size))
        except BaseException:
            self._release()
            raise

    def _take(self, size: int) -> PinnedBuffer:
        room = self._host_room()
        if room < size + RESERVE_BYTES:
            raise CapacityError(
                f"{sum(self._sizes)} bytes of host memory are needed to keep the sleeping content; "
                f"{max(0, room - RESERVE_BYTES)} more are available beyond {self.held_bytes}",
                fix="free host memory, or sleep at level 2",
            )
        return PinnedBuffer(size, self._device)

    def _release(self) -> None:
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()


def host_room_bytes() -> int:
    """Return how much memory this process may still allocate: of the host, and of its control
    groups (version 2) if they have a limit. File pages of a group count as free: the kernel can
    drop them."""
    room = read_sizes(MEMINFO)["MemAvailable"]
    for group in own_cgroups():
        with suppress(OSError, ValueError, KeyError):  # no limit here, or another version
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            dropped = int(dict(line.split() for line in lines)["inactive_file"])
            room = min(room, limit - used + dropped)
    return max(0, room)
