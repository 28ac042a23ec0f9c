"""Transfer engines: receive the weights of an update from a trainer's broadcasts, from its CUDA
memory, or from files, and pass them to a callback.

Used on the step thread, except abort().
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rpc_schema import weight_transfer as wt
from rpc_schema.errors import CapacityError, ConfigError, TransferError
from rpc_schema.shard_wants import LongValueError, put_long
from rpc_schema.weight_packing import Part, Transfer, plan_transfers
from worker_daemon.device.ipc_memory import ImportedMemory
from worker_daemon.distributed.transfer_group import (
    IncomingTransfer,
    TrainerRendezvous,
    TransferGroup,
)
from worker_daemon.errors import config_error
from worker_daemon.models.file_identity import file_identity, file_stamps
from worker_daemon.models.safetensors_file import full_name
from worker_daemon.models.sparse_delta import delta_part, in_order
from worker_daemon.models.weight_places import Manifest, Places, packed_tensor
from worker_daemon.models.weights import (
    SINGLE_FILE,
    hold_the_same,
    read_headers,
    read_parts,
    tensor_names,
    weight_files,
)
from worker_daemon.worker.resolve import confine_directory
from worker_daemon.worker.weight_transfer.rows import DTYPE_NAMES, DTYPES, Place, Rows
from worker_daemon.worker.weight_transfer.shards import (
    Arrival,
    ShardArrivals,
    check_sources,
)

NUM_BUFFERS: Final = 2
"""Number of buffers: one receives while the other one is copied."""
MAX_BUFFER_BYTES: Final = 64 << 30


def no_check(directory: Path) -> None:
    """Take any directory."""


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The directories from which an update can be read."""

    roots: Sequence[Path]
    field: str = "model"
    option: str = "--model-root"
    """Purpose of the roots, and the daemon's option that has them, for errors."""
    single: str = SINGLE_FILE
    """Name of a file that has all tensors."""
    reads_all: bool = False
    """Without names, read all tensors of the files, not only those that are known."""
    check: Callable[[Path], None] = no_check
    """Raises ConfigError unless a directory's files fit."""

    def find(self, name: str) -> Path:
        """Return a directory. Raises as confine_directory and `check` do."""
        directory = confine_directory(name, self.roots, self.field, self.option)
        self.check(directory)
        return directory


class Expected(NamedTuple):
    """Tensors and files that an update takes."""

    places: Places
    files: TensorFiles


class TransferEngine:
    """A source of weights. Base of the three engines below, for one without buffers, trainer or
    background thread."""

    transfer_rank = 0
    """Rank in the trainer's communicator; 0 if there is none."""

    def describe(
        self, message: wt.UpdateWeights, former: Manifest | None, expected: Expected
    ) -> Manifest:
        """Return the tensors of a request, before any byte of them is received.

        former: the tensors of the previous request, used if this one names none; DiskReader ignores
        it and takes all of the model's that the files have. expected: what the update takes.

        Raises:
            ConfigError: the request is for another engine, or names too little; or the files hold
                different tensors under two names of one.
            CheckpointError: its files are missing, truncated or not safetensors files.
        """
        raise NotImplementedError

    def receive(self, manifest: Manifest, source: wt.Source, place: Place) -> int:
        """Receive all tensors, in order, after reserve() and accept(); return the number of bytes.
        On return they are on the device.

        Raises:
            TransferError: the trainer is lost, or a tensor cannot be reached.
        """
        raise NotImplementedError

    def contents(self, source: wt.Source) -> bytes:
        """Return a digest of the contents of the source, if each rank has a separate source;
        empty if all receive from one trainer."""
        return b""

    def reserve(self, manifest: Manifest, source: wt.Source) -> None:
        """Allocate the memory for receive(). Raises CapacityError."""

    def accept(self, source: wt.Source) -> None:
        """Report to the trainer that its tensors are awaited. Raises TransferError."""

    def refuse(self, source: wt.Source) -> None:
        """Report to the trainer that its tensors are not awaited; never fails."""

    def abort(self) -> None:
        """End the step thread's operation if it waits for a trainer. Any thread may call it."""

    def close(self) -> threading.Thread | None:
        """Free the engine's resources; return the thread that does so, if it takes time."""
        return None


