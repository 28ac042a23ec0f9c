"""Opens windows: memory of each rank of a tensor-parallel group that all its ranks can write.
Windows are opened and closed with the link.

Descriptors are passed over our own Unix sockets; their names and a secret come from the link's
store. torch's own symmetric memory is not used, for three reasons. Its rendezvous keeps a counter
for the life of the process, so a surviving rank never matches a new one. Its kernels cannot be
aborted. And freeing it waits for the whole device.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public nevertheless

from worker_daemon.contracts.window import Window
from worker_daemon.distributed.peer_memory import (
    CudaDriver,
    MappedBlock,
    PeerMemoryError,
    adopt,
    allocate,
)

BLANK = -0x7FFF8000
"""The initial int32 of every word of a window: a pair of 16-bit negative zeros."""

BYTES_PER_RANK = 8 << 20
"""Bytes of a window for each rank: two messages of 4 MiB."""

_LOG = logging.getLogger(__name__)
_SECRET_BYTES = 16
_HEADER = struct.Struct(f"<{_SECRET_BYTES}sII")
"""The message sent with a descriptor: secret, rank, and size of the block in MiB."""
_MIB = 1 << 20
_ABSENT = b"-"
_POLL_S = 0.001
_END_S = 5.0
"""Longest wait for the device to finish with a window before the window is abandoned."""


class Peers:
    """Windows of a link's group. This class has none: on the CPU, between hosts, or if the driver
    does not support them."""

    window: Window | None = None
    """This rank's view of the windows; None on every rank if there are none."""

    def stop(self) -> None:
        """Stop all waits for peers on the device, now and in the future. Any thread may call it."""

    def leave(self) -> None:
        """Stop, and unmap all windows once the device is done with them."""


class MappedPeers(Peers):
    """The windows of a group, all mapped here. Owned by the link; made on the step thread."""

    def __init__(self, rank: int, device: torch.device, blocks: Sequence[MappedBlock]) -> None:
        """Takes ownership of the blocks: one per rank, in order."""
        self._blocks = list(blocks)
        self._pinned = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        # A plain view for stop(), whose thread may be in any of torch's modes.
        self._stop = self._pinned.numpy()
        self._device = device
        self.window = Window(
            rank,
            device,
            tuple(block.address for block in blocks),
            blocks[rank].num_bytes,
            BLANK,
            self._pinned.data_ptr(),
        )

    def stop(self) -> None:
        self._stop[0] = 1

    def leave(self) -> None:
        self.stop()
        blocks, self._blocks = self._blocks, []
        if blocks and not is_device_done(self._device, _END_S):
            # Memory that a kernel may still write must stay mapped until the process exits.
            _LOG.warning("the device still uses the windows: they stay mapped")
            return
        _release(blocks)


