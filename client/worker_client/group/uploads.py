"""Upload of tensors that are too large for a message to a group's daemons, chunk by chunk, so that
a driver can run steps in between."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rpc_schema import uploads as up
from rpc_schema.base import HASH_BYTES
from rpc_schema.errors import BadFrameError
from worker_client.errors import (
    ClientError,
    config_error,
)
from worker_client.group.group_channel import GroupChannel
from worker_client.inputs.host_tensor import HostTensor as HostTensor
from worker_client.wire.worker_client import WorkerClient


class _Planned(NamedTuple):
    """A chunk that some ranks lack."""

    tensor: HostTensor
    offset: int
    clients: Sequence[WorkerClient]

    @property
    def is_last(self) -> bool:
        return self.offset + up.CHUNK_BYTES >= len(self.tensor.data)


class UploadTask:
    """Tensors being uploaded to some ranks of a group. Belongs to the group's thread. An abandoned
    task leaves unfinished uploads, for GroupUploads.drop or another try."""

    def __init__(
        self, channel: GroupChannel, tensors: Sequence[HostTensor], ranks: Sequence[int] | None
    ) -> None:
        """Ask the ranks (None: all) which tensors they have already. Raises as GroupUploads.put
        does."""
        self._channel = channel
        self._epoch = _attached_epoch(channel)
        self.content_hashes = [tensor.content_hash for tensor in tensors]
        """In the order of the tensors."""
        wanted = {tensor.content_hash: tensor for tensor in tensors}
        clients = _chosen(channel, ranks)
        found = [_find(client, self._epoch, list(wanted)) for client in clients]
        self._rest: deque[_Planned] = deque()
        for name, tensor in wanted.items():
            lacking = [client for client, has in zip(clients, found, strict=True) if not has[name]]
            if lacking:
                offsets = range(0, len(tensor.data), up.CHUNK_BYTES)
                self._rest += [_Planned(tensor, offset, lacking) for offset in offsets]

    def proceed(self) -> bool:
        """Send one chunk to all ranks that lack it, and wait for their replies. Return False if
        nothing was left to send. After an error the next call tries the same chunk again. Raises as
        GroupUploads.put does."""
        if not self._rest:
            return False
        self._channel.check_usable()
        planned = self._rest[0]
        are_complete = self._send(planned)
        if planned.is_last and not all(are_complete):
            raise ClientError("uploads were dropped while they were sent: upload them again")
        self._rest.popleft()
        return True

    def finish(self) -> list[bytes]:
        """Send all that is left; return content_hashes. Raises as GroupUploads.put does."""
        while self.proceed():
            pass
        return self.content_hashes

    def _send(self, planned: _Planned) -> list[bool]:
        tensor, begin = planned.tensor, planned.offset
        chunk = partial(
            up.UploadChunk,
            epoch=self._epoch,
            content_hash=tensor.content_hash,
            dtype=tensor.dtype,
            shape=tensor.shape,
            offset=begin,
            data=bytes(tensor.data[begin : begin + up.CHUNK_BYTES]),
        )
        pending = [client.begin(chunk) for client in planned.clients]
        return [call.result().is_complete for call in pending]


class GroupUploads:
    """`WorkerGroup.uploads`: tensors of requests in the host memory of ranks. Belongs to the
    group's thread."""

    def __init__(self, channel: GroupChannel) -> None:
        self._channel = channel

    def put(self, tensors: Sequence[HostTensor], ranks: Sequence[int] | None = None) -> list[bytes]:
        """Put tensors into the host memory of ranks (by default all), and return the content hashes
        that steps name them by. Tensors that are there already are not sent. Daemons run steps
        meanwhile, but this returns only when all is there: while it serves requests, a driver calls
        begin instead.

        They stay until drop(), a WorkerGroup.reset() or the end of the lease: after attach() and
        replace(), upload them again. attach(keep_requests=True) keeps those that requests name.

        Raises:
            CapacityError: a daemon has no room. Tensors that others have received stay.
            StateError: no model is loaded.
            ClientError: uploads were dropped meanwhile, by a reset.
        """
        return self.begin(tensors, ranks).finish()

    def begin(
        self, tensors: Sequence[HostTensor], ranks: Sequence[int] | None = None
    ) -> UploadTask:
        """Begin an upload, to be sent chunk by chunk: call its proceed() between steps, until that
        returns False."""
        return UploadTask(self._channel, tensors, ranks)

    def capacity(self) -> int:
        """Return the least host memory that a rank has for uploads, taken or not, in bytes."""
        self._channel.check_usable()
        clients = _chosen(self._channel, None)
        return min(client.get_status().max_upload_bytes for client in clients)

    def read(
        self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None
    ) -> list[HostTensor]:
        """Return those of these tensors that one of these ranks has completely. Waits.

        Raises:
            BadFrameError: what a rank has is not the tensor of its hash.
        """
        epoch = _attached_epoch(self._channel)
        read: dict[bytes, HostTensor] = {}
        for client in _chosen(self._channel, ranks):
            wanted = [name for name in dict.fromkeys(content_hashes) if name not in read]
            found = _find(client, epoch, wanted)
            read |= {name: _read(client, epoch, name) for name in wanted if found[name]}
        return list(read.values())

    def find(
        self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None
    ) -> list[bool]:
        """Return, for each tensor, True if all of these ranks have it completely."""
        epoch = _attached_epoch(self._channel)
        found = [_find(client, epoch, content_hashes) for client in _chosen(self._channel, ranks)]
        return [all(on_rank[name] for on_rank in found) for name in content_hashes]

    def drop(self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
        """Have ranks forget tensors, also incomplete ones. A step that uses one keeps it until it
        is done. Unknown hashes are no error."""
        epoch = _attached_epoch(self._channel)
        for client in _chosen(self._channel, ranks):
            for part in _named_parts(content_hashes):
                client.ask(partial(up.DropUploads, epoch=epoch, content_hashes=part))


def _attached_epoch(channel: GroupChannel) -> int:
    """Return the epoch that uploads belong to. Raises as GroupChannel.check_usable does."""
    channel.check_usable()
    return channel.epoch


def _chosen(channel: GroupChannel, ranks: Sequence[int] | None) -> list[WorkerClient]:
    """Return the clients of some ranks (None: all). Raises ClientConfigError: there is none."""
    clients = {client.rank: client for client in channel.daemons.present}
    if ranks is None:
        return list(clients.values())
    if not ranks or not clients.keys() >= set(ranks):
        fix = f"use some of {list(clients)}"
        raise config_error("ranks", list(ranks), "the group has no such ranks", fix)
    return [clients[rank] for rank in sorted(set(ranks))]


def _read(client: WorkerClient, epoch: int, name: bytes) -> HostTensor:
    """Read a tensor that a rank has, chunk by chunk. Raises as GroupUploads.read does."""

    def chunk_at(offset: int) -> up.ReadUploadReply:
        ask = partial(up.ReadUpload, epoch=epoch, content_hash=name, offset=offset)
        return client.ask(ask)

    first = chunk_at(0)
    num_bytes = up.tensor_bytes(first.dtype, first.shape)
    data = bytearray(first.data)
    while first.data and len(data) < num_bytes:
        data += chunk_at(len(data)).data
    if len(data) == num_bytes:
        tensor = HostTensor.from_bytes(first.dtype, first.shape, data)
        if tensor.content_hash == name:
            return tensor
    raise BadFrameError(f"the upload {name.hex()} of rank {client.rank} is not what its name says")


def _find(client: WorkerClient, epoch: int, content_hashes: Sequence[bytes]) -> dict[bytes, bool]:
    """Return, by hash, True for tensors that a rank has completely."""
    found: dict[bytes, bool] = {}
    for part in _named_parts(content_hashes):
        reply = client.ask(partial(up.FindUploads, epoch=epoch, content_hashes=part))
        found |= zip(part, reply.are_complete, strict=True)
    return found


def _named_parts(content_hashes: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Split hashes into parts of the size that a request may name. Raises ClientConfigError: one is
    not a hash."""
    for name in content_hashes:
        if len(name) != HASH_BYTES:
            fix = f"use the {HASH_BYTES} bytes that put() has returned"
            raise config_error("content_hashes", name, "it is not a content hash", fix)
    for begin in range(0, len(content_hashes), up.MAX_NAMED_UPLOADS):
        yield tuple(content_hashes[begin : begin + up.MAX_NAMED_UPLOADS])
