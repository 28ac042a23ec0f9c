"""The routes of a source's blocks, piece by piece (pieces.py): what moves together of contents, as
both sides know it from what the source keeps."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rpc_schema.kv_transfer import KVShard
from worker_daemon.runner.connectors.checksums import CHECKSUM_WORDS, WORD_BYTES
from worker_daemon.runner.connectors.peer_pages import parts_of
from worker_daemon.runner.connectors.peer_routes import PartSpan, Route
from worker_daemon.runner.connectors.pieces import page_ends, pieces_of


class SlotColumns(NamedTuple):
    """Bytes of each slot, by their places in it."""

    words: slice
    """Words of the block."""
    checksums: slice
    """Checksums behind them."""


class MovedPieces(NamedTuple):
    """Pieces that follow each other, of the blocks of one source."""

    routes: Mapping[int, Mapping[int, Sequence[Route]]]
    """By window and destination's number."""
    contents_at_once: int
    """Contents of a message."""
    columns: SlotColumns
    """In the source's slots."""
    are_last: bool
    """They end with the last piece."""


class PieceRoutes:
    """Owned by a transfer link, for one source. Belongs to its thread."""

    def __init__(self, shard: KVShard, routes: Sequence[Route], message_bytes: int) -> None:
        """shard: the source's. routes: from there, to all destinations. message_bytes: size of a
        message, or what the data of one content take in it."""
        parts = parts_of(shard)
        self._shard = shard
        self._routes = routes
        self._message_bytes = message_bytes
        self._pieces = pieces_of(parts)
        self._ends = [0, *page_ends(parts.sections[0].num_pages)]
        self._num_words = parts.num_words
        self._found: dict[tuple[int, int], MovedPieces] = {}

    @property
    def num_pieces(self) -> int:
        """Pieces of a block."""
        return len(self._pieces)

    def between(self, first: int, end: int) -> MovedPieces:
        """Return pieces `first` to end - 1."""
        found = self._found.get((first, end))
        if found is None:
            found = self._found[first, end] = self._between(first, end)
        return found

    def _between(self, first: int, end: int) -> MovedPieces:
        routes: dict[int, dict[int, list[Route]]] = {}
        most, are_last = 1, end == self.num_pieces
        for whole in self._routes:
            route = _cut(whole, range(self._ends[first], self._ends[end]), are_last=are_last)
            if route is not None:
                of_window = routes.setdefault(route.window, {})
                of_window.setdefault(route.destination, []).append(route)
                most = max(most, self._data_bytes(route))
        start, last = self._pieces[first], self._pieces[end - 1]
        sums = self._num_words + CHECKSUM_WORDS * start.parts.start
        sums_end = self._num_words + CHECKSUM_WORDS * last.parts.stop
        columns = SlotColumns(
            slice(WORD_BYTES * start.words.start, WORD_BYTES * last.words.stop),
            slice(WORD_BYTES * sums, WORD_BYTES * sums_end),
        )
        return MovedPieces(routes, max(1, self._message_bytes // most), columns, are_last)

    def _data_bytes(self, route: Route) -> int:
        """Return the bytes that the data of contents take on a route."""
        shard = self._shard
        form = shard.drafts if route.sent.section and shard.drafts is not None else shard
        num_parts = len(route.layers) * route.sent.num_heads
        return WORD_BYTES * num_parts * form.rows * form.words


def _cut(route: Route, pages: range, *, are_last: bool) -> Route | None:
    """Return what a route has of these pages of the source's layers; None: nothing. are_last: they
    are the last ones, with which all moves that is no layer's."""
    if route.sent.section:
        return route if are_last else None
    kept = [i for i, place in enumerate(route.sent.pages) if place.page in pages]
    if not kept:
        return None

    def cut(span: PartSpan) -> PartSpan:
        return span._replace(pages=tuple(span.pages[i] for i in kept))

    return route._replace(
        layers=tuple(route.layers[i] for i in kept),
        sent=cut(route.sent),
        received=cut(route.received),
    )
