"""Moves blocks between the slots of this rank's host tier and those of another group's ranks,
beside the steps: a thread for each transfer link sends and receives, and the step that loads a
received block checks it as any other (host_tier.py).

Shapes: n blocks, R words of a slot.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rpc_schema import kv_transfer as kt
from rpc_schema.errors import FencedError, WorkerError
from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.distributed.peer_channel import PeerChannel, PeerMeeting
from worker_daemon.errors import config_error
from worker_daemon.runner.block_contents import BlockContents, Hashes, versioned_tag
from worker_daemon.runner.connectors.checksums import CHECKSUM_WORDS, BlockParts, digest
from worker_daemon.runner.connectors.host_tier import ReceivedBlocks, TierCounts
from worker_daemon.runner.connectors.peer_routes import PartSpan, Route, find_routes

MESSAGE_BYTES: Final = 4 << 20
"""Size of a message, or what one block takes in it."""
_IS_HELD: Final = b"held"
_IS_LACKING: Final = b"lack"
_HEADER_BYTES: Final = len(_IS_HELD) + 32
_STORE_WAIT_S: Final = 5.0
"""Longest wait for a step to store what is to be sent: moves behind it wait too."""
_STORE_POLL_S: Final = 0.001

_LOG = logging.getLogger(__name__)


class WeightsNow(Protocol):
    """The weights that compute blocks: WeightState."""

    @property
    def version(self) -> int:
        """Number of their version."""

    @property
    def identity(self) -> SourceIdentity:
        """Names their contents."""


class SharedSlots(NamedTuple):
    """The host tier, as other groups use it: none of its device memory."""

    rows: Tensor
    """uint8 [slots, bytes of a slot]: blocks with their checksums."""
    arrivals: deque[ReceivedBlocks]
    counts: TierCounts
    have_left: Callable[[], bool]
    contents: BlockContents


class ShardPlace(NamedTuple):
    """This rank's blocks, and its place in its group."""

    pp_rank: int
    tp_rank: int
    dtype: str
    parts: BlockParts


@dataclass(frozen=True, slots=True)
class _Move:
    number: int
    tag: bytes
    slots: Int32s
    """[n]"""
    hashes: Hashes
    """[n, bytes of a hash]"""


class PeerTransfers:
    """Owned by Serving. The control thread calls its methods; close() may be called from any."""

    def __init__(
        self, place: ShardPlace, slots: SharedSlots, weights: WeightsNow, meeting: threading.Lock
    ) -> None:
        """meeting: held while gloo connects the members of a group."""
        self._place = place
        self._slots = slots
        self._weights = weights
        self._meeting = meeting
        self._link: _PeerLink | None = None

    @property
    def shard(self) -> kt.KVShard:
        """This rank, as the ranks of another group must know it."""
        parts = self._place.parts
        return kt.KVShard(
            pp_rank=self._place.pp_rank,
            tp_rank=self._place.tp_rank,
            layer_names=parts.layers,
            first_head=parts.first_head,
            num_heads=parts.num_heads,
            rows=parts.rows,
            words=parts.words,
            dtype=self._place.dtype,
            weights=self._weights.identity.content,
        )

    def open(self, message: kt.OpenKVTransfer) -> None:
        """Leave the present link, and begin to meet the members of another.

        Raises:
            FencedError: the link is not newer.
            ConfigError: blocks of the groups are not alike, or this rank's are others.
        """
        present = (0, 0) if self._link is None else (self._link.epoch, self._link.number)
        if (message.epoch, message.number) <= present:
            problem = f"transfer link {message.number} is not above link {present[1]}"
            raise FencedError(problem, fix="use a higher number")
        members = (*message.sources, *message.destinations)
        if message.rank >= len(members):
            fix = f"0 to {len(members) - 1}"
            raise config_error("rank", message.rank, "the link has no such member", fix)
        if members[message.rank] != self.shard:
            fix = "get the handshake metadata of all ranks again"
            raise config_error("rank", message.rank, "this rank has other blocks", fix)
        routes = find_routes(message.sources, message.destinations)
        self.close()
        self._link = _PeerLink(message, routes, self._place.parts, self._slots, self._weights)
        self._link.start(self._meeting)

    def move(self, message: kt.MoveKVBlocks) -> None:
        """Queue a move.

        Raises:
            FencedError: it is not the next one of the present link.
            ConfigError: a slot does not exist, or is named twice, or columns do not fit.
        """
        link = self._link
        if link is None or message.number != link.number or message.move != link.num_queued + 1:
            problem = f"move {message.move} of transfer link {message.number} is not the next one"
            raise FencedError(problem, fix="open another transfer link")
        link.queue(_read(message, self._slots.rows.shape[0]))

    def report(self, call: int) -> kt.GetKVTransfersReply:
        """Return what has become of the moves of the present link."""
        link = self._link
        return kt.GetKVTransfersReply(call=call) if link is None else link.report(call)

    def close(self) -> None:
        """Leave the link: nothing that arrives from now on is kept. Idempotent."""
        if self._link is not None:
            self._link.close()


