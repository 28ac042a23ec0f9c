"""The parameters of matrices in 4 bits: values, and the scales and zero points of their groups.

All formats of checkpoints are converted as they arrive (int4_formats.py), so that kernels see one
layout (contracts/int4.py).

Shapes: K input features, M output features of this rank, G groups of a row.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rpc_schema.errors import ConfigError
from worker_daemon.contracts.int4 import INT4_BLOCK, INT4_PER_WORD, Int4Matrix, pack
from worker_daemon.errors import config_error
from worker_daemon.layers.int4_formats import PACKINGS, CheckpointPacking, Packing, module_of
from worker_daemon.layers.parameter import Kind, Parameter, Piece
from worker_daemon.layers.quantization import Int4Quantization
from worker_daemon.layers.requantize import Int4Rows, RowQuantizer

_FIELD: Final = "quantization_config.group_size"
_CHUNK_ELEMENTS: Final = 1 << 24
"""Values that are converted at a time; a copy takes a byte for each."""
_SCALE: Final = slice(0, 1)
_ZERO: Final = slice(1, 2)
"""Places in the last dimension of groups."""
_ARRIVES: Final = ("int4", "int4_zero", "int4_scale")


class Int4Parameter(Parameter):
    """A parameter that converts the tensors of a 4-bit checkpoint. Each piece arrives whole."""

    def __init__(
        self,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        packing: Packing,
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shape, pieces, name=name, dtype=dtype, device=device)
        self._packing = packing

    def converts(self, piece: Piece) -> bool:
        """See Parameter."""
        return piece.kind in _ARRIVES

    def stored_kind(self, piece: Piece) -> Kind:
        """See Parameter."""
        return "int4_stored" if self.data.dtype == torch.int32 else "matrix"

    def arrival_dtype(self, piece: Piece) -> torch.dtype:
        """See Parameter."""
        return torch.float32 if piece.kind == "int4_scale" else torch.int32


class Int4Groups(Int4Parameter):
    """Scales and zero points, [G, M, 2]."""

    zero_packing: Packing
    zero_offset = 0
    """Added to the zero points of the checkpoint."""

    @property
    def sent_pieces(self) -> Iterator[Piece]:
        """See Parameter; none: they are computed from the matrix."""
        return iter(())

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """Convert a complete piece of the checkpoint. region: its target."""
        if region[2] == _SCALE:
            by_row = self._packing.unpacked(values)
        else:
            # All eight of a word at once: carries undo the borrows of the subtraction at the save.
            words = values + self.zero_offset * 0x11111111
            by_row = self.zero_packing.unpacked(words)
        self.store(region, by_row.t().unsqueeze(2))


class Int4Values(Int4Parameter):
    """The values of a matrix, int32 [M, K / 8]."""

    order: Parameter | None = None
    """int32 [K]: the column of the checkpoint at each place. Set before values arrive."""
    quantization: Int4Quantization
    groups: Parameter
    matrix_pieces: tuple[Piece, ...]
    """Those of the unquantized matrix."""

    @property
    def sent_pieces(self) -> Iterator[Piece]:
        """See Parameter."""
        return iter(self.matrix_pieces)

    def quantizer(self) -> RowQuantizer:
        """See Parameter."""
        order = None if self.order is None else self.order.data
        return Int4Rows(
            self.data,
            self.groups.data,
            order,
            has_zeros=self.quantization.has_zeros,
            is_symmetric=self.quantization.is_symmetric,
        )

    @property
    def num_values(self) -> int:
        """M * K"""
        return self.data.numel() * INT4_PER_WORD

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """Convert a complete piece of the checkpoint. region: its target."""
        first, last = region[0].start, region[0].stop
        width = self.data.shape[1] * INT4_PER_WORD
        step = max(1, _CHUNK_ELEMENTS // width // INT4_PER_WORD) * INT4_PER_WORD
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            part = self._packing.rows_of(values, start, stop)
            rows = slice(first + start, first + stop)
            self.store((rows, region[1]), self._converted(part))

    def _converted(self, values: Tensor) -> Tensor:
        unpacked = self._packing.unpacked(values)
        if self.order is not None:
            unpacked = unpacked[:, self.order.data.to(values.device)]
        return pack(unpacked.contiguous())


class Int4Parameters(NamedTuple):
    """StoredMatrix in 4 bits."""

    values: Int4Values
    """int32 [M, K / 8], in the layout of contracts/int4.py"""
    groups: Parameter
    """[G, M, 2] in the model's dtype: scales and zero points"""
    order: Parameter | None
    """int32 [K]: the input of each column; None: as they come"""

    @property
    def matrix(self) -> Int4Matrix:
        """See StoredMatrix."""
        values, groups, order = self
        given = None if order is None else order.data
        return Int4Matrix(values.data, groups.data, values.quantization.has_zeros, given)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """See StoredMatrix."""
        required = self.values, self.groups
        return required if self.order is None else (*required, self.order)


