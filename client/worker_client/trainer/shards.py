"""Weight updates from a trainer of several processes: each rank sends the pieces that it has, and
each worker gets what lies in its own part alone.

    sender = ShardSender("gloo", group if dist.get_rank() == 0 else None)
    sender.send(shards_of(model.state_dict()))          # on every rank of the trainer
"""

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rendezvous.store import Member, RendezvousError, StoreServer
from rpc_schema import weight_transfer as wt
from rpc_schema.config import RendezvousAddress
from rpc_schema.shard_plan import NOTHING, SentTensor, Wants, plan_rounds, region_of
from rpc_schema.shard_wants import (
    LongValueError,
    decode_tensors,
    decode_wants,
    encode_tensors,
    get_long,
    put_long,
)
from worker_client.errors import config_error
from worker_client.group.running import RunningRequests
from worker_client.group.weights import Target
from worker_client.trainer.broadcast import DTYPE_NAMES, await_keys, await_workers
from worker_client.trainer.communicator import (
    Backend,
    Communicator,
    Failures,
    Place,
    Sending,
    TransferStopped,
)
from worker_client.trainer.connection import Connection, SendReport, UpdateOptions
from worker_client.trainer.deltas import TensorPiece
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

PACKED_BYTES: Final = 64 << 20
FINISH_S: Final = 600.0
"""Limit on rank 0's last operations, after all bytes have arrived."""
FAREWELL_S: Final = 5.0
"""Limit on the time for which rank 0, when it leaves, waits for the others to hear how the last
round ended."""
_ADDRESS_BYTES: Final = 512
_NUM_IN_FLIGHT: Final = 2

Shards: TypeAlias = Mapping[str, Tensor | Sequence[TensorPiece]]
"""Tensors of one rank of a trainer: all of each, or pieces of it."""


class _Own(NamedTuple):
    """A tensor of this rank, or a piece of one."""

    sent: SentTensor
    values: Tensor


class _Meeting(msgspec.Struct, frozen=True):
    """Words of rank 0 to the trainer's others."""

    address: RendezvousAddress
    num_workers: int


