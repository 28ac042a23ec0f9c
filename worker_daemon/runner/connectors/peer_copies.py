"""Copies blocks from the slots of another group's ranks, whose device memory this process maps by
CUDA IPC: no byte of them crosses the host. What both sides tell each other for that is here too.

Shapes: m contents, G KV groups of one window.
"""

import logging
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rpc_schema.cached_blocks import MAX_BLOCK_HASH_BYTES
from rpc_schema.errors import TransferError
from rpc_schema.kv_transfer import KVShard
from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_daemon.device.ipc_driver import HANDLE_BYTES
from worker_daemon.device.peer_rows import MappedRows
from worker_daemon.device.side_stream import SideStream
from worker_daemon.runner.connectors.checksums import WORD_BYTES
from worker_daemon.runner.connectors.peer_moves import BlocksToMove, MovedContents
from worker_daemon.runner.connectors.peer_pages import SlotPages, pages_of, parts_of
from worker_daemon.runner.connectors.peer_pieces import SlotColumns
from worker_daemon.runner.connectors.peer_routes import Route, windows_of
from worker_daemon.runner.connectors.staging import staging_rows

_SLOT_BYTES: Final = np.dtype("<i4").itemsize
MAX_LISTING_BYTES: Final = MAX_MOVED_BLOCKS * (_SLOT_BYTES + MAX_BLOCK_HASH_BYTES)
_OFFER: Final = struct.Struct(f"<64s{HANDLE_BYTES}sQQ")
OFFER_BYTES: Final = _OFFER.size
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_LOG = logging.getLogger(__name__)


class SharedMemory(NamedTuple):
    """Means by which others map this rank's slots, and it maps theirs."""

    handle: bytes
    """See TierRows."""
    map_rows: "MapRows"


class MapRows(Protocol):
    """Maps rows of another process: PeerRows with a device."""

    def __call__(self, handle: bytes, num_rows: int, row_bytes: int) -> MappedRows:
        """Raises TransferError: they cannot be mapped here."""


class SlotOffer(NamedTuple):
    """A rank's slots, for others to map."""

    handle: bytes
    """Empty: none can."""
    num_slots: int
    slot_bytes: int

    def packed(self) -> bytes:
        """Return OFFER_BYTES, which name this host too."""
        return _OFFER.pack(_boot_id(), self.handle, self.num_slots, self.slot_bytes)


def read_offer(packed: bytes) -> SlotOffer | None:
    """Return another rank's offer; None: it makes none, or is on another host."""
    host, handle, num_slots, slot_bytes = _OFFER.unpack(packed)
    own = _boot_id()
    if not own or host.rstrip(b"\0") != own or not any(handle):
        return None
    return SlotOffer(handle, num_slots, slot_bytes)


def listing_of(move: BlocksToMove) -> bytes:
    """Return where a move's blocks are on this rank: all slots, then all hashes, by window."""
    slots = [each.slots.astype("<i4").tobytes() for each in move.contents]
    return b"".join([*slots, *(each.hashes.tobytes() for each in move.contents)])