class BroadcastReceiver(TransferEngine):
    """Receives a trainer's broadcasts, or this rank's shards of tensors from several ranks of a
    trainer."""

    def __init__(self, meeting: TrainerRendezvous, device: torch.device) -> None:
        """Does not connect: open() does, and can be aborted. gloo's buffers are in
        host memory, even for weights on a GPU."""
        self._buffer_device = device if meeting.backend == "nccl" else torch.device("cpu")
        self._group = TransferGroup(meeting, self._buffer_device)
        self.transfer_rank = meeting.rank
        self._transfers: list[Transfer] = []
        self._buffers: list[Tensor] = []
        """The transfers of the last reserved round, and their buffers."""
        self._shards: ShardArrivals | None = None
        """Those of the last reserved round, if it has any."""
        self._places: Places | None = None
        """Those of the request that was described last."""
        self._device = device

    def open(self) -> None:
        """Connect to the trainer and the other workers. Raises TransferError."""
        self._group.open()

    def describe(
        self, message: wt.UpdateWeights, former: Manifest | None, expected: Expected
    ) -> Manifest:
        source, self._places = message.source, expected.places
        if not isinstance(source, (wt.BroadcastSource, wt.ShardSource)):
            raise _wrong_engine("broadcasts", source)
        if isinstance(source, wt.BroadcastSource) and self._num_trainers > 1:
            problem = "the trainer has several ranks, which send shards"
            fix = "ShardSource, or a BroadcastEngine of one trainer"
            raise config_error("source", type(source).__name__, problem, fix)
        if source.packed_bytes > MAX_BUFFER_BYTES:
            problem = "the buffer is too large"
            fix = f"at most {MAX_BUFFER_BYTES}"
            raise config_error("packed_bytes", source.packed_bytes, problem, fix)
        manifest = _named(message, former)
        if isinstance(source, wt.ShardSource):
            check_sources(manifest, source, expected.places, self._num_trainers)
        return manifest

    def reserve(self, manifest: Manifest, source: wt.Source) -> None:
        if isinstance(source, wt.ShardSource):
            self._reserve_shards(manifest, source)
            return
        assert isinstance(source, wt.BroadcastSource), "described before"
        dtypes = [DTYPE_NAMES[dtype] for dtype in manifest.dtypes]
        transfers = plan_transfers(manifest.shapes, dtypes, source.packed_bytes)
        longest = max((transfer.num_bytes for transfer in transfers), default=0)
        self._buffers = self._allocate(min(NUM_BUFFERS, len(transfers)), longest)
        self._transfers = transfers

    def _reserve_shards(self, manifest: Manifest, source: wt.ShardSource) -> None:
        assert self._places is not None, "described before"
        shards = ShardArrivals(manifest, source, self._places, self._num_trainers)
        longest = max((arrival.num_bytes for arrival in shards.rounds), default=0)
        self._buffers = self._allocate(min(NUM_BUFFERS, len(shards.rounds)), longest)
        self._shards = shards
        key = f"round/{source.round}/wants/{self.transfer_rank}"
        try:
            put_long(self._group.tell, key, shards.encoded_wants)
        except LongValueError as error:
            problem = "too many for one request"
            raise config_error("names", len(manifest.names), problem, str(error)) from None

    def accept(self, source: wt.Source) -> None:
        assert isinstance(source, (wt.BroadcastSource, wt.ShardSource)), "described before"
        self._answer(source, b"ready")

    def refuse(self, source: wt.Source) -> None:
        if isinstance(source, (wt.BroadcastSource, wt.ShardSource)):
            try:
                self._answer(source, b"refused")
            except TransferError:
                return  # the trainer is lost

    def receive(self, manifest: Manifest, source: wt.Source, place: Place) -> int:
        shards, self._shards = self._shards, None
        if shards is not None:
            return self._receive_shards(shards, manifest, place)
        transfers, self._transfers = self._transfers, []
        buffers, self._buffers = self._buffers, []
        under_way: deque[tuple[IncomingTransfer, Transfer]] = deque()

        def take_oldest() -> None:
            arrival, transfer = under_way.popleft()
            received = self._group.wait(arrival)
            place([_rows(manifest, part, received) for part in transfer.parts])

        for number, transfer in enumerate(transfers):
            if len(under_way) == NUM_BUFFERS:
                # On a device the next broadcast into that buffer waits for the copies out of it.
                take_oldest()
            buffer = buffers[number % NUM_BUFFERS][: transfer.num_bytes]
            under_way.append((self._group.receive(buffer), transfer))
        while under_way:
            take_oldest()
        _synchronize(self._device)
        place(_empty_rows(manifest))
        return sum(part.num_bytes for transfer in transfers for part in transfer.parts)

    def _receive_shards(self, shards: ShardArrivals, manifest: Manifest, place: Place) -> int:
        buffers, self._buffers = self._buffers, []
        under_way: deque[tuple[IncomingTransfer, Arrival]] = deque()

        def take_oldest() -> None:
            incoming, arrival = under_way.popleft()
            place(list(shards.rows(arrival, self._group.wait(incoming))))

        for number, arrival in enumerate(shards.rounds):
            if len(under_way) == NUM_BUFFERS:
                take_oldest()
            buffer = buffers[number % NUM_BUFFERS][: arrival.num_bytes]
            sizes = [region.num_bytes for region in arrival.regions]
            under_way.append((self._group.receive_shards(buffer, sizes), arrival))
        while under_way:
            take_oldest()
        _synchronize(self._device)
        place(_empty_rows(manifest))
        return shards.num_bytes

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> threading.Thread | None:
        return self._group.leave()

    @property
    def _num_trainers(self) -> int:
        return self._group.meeting.num_trainers

    def _answer(self, source: wt.BroadcastSource | wt.ShardSource, word: bytes) -> None:
        self._group.tell(f"round/{source.round}/{self.transfer_rank}", word)

    def _allocate(self, count: int, num_bytes: int) -> list[Tensor]:
        try:
            return [
                torch.empty(num_bytes, dtype=torch.uint8, device=self._buffer_device)
                for _ in range(count)
            ]
        except torch.OutOfMemoryError as error:
            problem = f"no memory for {count} buffers of {num_bytes} bytes: {error}"
            fix = "pack into smaller buffers: large tensors are then split by rows"
            raise CapacityError(problem, field="packed_bytes", fix=fix) from None


