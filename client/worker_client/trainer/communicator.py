"""One rank of a trainer in a communicator with its workers, and with the trainer's other ranks.

It uses torch.distributed's backends directly, so that it can exist next to the trainer's process
groups. No object is pickled: raw bytes are sent.
"""

import hmac
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public nevertheless
    PrefixStore,
    Store,
    distributed_c10d,
)

from rendezvous.listeners import ListenerWatch
from rendezvous.store import Member, RendezvousError, StoreServer, member_proof
from worker_client.errors import ClientError, config_error

Backend: TypeAlias = Literal["gloo", "nccl"]
_WATCHDOG_GRACE = timedelta(minutes=10)
_DISPOSAL_S = 1.0
_SHORT_WAIT_S = 0.05
_SHORT_PAUSE_S = 50e-6
_LONG_PAUSE_S = 2e-3
"""Pauses between checks while waiting: short ones at first, as the next transfer is close."""


class TransferStopped(ClientError):
    """A transfer was not completed: workers refused it, did not connect, or were lost."""


class Sending(NamedTuple):
    """A transfer in progress; the buffer must stay unchanged until it is complete."""

    work: dist.Work
    buffer: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a communicator."""

    rank: int
    num_trainers: int
    """Ranks of the trainer, the first ones."""
    size: int
    """All members."""
    host: str
    """Address of this process for the others."""
    timeout_s: float
    """The longest wait for a member."""


class Communicator:
    """Belongs to one thread at a time; stop() may be called from any other."""

    def __init__(self, backend: Backend, place: Place, device: torch.device | str) -> None:
        """Connect to nobody yet. device: the GPU of the NCCL communicator; gloo sends from host
        memory for any device.

        Raises:
            ClientConfigError: NCCL without a GPU.
        """
        self.place = place
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl" and self.device.type != "cuda":
            raise config_error("device", str(device), "NCCL sends from a GPU", "use cuda:0 or gloo")
        self.backend: Backend = backend
        self.buffer_device = self.device if backend == "nccl" else torch.device("cpu")
        """Device of buffers."""
        self._stopped = threading.Event()
        self._group: dist.ProcessGroup | None = None
        self._store: Store | None = None
        """Kept here, since torch does not."""

    def connect(self, board: StoreServer | Member, secret: bytes) -> None:
        """Connect to all other members, and pass one byte from rank 0 to each. board: their
        rendezvous.

        Raises:
            TransferStopped: not all came in time, or one of them is a stranger.
        """
        with Failures("the rendezvous with the workers"):
            self._store = _BoardStore(board, self.place.timeout_s)
            self._group = self._make_group(PrefixStore("transfer", self._store), secret)
            byte = torch.zeros(1, dtype=torch.uint8, device=self.buffer_device)
            self.finish(self.broadcast(byte), "the first byte")

    def broadcast(self, payload: Tensor) -> Sending:
        """Start to send rank 0's uint8 [n] to all members; the others give a buffer for it."""
        options = distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return Sending(self._connected.broadcast([payload], options), payload)

    def send_shards(self, payload: Tensor, sizes: Sequence[int]) -> Sending:
        """Start to send different bytes to each member, in an exchange of all members. payload:
        uint8 [sum(sizes)], one after another; sizes: by member."""
        nothing, none = payload.new_empty(0), [0] * self.place.size
        options = distributed_c10d.AllToAllOptions()
        work = self._connected.alltoall_base(nothing, payload, none, list(sizes), options)
        return Sending(work, payload)

    def finish(self, sending: Sending, what: str) -> None:
        """Wait until a transfer is complete. Raises TransferStopped, or torch's RuntimeError."""
        self.until(sending.work.is_completed, what)
        sending.work.wait()

    def until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait for something. Raises TransferStopped: it did not come in time, or stop() was
        called."""
        deadline = time.monotonic() + self.place.timeout_s
        patience = time.monotonic() + _SHORT_WAIT_S
        while not is_over():
            if self._stopped.is_set():
                raise TransferStopped(f"stopped while waiting for {what}")
            if time.monotonic() >= deadline:
                raise TransferStopped(f"{what} did not arrive within {self.place.timeout_s:g} s")
            time.sleep(_SHORT_PAUSE_S if time.monotonic() < patience else _LONG_PAUSE_S)

    def stop(self) -> None:
        """End a wait."""
        self._stopped.set()

    def close(self) -> None:
        """Leave the members, even if they have died."""
        self._stopped.set()
        group, self._group = self._group, None
        if group is not None and self.backend == "nccl":
            group.abort()
        # gloo's threads wait for a lost worker until the timeout, so use another thread.
        left_behind: list[object] = [group, self._store]
        self._store = None
        del group
        disposal = threading.Thread(target=left_behind.clear, name="channel-disposal", daemon=True)
        disposal.start()
        disposal.join(_DISPOSAL_S)  # a process that ends meanwhile would abort

    @property
    def _connected(self) -> dist.ProcessGroup:
        assert self._group is not None, "after connect() only"
        return self._group

    def _make_group(self, store: Store, secret: bytes) -> dist.ProcessGroup:
        rank, size, timeout = self.place.rank, self.place.size, self.place.timeout_s
        limit = timedelta(seconds=timeout)
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            # Our timeout fires first: NCCL's would end the process.
            options._timeout = limit + _WATCHDOG_GRACE
            return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, size, options))
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it has
        gloo._timeout = limit
        with ListenerWatch():
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self.place.host)]
            group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, gloo))
        self._prove_members(group, secret)
        return group

    def _prove_members(self, group: dist.ProcessGroup, secret: bytes) -> None:
        """Exchange proofs with each other member: a stranger may have connected in its place."""
        own = self.place.rank
        ranks = [rank for rank in range(self.place.size) if rank != own]
        codes = {rank: member_proof(secret, "the transfer", own, rank) for rank in ranks}
        sent = [torch.frombuffer(bytearray(code), dtype=torch.uint8) for code in codes.values()]
        received = [torch.zeros_like(code) for code in sent]
        works = [group.recv([r], rank, 0) for r, rank in zip(received, ranks, strict=True)]
        works += [group.send([s], rank, 0) for s, rank in zip(sent, ranks, strict=True)]
        for work in works:
            work.wait()
        for rank, code in zip(ranks, received, strict=True):
            expected = member_proof(secret, "the transfer", rank, own)
            if not hmac.compare_digest(code.numpy().tobytes(), expected):
                worker = rank - self.place.num_trainers
                who = f"worker {worker}" if worker >= 0 else f"the trainer's rank {rank}"
                raise TransferStopped(f"a stranger connected in the place of {who}")


class _BoardStore(Store):
    """A rendezvous as a torch store."""

    def __init__(self, board: StoreServer | Member, timeout_s: float) -> None:
        super().__init__()
        self._board = board
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._board.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._board.get(key, self._timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Report nothing: no caller polls this store."""
        return False

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._board.get(key, self._timeout_s)


class Failures:
    """Context that raises TransferStopped if torch or the rendezvous fails. Not a generator, which
    since Python 3.12 would leave a reference cycle that keeps the group alive."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, (RuntimeError, RendezvousError)):
            raise TransferStopped(f"{self._what} failed: {error}") from error
