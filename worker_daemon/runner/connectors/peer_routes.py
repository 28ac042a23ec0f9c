"""Routes of the parts of a block, from the ranks of one group to those of another: a function of
what the ranks have."""

from collections.abc import Sequence
from typing import NamedTuple

from rpc_schema.kv_transfer import KVShard
from worker_daemon.errors import config_error


class PartSpan(NamedTuple):
    """Parts of a block on a rank."""

    layers: tuple[int, ...]
    """Places of the layers among the rank's pages."""
    first_head: int
    """Place among the rank's heads."""
    num_heads: int


class Route(NamedTuple):
    """The parts of each block that a source rank sends to a destination rank: the same ones in the
    same order on both sides."""

    source: int
    destination: int
    sent: PartSpan
    received: PartSpan


def find_routes(sources: Sequence[KVShard], destinations: Sequence[KVShard]) -> tuple[Route, ...]:
    """Return the routes by which each destination gets each of its parts once. Where several
    sources have a part, as tensor-parallel ranks that share a KV head do, destinations take turns.

    Raises:
        ConfigError: a part has no source, or blocks of the groups are not alike.
    """
    _check_alike([*sources, *destinations])
    routes = []
    for number, destination in enumerate(destinations):
        found = [
            route
            for source in _own_sources(sources, number)
            if (route := _route(source, sources[source], number, destination)) is not None
        ]
        num_parts = sum(len(route.received.layers) * route.received.num_heads for route in found)
        if num_parts != len(destination.layer_names) * destination.num_heads:
            problem = f"rank {number} has parts that no rank of the other group has"
            fix = "two groups of one model"
            raise config_error("sources", len(sources), problem, fix)
        routes += found
    return tuple(routes)


def _own_sources(sources: Sequence[KVShard], destination: int) -> list[int]:
    """Return one of each set of sources that have the same parts."""
    alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for number, source in enumerate(sources):
        alike.setdefault((source.layer_names, source.first_head), []).append(number)
    return [numbers[destination % len(numbers)] for numbers in alike.values()]


def _route(source: int, of: KVShard, destination: int, to: KVShard) -> Route | None:
    places = {name: place for place, name in enumerate(of.layer_names)}
    layers = [(places[name], own) for own, name in enumerate(to.layer_names) if name in places]
    first = max(of.first_head, to.first_head)
    num_heads = min(of.first_head + of.num_heads, to.first_head + to.num_heads) - first
    if not layers or num_heads <= 0:
        return None
    sent, received = zip(*layers, strict=True)
    return Route(
        source,
        destination,
        PartSpan(sent, first - of.first_head, num_heads),
        PartSpan(received, first - to.first_head, num_heads),
    )


def _check_alike(shards: Sequence[KVShard]) -> None:
    expected = _kind(shards[0])
    for shard in shards[1:]:
        for field, value in _kind(shard).items():
            if value != expected[field]:
                place = f"rank ({shard.pp_rank}, {shard.tp_rank})"
                problem = f"blocks of {place} are not those of the first rank"
                fix = f"{expected[field]}, as the others"
                raise config_error(f"shards.{field}", value, problem, fix)


def _kind(shard: KVShard) -> dict[str, object]:
    """Return what all ranks have alike, by field."""
    return {
        "rows": shard.rows,
        "words": shard.words,
        "dtype": shard.dtype,
        "weights": shard.weights.hex(),
    }
