"""A trainer's tensors as it sends them: whole, in pieces, or as the places and new values of the
elements that have changed since workers were sent them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

_BITS: Final[Mapping[int, torch.dtype]] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
"""Integers of the same size as an element, to compare its bits: NaN equals itself, 0 is not -0."""


class SparseDelta(NamedTuple):
    """Changed elements of a tensor. Values are absolute, so a delta may be applied twice."""

    indices: Tensor
    """int32 or int64 [n]: places in the row-major tensor, increasing."""
    values: Tensor
    """[n]: what they become."""

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return sum(each.numel() * each.element_size() for each in self)


Change: TypeAlias = Tensor | SparseDelta
"""New content of a tensor, or of some of its elements."""


class TensorPiece(NamedTuple):
    """A box of a tensor, as one rank of a trainer has it: the local tensor of a DTensor, and what
    compute_local_shape_and_global_offset returns for it."""

    origin: tuple[int, ...]
    """Place of its first element in the whole tensor, in each dimension."""
    values: Tensor


Sent: TypeAlias = Tensor | SparseDelta | Sequence[TensorPiece]
"""Content of a tensor for an update. Pieces do not overlap; those of one update are all of it."""


class UpdateEntry(NamedTuple):
    """A tensor of an update."""

    name: str
    values: Tensor
    origin: tuple[int, ...] = ()
    """Origin of a piece; empty for a whole tensor."""


def find_change(old: Tensor | None, new: Tensor) -> Change | None:
    """Return what makes a tensor `new` that was `old`: None if nothing, the elements whose bits
    differ, or all of `new` where that takes fewer bytes, or where `old` is None or of another form.

    The result is on the device of `new`; `old` may be on any.
    """
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return new
    bits = _BITS[new.element_size()]
    flat = new.detach().reshape(-1)
    before = old.to(new.device).reshape(-1)
    indices = (flat.view(bits) != before.view(bits)).nonzero().squeeze(1)
    if not indices.numel():
        return None
    small = new.numel() <= torch.iinfo(torch.int32).max
    delta = SparseDelta(indices.to(torch.int32) if small else indices, flat[indices])
    return delta if delta.num_bytes < flat.numel() * flat.element_size() else new


def as_tensors(changes: Mapping[str, Change]) -> dict[str, Tensor]:
    """Return changes as the tensors of an update, by name and in order: NAME.indices of each sparse
    delta, then NAME.values, and tensors that are whole. save_file of safetensors writes what the
    disk engine reads."""
    return {entry.name: entry.values for entry in entries_of(changes)}


def entries_of(sent: Mapping[str, Sent]) -> list[UpdateEntry]:
    """Return the tensors of an update, in order: like as_tensors(), with the pieces of tensors."""
    deltas = {name: each for name, each in sent.items() if isinstance(each, SparseDelta)}
    entries = [UpdateEntry(f"{name}.indices", delta.indices) for name, delta in deltas.items()]
    for name, each in sent.items():
        if isinstance(each, SparseDelta):
            entries.append(UpdateEntry(f"{name}.values", each.values))
        elif isinstance(each, Tensor):
            entries.append(UpdateEntry(name, each))
        else:
            entries += [UpdateEntry(name, piece.values, tuple(piece.origin)) for piece in each]
    return entries


class SentTensors:
    """A copy of the tensors that workers were sent last, each on the device that it had then."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def changes(self, tensors: Mapping[str, Tensor]) -> dict[str, Change]:
        """Return what has changed since, by name; tensors that are equal are absent."""
        found = {
            name: find_change(self._copies.get(name), tensor) for name, tensor in tensors.items()
        }
        return {name: change for name, change in found.items() if change is not None}

    def record(self, changes: Mapping[str, Change]) -> None:
        """Note that these changes were sent."""
        for name, change in changes.items():
            if isinstance(change, SparseDelta):
                copy = self._copies[name]
                places = change.indices.to(copy.device).long()
                copy.view(-1)[places] = change.values.to(copy.device)
            else:
                copy = change.detach().clone(memory_format=torch.contiguous_format)
                self._copies[name] = copy
