"""The transfers of a request whose tensors several ranks of a trainer send: which bytes go from
each of them to each worker, in rounds. All sides compute the same plan. Pure.

In a round, a trainer's rank sends the next rows of the tensors that it has, at most `packed_bytes`
of them, and each worker gets what it wants of these. So the number of rounds depends on the request
alone, and a side needs to know the wants of those workers alone with which it exchanges bytes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from rpc_schema.weight_packing import ALIGNMENT, ITEM_BYTES, Part, plan_transfers

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""A box of a tensor: first index, and the one behind the last, per dimension."""
Wants: TypeAlias = Mapping[str, Sequence[Bounds]]
"""The boxes of each tensor that a worker needs; others are absent."""


class SentTensor(NamedTuple):
    """A tensor of a request, or a piece of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    """Place of its first element in the tensor of that name; empty for a whole tensor."""
    source: int
    """The trainer's rank that sends it."""


class Share(NamedTuple):
    """Part of the rows that a rank sends in a round, for one worker."""

    tensor: int
    """Index of the tensor in the request."""
    box: Bounds
    """Box of the sent tensor, from its own first element on."""
    offset: int
    """Bytes from the start of what the worker gets from that rank in this round."""
    num_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)


class Region(NamedTuple):
    """Bytes that one worker gets from one rank in a round: uint8 [num_bytes]."""

    shares: tuple[Share, ...]
    num_bytes: int
    """With the bytes between shares, which have no meaning."""


NOTHING = Region((), 0)


class Round(NamedTuple):
    """One exchange."""

    parts: tuple[tuple[Part, ...], ...]
    """The rows that each of the trainer's ranks sends; the tensors of Part are the request's."""

    def ended(self) -> Iterator[int]:
        """Yield the tensors whose last rows are sent."""
        for parts in self.parts:
            yield from (part.tensor for part in parts if part.is_last)


def plan_rounds(tensors: Sequence[SentTensor], num_sources: int, packed_bytes: int) -> list[Round]:
    """Return the rounds of a request; tensors without elements take no part. packed_bytes: most
    bytes that a rank sends of its rows in a round; a longer row has a round by itself."""
    by_source: list[list[tuple[Part, ...]]] = []
    for source in range(num_sources):
        own = [index for index, tensor in enumerate(tensors) if tensor.source == source]
        transfers = plan_transfers(
            [tensors[index].shape for index in own],
            [tensors[index].dtype for index in own],
            max(1, packed_bytes),
        )
        by_source.append(
            [
                tuple(_renumbered(part, own[part.tensor]) for part in transfer.parts)
                for transfer in transfers
            ]
        )
    return [Round(tuple(parts)) for parts in zip_longest(*by_source, fillvalue=())]


def region_of(tensors: Sequence[SentTensor], parts: Sequence[Part], wants: Wants) -> Region:
    """Return what a worker with these wants gets of some rows. Regions are a multiple of 256 bytes
    long, and shares begin at one."""
    shares: list[Share] = []
    offset = 0
    for part in parts:
        tensor = tensors[part.tensor]
        for wanted in wants.get(tensor.name, ()):
            box = _common(tensor, part, wanted)
            num_bytes = math.prod(b - a for a, b in box) * ITEM_BYTES[tensor.dtype]
            if num_bytes:
                shares.append(Share(part.tensor, box, offset, num_bytes))
                offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return Region(tuple(shares), offset) if shares else NOTHING


def _renumbered(part: Part, tensor: int) -> Part:
    return Part(tensor, part.start, part.stop, part.offset, part.num_bytes, part.is_last)


def _common(tensor: SentTensor, part: Part, wanted: Bounds) -> Bounds:
    """Return the box of a sent tensor that some of its rows and a wanted box of the whole tensor
    have in common; an empty one has no bytes."""
    if not tensor.shape:
        return ()
    origin = tensor.origin or (0,) * len(tensor.shape)
    rows = ((part.start, part.stop), *((0, size) for size in tensor.shape[1:]))
    found = []
    for (start, stop), first, (low, high) in zip(rows, origin, wanted, strict=True):
        begin = max(start, low - first)
        found.append((begin, max(begin, min(stop, high - first))))
    return tuple(found)
