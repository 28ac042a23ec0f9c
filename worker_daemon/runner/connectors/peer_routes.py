"""Routes of the parts of a block, from the ranks of one group to those of another: a function of
what the ranks have."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rpc_schema.kv_transfer import KVDraftPages, KVShard, KVShardGroup
from worker_daemon.errors import config_error

NO_WINDOW: Final = 0
"""Takes the place of the sliding window of a KV group that keeps everything."""
_LAYERS: Final = 0
_DRAFTS: Final = 1
"""Sections of a block (BlockParts)."""


class PagePlace(NamedTuple):
    """A layer's page on a rank."""

    kv_group: int
    """KV group whose blocks have it."""
    page: int
    """Place in its section."""


class PartSpan(NamedTuple):
    """Parts of a block's contents on a rank."""

    section: int
    pages: tuple[PagePlace, ...]
    first_head: int
    """Place among the rank's heads."""
    num_heads: int


class Route(NamedTuple):
    """The parts of all contents of one window that a source rank sends to a destination rank: the
    same ones in the same order on both sides."""

    source: int
    destination: int
    window: int
    """Sliding window of the KV groups that keep these contents; NO_WINDOW: those without."""
    layers: tuple[str, ...]
    """Name of each page's layer."""
    sent: PartSpan
    received: PartSpan


class _Section(NamedTuple):
    """Pages of a rank that go the same way."""

    window: int
    section: int
    places: Mapping[str, PagePlace]
    """By layer."""
    first_head: int
    num_heads: int

    @property
    def kind(self) -> tuple[int, int]:
        return self.window, self.section


def kv_groups_of(shard: KVShard) -> tuple[KVShardGroup, ...]:
    """Return a rank's KV groups."""
    return shard.groups or (KVShardGroup(num_layers=len(shard.layer_names)),)


def windows_of(shard: KVShard) -> tuple[int, ...]:
    """Return the window of each KV group, or NO_WINDOW."""
    return tuple(group.sliding_window or NO_WINDOW for group in kv_groups_of(shard))


def find_routes(sources: Sequence[KVShard], destinations: Sequence[KVShard]) -> tuple[Route, ...]:
    """Return the routes by which each destination gets each of its parts once. Where several
    sources have a part, as tensor-parallel ranks that share a KV head do, destinations take turns.

    Raises:
        ConfigError: a part has no source, or blocks of the groups are not alike.
    """
    _check_alike([*sources, *destinations])
    of_sources = [_sections(shard) for shard in sources]
    routes = []
    for number, destination in enumerate(destinations):
        for section in _sections(destination):
            found = [
                route
                for source, own in _own_sources(of_sources, section.kind, number)
                if (route := _route(source, own, number, section)) is not None
            ]
            num_parts = sum(len(route.layers) * route.received.num_heads for route in found)
            if num_parts != len(section.places) * section.num_heads:
                whose = "of a draft model " if section.section == _DRAFTS else ""
                problem = f"rank {number} has parts {whose}that no rank of the other group has"
                fix = "two groups of one model, and of one draft model"
                raise config_error("sources", len(sources), problem, fix)
            routes += found
    return tuple(routes)


def _sections(shard: KVShard) -> list[_Section]:
    by_window: dict[int, dict[str, PagePlace]] = {}
    first = 0
    for number, (group, window) in enumerate(
        zip(kv_groups_of(shard), windows_of(shard), strict=True)
    ):
        names = shard.layer_names[first : first + group.num_layers]
        first += group.num_layers
        places = {name: PagePlace(number, page) for page, name in enumerate(names)}
        by_window.setdefault(window, {}).update(places)
    found = [
        _Section(window, _LAYERS, places, shard.first_head, shard.num_heads)
        for window, places in by_window.items()
        if places
    ]
    if shard.drafts is not None:
        own = shard.drafts
        places = {name: PagePlace(0, page) for page, name in enumerate(own.layer_names)}
        window = windows_of(shard)[0]
        found.append(_Section(window, _DRAFTS, places, own.first_head, own.num_heads))
    return found


def _own_sources(
    sources: Sequence[Sequence[_Section]], kind: tuple[int, int], destination: int
) -> list[tuple[int, _Section]]:
    """Return one of each set of sources that have the same parts of a kind, and what it has."""
    alike: dict[tuple[frozenset[str], int], list[tuple[int, _Section]]] = {}
    for number, sections in enumerate(sources):
        for own in sections:
            if own.kind == kind:
                key = frozenset(own.places), own.first_head
                alike.setdefault(key, []).append((number, own))
    return [each[destination % len(each)] for each in alike.values()]


def _route(source: int, of: _Section, destination: int, to: _Section) -> Route | None:
    layers = tuple(name for name in to.places if name in of.places)
    first = max(of.first_head, to.first_head)
    num_heads = min(of.first_head + of.num_heads, to.first_head + to.num_heads) - first
    if not layers or num_heads <= 0:
        return None
    sent, received = (
        PartSpan(
            own.section,
            tuple(own.places[name] for name in layers),
            first - own.first_head,
            num_heads,
        )
        for own in (of, to)
    )
    return Route(source, destination, to.window, layers, sent, received)


def _check_alike(shards: Sequence[KVShard]) -> None:
    with_drafts = [shard for shard in shards if shard.drafts is not None]
    for own, kind_of in ((shards, _kind), (with_drafts, _draft_kind)):
        for shard in own[1:]:
            expected = kind_of(own[0])
            for field, value in kind_of(shard).items():
                if value != expected[field]:
                    place = f"rank ({shard.pp_rank}, {shard.tp_rank})"
                    problem = f"blocks of {place} are not those of the first rank"
                    fix = f"{expected[field]}, as the others"
                    raise config_error(f"shards.{field}", value, problem, fix)
    windows: dict[str, int] = {}
    for shard in shards:
        for section in _sections(shard):
            for layer in section.places:
                window = windows.setdefault(layer, section.window)
                if window != section.window:
                    problem = f"the groups keep different windows of {layer}: also {window}"
                    fix = "the same pipeline parallel size for both groups"
                    raise config_error("shards.groups", section.window, problem, fix)


def _kind(shard: KVShard) -> dict[str, object]:
    """Return what all ranks have alike, by field."""
    return {
        "rows": shard.rows,
        "words": shard.words,
        "dtype": shard.dtype,
        "weights": shard.weights.hex(),
    }


def _draft_kind(shard: KVShard) -> dict[str, object]:
    """Return what all ranks with a draft model have alike, by field."""
    assert isinstance(shard.drafts, KVDraftPages), "only these are compared"
    return {
        "drafts.rows": shard.drafts.rows,
        "drafts.words": shard.drafts.words,
        "drafts.dtype": shard.drafts.dtype,
        "drafts.weights": shard.drafts.weights.hex(),
    }
