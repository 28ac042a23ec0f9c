"""Host memory that an arena's content goes to while the arena sleeps: page-locked, had once, ahead
of the first sleep, and used again by every later one. Knows no tag and no model.

Page-locking takes seconds for a large model, so a thread of its own does it; that thread touches no
memory of the device. It stops where the host would be left with too little.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from worker_daemon.device.pinned import PinnedBuffer
from worker_daemon.errors import CapacityError

RESERVE_BYTES: Final = 1 << 30
"""What a backup leaves of the host's memory to everybody else."""
_MEMINFO: Final = Path("/proc/meminfo")
_OWN_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")

logger = logging.getLogger(__name__)


class HostBackup:
    """Owns one buffer for each chunk of an arena. Everything but prepare_ahead()'s own thread is
    the step thread's."""

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        host_room: Callable[[], int] | None = None,
    ) -> None:
        """Takes no memory yet. sizes are bytes; host_room says how many bytes of host memory are
        free, by default those that Linux and the process's control group have."""
        self._sizes = sizes
        self._device = device
        self._host_room = host_room or host_room_bytes
        self._buffers: list[PinnedBuffer] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def held_bytes(self) -> int:
        """Host memory that it holds now."""
        return sum(len(buffer.view) for buffer in self._buffers)

    def prepare_ahead(self) -> None:
        """Begin to take the memory, beside whatever else goes on. Failing costs nothing yet:
        buffers() tries again."""
        if self._buffers or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._try_ahead, name="backup", daemon=True)
        self._thread.start()

    def buffers(self) -> Sequence[PinnedBuffer]:
        """Return the buffers, in the order of the sizes; waits until they are there.

        Raises:
            CapacityError: the host has not that much memory to lock; none is held then.
        """
        self._join()
        if not self._buffers:
            self._take_all()
        return self._buffers

    def stop(self) -> None:
        """End what prepare_ahead() began. Idempotent."""
        self._stopping.set()
        self._join()

    def close(self) -> None:
        """Give all memory back, for good; no copy may be under way. Idempotent."""
        self.stop()
        self._release()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try_ahead(self) -> None:
        try:
            if self._device.type == "cuda":  # the current device is a thread's own
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
                f"{sum(self._sizes)} bytes of host memory are needed to keep what sleeps; "
                f"{max(0, room - RESERVE_BYTES)} more can be had after {self.held_bytes}",
                fix="free host memory, or sleep at level 2",
            )
        return PinnedBuffer(size, self._device)

    def _release(self) -> None:
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()


def host_room_bytes() -> int:
    """Return how much memory this process may still take: of the host, and of its control group
    where that has a limit."""
    available = _read_words(_MEMINFO)["MemAvailable:"] * 1024
    return min(available, _group_room(_own_group()))


def _group_room(group: Path) -> int:
    """What a control group (version 2) and those above it allow; file pages can be dropped."""
    room = 1 << 62
    while group.is_relative_to(_GROUPS):
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            dropped = _read_words(group / "memory.stat")["inactive_file"]
            room = min(room, limit - used + dropped)
        except (OSError, ValueError, KeyError):  # no limit here, or another version
            pass
        group = group.parent
    return max(0, room)


def _own_group() -> Path:
    try:
        names = _OWN_GROUP.read_text().splitlines()
    except OSError:
        return _GROUPS
    own = [line.removeprefix("0::/") for line in names if line.startswith("0::/")]
    return _GROUPS / own[0] if own else _GROUPS


def _read_words(path: Path) -> dict[str, int]:
    """Parse lines of `name number ...`."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
