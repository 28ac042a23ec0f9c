"""A trainer's communicator with its workers: their rendezvous, and broadcasts of tensors to all
workers. Independent of RPCs: it may run in a different process than the driver.

It uses torch.distributed's backends directly, so that it can exist next to the trainer's process
groups. No object is pickled: raw bytes are sent.
"""

import hmac
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from rendezvous.store import RendezvousError, StoreServer, member_proof
from rpc_schema import weight_transfer as wt
from rpc_schema.config import RendezvousAddress
from rpc_schema.weight_packing import Transfer, plan_transfers
from worker_client.errors import ClientError, config_error

Backend: TypeAlias = Literal["gloo", "nccl"]
DTYPE_NAMES: dict[torch.dtype, wt.TensorDtype] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int32: "int32",
    torch.int64: "int64",
}
_NUM_BUFFERS = 2
_WATCHDOG_GRACE = timedelta(minutes=10)
_SHORT_WAIT_S = 0.05
_SHORT_PAUSE_S = 50e-6
_LONG_PAUSE_S = 2e-3
"""Pauses between checks while waiting: short ones at first, as the next transfer is close."""


class TransferStopped(ClientError):
    """A transfer was not completed: workers refused it, did not connect, or were lost."""


class _Sending(NamedTuple):
    """A broadcast in progress; the buffer must stay unchanged until it is complete."""

    work: dist.Work
    buffer: Tensor


