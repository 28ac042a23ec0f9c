"""A communicator with a trainer, which is rank 0. It is independent of this worker's own link,
which must survive a trainer's death.

It uses torch.distributed's backends directly: torch would forget a registered process group with
the link (`link.py`), and all registered groups of a process would have the same members.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public nevertheless
    PrefixStore,
    Store,
    distributed_c10d,
)

from rendezvous.listeners import ListenerWatch
from rpc_schema.errors import CommError, TransferError
from worker_daemon.distributed.link import prove_members
from worker_daemon.distributed.rendezvous import RendezvousStore, connect_store
from worker_daemon.raising import Translation

TransferBackend: TypeAlias = Literal["gloo", "nccl"]
_T = TypeVar("_T")
_MEMBERS = "member/{}"
_SHORT_WAIT_S = 0.05
_SHORT_PAUSE_S = 50e-6
_LONG_PAUSE_S = 2e-3
"""Pauses between checks while waiting: short ones at first, since the next transfer may be
close."""
_ABORT_LIMIT_S = 2.0
_WATCHDOG_GRACE = timedelta(minutes=10)
_MEETING_GRACE_S = 1.0
"""Margin beyond the rendezvous's timeout, whose error is more specific than ours."""


@dataclass(frozen=True, slots=True)
class TrainerRendezvous:
    """The rendezvous of a trainer and its workers."""

    backend: TransferBackend
    host: str
    port: int
    secret: bytes
    rank: int
    size: int
    """Number of members, the trainer included."""
    timeout_s: float
    """Limit on every wait for the trainer or another member."""
    num_trainers: int = 1
    """Members of the trainer, the first ones."""


@dataclass(frozen=True, slots=True, eq=False)
class IncomingTransfer:
    """A transfer in progress into `buffer`."""

    buffer: Tensor


