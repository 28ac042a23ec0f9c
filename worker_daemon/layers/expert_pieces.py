"""Experts' tensors in a checkpoint, and where a rank's part of them lies in its own stacks.

A stack has the matrices of the rank's experts one below the other, each [2 I, H] with the gate's
rows first, or [H, I].

Shapes: H hidden size, E experts of the model, I inner size of an expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from worker_daemon.layers.mxfp4 import MXFP4_BLOCK, MXFP4_BYTES, dequantized
from worker_daemon.layers.parameter import Arrangement, PackedTensors, Piece

ExpertsForm: TypeAlias = Literal["separate", "interleaved", "mxfp4"]
"""The form of a layer's matrices in the checkpoint.

separate: for each expert gate and up [I, H] and down [H, I]; files may also stack them by expert
(models/expert_tensors.py). interleaved: gate_up_proj [E, H, 2 I], each gate column before its up
column, and down_proj [E, I, H]. mxfp4: the interleaved matrices transposed, in blocks along rows:
gate_up_proj_blocks [E, 2 I, H / 32, 16] and gate_up_proj_scales [E, 2 I, H / 32], down_proj_blocks
[E, H, I / 32, 16] and down_proj_scales [E, H, I / 32].

Biases are interleaved: gate_up_proj_bias [E, 2 I], and down_proj_bias [E, H].
"""


@dataclass(frozen=True, slots=True)
class ExpertPieces:
    """One layer's experts, and the part of them that a rank holds. In stacked tensors, they have
    the names of models/expert_tensors.py."""

    prefix: str
    """The checkpoint's name of the layer's experts."""
    form: ExpertsForm
    num_experts: int
    intermediate_size: int
    hidden_size: int
    experts: Sequence[int]
    """Numbers of the rank's experts, in the order of their places."""
    inner: range
    """The rank's part of the inner size of each."""

    def gate_up(self) -> Iterator[Piece]:
        """Yield the pieces of the gates and ups."""
        rows, columns = 2 * len(self.inner), slice(0, self.hidden_size)
        for index, expert in enumerate(self.experts):
            first = index * rows
            if self.form == "separate":
                yield from self._separate_gate_up(expert, first)
                continue
            yield self._interleaved_gate_up(expert, (slice(first, first + rows), columns))

    def down(self) -> Iterator[Piece]:
        """Yield the pieces of the downs."""
        inner, rows = slice(self.inner.start, self.inner.stop), slice(0, self.hidden_size)
        shape = (self.hidden_size, self.intermediate_size)
        for index, expert in enumerate(self.experts):
            first = index * self.hidden_size
            target = (slice(first, first + self.hidden_size), slice(0, len(self.inner)))
            name = f"{self.prefix}.{expert}.down_proj"
            if self.form == "separate":
                yield Piece(f"{name}.weight", shape, (rows, inner), target)
                continue
            packed = self._packed(name, shape, (rows, inner), target, _unpacked)
            yield Piece(
                name, shape[::-1], (inner, rows), target, arrange=_TRANSPOSED, packed=packed
            )

    def gate_up_bias(self) -> Iterator[Piece]:
        """Yield the pieces of a bias [experts of the rank, 2 I of the rank], gates first."""
        name, shape = f"{self.prefix}.gate_up_proj_bias", (self.num_experts, self._gate_up_rows)
        columns = slice(2 * self.inner.start, 2 * self.inner.stop)
        own = slice(0, 2 * len(self.inner))
        for experts, places in self._runs():
            source, target = (experts, columns), (places, own)
            yield Piece(name, shape, source, target, "bias", arrange=_GATE_COLUMNS_FIRST)

    def down_bias(self) -> Iterator[Piece]:
        """Yield the pieces of a bias [experts of the rank, H]."""
        name, shape = f"{self.prefix}.down_proj_bias", (self.num_experts, self.hidden_size)
        columns = slice(0, self.hidden_size)
        for experts, places in self._runs():
            yield Piece(name, shape, (experts, columns), (places, columns), "bias")

    def _runs(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rank's runs of successive experts, each with its places."""
        first = 0
        for place, expert in enumerate(self.experts, 1):
            if place < len(self.experts) and self.experts[place] == expert + 1:
                continue
            yield slice(self.experts[first], expert + 1), slice(first, place)
            first = place

    def _separate_gate_up(self, expert: int, first: int) -> Iterator[Piece]:
        shape, columns = (self.intermediate_size, self.hidden_size), slice(0, self.hidden_size)
        source = (slice(self.inner.start, self.inner.stop), columns)
        for matrix in ("gate_proj", "up_proj"):
            rows = slice(first, first + len(self.inner))
            yield Piece(f"{self.prefix}.{expert}.{matrix}.weight", shape, source, (rows, columns))
            first = rows.stop

    def _interleaved_gate_up(self, expert: int, target: tuple[slice, slice]) -> Piece:
        name, shape = f"{self.prefix}.{expert}.gate_up_proj", (self._gate_up_rows, self.hidden_size)
        rows, columns = slice(2 * self.inner.start, 2 * self.inner.stop), slice(0, self.hidden_size)
        packed = self._packed(name, shape, (rows, columns), target, _unpacked_pairs)
        return Piece(
            name, shape[::-1], (columns, rows), target, arrange=_COLUMN_PAIRS, packed=packed
        )

    def _packed(
        self,
        name: str,
        shape: tuple[int, int],
        region: tuple[slice, slice],
        target: tuple[slice, slice],
        unpack: Callable[..., Tensor],
    ) -> PackedTensors | None:
        """Return the tensors of a region of a matrix [M, K] in MXFP4; None in other forms. A block
        that the region cuts is read whole."""
        if self.form != "mxfp4":
            return None
        (num_rows, num_columns), (rows, columns) = shape, region
        blocks = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        total = num_columns // MXFP4_BLOCK
        in_block = slice(0, MXFP4_BYTES)
        values = Piece(
            f"{name}_blocks",
            (num_rows, total, MXFP4_BYTES),
            (rows, blocks, in_block),
            target,
            "mxfp4",
        )
        scales = Piece(f"{name}_scales", (num_rows, total), (rows, blocks), target, "mxfp4_scale")
        first = blocks.start * MXFP4_BLOCK
        cut = slice(columns.start - first, columns.stop - first)
        return PackedTensors((values, scales), partial(unpack, columns=cut))

    @property
    def _gate_up_rows(self) -> int:
        """Rows of an expert's gate and up."""
        return 2 * self.intermediate_size


def _transposed(values: Tensor) -> Tensor:
    return values.t()


def _gate_rows_first(values: Tensor) -> Tensor:
    """Return rows [2 I, ...] that alternate between gate and up with all the gate's first."""
    return torch.cat((values[0::2], values[1::2]))


def _column_pairs(values: Tensor) -> Tensor:
    """Return gate_up [H, 2 I] with alternating columns as [2 I, H], the gate's rows first."""
    return _gate_rows_first(values.t())


def _gate_columns_first(values: Tensor) -> Tensor:
    """Return values [N, 2 I] with alternating columns, with the gate's columns first."""
    return torch.cat((values[:, 0::2], values[:, 1::2]), dim=1)


def _locate_transposed(places: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return places[1], places[0]


def _locate_pair(places: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return _gate_first(places[1], shape[1]), places[0]


def _locate_column(places: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return places[0], _gate_first(places[1], shape[1])


def _gate_first(column: Tensor, num_columns: int) -> Tensor:
    return column // 2 + (column % 2) * (num_columns // 2)


_TRANSPOSED: Final = Arrangement(_transposed, _locate_transposed)
_COLUMN_PAIRS: Final = Arrangement(_column_pairs, _locate_pair)
_GATE_COLUMNS_FIRST: Final = Arrangement(_gate_columns_first, _locate_column)


def _unpacked(blocks: Tensor, scales: Tensor, *, columns: slice) -> Tensor:
    return dequantized(blocks, scales)[:, columns]


def _unpacked_pairs(blocks: Tensor, scales: Tensor, *, columns: slice) -> Tensor:
    return _gate_rows_first(_unpacked(blocks, scales, columns=columns))