class IpcReader(TransferEngine):
    """Copies out of a trainer's CUDA memory."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError on a CPU, TransferError without CUDA's driver."""
        if device.type != "cuda":
            problem = "CUDA memory can be shared between GPU processes only"
            raise config_error("engine", "ipc", problem, "gloo or disk")
        self._device = device
        self._memory = ImportedMemory(device)

    def describe(
        self, message: wt.UpdateWeights, former: Manifest | None, expected: Expected
    ) -> Manifest:
        source = message.source
        if not isinstance(source, wt.IpcSource):
            raise _wrong_engine("CUDA IPC", source)
        manifest = _named(message, former)
        count = len(manifest.names)
        if not len(source.blocks) == len(source.offsets) == count:
            problem = "one block and one offset per tensor are needed"
            raise config_error("blocks", len(source.blocks), problem, str(count))
        if any(block >= len(source.handles) for block in source.blocks):
            fix = f"below {len(source.handles)}"
            raise config_error("blocks", max(source.blocks), "there is no such handle", fix)
        return manifest

    def receive(self, manifest: Manifest, source: wt.Source, place: Place) -> int:
        assert isinstance(source, wt.IpcSource), "described before"
        views = [  # check all of them first: a wrong offset then leaves the weights intact
            self._memory.view(source.handles[block], offset, shape, dtype)
            for block, offset, shape, dtype in zip(
                source.blocks, source.offsets, manifest.shapes, manifest.dtypes, strict=True
            )
        ]
        for tensor, values in enumerate(views):
            place([Rows(tensor, 0, values, True)])
        _synchronize(self._device)
        num_bytes = sum(view.numel() * view.element_size() for view in views)
        del views
        self._memory.close()
        return num_bytes

    def close(self) -> threading.Thread | None:
        self._memory.close()
        return None


