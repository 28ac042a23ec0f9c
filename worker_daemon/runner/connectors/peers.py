"""Moves blocks between the slots of this rank's host tier and those of another group's ranks,
beside the steps: a thread for each transfer link sends and receives, and the step that loads a
received block checks it as any other (host_tier.py).

A source says what it sends. Where the other rank maps its slots, that one reads the blocks from
there (peer_copies.py), and says when it has; others get them as messages.
"""

import logging
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
_HEADER_BYTES: Final = len(_IS_HELD) + _NUMBER_BYTES + 32
_STORE_WAIT_S: Final = 10.0
"""Longest wait for a step to store what is to be sent: moves behind it wait too."""
_STORE_POLL_S: Final = 0.0003
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
    have_left: Callable[[Int32s], bool]
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
        rank = message.rank if self._sends else message.rank - num_sources
        self._routes: dict[int, dict[int, list[Route]]] = {}
        """By window and member: what it gets of this rank, or this rank of it."""
        for route in routes:
            if rank == (route.source if self._sends else route.destination):
                member = num_sources + route.destination if self._sends else route.source
                self._routes.setdefault(route.window, {}).setdefault(member, []).append(route)
        self._members = sorted({member for each in self._routes.values() for member in each})
        self._shards = (*message.sources, *message.destinations)
        self._readers: list[int] = []
        """The members that map this rank's slots."""
        own_shard = self._shards[message.rank]
        self._mapped = MappedSources(slots.shared, own_shard, slots.rows, self._pages, self._side)
        """The members whose slots are mapped here."""
        self._contents_at_once = max(1, MESSAGE_BYTES // _most_bytes(routes, message))
        """Contents of a message, the same on all ranks."""
        self.largest_message = _HEADER_BYTES
        """Most bytes of a message that this rank receives."""
        if not self._sends:
            received = [own for each in self._routes.values() for own in each.values()]
            words = self._contents_at_once * max(map(self._words, received), default=0)
            self.largest_message = max(_HEADER_BYTES + MAX_LISTING_BYTES, WORD_BYTES * words)
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
        """Send a move's blocks, if all are there; else tell the members. Return what failed."""
        is_held, began = self._await_stores(move), time.perf_counter()
        header = (_IS_HELD if is_held else _IS_LACKING) + self._name(move)
        listed = header + listing_of(move) if self._readers else header
        self._channel.send(
            [
                (member, _bytes(listed if member in self._readers else header))
                for member in self._members
            ]
        )
        if not is_held:
            return "blocks to send are not in their slots"
        num_bytes = 0
        # Mapped blocks need no messages, and a look at each of many costs more than their copies.
        for contents in self._in_messages(move) if len(self._readers) < len(self._members) else ():
            packed = [
                (member, self._packed(routes, contents))
                for member, routes in self._routes.get(contents.window, {}).items()
                if member not in self._readers
            ]
            self._channel.send(packed)
            num_bytes += sum(words.nbytes for _, words in packed)
        num_bytes += self._await_readers(move)
        # A slot that was given away meanwhile has sent other bytes: those do not match their hash
        # where they are loaded. So this need not be asked again.
        counts = self._slots.counts
        counts.num_sent += move.slots.size
        counts.sent.add(num_bytes, time.perf_counter() - began)
        return ""

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
        headers = [
            (member, self._buffer(_HEADER_BYTES + self._mapped.listing_bytes(member, move)))
            for member in self._members
        ]
        self._channel.receive(headers)
        began = time.perf_counter()
        expected, fault = _IS_HELD + self._name(move), ""
        holding, num_bytes = set[int](), 0
        listings: dict[int, bytes] = {}
        for member, header in headers:
            raw = header.numpy().tobytes()
            found, listings[member] = raw[:_HEADER_BYTES], raw[_HEADER_BYTES:]
            _check_header(found, move, member)
            if found.startswith(_IS_HELD):
                holding.add(member)
            if found != expected:
                fault = f"member {member} does not hold the same blocks"
        is_wanted = not fault
        if is_wanted:
            for contents in move.contents:
                self._pages.clear_unused(contents)
        far = [each for each in self._members if each in holding and each not in self._mapped]
        if far:
            num_bytes += self._receive_words(move, far, is_wanted=is_wanted)
        for member in [each for each in self._members if each in holding and each in self._mapped]:
            count = 0
            if is_wanted and not self._is_closed:
                count = self._mapped.read(member, move, listings[member], self._routes)
            self._channel.send([(member, _bytes(_END.pack(move.number, count)))])
            num_bytes += count
        self._side.settle()
        if self._is_closed:
            return "the transfer link was closed"
        if not fault:
            version = self._weights.model.version
            self._slots.arrivals.append(ReceivedBlocks(move.tag, version, move.slots, move.hashes))
            counts = self._slots.counts
            counts.num_received += move.slots.size
            counts.num_mapped += move.slots.size if self._mapped else 0
            counts.received.add(num_bytes, time.perf_counter() - began)
        return fault

    def _receive_words(self, move: BlocksToMove, members: Sequence[int], *, is_wanted: bool) -> int:
        """Receive a move's blocks from these members as messages, into their slots if they are
        wanted; return the bytes."""
        num_bytes = 0
        for contents in self._in_messages(move):
            routes, count = self._routes.get(contents.window, {}), len(contents.names)
            sizes = [
                (member, WORD_BYTES * count * self._words(routes[member]))
                for member in members
                if member in routes
            ]
            arrived = [
                (member, self._buffer(size).view(torch.int32).view(count, -1))
                for member, size in sizes
            ]
            self._channel.receive(arrived)
            if self._is_closed or not is_wanted:
                continue
            for member, words in arrived:
                self._unpack(routes[member], contents, self._side.to_device(words))
                num_bytes += words.nbytes
        return num_bytes

    def _await_stores(self, move: BlocksToMove) -> bool:
        """Return True once steps have stored all blocks; False if they have not in time."""
        until = time.monotonic() + min(_STORE_WAIT_S, self._timeout_s / 2)
        while not (self._holds(move) and self._slots.have_left(move.slots)):
            if time.monotonic() >= until or self._is_closed:
                return False
            time.sleep(_STORE_POLL_S)
        return True

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

    def _in_messages(self, move: BlocksToMove) -> Iterator[MovedContents]:
        """Divide a move into the contents of each message."""
        for each in move.contents:
            yield from each.in_parts(self._contents_at_once)

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


def _check_header(found: bytes, move: BlocksToMove, member: int) -> None:
    """Raises TransferError: it is no header of this move. Then neither are later messages in their
    places."""
    kind, number = found[: len(_IS_HELD)], found[len(_IS_HELD) :][:_NUMBER_BYTES]
    if kind not in (_IS_HELD, _IS_LACKING) or number != _number(move):
        raise _out_of_step(member, move)


def _out_of_step(member: int, move: BlocksToMove) -> TransferError:
    problem = f"messages of member {member} are out of step at move {move.number}"
    return TransferError(problem, fix="open another transfer link")


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _most_bytes(routes: Sequence[Route], message: kt.OpenKVTransfer) -> int:
    """Return the most bytes that the data of contents take on a route."""
    most = 1
    for route in routes:
        shard = message.sources[route.source]
        form = shard.drafts if route.sent.section and shard.drafts is not None else shard
        num_parts = len(route.layers) * route.sent.num_heads
        most = max(most, WORD_BYTES * num_parts * form.rows * form.words)
    return most