class _PeerLink:
    """A transfer link, and its thread. Counts are written by that thread alone."""

    def __init__(
        self,
        message: kt.OpenKVTransfer,
        routes: Sequence[Route],
        parts: BlockParts,
        slots: SharedSlots,
        weights: WeightsNow,
    ) -> None:
        self.epoch, self.number = message.epoch, message.number
        self.num_queued = 0
        self._parts, self._slots, self._weights = parts, slots, weights
        self._timeout_s = message.timeout_ms / 1000
        num_sources = len(message.sources)
        self._sends = message.rank < num_sources
        own = message.rank if self._sends else message.rank - num_sources
        place = message.place
        size = num_sources + len(message.destinations)
        self._channel = PeerChannel(
            PeerMeeting(place.host, place.port, place.secret, message.rank, size, self._timeout_s)
        )
        self._spans: list[tuple[int, PartSpan]] = [
            (num_sources + route.destination, route.sent)
            if self._sends
            else (route.source, route.received)
            for route in routes
            if own == (route.source if self._sends else route.destination)
        ]
        """Members, and what they get of this rank, or this rank of them."""
        most_bytes = max(4 * self._words(route.sent) for route in routes)
        self._blocks_at_once = max(1, MESSAGE_BYTES // most_bytes)
        """Blocks of a message, the same on all ranks."""
        self._moves: queue.SimpleQueue[_Move | None] = queue.SimpleQueue()
        """None: leave."""
        self._is_closed = False
        self._state: kt.KVTransferState = "opening"
        self._num_ended = 0
        self._failed: deque[int] = deque(maxlen=kt.MAX_FAILED_MOVES)
        self._fault = ""

    def start(self, meeting: threading.Lock) -> None:
        """Meet the members and carry out moves, on a thread of its own."""
        threading.Thread(target=self._run, args=(meeting,), name="kv-transfer", daemon=True).start()

    def queue(self, move: _Move) -> None:
        self.num_queued = move.number
        self._moves.put(move)

    def report(self, call: int) -> kt.GetKVTransfersReply:
        return kt.GetKVTransfersReply(
            call=call,
            number=self.number,
            state=self._state,
            num_ended=self._num_ended,
            failed=tuple(self._failed),
            fault=self._fault,
        )

    def close(self) -> None:
        self._is_closed = True
        self._moves.put(None)
        self._channel.abort()

    def _run(self, meeting: threading.Lock) -> None:
        try:
            self._channel.open(meeting)
            self._state = "open"
            while not self._is_closed and (move := self._moves.get()) is not None:
                self._carry_out(move)
                self._num_ended = move.number
        except WorkerError as error:
            if not self._is_closed:
                _LOG.warning("transfer link %d is broken: %s", self.number, error)
            self._fault = str(error)
        finally:
            self._channel.leave()
            self._state = "broken"

    def _carry_out(self, move: _Move) -> None:
        """Raises TransferError: the link is broken."""
        fault = self._send(move) if self._sends else self._receive(move)
        if fault:
            self._fault = fault
            self._failed.append(move.number)

    def _send(self, move: _Move) -> str:
        """Send a move's blocks, if all are there; else tell the members. Return what failed."""
        is_held = self._await_stores(move)
        header = (_IS_HELD if is_held else _IS_LACKING) + self._name(move)
        self._channel.send([(rank, _bytes(header)) for rank, _ in self._spans])
        if not is_held:
            return "blocks to send are not in their slots"
        for slots in self._in_messages(move.slots):
            self._channel.send([(rank, self._packed(span, slots)) for rank, span in self._spans])
        # A slot that was given away meanwhile has sent other bytes: those do not match their hash
        # where they are loaded. So this need not be asked again.
        self._slots.counts.num_sent += move.slots.size
        return ""

    def _receive(self, move: _Move) -> str:
        """Receive a move's blocks into their slots, and note them. Return what failed."""
        headers = [(rank, torch.empty(_HEADER_BYTES, dtype=torch.uint8)) for rank, _ in self._spans]
        self._channel.receive(headers)
        expected, fault = _IS_HELD + self._name(move), ""
        holding = []
        for (rank, header), (_, span) in zip(headers, self._spans, strict=True):
            found = header.numpy().tobytes()
            if found.startswith(_IS_HELD):
                holding.append((rank, span))
            if found != expected:
                fault = f"member {rank} does not hold the same blocks"
        for slots in self._in_messages(move.slots):
            shape = (slots.numel(), -1)
            arrived = [
                (rank, torch.empty((slots.numel(), self._words(span)), dtype=torch.int32))
                for rank, span in holding
            ]
            self._channel.receive(arrived)
            if self._is_closed or fault:
                continue
            for (_, words), (_, span) in zip(arrived, holding, strict=True):
                self._unpack(span, slots, words.view(shape))
        if self._is_closed:
            return "the transfer link was closed"
        if not fault:
            arrival = ReceivedBlocks(move.tag, self._weights.version, move.slots, move.hashes)
            self._slots.arrivals.append(arrival)
            self._slots.counts.num_received += move.slots.size
        return fault

    def _await_stores(self, move: _Move) -> bool:
        """Return True once steps have stored all blocks; False if they have not in time."""
        until = time.monotonic() + min(_STORE_WAIT_S, self._timeout_s / 2)
        while not (self._hold(move).all() and self._slots.have_left()):
            if time.monotonic() >= until or self._is_closed:
                return False
            time.sleep(_STORE_POLL_S)
        return True

    def _hold(self, move: _Move) -> Bools:
        tag = versioned_tag(move.tag, self._weights.version)
        return self._slots.contents.hold(tag, move.slots, move.hashes)

    def _name(self, move: _Move) -> bytes:
        """Return what both sides of a move must agree on, in 32 bytes."""
        number = move.number.to_bytes(8, "little")
        hashes = np.ascontiguousarray(move.hashes).tobytes()
        return digest(number, move.tag, hashes, self._weights.identity.content)

    def _in_messages(self, slots: Int32s) -> Sequence[Tensor]:
        """Divide slots into those of each message, int64 [n]."""
        return torch.split(torch.from_numpy(slots.astype(np.int64)), self._blocks_at_once)

    def _words(self, span: PartSpan) -> int:
        """Return the words of a block's parts and their checksums."""
        parts = len(span.layers) * span.num_heads
        return parts * (self._parts.rows * self._parts.words + CHECKSUM_WORDS)

    def _packed(self, span: PartSpan, slots: Tensor) -> Tensor:
        """Copy parts of blocks, and their checksums, to int32 [n, words]."""
        index, layers = slots[:, None], torch.tensor(span.layers)
        copied = [view[index, layers].flatten(1) for view in self._views(span)]
        return torch.cat(copied, dim=1)

    def _unpack(self, span: PartSpan, slots: Tensor, words: Tensor) -> None:
        """Copy what _packed has made, int32 [n, words], to this rank's slots."""
        index, layers = slots[:, None], torch.tensor(span.layers)
        data, sums = self._views(span)
        num = len(span.layers) * span.num_heads * self._parts.rows * self._parts.words
        shape = (slots.numel(), len(span.layers))
        data[index, layers] = words[:, :num].reshape(*shape, *data.shape[2:])
        sums[index, layers] = words[:, num:].reshape(*shape, *sums.shape[2:])

    def _views(self, span: PartSpan) -> tuple[Tensor, Tensor]:
        """View all slots' words of some heads as [slots, layers, rows, heads, words], and their
        checksums as [slots, layers, heads, words of a checksum]."""
        parts, rows = self._parts, self._slots.rows.view(torch.int32)
        heads = slice(span.first_head, span.first_head + span.num_heads)
        start = parts.num_words
        sums = rows[:, start : start + CHECKSUM_WORDS * parts.num_layer_parts]
        by_part = sums.view(-1, len(parts.layers), parts.num_heads, CHECKSUM_WORDS)
        return parts.by_head(rows)[:, :, :, heads], by_part[:, :, heads]


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _read(message: kt.MoveKVBlocks, num_slots: int) -> _Move:
    if len(message.slots) % 4:
        problem = "it is not a sequence of int32"
        raise config_error("slots", f"{len(message.slots)} bytes", problem, "send int32")
    slots = np.frombuffer(message.slots, "<i4").astype(np.int32)
    outside = (slots < 0) | (slots >= num_slots)
    if not slots.size or outside.any():
        value = int(slots[int(outside.argmax())]) if slots.size else "none"
        raise config_error("slots", value, "there is no such slot", f"0 to {num_slots - 1}")
    if np.unique(slots).size < slots.size:
        raise config_error("slots", slots.size, "a slot is named twice", "name it once")
    expected = slots.size * message.hash_bytes
    if len(message.hashes) != expected:
        problem = f"{slots.size} blocks have {expected} bytes of hashes"
        raise config_error("hashes", f"{len(message.hashes)} bytes", problem, "send as many")
    hashes = np.frombuffer(message.hashes, np.uint8).reshape(-1, message.hash_bytes)
    return _Move(message.move, message.block_tag, slots, hashes)