class DiskReader(TransferEngine):
    """Reads the files of checkpoints and adapters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_from: tuple[Path, str] | None = None
        """Directory of the request that was described last, and TensorFiles.single."""
        self._content: tuple[Path, bytes, bytes] | None = None
        """Directory of the last round, stamps of its files, and their digest."""

    def describe(
        self, message: wt.UpdateWeights, former: Manifest | None, expected: Expected
    ) -> Manifest:
        source, places = message.source, expected.places
        if not isinstance(source, wt.DiskSource):
            raise _wrong_engine("disk", source)
        if message.dtypes or message.shapes or message.origins:
            problem = "dtypes and shapes come from the files, which have whole tensors"
            fix = "leave dtypes, shapes and origins empty"
            raise config_error("shapes", len(message.shapes), problem, fix)
        directory, single = expected.files.find(source.model), expected.files.single
        self._read_from = directory, single
        names = list(map(full_name, message.names))
        held, known = tensor_names(directory, single), places.specs
        copies = [alias for alias, name in places.aliases.items() if {alias, name} <= held]
        if not names:
            # A packed tensor of the model's is kept, and refused later: updates do not unpack.
            wanted = sorted(held.difference(copies))
            reads_all = expected.files.reads_all
            names = [each for each in wanted if reads_all or _is_known(each, known)]
        for alias in copies:
            name = places.aliases[alias]
            if {alias, name} & set(names) and not hold_the_same(directory, name, alias):
                problem = f"the files have another {alias} than {name}; the loaded model has one"
                raise config_error("names", alias, problem, "reset and load that checkpoint")
        names = in_order(names, known)
        headers = read_headers(directory, names, single)
        return Manifest(
            tuple(names),
            tuple(headers[name].dtype for name in names),
            tuple(headers[name].shape for name in names),
        )

    def contents(self, source: wt.Source) -> bytes:
        directory, single = self._described
        files = weight_files(directory, single)
        state = directory, file_stamps(files)
        if self._content is None or self._content[:2] != state:  # many rounds read one checkpoint
            self._content = *state, file_identity(directory, {}, files, state[1]).content
        return self._content[2]

    def receive(self, manifest: Manifest, source: wt.Source, place: Place) -> int:
        directory, single = self._described
        headers = read_headers(directory, manifest.names, single)
        num_bytes = 0
        for tensor, name in enumerate(manifest.names):
            num_left = math.prod(headers[name].shape)
            for first, values in read_parts(headers[name].path, name):
                num_left -= values.numel()
                place([Rows(tensor, first, values, num_left == 0)])
                num_bytes += values.numel() * values.element_size()
        _synchronize(self._device)
        return num_bytes

    @property
    def _described(self) -> tuple[Path, str]:
        assert self._read_from is not None, "described before"
        return self._read_from


def _named(message: wt.UpdateWeights, former: Manifest | None) -> Manifest:
    """Return the tensors that a request names, or those of the previous request."""
    if not (message.names or message.dtypes or message.shapes or message.origins):
        if former is None:
            fix = "send names, dtypes and shapes once"
            raise config_error("names", [], "no names were given, now or before", fix)
        return former
    lengths = [len(message.names), len(message.dtypes), len(message.shapes)]
    lengths += [len(message.origins)] if message.origins else []
    if len(set(lengths)) > 1:
        raise config_error(
            "names",
            lengths,
            "names, dtypes and shapes are of different lengths, or origins are",
            "one of each per tensor, or none at all",
        )
    dtypes = tuple(DTYPES[name] for name in message.dtypes)
    names = tuple(map(full_name, message.names))
    return Manifest(names, dtypes, message.shapes, message.origins)


def _is_known(name: str, known: Collection[str]) -> bool:
    """Return True for a tensor of the model, packed or not, and for a part of its sparse delta."""
    return name in known or packed_tensor(name) in known or delta_part(name, known) is not None


def _rows(manifest: Manifest, part: Part, received: Tensor) -> Rows:
    dtype, shape = manifest.dtypes[part.tensor], manifest.shapes[part.tensor]
    raw = received[part.offset : part.offset + part.num_bytes]
    values = raw.view(dtype).view(part.stop - part.start, *shape[1:])
    return Rows(part.tensor, part.start, values, part.is_last)


def _empty_rows(manifest: Manifest) -> list[Rows]:
    """Return the tensors without elements, which no transfer contains."""
    return [
        Rows(tensor, 0, torch.empty(shape, dtype=dtype), True)
        for tensor, (dtype, shape) in enumerate(zip(manifest.dtypes, manifest.shapes, strict=True))
        if 0 in shape
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wrong_engine(engine: str, source: wt.Source) -> ConfigError:
    problem = f"the weight transfer engine is {engine}"
    fix = "init_weight_transfer_engine for this source first"
    return config_error("source", type(source).__name__, problem, fix)