class BroadcastChannel:
    """The trainer's side: rank 0. open() and send() block, and belong to one thread at a time;
    stop() may be called from any other."""

    def __init__(
        self,
        backend: Backend,
        num_workers: int,
        *,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
    ) -> None:
        """Open a rendezvous on a free port of `host`, without waiting for workers.

        device: the GPU of the NCCL communicator; gloo sends from host memory for any device.
        timeout_s: the longest wait for the workers.

        Raises:
            ClientConfigError: NCCL without a GPU.
        """
        self._device = torch.device(device)
        if self._device == torch.device("cuda"):
            self._device = torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl" and self._device.type != "cuda":
            raise config_error("device", str(device), "NCCL sends from a GPU", "use cuda:0 or gloo")
        self._backend = backend
        self._buffer_device = self._device if backend == "nccl" else torch.device("cpu")
        self._size = num_workers + 1
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._group: dist.ProcessGroup | None = None
        self._host = host
        self._server = StoreServer(host, num_workers)
        self._store = _TrainerStore(self._server, timeout_s)

    @property
    def engine(self) -> wt.BroadcastEngine:
        """Argument of init_weight_transfer_engine."""
        return wt.BroadcastEngine(
            backend=self._backend,
            place=RendezvousAddress(
                host=self._host, port=self._server.port, secret=self._server.secret
            ),
            world_size=self._size,
        )

    def open(self) -> None:
        """Connect to all workers, which must receive `engine` at the same time.

        Raises:
            TransferStopped: they did not connect in time, or stop() was called.
        """
        self._server.set("member/0", b"here")
        self._until_set([f"member/{rank}" for rank in range(1, self._size)])
        with _Failures("the rendezvous with the workers"):
            self._group = self._make_group()
            byte = torch.zeros(1, dtype=torch.uint8, device=self._buffer_device)
            self._finish(self._start(byte))

    def send(self, tensors: Sequence[Tensor], *, packed_bytes: int = 0, round: int = 0) -> None:
        """Broadcast tensors in order, once every worker is ready: update_weights must run at the
        same time, with their names and BroadcastSource(packed_bytes, round).

        tensors: any strides, on any device; they must not change during the send. round: a number
        not used on this channel before.

        Raises:
            TransferStopped: a worker refused, is lost or too slow, or stop() was called.
        """
        self._until_awaited(round)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dtypes = [DTYPE_NAMES[tensor.dtype] for tensor in tensors]
        transfers = plan_transfers([tensor.shape for tensor in tensors], dtypes, packed_bytes)
        buffers = self._buffers(transfers) if packed_bytes else []
        under_way: deque[_Sending] = deque()
        with _Failures("broadcasting"):
            for number, transfer in enumerate(transfers):
                if len(under_way) == _NUM_BUFFERS:
                    self._finish(under_way.popleft())
                if packed_bytes:
                    payload = _packed(tensors, transfer, buffers[number % _NUM_BUFFERS])
                else:
                    payload = _raw(tensors[transfer.parts[0].tensor]).to(self._buffer_device)
                under_way.append(self._start(payload))
            while under_way:
                self._finish(under_way.popleft())

    def stop(self) -> None:
        """End a wait of open() or send()."""
        self._stopped.set()

    def close(self) -> None:
        """Leave the workers, even if they have died."""
        self._stopped.set()
        self._server.close()
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            group.abort()
        # gloo's threads wait for a lost worker until the timeout, so use another thread.
        left_behind: list[object] = [group]
        del group
        threading.Thread(target=left_behind.clear, name="channel-disposal", daemon=True).start()

    def _make_group(self) -> dist.ProcessGroup:
        store = PrefixStore("transfer", self._store)
        timeout = timedelta(seconds=self._timeout_s)
        if self._backend == "nccl":
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            # Our timeout fires first: NCCL's would end the process.
            options._timeout = timeout + _WATCHDOG_GRACE
            return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, 0, self._size, options))
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it has
        gloo._timeout = timeout
        with ListenerWatch():
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, 0, self._size, gloo))
        self._prove_workers(group)
        return group

    def _prove_workers(self, group: dist.ProcessGroup) -> None:
        """Exchange proofs with each worker: a stranger may have connected in a worker's place."""
        secret, ranks = self._server.secret, range(1, self._size)
        codes = {rank: member_proof(secret, "the transfer", 0, rank) for rank in ranks}
        sent = [torch.frombuffer(bytearray(code), dtype=torch.uint8) for code in codes.values()]
        received = [torch.zeros_like(code) for code in sent]
        works = [group.recv([r], rank, 0) for r, rank in zip(received, ranks, strict=True)]
        works += [group.send([s], rank, 0) for s, rank in zip(sent, ranks, strict=True)]
        for work in works:
            work.wait()
        for rank, code in zip(ranks, received, strict=True):
            own = member_proof(secret, "the transfer", rank, 0)
            if not hmac.compare_digest(code.numpy().tobytes(), own):
                raise TransferStopped(f"a stranger connected in the place of worker {rank - 1}")

    def _buffers(self, transfers: Sequence[Transfer]) -> list[Tensor]:
        longest = max((transfer.num_bytes for transfer in transfers), default=0)
        return [
            torch.empty(longest, dtype=torch.uint8, device=self._buffer_device)
            for _ in range(min(_NUM_BUFFERS, len(transfers)))
        ]

    def _start(self, payload: Tensor) -> _Sending:
        assert self._group is not None, "after open() only"
        options = distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return _Sending(self._group.broadcast([payload], options), payload)

    def _finish(self, sending: _Sending) -> None:
        self._until(sending.work.is_completed, "a broadcast")
        sending.work.wait()

    def _until_awaited(self, round: int) -> None:
        """Wait until every worker is ready to receive."""
        keys = {rank: f"round/{round}/{rank}" for rank in range(1, self._size)}
        self._until_set(list(keys.values()))
        answers = {rank: self._server.get(key, 0.0) for rank, key in keys.items()}
        self._server.forget(keys.values())
        refused = [rank - 1 for rank, answer in answers.items() if answer != b"ready"]
        if refused:
            raise TransferStopped(f"ranks {refused} refused the transfer; nothing was sent")

    def _until_set(self, keys: list[str]) -> None:
        self._until(lambda: self._server.has(keys), f"the workers' {keys[0]}")

    def _until(self, is_over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        patience = time.monotonic() + _SHORT_WAIT_S
        while not is_over():
            if self._stopped.is_set():
                raise TransferStopped(f"stopped while waiting for {what}")
            if time.monotonic() >= deadline:
                raise TransferStopped(f"{what} did not arrive within {self._timeout_s:g} s")
            time.sleep(_SHORT_PAUSE_S if time.monotonic() < patience else _LONG_PAUSE_S)


class _TrainerStore(Store):
    """The rendezvous as a torch store. The channel keeps a reference, since torch does not."""

    def __init__(self, server: StoreServer, timeout_s: float) -> None:
        super().__init__()
        self._server = server
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._server.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._server.get(key, self._timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        return self._server.has(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._server.get(key, self._timeout_s)


def _packed(tensors: Sequence[Tensor], transfer: Transfer, buffer: Tensor) -> Tensor:
    """Copy the rows of a transfer to their places in the buffer."""
    for part in transfer.parts:
        tensor = tensors[part.tensor].detach()
        rows = tensor[part.start : part.stop] if tensor.dim() else tensor
        target = buffer[part.offset : part.offset + part.num_bytes]
        target.view(tensor.dtype).view(rows.shape).copy_(rows)
    return buffer[: transfer.num_bytes]


def _raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [n]; a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Failures:
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
