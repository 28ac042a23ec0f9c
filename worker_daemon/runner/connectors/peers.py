"""Moves blocks between the slots of this rank's host tier and those of another group's ranks,
beside the steps: a thread for each transfer link sends and receives, and the step that loads a
received block checks it as any other (host_tier.py)."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from msgspec import structs
from torch import Tensor

from rpc_schema import kv_transfer as kt
from rpc_schema.errors import FencedError, TransferError, WorkerError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.distributed.peer_channel import PeerChannel, PeerMeeting
from worker_daemon.errors import config_error
from worker_daemon.runner.block_contents import BlockContents, versioned_tag
from worker_daemon.runner.connectors.checksums import WORD_BYTES, BlockParts, digest
from worker_daemon.runner.connectors.host_tier import ReceivedBlocks, TierCounts
from worker_daemon.runner.connectors.peer_moves import BlocksToMove, MovedContents, read_move
from worker_daemon.runner.connectors.peer_pages import SlotPages
from worker_daemon.runner.connectors.peer_routes import (
    Route,
    find_routes,
    kv_groups_of,
    windows_of,
)

MESSAGE_BYTES: Final = 4 << 20
"""Size of a message, or what one block takes in it."""
_IS_HELD: Final = b"held"
_IS_LACKING: Final = b"lack"
_NUMBER_BYTES: Final = 8
_HEADER_BYTES: Final = len(_IS_HELD) + _NUMBER_BYTES + 32
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

    def pages_in(self, rows: Tensor) -> SlotPages:
        """Return the slots by parts. rows: uint8 [slots, bytes of a slot]."""
        drafts = self.described.drafts
        further = [] if drafts is None else [len(drafts.layer_names)]
        groups = kv_groups_of(self.described)
        num_pages = [
            [group.num_layers, *(further if number == 0 else [0] * len(further))]
            for number, group in enumerate(groups)
        ]
        return SlotPages(rows, self.parts, num_pages)


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
        self._pages = own.pages_in(slots.rows)
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
        self._contents_at_once = max(1, MESSAGE_BYTES // _most_bytes(routes, message))
        """Contents of a message, the same on all ranks."""
        self.largest_message = _HEADER_BYTES
        """Bytes of the largest message that this rank receives."""
        if not self._sends:
            received = [own for each in self._routes.values() for own in each.values()]
            words = self._contents_at_once * max(map(self._words, received), default=0)
            self.largest_message = max(_HEADER_BYTES, WORD_BYTES * words)
        self._moves: queue.SimpleQueue[BlocksToMove | None] = queue.SimpleQueue()
        """None: leave."""
        self._is_closed = False
        self._state: kt.KVTransferState = "opening"
        self._num_ended = 0
        self._failed: deque[int] = deque(maxlen=kt.MAX_FAILED_MOVES)
        self._fault = ""

    def start(self, meeting: threading.Lock) -> None:
        """Meet the members and carry out moves, on a thread of its own."""
        threading.Thread(target=self._run, args=(meeting,), name="kv-transfer", daemon=True).start()

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
        self._channel.send([(member, _bytes(header)) for member in self._members])
        if not is_held:
            return "blocks to send are not in their slots"
        num_bytes = 0
        for contents in self._in_messages(move):
            packed = [
                (member, self._packed(routes, contents))
                for member, routes in self._routes.get(contents.window, {}).items()
            ]
            self._channel.send(packed)
            num_bytes += sum(words.nbytes for _, words in packed)
        # A slot that was given away meanwhile has sent other bytes: those do not match their hash
        # where they are loaded. So this need not be asked again.
        counts = self._slots.counts
        counts.num_sent += move.slots.size
        counts.sent.add(num_bytes, time.perf_counter() - began)
        return ""

    def _receive(self, move: BlocksToMove) -> str:
        """Receive a move's blocks into their slots, and note them. Return what failed."""
        headers = [(member, self._buffer(_HEADER_BYTES)) for member in self._members]
        self._channel.receive(headers)
        began = time.perf_counter()
        expected, fault = _IS_HELD + self._name(move), ""
        holding, num_bytes = set[int](), 0
        for member, header in headers:
            found = header.numpy().tobytes()
            _check_header(found, move, member)
            if found.startswith(_IS_HELD):
                holding.add(member)
            if found != expected:
                fault = f"member {member} does not hold the same blocks"
        for contents in self._in_messages(move):
            routes, count = self._routes.get(contents.window, {}), len(contents.names)
            sizes = [
                (member, count * self._words(own))
                for member, own in routes.items()
                if member in holding
            ]
            arrived = [
                (member, self._buffer(WORD_BYTES * words).view(torch.int32).view(count, -1))
                for member, words in sizes
            ]
            self._channel.receive(arrived)
            if self._is_closed or fault:
                continue
            self._pages.clear_unused(contents)
            for member, words in arrived:
                self._unpack(routes[member], contents, words)
                num_bytes += words.nbytes
        if self._is_closed:
            return "the transfer link was closed"
        if not fault:
            version = self._weights.model.version
            self._slots.arrivals.append(ReceivedBlocks(move.tag, version, move.slots, move.hashes))
            counts = self._slots.counts
            counts.num_received += move.slots.size
            counts.received.add(num_bytes, time.perf_counter() - began)
        return fault

    def _await_stores(self, move: BlocksToMove) -> bool:
        """Return True once steps have stored all blocks; False if they have not in time."""
        until = time.monotonic() + min(_STORE_WAIT_S, self._timeout_s / 2)
        while not (self._holds(move) and self._slots.have_left()):
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
        return torch.cat(own, dim=1)

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
        problem = f"messages of member {member} are out of step at move {move.number}"
        raise TransferError(problem, fix="open another transfer link")


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
