"""Moves blocks between the slots of this rank's host tier and those of another group's ranks,
beside the steps: a thread for each transfer link sends and receives, and the step that loads a
received block checks it as any other (host_tier.py).

A source says what it sends, piece by piece (pieces.py), as far as steps have stored it: so the
pieces of blocks that a step is computing move meanwhile. Where the other rank maps its slots, that
one reads the blocks from there (peer_copies.py), and says when it has; others get them as messages.
"""

import logging
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Final, NamedTuple, Protocol

import torch
from msgspec import structs
from torch import Tensor

from rpc_schema import kv_transfer as kt
from rpc_schema.errors import ConfigError, FencedError, TransferError, WorkerError
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.device.side_stream import open_side_stream
from worker_daemon.distributed.peer_channel import PeerChannel, PeerMeeting
from worker_daemon.errors import config_error
from worker_daemon.runner.block_contents import BlockContents, versioned_tag
from worker_daemon.runner.connectors.checksums import WORD_BYTES, BlockParts, digest
from worker_daemon.runner.connectors.host_tier import ReceivedBlocks, TierCounts
from worker_daemon.runner.connectors.peer_copies import (
    MAX_LISTING_BYTES,
    OFFER_BYTES,
    MappedSources,
    SharedMemory,
    SlotOffer,
    listing_of,
)
from worker_daemon.runner.connectors.peer_moves import BlocksToMove, MovedContents, read_move
from worker_daemon.runner.connectors.peer_pages import pages_of
from worker_daemon.runner.connectors.peer_pieces import MovedPieces, PieceRoutes
from worker_daemon.runner.connectors.peer_routes import (
    Route,
    find_routes,
    windows_of,
)

MESSAGE_BYTES: Final = 4 << 20
"""Size of a message, or what one block takes in it."""
_IS_HELD: Final = b"held"
_IS_LACKING: Final = b"lack"
_NUMBER_BYTES: Final = 8
_HEADER: Final = struct.Struct(f"<{len(_IS_HELD)}s{_NUMBER_BYTES + 32}sB")
"""Says that the blocks of a move are held, or not; the move's name; and how many pieces, the first
ones, are there: those follow that were not sent before."""
_STORE_WAIT_S: Final = 10.0
"""Longest wait for a step to store what is to be sent: moves behind it wait too."""
_STORE_POLL_S: Final = 0.0003
_POLLS_A_LOOK: Final = 32
"""A rank looks as seldom for the failure of a step whose blocks it sends."""
_LOOK_S: Final = 0.25
"""Interval at which a rank looks for the end of those whose memory it maps."""
_END: Final = struct.Struct("<QQ")
"""Says that blocks have been read: number of the move, and bytes."""

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
    """The host tier, as other groups use it: none of its staging buffers."""

    rows: Tensor
    """uint8 [slots, bytes of a slot]: blocks with their checksums."""
    arrivals: deque[ReceivedBlocks]
    counts: TierCounts
    pieces_left: Callable[[Int32s], int]
    contents: BlockContents
    shared: SharedMemory | None = None
    """None: no other process maps the rows, nor this one theirs."""


class PeerWeights(NamedTuple):
    """The weights that compute a rank's blocks."""

    model: WeightsNow
    draft: WeightsNow | None = None
    """None without a draft model."""

    @property
    def contents(self) -> tuple[bytes, bytes]:
        """Names of what they contain now: the model's, and the draft model's."""
        draft = b"" if self.draft is None else self.draft.identity.content
        return self.model.identity.content, draft


class OwnShard(NamedTuple):
    """This rank's blocks, and its place in its group."""

    described: kt.KVShard
    """Weights are of no account here: see of()."""
    parts: BlockParts
    """The layers' pages and, if there is a draft model, its own."""

    def of(self, weights: PeerWeights) -> kt.KVShard:
        """Return this rank, as the ranks of another group must know it."""
        model, draft = weights.contents
        shard = structs.replace(self.described, weights=model)
        if shard.drafts is None:
            return shard
        return structs.replace(shard, drafts=structs.replace(shard.drafts, weights=draft))