def shards_of(state: Mapping[str, Tensor]) -> dict[str, Tensor | list[TensorPiece]]:
    """Return what this rank has of a state dict: of a DTensor its local piece, other tensors whole.
    Tensors of which it has nothing are left out."""
    found: dict[str, Tensor | list[TensorPiece]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor
            continue
        local = tensor.to_local()
        _, origin = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if local.numel():
            found[name] = [TensorPiece(tuple(origin), local)]
    return found


class ShardChannel:
    """One rank of a trainer in the communicator with the workers. open() and send() block, and
    belong to one thread at a time; stop() may be called from any other."""

    def __init__(
        self,
        backend: Backend,
        rank: int,
        num_trainers: int,
        num_workers: int,
        *,
        address: RendezvousAddress | None = None,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
    ) -> None:
        """Rank 0 opens a rendezvous on a free port of `host`; the others are given its `address`.
        device, timeout_s: as BroadcastChannel takes them.

        Raises:
            ClientConfigError: NCCL without a GPU.
            TransferStopped: no rendezvous answers at the address.
        """
        size = num_trainers + num_workers
        self._communicator = Communicator(
            backend, Place(rank, num_trainers, size, host, timeout_s), device
        )
        self._server: StoreServer | None = None
        self._board: StoreServer | Member
        self._round: int | None = None
        """The last round that this rank has begun."""
        if address is None:
            self._server = self._board = StoreServer(host, size - 1)
            address = RendezvousAddress(
                host=host, port=self._server.port, secret=self._server.secret
            )
        else:
            with Failures("the rendezvous with the trainer's rank 0"):
                self._board = Member(address.host, address.port, address.secret, timeout_s)
        self.address = address
        """Address of the rendezvous."""

    @property
    def engine(self) -> wt.BroadcastEngine:
        """Argument of init_weight_transfer_engine."""
        place = self._communicator.place
        return wt.BroadcastEngine(
            backend=self._communicator.backend,
            place=self.address,
            rank_offset=place.num_trainers,
            world_size=place.size,
            num_trainers=place.num_trainers,
        )

    def open(self) -> None:
        """Connect to all members; the workers must receive `engine` at the same time.

        Raises:
            TransferStopped: they did not connect in time, or stop() was called.
        """
        place = self._communicator.place
        with Failures("the rendezvous with the workers"):
            self._board.set(f"member/{place.rank}", b"here")
            if self._server is not None:
                await_keys(self._communicator, self._server, range(place.size), "member/{}")
            self._communicator.connect(self._board, self.address.secret)

    def gather(self, own: Sequence[SentTensor], round: int) -> list[SentTensor]:
        """Return the tensors of a request: those of all ranks of the trainer, each with the rank
        that sends it. Of what several have, the one that has least to send does.

        own: of this rank. round: a number not used on this channel before.

        Raises:
            TransferStopped: a rank is lost, or has given up the round.
        """
        self._round = round
        try:
            with Failures("gathering the trainer's tensors"):
                if self._server is None:
                    put_long(
                        self._board.set, f"round/{round}/own/{self._rank}", encode_tensors(own)
                    )
                    return decode_tensors(self._read(f"round/{round}/all"))
                offered = [list(own)]
                for rank in range(1, self._communicator.place.num_trainers):
                    offered.append(decode_tensors(self._read(f"round/{round}/own/{rank}")))
                self._server.forget_under(f"round/{round - 1}/")  # which all have ended
                chosen = _choose(offered)
                put_long(self._server.set, f"round/{round}/all", encode_tensors(chosen))
                return chosen
        except LongValueError as error:
            raise TransferStopped(f"gathering the trainer's tensors failed: {error}") from error

    def send(
        self,
        tensors: Sequence[SentTensor],
        own: Mapping[tuple[str, tuple[int, ...]], Tensor],
        *,
        packed_bytes: int = PACKED_BYTES,
        round: int = 0,
    ) -> None:
        """Send this rank's tensors, once every worker is ready: update_weights must run at the same
        time, and send() on the trainer's other ranks.

        tensors: what gather() has returned for this round. own: this rank's, by name and origin, of
        any strides, on any device; they must not change during the send.

        Raises:
            TransferStopped: a worker refused; a worker or another rank is lost or too slow, or has
                given up; or stop() was called.
        """
        try:
            with Failures("sending shards"):
                wants = self._await_wants(tensors, round)
                self._send(tensors, own, wants, packed_bytes)
        except LongValueError as error:
            raise TransferStopped(f"sending shards failed: {error}") from error

    def announce(self, key: str, value: str) -> None:
        """Tell the trainer's other ranks; only rank 0 can. The first value of a key counts."""
        assert self._server is not None, "rank 0 alone"
        if not self._server.has([key]):
            self._server.set(key, value.encode())

    def hear(self, key: str, timeout_s: float) -> str:
        """Wait for what rank 0 announces. Raises TransferStopped."""
        with Failures("waiting for the trainer's rank 0"):
            return self._board.get(key, timeout_s).decode()

    def end_round(self) -> None:
        """Tell rank 0 that this rank waits for nothing more of its round. Another rank only."""
        with contextlib.suppress(RendezvousError):  # rank 0 has left already
            self._board.set(f"round/{self._round}/ended/{self._rank}", b"")

    def stop(self) -> None:
        """End a wait of rank 0."""
        self._communicator.stop()

    def close(self) -> None:
        """Leave the members, even if they have died. Rank 0 first lets the others hear how the
        last round ended, for FAREWELL_S at most."""
        self._communicator.stop()
        if self._server is not None and self._round is not None:
            self._await_ends(self._server, self._round)
        self._board.close()
        self._communicator.close()

    @property
    def _rank(self) -> int:
        return self._communicator.place.rank

    def _await_ends(self, server: StoreServer, round: int) -> None:
        """Wait until every other rank of the trainer has ended the round."""
        deadline = time.monotonic() + FAREWELL_S
        with contextlib.suppress(RendezvousError):  # a rank is lost, or too slow
            for rank in range(1, self._communicator.place.num_trainers):
                server.get(f"round/{round}/ended/{rank}", max(0.0, deadline - time.monotonic()))

    def _read(self, key: str) -> bytes:
        timeout_s = self._communicator.place.timeout_s
        return get_long(lambda part: self._board.get(part, timeout_s), key)

    def _await_wants(self, tensors: Sequence[SentTensor], round: int) -> list[Wants]:
        """Return what each worker needs, once all are ready."""
        place = self._communicator.place
        go = f"round/{round}/go"
        if self._server is not None:
            try:
                await_workers(self._communicator, self._server, round)
            except TransferStopped as error:
                self.announce(go, str(error))
                raise
            self.announce(go, "")
        elif fault := self.hear(go, place.timeout_s):
            raise TransferStopped(fault)
        return [
            decode_wants(self._read(f"round/{round}/wants/{rank}"), tensors)
            for rank in range(place.num_trainers, place.size)
        ]

    def _send(
        self,
        tensors: Sequence[SentTensor],
        own: Mapping[tuple[str, tuple[int, ...]], Tensor],
        wants: Sequence[Wants],
        packed_bytes: int,
    ) -> None:
        communicator = self._communicator
        if communicator.device.type == "cuda":
            torch.cuda.set_device(communicator.device)
        num_trainers = communicator.place.num_trainers
        under_way: deque[Sending] = deque()
        for step in plan_rounds(tensors, num_trainers, packed_bytes):
            if len(under_way) == _NUM_IN_FLIGHT:
                communicator.finish(under_way.popleft(), "an exchange")
            parts = step.parts[self._rank]
            regions = [NOTHING] * num_trainers
            regions += [region_of(tensors, parts, of_worker) for of_worker in wants]
            sizes = [region.num_bytes for region in regions]
            payload = torch.empty(sum(sizes), dtype=torch.uint8, device=communicator.buffer_device)
            first = 0
            for region in regions:
                for share in region.shares:
                    sent = tensors[share.tensor]
                    values = own[sent.name, sent.origin].detach()
                    values = values[tuple(slice(*bounds) for bounds in share.box)]
                    begin = first + share.offset
                    target = payload[begin : begin + share.num_bytes]
                    target.view(values.dtype).view(values.shape).copy_(values)
                first += region.num_bytes
            under_way.append(communicator.send_shards(payload, sizes))
        while under_way:
            communicator.finish(under_way.popleft(), "an exchange")


class ShardSender:
    """One rank of a trainer that uses torch.distributed. Every rank makes one, and makes the same
    calls. Rank 0 is the driver too: it has the group, which must be attached and have a model."""

    def __init__(
        self,
        backend: Backend,
        group: WorkerGroup | None,
        *,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
    ) -> None:
        """Sends nothing. group: rank 0's; None on the others. process_group: the trainer's ranks;
        None: all. device: the GPU that NCCL sends from. host: this process's address for the
        workers and the other ranks. timeout_s: the longest silence on either side."""
        self._rank, self._size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if (group is None) == (self._rank == 0):
            fix = "give it on rank 0 alone"
            raise config_error("group", group, f"this is the trainer's rank {self._rank}", fix)
        self._backend: Backend = backend
        self._group = group
        self._process_group = process_group
        self._device = torch.device(device)
        self._host = host
        self._timeout_s = timeout_s
        self._connection: Connection[ShardChannel] = Connection(
            None if group is None else group.weights, timeout_s
        )
        self._round = 0

    def __enter__(self) -> "ShardSender":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the workers; their weights do not change."""
        self._connection.close()

    def connect(self) -> None:
        """Create the communicator; send() does this if there is none.

        Raises:
            TransferError, TransferStopped: not all members have connected.
            ConfigError: the engine is not for this group.
        """
        self.close()
        channel = self._make_channel()
        self._connection.open(channel.engine, channel)

    def send(
        self,
        shards: Shards,
        *,
        format: wt.WeightFormat = "checkpoint",
        partial: bool = False,
        packed_bytes: int = PACKED_BYTES,
        version: int | None = None,
        target: Target = "model",
        running: RunningRequests = "drop",
        recompute_budget: int | None = None,
    ) -> SendReport:
        """Replace the weights of every rank of the group, as one complete update.

        shards: what this rank has. Of a tensor or piece that several ranks have, one sends it; all
        ranks' pieces together are the whole tensor, without overlaps. packed_bytes: most bytes that
        a rank sends at a time. format, partial, version, target, running, recompute_budget: rank
        0's count, as GroupWeights.start_update takes them.

        Raises:
            ConfigError: on rank 0, as WeightSender.send does.
            TransferError, WorkerDied: on rank 0: a member was lost. The weights are dirty until
                another send() or GroupWeights.reload() succeeds (an adapter is as it was).
            TransferStopped: the same on the other ranks, or rank 0 has given up, or is lost. After
                any of these, the next send() connects anew, on all ranks.
        """
        own = _entries(shards, self._rank)
        for device in {each.values.device for each in own if each.values.is_cuda}:
            torch.cuda.synchronize(device)  # they may have been computed on any stream
        if not self._connection.is_open:
            self.connect()
        self._round += 1
        channel = self._connection.channel
        assert channel is not None, "it is open"
        try:
            if self._group is not None:
                options = UpdateOptions(format, partial, version, target, running, recompute_budget)
                return self._update(self._group, channel, own, packed_bytes, options)
            try:
                tensors = channel.gather([each.sent for each in own], self._round)
                channel.send(tensors, _by_place(own), packed_bytes=packed_bytes, round=self._round)
                done = channel.hear(f"round/{self._round}/done", self._timeout_s + FINISH_S)
            finally:
                channel.end_round()
            return _report(done)
        except BaseException:
            self._connection.is_open = False
            raise

    def _update(
        self,
        group: WorkerGroup,
        channel: ShardChannel,
        own: Sequence[_Own],
        packed_bytes: int,
        options: UpdateOptions,
    ) -> SendReport:
        number = self._round
        try:
            tensors = channel.gather([each.sent for each in own], number)
            source = wt.ShardSource(
                sources=tuple(tensor.source for tensor in tensors),
                packed_bytes=packed_bytes,
                round=number,
            )
            report = options.update(
                group.weights,
                lambda: self._connection.run(
                    lambda: channel.send(
                        tensors, _by_place(own), packed_bytes=packed_bytes, round=number
                    ),
                    lambda: group.weights.update(_listed(tensors), source),
                ),
                num_tensors=len({tensor.name for tensor in tensors}),
            )
        except BaseException as error:
            reason = f"rank 0 has given up: {error}"
            for key in (f"round/{number}/go", f"round/{number}/done"):
                channel.announce(key, reason)
            raise
        channel.announce(f"round/{number}/done", msgspec.json.encode(report).decode())
        return report

    def _make_channel(self) -> ShardChannel:
        """Return this rank's channel; rank 0 tells the others where they meet."""
        if self._group is None:
            meeting = msgspec.msgpack.decode(self._share(b""), type=_Meeting)
            return self._channel_for(meeting.num_workers, meeting.address)
        num_workers = self._group.parallel.group_size
        channel = self._channel_for(num_workers, None)
        self._share(msgspec.msgpack.encode(_Meeting(channel.address, num_workers)))
        return channel

    def _channel_for(self, num_workers: int, address: RendezvousAddress | None) -> ShardChannel:
        return ShardChannel(
            self._backend,
            self._rank,
            self._size,
            num_workers,
            address=address,
            device=self._device,
            host=self._host,
            timeout_s=self._timeout_s,
        )

    def _share(self, value: bytes) -> bytes:
        """Return rank 0's bytes, at most _ADDRESS_BYTES, on every rank of the trainer."""
        on_gpu = dist.get_backend(self._process_group) == "nccl"
        raw = bytearray(len(value).to_bytes(4, "little") + value).ljust(_ADDRESS_BYTES, b"\0")
        shared = torch.frombuffer(raw, dtype=torch.uint8)
        shared = shared.to(torch.device("cuda", torch.cuda.current_device())) if on_gpu else shared
        dist.broadcast(shared, group=self._process_group, group_src=0)
        found = shared.cpu().numpy().tobytes()
        return found[4 : 4 + int.from_bytes(found[:4], "little")]


def _entries(shards: Shards, rank: int) -> list[_Own]:
    """Return a rank's tensors and pieces. Raises ClientConfigError."""
    found: list[_Own] = []
    for name, each in shards.items():
        pieces = [TensorPiece((), each)] if isinstance(each, Tensor) else each
        for origin, values in pieces:
            if values.dtype not in DTYPE_NAMES:
                problem = f"{name} has an unsupported dtype"
                fix = f"one of {sorted(DTYPE_NAMES.values())}"
                raise config_error("shards", str(values.dtype), problem, fix)
            dtype, shape = DTYPE_NAMES[values.dtype], tuple(values.shape)
            found.append(_Own(SentTensor(name, dtype, shape, tuple(origin), rank), values))
    return found


def _by_place(own: Sequence[_Own]) -> dict[tuple[str, tuple[int, ...]], Tensor]:
    return {(sent.name, sent.origin): values for sent, values in own}


def _choose(offered: Sequence[Sequence[SentTensor]]) -> list[SentTensor]:
    """Return each of the ranks' tensors once, with the rank that sends it."""
    holders: dict[SentTensor, list[int]] = {}
    for rank, tensors in enumerate(offered):
        for tensor in tensors:
            holders.setdefault(tensor._replace(source=0), []).append(rank)
    loads = [0] * len(offered)
    chosen = []
    for tensor, ranks in holders.items():
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += torch.Size(tensor.shape).numel()
        chosen.append(tensor._replace(source=rank))
    return chosen


def _listed(tensors: Sequence[SentTensor]) -> TensorList:
    has_pieces = any(tensor.origin for tensor in tensors)
    return TensorList(
        tuple(tensor.name for tensor in tensors),
        msgspec.convert(tuple(tensor.dtype for tensor in tensors), tuple[wt.TensorDtype, ...]),
        tuple(tensor.shape for tensor in tensors),
        tuple(tensor.origin for tensor in tensors) if has_pieces else (),
    )


def _report(announced: str) -> SendReport:
    """Return what rank 0 has announced. Raises TransferStopped: it has given up."""
    try:
        return msgspec.json.decode(announced, type=SendReport)
    except msgspec.DecodeError:
        raise TransferStopped(announced) from None
