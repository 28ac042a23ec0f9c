"""A trainer's broadcasts of tensors to all workers, and their rendezvous. Independent of RPCs: it
may run in a different process than the driver."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from rendezvous.store import StoreServer
from rpc_schema import weight_transfer as wt
from rpc_schema.config import RendezvousAddress
from rpc_schema.weight_packing import Transfer, plan_transfers
from worker_client.trainer.communicator import (
    Backend,
    Communicator,
    Failures,
    Place,
    Sending,
    TransferStopped,
)

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
        self._size = num_workers + 1
        self._host = host
        place = Place(0, 1, self._size, host, timeout_s)
        self._communicator = Communicator(backend, place, device)
        self._server = StoreServer(host, num_workers)

    @property
    def engine(self) -> wt.BroadcastEngine:
        """Argument of init_weight_transfer_engine."""
        return wt.BroadcastEngine(
            backend=self._communicator.backend,
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
        await_keys(self._communicator, self._server, range(1, self._size), "member/{}")
        self._communicator.connect(self._server, self._server.secret)

    def send(self, tensors: Sequence[Tensor], *, packed_bytes: int = 0, round: int = 0) -> None:
        """Broadcast tensors in order, once every worker is ready: update_weights must run at the
        same time, with their names and BroadcastSource(packed_bytes, round).

        tensors: any strides, on any device; they must not change during the send. round: a number
        not used on this channel before.

        Raises:
            TransferStopped: a worker refused, is lost or too slow, or stop() was called.
        """
        await_workers(self._communicator, self._server, round)
        device = self._communicator.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dtypes = [DTYPE_NAMES[tensor.dtype] for tensor in tensors]
        transfers = plan_transfers([tensor.shape for tensor in tensors], dtypes, packed_bytes)
        buffers = self._buffers(transfers) if packed_bytes else []
        under_way: deque[Sending] = deque()
        with Failures("broadcasting"):
            for number, transfer in enumerate(transfers):
                if len(under_way) == _NUM_BUFFERS:
                    self._communicator.finish(under_way.popleft(), "a broadcast")
                if packed_bytes:
                    payload = _packed(tensors, transfer, buffers[number % _NUM_BUFFERS])
                else:
                    raw = _raw(tensors[transfer.parts[0].tensor])
                    payload = raw.to(self._communicator.buffer_device)
                under_way.append(self._communicator.broadcast(payload))
            while under_way:
                self._communicator.finish(under_way.popleft(), "a broadcast")

    def stop(self) -> None:
        """End a wait of open() or send()."""
        self._communicator.stop()

    def close(self) -> None:
        """Leave the workers, even if they have died."""
        self._communicator.stop()
        self._server.close()
        self._communicator.close()

    def _buffers(self, transfers: Sequence[Transfer]) -> list[Tensor]:
        longest = max((transfer.num_bytes for transfer in transfers), default=0)
        return [
            torch.empty(longest, dtype=torch.uint8, device=self._communicator.buffer_device)
            for _ in range(min(_NUM_BUFFERS, len(transfers)))
        ]


def await_keys(
    communicator: Communicator, server: StoreServer, ranks: Sequence[int], key: str
) -> list[bytes]:
    """Wait until each of these members has written its key, and return the values. Raises
    TransferStopped."""
    keys = [key.format(rank) for rank in ranks]
    communicator.until(lambda: server.has(keys), f"the workers' {keys[0]}")
    return [server.get(key, 0.0) for key in keys]


def await_workers(communicator: Communicator, server: StoreServer, round: int) -> None:
    """Wait until every worker is ready to receive. Raises TransferStopped: one refuses."""
    first, size = communicator.place.num_trainers, communicator.place.size
    key = f"round/{round}/{{}}"
    answers = await_keys(communicator, server, range(first, size), key)
    server.forget(key.format(rank) for rank in range(first, size))
    refused = [worker for worker, answer in enumerate(answers) if answer != b"ready"]
    if refused:
        raise TransferStopped(f"ranks {refused} refused the transfer; nothing was sent")


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
