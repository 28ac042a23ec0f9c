"""Sparse deltas of an update: the places and new values of single elements of a tensor, which come
as two tensors, NAME.indices and NAME.values. The values are absolute, so that a delta that is
applied twice changes nothing."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from rpc_schema.errors import ConfigError
from worker_daemon.errors import config_error

Part = Literal["indices", "values"]
_PARTS: Final[Mapping[str, Part]] = {".indices": "indices", ".values": "values"}
_INDEX_DTYPES: Final = (torch.int32, torch.int64)


class DeltaPart(NamedTuple):
    """A tensor of an update that is half of a sparse delta."""

    name: str
    """The tensor that the delta changes."""
    part: Part


def delta_part(name: str, known: Collection[str]) -> DeltaPart | None:
    """Return what a tensor of this name is of a sparse delta of a known tensor; None if it is a
    tensor itself, or no known one."""
    if name in known:
        return None
    for suffix, part in _PARTS.items():
        base = name.removesuffix(suffix)
        if base != name and base in known:
            return DeltaPart(base, part)
    return None


class Incoming(NamedTuple):
    """The form of an incoming tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def check_delta(name: str, parts: Mapping[Part, Incoming], size: int) -> None:
    """Check the form of a delta of a tensor with `size` elements, before any byte arrives.

    Raises:
        ConfigError: its indices or its values are missing, or of another form.
    """
    for part in _PARTS.values():
        if part not in parts:
            fix = f"send {name}.indices and {name}.values in one request"
            raise config_error("names", f"{name}.{part}", "a sparse delta lacks it", fix)
    indices, values = parts["indices"], parts["values"]
    if indices.dtype not in _INDEX_DTYPES:
        raise config_error(
            "dtypes", str(indices.dtype), f"{name}.indices are not integers", "int32 or int64"
        )
    if len(indices.shape) != 1 or indices.shape != values.shape:
        shapes = [list(indices.shape), list(values.shape)]
        problem = f"{name}.indices and {name}.values differ, or are not vectors"
        raise config_error("shapes", shapes, problem, "one index for each value: [n] and [n]")
    if indices.shape[0] > size:
        problem = f"{name} has {size} elements"
        raise config_error("shapes", list(indices.shape), problem, f"send all of {name} instead")


def index_fault(name: str, indices: Tensor, size: int) -> ConfigError | None:
    """Return what is wrong with a delta's indices [n] for a tensor with `size` elements: one is out
    of bounds, or they do not increase, as those of an element that occurs twice."""
    if not indices.numel():
        return None
    outside = (indices < 0) | (indices >= size)
    steps = indices[1:] <= indices[:-1]
    if not bool(outside.any()) and not bool(steps.any()):
        return None
    field = f"{name}.indices"
    if bool(outside.any()):
        bad = int(indices[outside.nonzero()[0]])
        problem = f"an index is outside {name}"
        return config_error(field, bad, problem, f"0 to {size - 1}, row-major in the whole tensor")
    place = int(steps.nonzero()[0])
    before, after = indices[place : place + 2].tolist()
    problem = "an element occurs twice" if before == after else f"an index comes after {before}"
    return config_error(field, after, problem, "sort the indices, each once")


class DeltaIndices:
    """The indices of one request's deltas, while they and then the values arrive."""

    def __init__(self) -> None:
        self._indices: dict[str, Tensor] = {}

    def take(self, name: str, first: int, part: Tensor, size: int) -> None:
        """Copy indices [first, first + n) of `size` of the delta of a tensor."""
        if name not in self._indices:
            self._indices[name] = torch.empty(size, dtype=part.dtype, device=part.device)
        self._indices[name][first : first + part.shape[0]].copy_(part)

    def fault(self, name: str, size: int) -> ConfigError | None:
        """See index_fault; of a delta whose indices have all arrived."""
        indices = self._indices.get(name)
        return None if indices is None else index_fault(name, indices, size)

    def of(self, name: str, first: int, count: int) -> Tensor:
        """Return the indices int64 of values [first, first + count)."""
        return self._indices[name][first : first + count].long()


def in_order(names: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the names of an update's tensors with the indices of deltas first."""

    def is_last(name: str) -> bool:
        half = delta_part(name, known)
        return half is None or half.part != "indices"

    return sorted(names, key=is_last)
