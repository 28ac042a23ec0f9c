"""The layout of 4-bit matrices, into which every checkpoint format is converted while it is loaded.

Columns come in blocks of 32, which take 16 bytes of a row: byte j has column j of its block in the
low four bits and column 16 + j in the high ones. So the columns of all low halves, or all high
ones, are 16 neighbors, and their inputs are read as vectors.

Shapes: M rows, K columns, G groups of a row.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

INT4_BLOCK: Final = 32
"""Columns of a block; K is a multiple."""
INT4_HALF: Final = 16
INT4_PER_WORD: Final = 8
INT4_MIDDLE: Final = 8
"""The zero point of symmetric quantization."""


class Int4Matrix(NamedTuple):
    """A matrix W [M, K] in 4 bits: (value - zero point) * scale."""

    values: Tensor
    """int32 [M, K / 8], the bytes of the layout"""
    groups: Tensor
    """[G, M, 2] in the model's dtype: the scale, and the zero point (an integer from 0 to 15), of
    each K / G consecutive columns of a row. In 16 bits they are one word, which kernels load
    ahead."""
    has_zeros: bool
    """False: all zero points are 8, and groups does not have them."""
    order: Tensor | None = None
    """int32 [K]: the input of each column; None: as they come."""

    @property
    def group_size(self) -> int:
        """K / G"""
        return self.shape[1] // self.groups.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)"""
        return self.values.shape[0], self.values.shape[1] * INT4_PER_WORD

    def ordered(self, x: Tensor) -> Tensor:
        """Return inputs x [N, K] in the order of the columns."""
        return x if self.order is None else x.index_select(1, self.order)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return W [M, K], computed in float32 and rounded once to dtype; columns in their own
        order."""
        num_rows, num_columns = self.shape
        scale, zero = self.groups.float().transpose(0, 1).unsqueeze(3).unbind(2)
        grouped = unpack(self.values).view(num_rows, scale.shape[1], -1).float()
        grouped -= zero if self.has_zeros else INT4_MIDDLE
        grouped *= scale
        return grouped.view(num_rows, num_columns).to(dtype)


def pack(values: Tensor) -> Tensor:
    """Return values uint8 [M, K] from 0 to 15 in the layout, int32 [M, K / 8]."""
    blocks = values.view(values.shape[0], -1, 2, INT4_HALF)
    packed = blocks[:, :, 0] | (blocks[:, :, 1] << 4)
    return packed.view(values.shape[0], -1).view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Return the values uint8 [M, K] of the layout, int32 [M, K / 8]."""
    packed = words.contiguous().view(torch.uint8).view(words.shape[0], -1, INT4_HALF)
    return torch.stack((packed & 15, packed >> 4), 2).view(words.shape[0], -1)