def make_int4_parameters(
    prefix: str,
    shape: tuple[int, int],
    pieces: Sequence[Piece],
    quantization: Int4Quantization,
    dtype: torch.dtype,
    device: torch.device,
) -> Int4Parameters:
    """Return zeroed parameters of a matrix [M, K]. prefix: its name without .weight; pieces: those
    of an unquantized matrix; dtype: the model's.

    Raises:
        ConfigError: the groups or words of the checkpoint do not fit this rank's part.
    """
    for piece in pieces:
        _check(piece, quantization)
    packing = PACKINGS[quantization.form]
    num_rows, num_columns = shape
    size = quantization.group_size
    num_groups = 1 if size is None else num_columns // size
    words = (num_rows, num_columns // INT4_PER_WORD)
    values = Int4Values(
        words,
        [_values_piece(piece, packing) for piece in pieces],
        packing.values,
        name=f"{prefix}.weight",
        dtype=torch.int32,
        device=device,
    )
    values.quantization = quantization
    values.matrix_pieces = tuple(pieces)
    group_pieces = [
        _group_piece(piece, packing.scale, size, _SCALE, "int4_scale") for piece in pieces
    ]
    if quantization.has_zeros:
        group_pieces += [
            _group_piece(piece, packing.zero, size, _ZERO, "int4_zero") for piece in pieces
        ]
    groups = Int4Groups(
        (num_groups, num_rows, 2),
        group_pieces,
        packing.scale,
        name=f"{prefix}.weight_groups",
        dtype=dtype,
        device=device,
    )
    values.groups = groups
    groups.zero_packing = packing.zero
    groups.zero_offset = quantization.zero_offset
    if quantization.has_order:
        whole = (slice(0, num_columns),)
        values.order = Parameter(
            (num_columns,),
            [
                Piece(f"{module_of(p)}.order", (num_columns,), whole, whole, "int4_order")
                for p in pieces
            ],
            name=f"{prefix}.weight_order",
            dtype=torch.int32,
            device=device,
        )
    return Int4Parameters(values, groups, values.order)


def _values_piece(piece: Piece, packing: CheckpointPacking) -> Piece:
    columns = piece.source[1]
    words = slice(0, (columns.stop - columns.start) // INT4_PER_WORD)
    target = (piece.target[0], words)
    return packing.values.piece(piece, columns, piece.full_shape[1], target, "int4")


def _group_piece(
    piece: Piece, packing: Packing, size: int | None, part: slice, kind: Kind
) -> Piece:
    if size is None:
        one = slice(0, 1)
        return packing.piece(piece, one, 1, (one, piece.target[0], part), kind)
    columns = piece.source[1]
    groups = slice(columns.start // size, columns.stop // size)
    target = (slice(0, groups.stop - groups.start), piece.target[0], part)
    return packing.piece(piece, groups, piece.full_shape[1] // size, target, kind)


def _check(piece: Piece, quantization: Int4Quantization) -> None:
    """Raise ConfigError unless groups and words fit a rank's part of a matrix."""
    (num_rows, num_columns), (rows, columns) = piece.full_shape, piece.source
    size = quantization.group_size
    unit = INT4_BLOCK if size is None else size
    if num_columns % unit:
        fix = "use the unquantized checkpoint"
        raise _misfit(size, f"{piece.name} has {num_columns} columns, no multiple of {unit}", fix)
    if columns.start % unit or columns.stop % unit:
        shown = f"{columns.start}:{columns.stop}"
        problem = f"a rank's part of the columns of {piece.name}, {shown}, cuts a group"
        fix = f"a tensor_parallel_size that splits them at multiples of {unit}"
        raise _misfit(size, problem, fix)
    bounds = (num_rows, rows.start, rows.stop)
    if any(bound % INT4_PER_WORD for bound in bounds):
        problem = (
            f"a rank's part of the rows of {piece.name}, {rows.start}:{rows.stop}, cuts a word"
        )
        fix = f"a tensor_parallel_size that splits them at multiples of {INT4_PER_WORD}"
        raise _misfit(size, problem, fix)
    if quantization.has_order and columns != slice(0, num_columns):
        problem = (
            f"the groups of {piece.name} are not consecutive columns, so ranks cannot split it"
        )
        fix = "1, or a checkpoint without activation order"
        raise config_error("parallel.tensor_parallel_size", "above 1", problem, fix)


def _misfit(size: int | None, problem: str, fix: str) -> ConfigError:
    return config_error(_FIELD, -1 if size is None else size, problem, fix)