class PeerTransfers:
    """Owned by Serving. The control thread calls its methods; close() may be called from any."""

    def __init__(
        self, own: OwnShard, slots: SharedSlots, weights: PeerWeights, meeting: threading.Lock
    ) -> None:
        """meeting: held while gloo connects the members of a group."""
        self._own = own
        self._slots = slots
        self._weights = weights
        self._meeting = meeting
        self._link: _PeerLink | None = None

    @property
    def shard(self) -> kt.KVShard:
        """This rank, as the ranks of another group must know it."""
        return self._own.of(self._weights)

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
        self._link = _PeerLink(message, routes, self._own, self._slots, self._weights)
        self._link.start(self._meeting)

    def move(self, message: kt.MoveKVBlocks) -> None:
        """Queue a move.

        Raises:
            FencedError: it is not the next one of the present link.
            ConfigError: see read_move.
        """
        link = self._link
        if link is None or message.number != link.number or message.move != link.num_queued + 1:
            problem = f"move {message.move} of transfer link {message.number} is not the next one"
            raise FencedError(problem, fix="open another transfer link")
        windows = windows_of(self._own.described)
        link.queue(read_move(message, windows, self._slots.rows.shape[0]))

    def report(self, call: int) -> kt.GetKVTransfersReply:
        """Return what has become of the moves of the present link."""
        link = self._link
        return kt.GetKVTransfersReply(call=call) if link is None else link.report(call)

    def close(self) -> None:
        """Leave the link: nothing that arrives from now on is kept. Idempotent."""
        if self._link is not None:
            self._link.close()

    def await_end(self, timeout_s: float) -> None:
        """Wait until nothing touches the slots any more, after close()."""
        if self._link is not None:
            self._link.await_end(timeout_s)


class NoTransfers:
    """Takes the place of PeerTransfers where other groups cannot use this rank's blocks."""

    def __init__(self, refusal: ConfigError) -> None:
        """refusal: says why."""
        self._refusal = refusal

    @property
    def shard(self) -> kt.KVShard:
        """Raises ConfigError."""
        raise self._refusal.with_traceback(None)

    def open(self, message: kt.OpenKVTransfer) -> None:
        """Raises ConfigError."""
        raise self._refusal.with_traceback(None)

    def move(self, message: kt.MoveKVBlocks) -> None:
        """Raises ConfigError."""
        raise self._refusal.with_traceback(None)

    def report(self, call: int) -> kt.GetKVTransfersReply:
        """Return that there is no link."""
        return kt.GetKVTransfersReply(call=call)

    def close(self) -> None:
        """Do nothing."""

    def await_end(self, timeout_s: float) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class _Coming:
    """State of a move on its way from a member."""

    routes: PieceRoutes
    listing: bytes = b""
    """Places of its blocks, if it is mapped here."""
    pieces: MovedPieces | None = None
    """Those that follow its last header."""
    num_received: int = 0
    """Pieces up to these."""
    has_ended: bool = False
    """Nothing comes after these pieces."""
    fault: str = ""
    num_bytes: int = 0

    def announce(self, kind: bytes, count: int) -> bool:
        """Take a header. Return False if it is none that can follow the last one."""
        if kind == _IS_LACKING:
            self.pieces, self.has_ended = None, True
            return True
        first, total = self.num_received, self.routes.num_pieces
        if kind != _IS_HELD or not first < count <= total:
            return False
        self.pieces = self.routes.between(first, count)
        self.num_received, self.has_ended = count, count == total
        return True


