"""Arrivals of one rank, if several ranks of a trainer send a request's tensors: its own part alone
(rpc_schema/shard_plan.py)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rpc_schema import weight_transfer as wt
from rpc_schema.shard_plan import Bounds, Region, SentTensor, Wants, plan_rounds, region_of
from rpc_schema.shard_wants import encode_wants
from worker_daemon.errors import config_error
from worker_daemon.models.weight_places import Manifest, Places
from worker_daemon.worker.weight_transfer.rows import DTYPE_NAMES, Rows


class Arrival(NamedTuple):
    """Bytes that come in a round."""

    regions: tuple[Region, ...]
    """By rank of the trainer."""
    ended: tuple[int, ...]
    """Tensors whose last rows are sent, to any worker."""

    @property
    def num_bytes(self) -> int:
        """Length of the buffer: the regions, one after another."""
        return sum(region.num_bytes for region in self.regions)


class ShardArrivals:
    """The arrivals of one request on one rank."""

    def __init__(
        self, manifest: Manifest, source: wt.ShardSource, places: Places, num_trainers: int
    ) -> None:
        self._manifest = manifest
        self._tensors = [
            SentTensor(name, DTYPE_NAMES[dtype], shape, manifest.origin(index), sender)
            for index, (name, dtype, shape, sender) in enumerate(
                zip(manifest.names, manifest.dtypes, manifest.shapes, source.sources, strict=True)
            )
        ]
        shapes = dict(zip(manifest.names, manifest.shapes, strict=True))
        wants: Wants = {name: _wanted(places, name, shape) for name, shape in shapes.items()}
        self.encoded_wants = encode_wants(list(wants.values()))
        self.rounds = [
            Arrival(
                tuple(region_of(self._tensors, parts, wants) for parts in round.parts),
                tuple(round.ended()),
            )
            for round in plan_rounds(self._tensors, num_trainers, source.packed_bytes)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that come."""
        regions = (region for arrival in self.rounds for region in arrival.regions)
        return sum(share.num_bytes for region in regions for share in region.shares)

    def rows(self, arrival: Arrival, received: Tensor) -> Iterator[Rows]:
        """Yield what has come in a round, then an empty end of each tensor that has ended.
        received: uint8 [arrival.num_bytes]."""
        first = 0
        for region in arrival.regions:
            for share in region.shares:
                begin = first + share.offset
                raw = received[begin : begin + share.num_bytes]
                values = raw.view(self._manifest.dtypes[share.tensor]).view(share.shape)
                yield Rows(share.tensor, 0, values, False, self._origin(share.tensor, share.box))
            first += region.num_bytes
        for tensor in arrival.ended:
            nothing = torch.empty(0, dtype=self._manifest.dtypes[tensor])
            yield Rows(tensor, 0, nothing, True)

    def _origin(self, tensor: int, box: Bounds) -> tuple[int, ...]:
        origin = self._tensors[tensor].origin or (0,) * len(box)
        return tuple(first + start for first, (start, _) in zip(origin, box, strict=True))


def check_sources(
    manifest: Manifest, source: wt.ShardSource, places: Places, num_trainers: int
) -> None:
    """Check where tensors come from, before any byte does; the same on every rank. Raises
    ConfigError."""
    if len(source.sources) != len(manifest.names):
        problem, fix = "one for each tensor is needed", str(len(manifest.names))
        raise config_error("sources", len(source.sources), problem, fix)
    if any(sender >= num_trainers for sender in source.sources):
        problem = "the trainer has no such rank in the communicator"
        fix = f"below {num_trainers}, or a BroadcastEngine with more num_trainers"
        raise config_error("sources", max(source.sources), problem, fix)
    for name in manifest.names:
        if places.delta_part(name) is not None:
            problem = "sparse deltas come from one rank, to all workers"
            raise config_error("names", name, problem, "a BroadcastSource, or the whole tensor")


def _wanted(places: Places, name: str, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
    """Return the boxes of an incoming tensor that this rank has a place for. shape: of the tensor,
    or of one of its pieces, which has as many dimensions."""
    boxes: dict[Bounds, None] = {}
    for place in places.places.get(name, ()):
        box = tuple((part.start, part.stop) for part in place.source)
        if len(box) != len(shape):  # a scale, with other dimensions of size 1: it comes whole
            box = tuple((0, size) for size in shape)
        boxes[box] = None
    return tuple(boxes)