@dataclass(slots=True)
class MappedSource:
    """A rank of the other group whose slots are mapped here. Belongs to the link's thread."""

    offer: SlotOffer
    rows: MappedRows
    pages: SlotPages
    """Its slots, by parts: their form alone, on rows of `staging`."""
    staging: Tensor
    """uint8 [rows, slot_bytes], on this rank's device; no rows if it is alike."""
    kv_groups: Mapping[int, tuple[int, ...]]
    """Its KV groups, by window."""
    is_alike: bool
    """It has the same parts in the same places as this rank, and is its only source."""

    def listing_bytes(self, move: BlocksToMove) -> int:
        """Return the size of its listing of a move."""
        num_blocks = sum(
            len(each.names) * len(self.kv_groups.get(each.window, ())) for each in move.contents
        )
        return num_blocks * (_SLOT_BYTES + int(move.hashes.shape[1]))

    def read(self, move: BlocksToMove, listing: bytes) -> list[MovedContents]:
        """Return a move's contents, as it has them. Raises TransferError: it has no such slot."""
        shapes = [
            (len(each.names), len(self.kv_groups.get(each.window, ()))) for each in move.contents
        ]
        width, first, found = move.hashes.shape[1], 0, []
        first_hash = _SLOT_BYTES * sum(count * groups for count, groups in shapes)
        for each, (count, groups) in zip(move.contents, shapes, strict=True):
            slots = np.frombuffer(listing, "<i4", count * groups, _SLOT_BYTES * first)
            hashes = np.frombuffer(
                listing, np.uint8, count * groups * width, first_hash + first * width
            )
            first += count * groups
            if ((slots < 0) | (slots >= self.offer.num_slots)).any():
                raise TransferError(f"the other rank has {self.offer.num_slots} slots, not more")
            found.append(
                each._replace(
                    kv_groups=self.kv_groups.get(each.window, ()),
                    slots=slots.astype(np.int32).reshape(count, groups),
                    hashes=hashes.reshape(count, groups, width),
                )
            )
        return found

    def copy(
        self,
        routes: Sequence[Route],
        own: MovedContents,
        theirs: MovedContents,
        target: Tensor,
        pages: SlotPages,
        columns: SlotColumns,
        *,
        are_last: bool,
    ) -> int:
        """Start to copy pieces of contents to this rank's slots; return the bytes read. target: its
        slots, uint8 [slots, bytes of a slot]. pages: the same by parts. columns: of the pieces.
        are_last: the last ones; all others were copied before."""
        if self.is_alike:  # all checksums come with the last piece, as its neighbors
            slots, copied = own.slots.reshape(-1), columns.words
            if are_last:
                copied = slice(copied.start, self.offer.slot_bytes)
            self.rows.copy(theirs.slots.reshape(-1), target, slots, copied)
            if are_last:
                width = own.hashes.shape[2]
                names = theirs.hashes.reshape(-1, width), own.hashes.reshape(-1, width)
                pages.rename(slots, *names)
                pages.clear_unused(own)
            return int(slots.size * (copied.stop - copied.start))
        num_groups = max(1, len(theirs.kv_groups))
        at_once = max(1, len(self.staging) // num_groups)
        for here, there in zip(own.in_parts(at_once), theirs.in_parts(at_once), strict=True):
            places = np.arange(there.slots.size, dtype=np.int32)
            for each in columns:
                self.rows.copy(there.slots.reshape(-1), self.staging, places, each)
            staged = there._replace(slots=places.reshape(there.slots.shape))
            for route in routes:
                words = self.pages.pack(route.sent, route.layers, staged)
                pages.unpack(route.received, route.layers, here, words)
        return int(theirs.slots.size * sum(each.stop - each.start for each in columns))


class MappedSources:
    """The ranks of the other group whose slots are mapped here. Belongs to a link's thread."""

    def __init__(
        self,
        shared: SharedMemory | None,
        shard: KVShard,
        rows: Tensor,
        pages: SlotPages,
        side: SideStream,
    ) -> None:
        """shared: None: none are mapped. shard: this rank's. rows: its slots, uint8 [slots, bytes
        of a slot]. pages: the same by parts. side: the thread's."""
        self._shared = shared
        self._shard = shard
        self._rows, self._pages = rows, pages
        self._side = side
        self._all: dict[int, MappedSource] = {}

    def __contains__(self, member: int) -> bool:
        return member in self._all

    def __bool__(self) -> bool:
        return bool(self._all)

    def map(self, member: int, packed: bytes, shard: KVShard, *, is_sole: bool) -> None:
        """Map the slots of a member, if they can be. packed: its offer. is_sole: it is the only
        one that this rank gets blocks of."""
        offer, shared = read_offer(packed), self._shared
        parts, windows = parts_of(shard), windows_of(shard)
        slot_bytes = WORD_BYTES * (parts.num_words + parts.checksum_words)
        if offer is None or shared is None or offer.slot_bytes != slot_bytes:
            return
        form = {"pp_rank": shard.pp_rank, "tp_rank": shard.tp_rank}
        is_alike = is_sole and structs.replace(self._shard, **form) == shard
        num_rows = 0 if is_alike else max(len(windows), staging_rows(slot_bytes))
        staging = self._rows.new_empty((num_rows, slot_bytes))
        groups = {
            each: tuple(group for group, own in enumerate(windows) if own == each)
            for each in windows
        }
        pages = pages_of(shard, parts, staging)
        try:
            rows = shared.map_rows(offer.handle, offer.num_slots, slot_bytes)
        except TransferError as error:
            _LOG.info("slots of another group are read over gloo: %s", error)
            return
        self._all[member] = MappedSource(offer, rows, pages, staging, groups, is_alike)

    def listing_bytes(self, member: int, move: BlocksToMove) -> int:
        """Return the size of a member's listing of a move; 0 if it is not mapped."""
        return self._all[member].listing_bytes(move) if member in self._all else 0

    def read(
        self,
        member: int,
        move: BlocksToMove,
        listing: bytes,
        routes: Mapping[int, Sequence[Route]],
        columns: SlotColumns,
        *,
        are_last: bool,
    ) -> int:
        """Copy pieces of what a member has of a move out of its slots, and wait for it; return the
        bytes. routes: of the pieces, by window. columns, are_last: see MappedSource.copy. Raises
        TransferError."""
        source, num_bytes = self._all[member], 0
        for own, theirs in zip(move.contents, source.read(move, listing), strict=True):
            found = routes.get(own.window, ())
            if found or (source.is_alike and theirs.slots.size):
                place = own, theirs, self._rows, self._pages, columns
                num_bytes += source.copy(found, *place, are_last=are_last)
        self._side.settle()
        return num_bytes

    def close(self) -> None:
        """Unmap all of them."""
        mapped, self._all = self._all, {}
        if mapped:
            with suppress(torch.AcceleratorError):  # the step thread learns of it too
                self._side.settle()
        for source in mapped.values():
            with suppress(TransferError):
                source.rows.close()


def _boot_id() -> bytes:
    """Name this host, until it starts again."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""