class TransferGroup:
    """This worker's communicator with a trainer. Created and used on the step thread; only abort()
    may be called from another."""

    def __init__(self, meeting: TrainerRendezvous, device: torch.device) -> None:
        """Create a group without connections, so that it can be aborted while it opens."""
        self.meeting = meeting
        self._device = device
        self._aborted = threading.Event()
        self._store: RendezvousStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._works: dict[IncomingTransfer, dist.Work] = {}
        """The broadcasts in progress. gloo's threads live as long as a work object, so only this
        list may hold one, and not the frames in an error's traceback."""

    def open(self) -> None:
        """Connect to the trainer and all other workers, and pass one byte to each.

        Raises:
            TransferError: not all have connected within the timeout, or it was aborted.
        """
        meeting = self.meeting
        try:
            with self._transferring("meeting the trainer"):
                self._store, self._group = self._beside(self._meet)
                if self._group is None:
                    # On this thread: NCCL's communicator belongs to the device that is current.
                    self._group = _nccl_group(PrefixStore("transfer", self._store), meeting)
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self.wait(self.receive(byte))
        except BaseException:
            self.leave()
            raise

    def tell(self, key: str, value: bytes) -> None:
        """Write a value where the trainer reads it.

        Raises:
            TransferError: it is gone.
        """
        with self._transferring("telling the trainer"):
            assert self._store is not None, "after open() only"
            self._store.set(key, value)

    def receive(self, buffer: Tensor) -> IncomingTransfer:
        """Start to receive the trainer's next broadcast, uint8 [n], into buffer; return at once.

        Raises:
            TransferError: the communicator is broken.
        """
        assert self._group is not None, "after open() only"
        options = distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        arrival = IncomingTransfer(buffer)
        with self._transferring("receiving"):
            self._works[arrival] = self._group.broadcast([buffer], options)
        return arrival

    def receive_shards(self, buffer: Tensor, sizes: Sequence[int]) -> IncomingTransfer:
        """Start to receive different bytes from each member of the trainer, in an exchange of all
        members; return at once. buffer: uint8 [sum(sizes)], one after another; sizes: by member.

        Raises:
            TransferError: the communicator is broken.
        """
        assert self._group is not None, "after open() only"
        nothing, none = buffer.new_empty(0), [0] * self.meeting.size
        splits = [*sizes, *none[len(sizes) :]]
        options = distributed_c10d.AllToAllOptions()
        arrival = IncomingTransfer(buffer)
        with self._transferring("receiving"):
            self._works[arrival] = self._group.alltoall_base(buffer, nothing, splits, none, options)
        return arrival

    def wait(self, arrival: IncomingTransfer) -> Tensor:
        """Wait until a transfer has arrived. Return its buffer: the current stream may read it.

        Raises:
            TransferError: it failed, did not arrive within the timeout, or was aborted.
        """
        with self._transferring("receiving"):
            self._until(lambda: self._works[arrival].is_completed())
            self._works[arrival].wait()
        del self._works[arrival]
        return arrival.buffer

    def abort(self) -> None:
        """End the step thread's wait, or its next one; the group is unusable afterwards. NCCL's
        kernels end at once, gloo's threads at the timeout."""
        self._aborted.set()
        self._abort_group()

    def leave(self) -> threading.Thread | None:
        """Abandon the communicator without contacting any member. Returns the thread that disposes
        of it; it may take until gloo's timeout."""
        self._aborted.set()
        self._abort_group()
        if self._store is not None:
            self._store.end()
        if self._group is None and self._store is None:
            return None
        left_behind: list[object] = [*self._works.values(), self._group, self._store]
        self._works.clear()
        self._group = self._store = None
        disposal = threading.Thread(target=left_behind.clear, name="transfer-disposal", daemon=True)
        disposal.start()
        return disposal

    def _abort_group(self) -> None:
        group = self._group
        if group is None or self.meeting.backend != "nccl":
            return
        aborting = threading.Thread(target=group.abort, name="transfer-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_LIMIT_S)

    def _meet(self) -> tuple[RendezvousStore, dist.ProcessGroup | None]:
        """Connect, on another thread: a call that blocks here cannot be aborted, only abandoned."""
        meeting = self.meeting
        store = connect_store(meeting.host, meeting.port, meeting.secret, meeting.timeout_s)
        store.set(_MEMBERS.format(meeting.rank), b"here")
        store.wait([_MEMBERS.format(rank) for rank in range(meeting.size)])
        if meeting.backend == "nccl":
            return store, None
        with ListenerWatch():
            group = _gloo_group(PrefixStore("transfer", store), meeting)
        prove_members(meeting.secret, "the transfer", group)
        return store, group

    def _beside(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread and return its result, unless the wait is ended first."""
        done: list[_T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                result = work()
                if not self._aborted.is_set():
                    done.append(result)
            except Exception as error:  # handed to the thread that waits, without a group
                traceback.clear_frames(error.__traceback__)
                failed.append(error)

        thread = threading.Thread(target=run, name="transfer-meeting", daemon=True)
        thread.start()
        self._until(lambda: not thread.is_alive(), _MEETING_GRACE_S)
        if failed:
            raise failed[0]
        return done[0]

    def _until(self, is_over: Callable[[], bool], grace_s: float = 0.0) -> None:
        """Wait for something. Raises TransferError."""
        deadline = time.monotonic() + self.meeting.timeout_s + grace_s
        patience = time.monotonic() + _SHORT_WAIT_S
        while not is_over():
            if self._aborted.is_set():
                raise TransferError("the wait for the trainer was aborted")
            if time.monotonic() >= deadline:
                problem = f"nothing has come from the trainer for {self.meeting.timeout_s:g} s"
                fix = "see why the trainer stopped, then call init_weight_transfer_engine again"
                raise TransferError(problem, fix=fix)
            time.sleep(_SHORT_PAUSE_S if time.monotonic() < patience else _LONG_PAUSE_S)

    def _transferring(self, what: str) -> Translation:
        meeting = self.meeting

        def translate(error: Exception) -> TransferError | None:
            if isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError)):
                return None  # a fault of the device, not of the trainer
            return TransferError(
                f"{what} failed: {error}",
                field="trainer",
                value=f"{meeting.host}:{meeting.port}, rank {meeting.rank} of {meeting.size}",
                fix="check that the trainer runs, then call init_weight_transfer_engine again",
            )

        return Translation((RuntimeError, ValueError, CommError), translate)


def _gloo_group(store: Store, meeting: TrainerRendezvous) -> dist.ProcessGroup:
    timeout = timedelta(seconds=meeting.timeout_s)
    backend = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timeout)
    return cast(dist.ProcessGroup, backend)  # torch's stubs lack these methods of backends


def _nccl_group(store: Store, meeting: TrainerRendezvous) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=meeting.timeout_s) + _WATCHDOG_GRACE  # ours first
    backend = dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
    return cast(dist.ProcessGroup, backend)
