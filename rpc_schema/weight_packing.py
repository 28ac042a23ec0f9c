"""Divides tensors into transfers: both sides of a broadcast follow the same plan. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int32": 4,
    "int64": 8,
}
ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one tensor, and their place in a transfer."""

    tensor: int
    """Its index among the names."""
    start: int
    """First row; a tensor's first dimension counts rows, a scalar is one."""
    stop: int
    offset: int
    """Bytes from the start of the transfer."""
    num_bytes: int
    is_last: bool
    """True if no later part holds rows of this tensor."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One broadcast of uint8 [num_bytes]; bytes between parts have no meaning."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return self.parts[-1].offset + self.parts[-1].num_bytes


def plan_transfers(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], packed_bytes: int
) -> list[Transfer]:
    """Return the transfers of these tensors, in order; tensors without elements take no part.

    packed_bytes 0: one transfer for each tensor. Else a transfer holds as many rows of as many
    tensors as fit, each tensor at a multiple of 256 bytes; a longer row has a separate transfer.
    """
    if packed_bytes == 0:
        sizes = [_num_rows(s) * _row_bytes(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        return [
            Transfer((Part(index, 0, _num_rows(shapes[index]), 0, size, True),))
            for index, size in enumerate(sizes)
            if size
        ]
    return list(_packed(shapes, dtypes, packed_bytes))


def _packed(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], packed_bytes: int
) -> Iterator[Transfer]:
    parts: list[Part] = []
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        num_rows, row_bytes = _num_rows(shape), _row_bytes(shape, dtype)
        row = 0
        while row < num_rows and row_bytes:
            offset = _aligned(parts[-1].offset + parts[-1].num_bytes) if parts else 0
            count = min((packed_bytes - offset) // row_bytes, num_rows - row)
            if count <= 0 and parts:
                yield Transfer(tuple(parts))
                parts = []
                continue
            count = max(count, 1)
            stop = row + count
            last = stop == num_rows
            parts.append(Part(index, row, stop, offset, count * row_bytes, last))
            row = stop
    if parts:
        yield Transfer(tuple(parts))


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _row_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape[1:]) * ITEM_BYTES[dtype]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
