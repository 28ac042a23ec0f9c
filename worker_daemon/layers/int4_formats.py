"""The formats of 4-bit checkpoints: names and shapes of a matrix's tensors, and their conversion.

A word is an int32 with eight 4-bit values, the first in the lowest bits. Sources of the formats:
AutoGPTQ and GPTQModel ("gptq"), AutoAWQ's GEMM version ("awq"), compressed-tensors'
pack-quantized.

Shapes: M rows, K columns of a matrix of the checkpoint, G groups of a row.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.int4 import INT4_PER_WORD
from worker_daemon.layers.parameter import Kind, Piece
from worker_daemon.layers.quantization import Int4Format

_WEIGHT: Final = ".weight"
_INTERLEAVED: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's place in a word of each of its eight rows."""


class Packing(NamedTuple):
    """The layout of one of a matrix's tensors."""

    suffix: str
    """Its name, after the matrix's and a dot."""
    is_transposed: bool
    """It has a row for each column (or group) of the matrix."""
    rows_per_word: int = 1
    columns_per_word: int = 1
    is_interleaved: bool = False
    """Rows in a word are in AWQ's order."""

    def piece(
        self, matrix: Piece, columns: slice, total: int, target: tuple[slice, ...], kind: Kind
    ) -> Piece:
        """Return the piece of this tensor for that of an unquantized matrix. columns: those to
        read, or groups; total: their number in the checkpoint; target: the place in the
        parameter."""
        source = (
            _over(matrix.source[0], self.rows_per_word),
            _over(columns, self.columns_per_word),
        )
        shape = (matrix.full_shape[0] // self.rows_per_word, total // self.columns_per_word)
        if self.is_transposed:
            source, shape = (source[1], source[0]), (shape[1], shape[0])
        return Piece(f"{module_of(matrix)}.{self.suffix}", shape, source, target, kind)

    def rows_of(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return the part of a tensor with rows [start, stop) of the matrix; both are multiples of
        rows_per_word."""
        part = slice(start // self.rows_per_word, stop // self.rows_per_word)
        return tensor[:, part] if self.is_transposed else tensor[part]

    def unpacked(self, tensor: Tensor) -> Tensor:
        """Return the values [M, K or G] of words, as uint8, or of a tensor that has none."""
        by_row = tensor.t() if self.is_transposed else tensor
        if self.rows_per_word > 1:
            return self._values(by_row.t()).t()
        return self._values(by_row) if self.columns_per_word > 1 else by_row

    def _values(self, words: Tensor) -> Tensor:
        """Return the values uint8 [A, 8 B] of words [A, B]."""
        packed = words.contiguous().view(torch.uint8)
        values = torch.stack((packed & 15, packed >> 4), 2)
        if self.is_interleaved:
            values = values.view(*words.shape, INT4_PER_WORD)[:, :, list(_INTERLEAVED)]
        return values.reshape(words.shape[0], -1)


class CheckpointPacking(NamedTuple):
    """The tensors of a 4-bit matrix."""

    values: Packing
    scale: Packing
    zero: Packing
    group_index: str | None
    """Suffix of the tensor with the group of each column, int32 [K]; None if there is none."""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors without further information."""


PACKINGS: Final[Mapping[Int4Format, CheckpointPacking]] = MappingProxyType(
    {
        "gptq": CheckpointPacking(
            Packing("qweight", True, columns_per_word=INT4_PER_WORD),
            Packing("scales", True),
            Packing("qzeros", True, rows_per_word=INT4_PER_WORD),
            "g_idx",
        ),
        "awq": CheckpointPacking(
            Packing("qweight", True, rows_per_word=INT4_PER_WORD, is_interleaved=True),
            Packing("scales", True),
            Packing("qzeros", True, rows_per_word=INT4_PER_WORD, is_interleaved=True),
            None,
        ),
        "compressed-tensors": CheckpointPacking(
            Packing("weight_packed", False, columns_per_word=INT4_PER_WORD),
            Packing("weight_scale", False),
            Packing("weight_zero_point", False, rows_per_word=INT4_PER_WORD),
            "weight_g_idx",
            ("weight_shape",),
        ),
    }
)


def module_of(piece: Piece) -> str:
    """Return the name of the matrix that a piece is part of, without the name of its tensor."""
    return piece.name.rpartition(".")[0]


def _over(part: slice, divisor: int) -> slice:
    return slice(part.start // divisor, part.stop // divisor)