class _PeerLink:
    """A transfer link, and its thread. Counts are written by that thread alone."""

    def __init__(
        self,
        message: kt.OpenKVTransfer,
        routes: Sequence[Route],
        own: OwnShard,
        slots: SharedSlots,
        weights: PeerWeights,
    ) -> None:
        self.epoch, self.number = message.epoch, message.number
        self.num_queued = 0
        self._pages = pages_of(own.described, own.parts, slots.rows)
        self._side = open_side_stream(slots.rows.device)
        self._slots, self._weights = slots, weights
        self._timeout_s = message.timeout_ms / 1000
        num_sources = len(message.sources)
        self._sends = message.rank < num_sources
        place, size = message.place, num_sources + len(message.destinations)
        self._channel = PeerChannel(
            PeerMeeting(
                "kv transfer",
                "check that the daemons of both groups run, then open another transfer link",
                *(place.host, place.port, place.secret, message.rank, size, self._timeout_s),
            )
        )
        self._num_sources = num_sources
        self._rank = message.rank if self._sends else message.rank - num_sources
        self._shards = (*message.sources, *message.destinations)
        of_source: dict[int, list[Route]] = {}
        for route in routes:
            of_source.setdefault(route.source, []).append(route)
        if self._sends:
            mine = of_source.get(self._rank, ())
            members = {num_sources + each.destination for each in mine}
        else:
            members = {each.source for each in routes if each.destination == self._rank}
        self._members = sorted(members)
        self._pieces = {
            source: PieceRoutes(self._shards[source], of_source[source], MESSAGE_BYTES)
            for source in ((self._rank,) if self._sends else self._members)
            if source in of_source
        }
        """By source: this rank, or those that it receives of."""
        self._readers: list[int] = []
        """The members that map this rank's slots."""
        own_shard = self._shards[message.rank]
        self._mapped = MappedSources(slots.shared, own_shard, slots.rows, self._pages, self._side)
        """The members whose slots are mapped here."""
        self.largest_message = _HEADER.size
        """Most bytes of a message that this rank receives."""
        if not self._sends:
            words = max(map(self._most_words, self._pieces.values()), default=0)
            self.largest_message = max(_HEADER.size + MAX_LISTING_BYTES, WORD_BYTES * words)
        self._moves: queue.SimpleQueue[BlocksToMove | None] = queue.SimpleQueue()
        """None: leave."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._state: kt.KVTransferState = "opening"
        self._num_ended = 0
        self._failed: deque[int] = deque(maxlen=kt.MAX_FAILED_MOVES)
        self._fault = ""

    def start(self, meeting: threading.Lock) -> None:
        """Meet the members and carry out moves, on a thread of its own."""
        self._thread = threading.Thread(
            target=self._run, args=(meeting,), name="kv-transfer", daemon=True
        )
        self._thread.start()

    def queue(self, move: BlocksToMove) -> None:
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

    def await_end(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, meeting: threading.Lock) -> None:
        try:
            with self._side.running():
                self._channel.open(meeting)
                self._meet_memory()
                self._state = "open"
                while (move := self._next_move()) is not None:
                    self._carry_out(move)
                    self._num_ended = move.number
        except (WorkerError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if not self._is_closed:
                _LOG.warning("transfer link %d is broken: %s", self.number, error)
            self._fault = str(error)
        finally:
            self._channel.leave()
            self._mapped.close()
            self._state = "broken"

    def _next_move(self) -> BlocksToMove | None:
        """Wait for the next move; None: leave. Raises TransferError: a member whose memory is
        mapped here has gone, and its successor needs that."""
        while not self._is_closed:
            try:
                return self._moves.get(timeout=_LOOK_S if self._mapped else None)
            except queue.Empty:
                if self._channel.is_lost:
                    fix = "open another transfer link"
                    raise TransferError("a member has gone", fix=fix) from None
        return None

    def _meet_memory(self) -> None:
        """Find out which members read the slots of which others. Raises TransferError."""
        if self._sends:
            shared, (num_slots, slot_bytes) = self._slots.shared, self._slots.rows.shape
            handle = b"" if shared is None else shared.handle
            offer = SlotOffer(handle, num_slots, slot_bytes).packed()
            self._channel.send([(member, _bytes(offer)) for member in self._members])
            answers = [(member, self._buffer(1)) for member in self._members]
            self._channel.receive(answers)
            self._readers = [member for member, answer in answers if answer.item()]
        else:
            offers = [(member, self._buffer(OFFER_BYTES)) for member in self._members]
            self._channel.receive(offers)
            is_sole = len(self._members) == 1
            for member, packed in offers:
                offer = packed.numpy().tobytes()
                self._mapped.map(member, offer, self._shards[member], is_sole=is_sole)
            answers = [(each, _bytes(bytes([each in self._mapped]))) for each in self._members]
            self._channel.send(answers)
        direct = self._readers or [each for each in self._members if each in self._mapped]
        _LOG.info(
            "transfer link %d: blocks move over CUDA IPC with members %s, over gloo with %s",
            self.number,
            direct,
            [member for member in self._members if member not in direct],
        )

    def _carry_out(self, move: BlocksToMove) -> None:
        """Raises TransferError: the link is broken."""
        try:
            fault = self._send(move) if self._sends else self._receive(move)
        except TransferError:
            self._slots.counts.num_failed += move.slots.size
            raise
        if fault:
            self._slots.counts.num_failed += move.slots.size
            self._fault = fault
            self._failed.append(move.number)

    def _send(self, move: BlocksToMove) -> str:
        """Send a move's blocks as they are stored; tell the members if they are not there, or not
        any more. Return what failed."""
        own, counts = self._pieces.get(self._rank), self._slots.counts
        total, num_sent, num_bytes, seconds = 1 if own is None else own.num_pieces, 0, 0, 0.0
        while num_sent < total:
            count = min(self._await_pieces(move, num_sent), total)
            began = time.perf_counter()
            kind = _IS_HELD if count else _IS_LACKING
            header = _HEADER.pack(kind, self._name(move), count)
            listed = header + listing_of(move) if self._readers and not num_sent else header
            self._channel.send(
                [
                    (member, _bytes(listed if member in self._readers else header))
                    for member in self._members
                ]
            )
            if not count:
                return "blocks to send are not in their slots"
            # Mapped blocks need no messages, and a look at each of many costs more than their
            # copies.
            if own is not None and len(self._readers) < len(self._members):
                num_bytes += self._send_words(move, own.between(num_sent, count))
            num_sent, seconds = count, seconds + time.perf_counter() - began
        began = time.perf_counter()
        num_bytes += self._await_readers(move)
        # A slot that was given away meanwhile has sent other bytes: those do not match their hash
        # where they are loaded. So this need not be asked again.
        counts.num_sent += move.slots.size
        counts.sent.add(num_bytes, seconds + time.perf_counter() - began)
        return ""

    def _send_words(self, move: BlocksToMove, pieces: MovedPieces) -> int:
        """Send pieces of a move's blocks as messages; return the bytes."""
        num_bytes = 0
        for contents in _in_messages(move, pieces):
            packed = [
                (self._num_sources + destination, self._packed(routes, contents))
                for destination, routes in pieces.routes.get(contents.window, {}).items()
                if self._num_sources + destination not in self._readers
            ]
            self._channel.send(packed)
            num_bytes += sum(words.nbytes for _, words in packed)
        return num_bytes

    def _await_readers(self, move: BlocksToMove) -> int:
        """Wait until the members that map the slots have read a move; return the bytes."""
        ends = [(member, self._buffer(_END.size)) for member in self._readers]
        self._channel.receive(ends)
        num_bytes = 0
        for member, packed in ends:
            number, count = _END.unpack(packed.numpy().tobytes())
            if number != move.number:
                raise _out_of_step(member, move)
            num_bytes += count
        return num_bytes

    def _receive(self, move: BlocksToMove) -> str:
        """Receive a move's blocks into their slots, and note them. Return what failed."""
        sources = {member: _Coming(self._pieces[member]) for member in self._members}
        fault, is_begun, seconds = "", False, 0.0
        while coming := {m: each for m, each in sources.items() if not each.has_ended}:
            self._receive_headers(move, coming)
            began = time.perf_counter()
            fault = fault or next((each.fault for each in coming.values() if each.fault), "")
            is_wanted = not (fault or self._is_closed)
            if is_wanted and not is_begun:
                is_begun = True
                for contents in move.contents:
                    self._pages.clear_unused(contents)
            for member, each in coming.items():
                if each.pieces is not None:
                    self._receive_pieces(move, member, each, each.pieces, is_wanted=is_wanted)
            self._side.settle()
            seconds += time.perf_counter() - began
        if self._is_closed:
            return "the transfer link was closed"
        if not fault:
            version = self._weights.model.version
            self._slots.arrivals.append(ReceivedBlocks(move.tag, version, move.slots, move.hashes))
            counts = self._slots.counts
            counts.num_received += move.slots.size
            counts.num_mapped += move.slots.size if self._mapped else 0
            counts.received.add(sum(each.num_bytes for each in sources.values()), seconds)
        return fault

    def _receive_headers(self, move: BlocksToMove, coming: Mapping[int, "_Coming"]) -> None:
        """Find out what each of these members sends next."""
        headers = []
        for member, each in coming.items():
            size = 0 if each.num_received else self._mapped.listing_bytes(member, move)
            headers.append((member, self._buffer(_HEADER.size + size)))
        self._channel.receive(headers)
        expected = self._name(move)
        for (member, header), each in zip(headers, coming.values(), strict=True):
            raw = header.numpy().tobytes()
            kind, name, count = _HEADER.unpack_from(raw)
            if not name.startswith(_number(move)) or not each.announce(kind, count):
                raise _out_of_step(member, move)
            each.listing = each.listing or raw[_HEADER.size :]
            if kind == _IS_LACKING or name != expected:
                each.fault = f"member {member} does not hold the same blocks"

    def _receive_pieces(
        self,
        move: BlocksToMove,
        member: int,
        source: "_Coming",
        pieces: MovedPieces,
        *,
        is_wanted: bool,
    ) -> None:
        """Receive pieces of a move's blocks from a member, into their slots if they are wanted."""
        if member not in self._mapped:
            source.num_bytes += self._receive_words(move, member, pieces, is_wanted=is_wanted)
            return
        if is_wanted:
            routes = self._received(pieces)
            read = partial(self._mapped.read, member, move, source.listing)
            source.num_bytes += read(routes, pieces.columns, are_last=pieces.are_last)
        if source.has_ended:
            self._channel.send([(member, _bytes(_END.pack(move.number, source.num_bytes)))])

    def _receive_words(
        self, move: BlocksToMove, member: int, pieces: MovedPieces, *, is_wanted: bool
    ) -> int:
        """Receive pieces of a move's blocks from a member as messages; return the bytes of those
        that are wanted."""
        num_bytes, by_window = 0, self._received(pieces)
        for contents in _in_messages(move, pieces):
            routes, count = by_window.get(contents.window), len(contents.names)
            if routes is None:
                continue
            size = WORD_BYTES * count * self._words(routes)
            words = self._buffer(size).view(torch.int32).view(count, -1)
            self._channel.receive([(member, words)])
            if is_wanted and not self._is_closed:
                self._unpack(routes, contents, self._side.to_device(words))
                num_bytes += words.nbytes
        return num_bytes

    def _received(self, pieces: MovedPieces) -> dict[int, Sequence[Route]]:
        """Return the routes of pieces to this rank, by window."""
        return {
            window: routes[self._rank]
            for window, routes in pieces.routes.items()
            if self._rank in routes
        }

    def _await_pieces(self, move: BlocksToMove, num_sent: int) -> int:
        """Return the number of a move's pieces, the first ones, that steps have stored of all its
        blocks, once they are more than so many; 0 if they are not in time, or a step has failed
        that was to store them."""
        until, num_polls = time.monotonic() + min(_STORE_WAIT_S, self._timeout_s / 2), 0
        while True:
            # Slots hold a block before its pieces are there: from the beginning of its step on.
            is_held = (num_sent > 0 and num_polls % _POLLS_A_LOOK != 0) or self._holds(move)
            num_left = self._slots.pieces_left(move.slots) if is_held else 0
            if num_left > num_sent and self._holds(move):
                return num_left
            if time.monotonic() >= until or self._is_closed or (num_sent and not is_held):
                return 0
            num_polls += 1
            time.sleep(_STORE_POLL_S)

    def _holds(self, move: BlocksToMove) -> bool:
        tag = versioned_tag(move.tag, self._weights.model.version)
        return bool(self._slots.contents.hold(tag, move.slots, move.hashes).all())

    def _name(self, move: BlocksToMove) -> bytes:
        """Return what both sides of a move must agree on: its number, and 32 bytes."""
        number = _number(move)
        contents = [
            field
            for each in move.contents
            for field in (each.window.to_bytes(8, "little"), each.names.tobytes())
        ]
        return number + digest(number, *contents, self._weights.model.identity.content)

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] for a message; its storage has room for any other."""
        return torch.empty(self.largest_message, dtype=torch.uint8)[:num_bytes]

    def _most_words(self, own: PieceRoutes) -> int:
        """Return the most words of a message from a source to this rank."""
        pairs = combinations(range(own.num_pieces + 1), 2)
        ranges = (own.between(first, end) for first, end in pairs)
        return max(
            pieces.contents_at_once
            * max(map(self._words, self._received(pieces).values()), default=0)
            for pieces in ranges
        )

    def _words(self, routes: Sequence[Route]) -> int:
        """Return the words that contents have on these routes to this rank."""
        return sum(self._pages.num_words(route.received) for route in routes)

    def _packed(self, routes: Sequence[Route], contents: MovedContents) -> Tensor:
        own = [self._pages.pack(route.sent, route.layers, contents) for route in routes]
        return self._side.to_host(torch.cat(own, dim=1))

    def _unpack(self, routes: Sequence[Route], contents: MovedContents, words: Tensor) -> None:
        sizes = [self._pages.num_words(route.received) for route in routes]
        for route, own in zip(routes, torch.split(words, sizes, dim=1), strict=True):
            self._pages.unpack(route.received, route.layers, contents, own)


def _number(move: BlocksToMove) -> bytes:
    return move.number.to_bytes(_NUMBER_BYTES, "little")


def _in_messages(move: BlocksToMove, pieces: MovedPieces) -> Iterator[MovedContents]:
    """Divide a move into the contents of each message with these pieces."""
    for each in move.contents:
        yield from each.in_parts(pieces.contents_at_once)


def _out_of_step(member: int, move: BlocksToMove) -> TransferError:
    problem = f"messages of member {member} are out of step at move {move.number}"
    return TransferError(problem, fix="open another transfer link")


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
