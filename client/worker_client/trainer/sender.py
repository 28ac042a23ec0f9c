"""Weight updates of a group from one process that is both driver and trainer: the RPCs of an
update, with the trainer's side in parallel.

    with WeightSender(group, "nccl", device="cuda:1") as sender:
        sender.send(model.state_dict())
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from rpc_schema import weight_transfer as wt
from worker_client.errors import config_error
from worker_client.group.running import RunningRequests
from worker_client.group.weights import Target
from worker_client.group.weights_state import WeightsVersion
from worker_client.trainer.broadcast import DTYPE_NAMES, BroadcastChannel
from worker_client.trainer.connection import Connection, SendReport, UpdateOptions
from worker_client.trainer.cuda_blocks import locate
from worker_client.trainer.deltas import Sent, SentTensors, UpdateEntry, entries_of
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

SendBackend: TypeAlias = Literal["gloo", "nccl", "ipc"]
PACKED_BYTES = 256 << 20
ChangeT = TypeVar("ChangeT", bound=Sent)


class WeightSender:
    """Used on the group's thread. The group must be attached and have a model."""

    def __init__(
        self,
        group: WorkerGroup,
        backend: SendBackend,
        *,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
    ) -> None:
        """Sends nothing. device: the GPU that NCCL sends from. host: this process's address for the
        workers. timeout_s: the longest silence on either side."""
        self._group = group
        self._backend = backend
        self._device = torch.device(device)
        self._host = host
        self._timeout_s = timeout_s
        self._connection: Connection[BroadcastChannel] = Connection(group.weights, timeout_s)
        self._rounds = itertools.count(1)
        self._sent = SentTensors()
        self._sent_version: WeightsVersion | None = None
        """Version that the workers' weights had when they were those of _sent."""

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the workers; their weights do not change."""
        self._connection.close()

    def connect(self) -> None:
        """Create the communicator; send() does this if there is none.

        Raises:
            TransferError, TransferStopped: not all workers have connected.
            ConfigError: the engine is not for this group.
        """
        self.close()
        if self._backend == "ipc":
            self._connection.open(wt.IpcEngine(), None)
            return
        channel = BroadcastChannel(
            self._backend,
            self._group.parallel.group_size,
            device=self._device,
            host=self._host,
            timeout_s=self._timeout_s,
        )
        self._connection.open(channel.engine, channel)

    def send(
        self,
        tensors: Mapping[str, Sent],
        *,
        format: wt.WeightFormat = "checkpoint",
        partial: bool = False,
        packed_bytes: int = PACKED_BYTES,
        version: int | None = None,
        target: Target = "model",
        running: RunningRequests = "drop",
        recompute_budget: int | None = None,
    ) -> SendReport:
        """Replace the weights of every rank, as one complete update; see GroupWeights.start_update.

        tensors: by checkpoint or kernel name, of any device and strides (ipc: contiguous, on the
        workers' GPU). Of names that share a tensor, as with tied embeddings, only the first is
        sent. A SparseDelta changes elements of a tensor; it needs `partial`. A sequence of
        TensorPiece is a tensor in pieces. packed_bytes: size of the buffers that small tensors
        share; 0 sends each by itself.
        version, target, running, recompute_budget: as GroupWeights.start_update takes them.

        Raises:
            ConfigError: the model has no such tensors, or some are missing, or the version is
                not larger; a corrected send() fixes that.
            TransferError, TransferStopped, WorkerDied: a transfer was interrupted; the
                weights are dirty until another send() or GroupWeights.reload() succeeds (an adapter
                is as it was).
        """
        unique = _without_aliases(tensors)
        entries = entries_of(unique)
        listed = _list(entries)
        if not self._connection.is_open:
            self.connect()
        options = UpdateOptions(format, partial, version, target, running, recompute_budget)
        sent = [entry.values for entry in entries]
        return options.update(
            self._group.weights,
            lambda: self._transfer(listed, sent, packed_bytes) if sent else [],
            num_tensors=len(unique),
        )

    def send_changes(
        self,
        tensors: Mapping[str, Tensor],
        *,
        format: wt.WeightFormat = "checkpoint",
        packed_bytes: int = PACKED_BYTES,
        version: int | None = None,
        running: RunningRequests = "drop",
        recompute_budget: int | None = None,
    ) -> SendReport:
        """Replace the weights of every rank, but send only what differs from the last
        send_changes(): single elements, or whole tensors where that takes fewer bytes. The first
        time, and if the workers have had other weights since, everything is sent.

        Bits are compared, so give tensors in the dtype of the workers: a small step changes all
        float32 values, but few when rounded to bfloat16. A copy of the tensors is kept on their
        device. Takes and raises as send() does.
        """
        unique = _without_aliases(tensors)
        is_partial = self._is_held()
        if not is_partial:
            self._sent = SentTensors()
        changes = self._sent.changes(unique)
        report = self.send(
            changes,
            format=format,
            partial=is_partial,
            packed_bytes=packed_bytes,
            version=version,
            running=running,
            recompute_budget=recompute_budget,
        )
        self._sent.record(changes)
        self._sent_version = self._group.weights.version
        return report

    def _is_held(self) -> bool:
        """Return True if the workers have the tensors that send_changes() sent last."""
        known = self._group.weights.version
        if known is None or known != self._sent_version:
            return False
        states = {status.weights.state for status in self._group.get_status() if status.weights}
        return states == {"whole"}

    def _transfer(
        self, listed: TensorList, tensors: Sequence[Tensor], packed_bytes: int
    ) -> list[wt.UpdateWeightsReply]:
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # they may have been computed on any stream
        update, channel = self._group.weights.update, self._connection.channel
        try:
            if channel is None:
                there = locate(tensors)
                return self._connection.run(None, lambda: update(listed, there))
            number = next(self._rounds)
            source = wt.BroadcastSource(packed_bytes=packed_bytes, round=number)
            return self._connection.run(
                lambda: channel.send(tensors, packed_bytes=packed_bytes, round=number),
                lambda: update(listed, source),
            )
        finally:
            if not self._connection.is_open:
                self.close()


def _without_aliases(tensors: Mapping[str, ChangeT]) -> dict[str, ChangeT]:
    seen: set[tuple[object, ...]] = set()
    unique: dict[str, ChangeT] = {}
    for name, tensor in tensors.items():
        memory = _memory_of(tensor)
        if memory is None or memory not in seen:
            unique[name] = tensor
        if memory is not None:
            seen.add(memory)
    return unique


def _memory_of(sent: Sent) -> tuple[object, ...] | None:
    """Return what names of one tensor share; None if it has no elements, or is not whole."""
    if not isinstance(sent, Tensor) or not sent.numel():
        return None
    return sent.data_ptr(), sent.shape, sent.dtype, sent.device


def _list(entries: Sequence[UpdateEntry]) -> TensorList:
    for name, tensor, _ in entries:
        if tensor.dtype not in DTYPE_NAMES:
            problem = f"{name} has an unsupported dtype"
            fix = f"one of {sorted(DTYPE_NAMES.values())}"
            raise config_error("tensors", str(tensor.dtype), problem, fix)
    has_pieces = any(entry.origin for entry in entries)
    return TensorList(
        tuple(entry.name for entry in entries),
        tuple(DTYPE_NAMES[entry.values.dtype] for entry in entries),
        tuple(tuple(entry.values.shape) for entry in entries),
        tuple(entry.origin for entry in entries) if has_pieces else (),
    )