def open_peers(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Peers:
    """Map the windows of all ranks of a group, or none on any rank. Collective.

    store: used only by this group, and new for each link; its timeout bounds the wait for the
    others.

    Raises:
        RuntimeError: they did not connect (torch's DistStoreError).
    """
    if size == 1 or device.type != "cuda":
        return Peers()
    blocks = share(store, rank, size, _new_block(device, size), timeout_s)
    if not blocks:
        _LOG.warning("the ranks of this stage share no memory: NCCL serves all messages")
        return Peers()
    return MappedPeers(rank, device, blocks)


def _new_block(device: torch.device, size: int) -> "BlockExchange | None":
    ordinal = device.index if device.index is not None else torch.cuda.current_device()
    try:
        return BlockExchange(ordinal, size)
    except PeerMemoryError as error:
        _LOG.warning("the driver shares no memory: %s", error)
        return None


class BlockExchange:
    """A rank's contribution to an exchange of blocks: a new, blank block of its device."""

    def __init__(self, device: int, size: int) -> None:
        self._driver, self._device = CudaDriver(), device
        self.own = allocate(self._driver, BYTES_PER_RANK * size, device)
        try:
            self.own.fill(BLANK & 0xFFFFFFFF)
        except PeerMemoryError:
            self.own.release()
            raise
        torch.cuda.synchronize(device)

    def adopt(self, descriptor: int, num_bytes: int) -> MappedBlock:
        """Map a peer's block, a multiple of 1 MiB. Raises PeerMemoryError."""
        return adopt(self._driver, descriptor, num_bytes, self._device)


def share(
    store: Store, rank: int, size: int, meeting: BlockExchange | None, timeout_s: float
) -> list[MappedBlock]:
    """Return every rank's block by rank, or an empty list on all ranks if one has none. Collective.

    meeting: None on a rank without a block. Takes ownership of meeting.own.
    """
    blocks = {} if meeting is None else {rank: meeting.own}
    try:
        with _listener(timeout_s) as (listener, name):
            secret = secrets.token_bytes(_SECRET_BYTES)
            own = _ABSENT if meeting is None else name + secret
            everyone = _exchange(store, "names", rank, size, own)
            places = set(_exchange(store, "places", rank, size, _place()))
            if meeting is not None and _ABSENT not in everyone and len(places) == 1:
                _trade(everyone, listener, secret, meeting, blocks)
        done = b"1" if len(blocks) == size else b"0"
        if set(_exchange(store, "mapped", rank, size, done)) == {b"1"}:
            return [blocks[peer] for peer in range(size)]
    except BaseException:
        _release(list(blocks.values()))
        raise
    _release(list(blocks.values()))
    return []


def _place() -> bytes:
    """Return the scope of this process's abstract sockets: this boot of this host, and this network
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return boot.strip() + bytes(Path("/proc/self/ns/net").readlink())


def _trade(
    everyone: Sequence[bytes],
    listener: socket.socket,
    secret: bytes,
    meeting: BlockExchange,
    blocks: dict[int, MappedBlock],
) -> None:
    """Send this rank's block to all others and receive theirs. If one peer gives up, continue, so
    that the others need not wait."""
    (rank,) = blocks
    for peer, address in enumerate(everyone):
        if peer != rank:
            with _warning_that(f"rank {peer} does not take this rank's window"):
                _give(address, rank, meeting.own, listener.gettimeout())
    with _warning_that("a peer's window cannot be mapped"):
        while len(blocks) < len(everyone):
            _take(listener, secret, len(everyone), meeting, blocks)


@contextlib.contextmanager
def _warning_that(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, PeerMemoryError) as error:
        _LOG.warning("%s: %s", what, error)


def _exchange(store: Store, key: str, rank: int, size: int, value: bytes) -> list[bytes]:
    """Return every rank's value, by rank."""
    store.set(f"{key}/{rank}", value.hex())
    return [bytes.fromhex(store.get(f"{key}/{peer}").decode()) for peer in range(size)]


@contextlib.contextmanager
def _listener(timeout_s: float) -> Iterator[tuple[socket.socket, bytes]]:
    """Open a listening Unix socket without a file; yield it and its name."""
    name = b"\0" + secrets.token_bytes(_SECRET_BYTES).hex().encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(timeout_s)
        listener.bind(name)
        listener.listen()
        yield listener, name


def _give(address: bytes, rank: int, block: MappedBlock, timeout_s: float | None) -> None:
    """Send this rank's block to a peer, which need not have accepted yet."""
    name, secret = address[:-_SECRET_BYTES], address[-_SECRET_BYTES:]
    descriptor = block.export()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(timeout_s)
            peer.connect(name)
            header = _HEADER.pack(secret, rank, block.num_bytes // _MIB)
            socket.send_fds(peer, [header], [descriptor])
    finally:
        os.close(descriptor)


def _take(
    listener: socket.socket,
    secret: bytes,
    size: int,
    meeting: BlockExchange,
    blocks: dict[int, MappedBlock],
) -> None:
    """Accept one peer's block; data from any other sender is dropped."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(listener.gettimeout())
        data, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
    try:
        if len(data) == _HEADER.size and len(descriptors) == 1:
            token, peer, size_mib = _HEADER.unpack(data)
            if secrets.compare_digest(token, secret) and peer < size and peer not in blocks:
                blocks[peer] = meeting.adopt(descriptors[0], size_mib * _MIB)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _release(blocks: Sequence[MappedBlock]) -> None:
    for block in blocks:
        with contextlib.suppress(PeerMemoryError):  # a broken context: freed when the process exits
            block.release()


def is_device_done(device: torch.device, limit_s: float) -> bool:
    """Return True if all work on the current stream ends within limit_s. Polls, so that it never
    blocks in the driver; work on a lost device never ends."""
    if device.type != "cuda":
        return True
    deadline = time.monotonic() + limit_s
    try:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    except RuntimeError:
        return False
    return True
