"""LoRA adapters of a stage's matrices: their layout in device memory, and those that a step uses.
worker_daemon/lora/ fills the memory, LinearMethod reads it.

An adapter slot is one row of a buffer [L, size], so that an adapter arrives by one copy. Letters:
L slots, N tokens, K input features, M output features, G matrices merged into one, r largest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from torch import Tensor

from worker_daemon.contracts.layer_ops import AdapterWeights, RowAdapters
from worker_daemon.layers.parameter import Piece

_ALIGNMENT: Final = 64
"""Elements: each matrix begins at a multiple, so that kernels may load vectors."""
_WEIGHT: Final = ".weight"


class MatrixShard(NamedTuple):
    """A matrix of the checkpoint that adapters may change, and this rank's part of it."""

    module: str
    """Its name in the checkpoint, without .weight."""
    full_shape: tuple[int, int]
    """(output features, input features) of the model."""
    rows: tuple[slice, ...]
    """This rank's parts of the output features."""
    columns: slice
    """This rank's part of the input features."""
    target: slice
    """The place of these rows in the merged matrix, one part after another."""


@dataclass(frozen=True, slots=True)
class MergedShards:
    """Offsets of a merged matrix in a slot."""

    shards: tuple[MatrixShard, ...]
    a_shape: tuple[int, int]
    """(G * r, K)"""
    b_shape: tuple[int, int]
    """(M, r)"""
    a_offset: int
    """Index of A's first element in a slot."""
    b_offset: int

    def a_of(self, slots: Tensor) -> Tensor:
        """slots [L, size] -> A of all of them, [L, G * r, K], a view."""
        return _matrices(slots, self.a_offset, self.a_shape)

    def b_of(self, slots: Tensor) -> Tensor:
        """slots [L, size] -> B of all of them, [L, M, r], a view."""
        return _matrices(slots, self.b_offset, self.b_shape)


def _matrices(slots: Tensor, offset: int, shape: tuple[int, int]) -> Tensor:
    rows, columns = shape
    return slots[:, offset : offset + rows * columns].view(-1, rows, columns)


class AdapterLayout:
    """The matrices of one stage and rank that adapters may change, with their places in a slot.
    Filled while the stage is built. Once bound, owns the views of the slots."""

    def __init__(self, max_slots: int, max_rank: int) -> None:
        self.max_slots = max_slots
        self.max_rank = max_rank
        self.merged: list[MergedShards] = []
        self.token_slots: Tensor | None = None
        """int32 [N], see RowAdapters: set during a forward pass whose rows use
        adapters. None: only the base model."""
        self._size = 0
        self._weights: list[AdapterWeights] = []

    @property
    def slot_size(self) -> int:
        """Elements of a slot."""
        return self._size

    @property
    def num_elements(self) -> int:
        """Elements of all slots."""
        return self.max_slots * self._size

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return each matrix's (output features, input features) in the model, by module."""
        return {shard.module: shard.full_shape for each in self.merged for shard in each.shards}

    def add(self, shape: Sequence[int], pieces: Sequence[Piece]) -> int:
        """Register a merged matrix [M, K], and return its number. pieces: those of an unquantized
        matrix."""
        num_outputs, num_inputs = shape
        shards = tuple(_shard(list(tensor)) for _, tensor in groupby(pieces, lambda p: p.name))
        a_shape = (len(shards) * self.max_rank, num_inputs)
        b_shape = (num_outputs, self.max_rank)
        a_offset = self._take(a_shape)
        self.merged.append(MergedShards(shards, a_shape, b_shape, a_offset, self._take(b_shape)))
        return len(self.merged) - 1

    def bind(self, slots: Tensor) -> None:
        """Read adapters from these slots [L, slot_size] from now on."""
        self._weights = [
            AdapterWeights(
                each.a_of(slots),
                each.b_of(slots),
                tuple(shard.target.stop for shard in each.shards),
            )
            for each in self.merged
        ]

    def weights(self, number: int) -> AdapterWeights:
        """Return the adapters of a matrix, in all slots."""
        return self._weights[number]

    def _take(self, shape: Sequence[int]) -> int:
        offset = self._size
        size = shape[0] * shape[1]
        self._size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset


def _shard(pieces: Sequence[Piece]) -> MatrixShard:
    """Return the shard of a checkpoint matrix that these pieces are all parts of."""
    first, last = pieces[0], pieces[-1]
    return MatrixShard(
        first.name.removesuffix(_WEIGHT),
        (first.full_shape[0], first.full_shape[1]),
        tuple(piece.source[0] for piece in pieces),
        first.source[1],
        slice(first.target[0].start, last.target[0].stop),
    )


def new_layout(max_slots: int, max_rank: int) -> AdapterLayout | None:
    """Return the empty layout of a stage; None without slots."""
    return AdapterLayout(max_slots, max_rank) if max_slots else None


class MatrixAdapters:
    """The adapters of one matrix of a layout."""

    def __init__(self, layout: AdapterLayout, number: int) -> None:
        """number: from AdapterLayout.add."""
        self._layout = layout
        self._number = number

    @property
    def of_step(self) -> RowAdapters | None:
        """The adapters of the present forward pass; None if it uses none."""
        slots = self._layout.token_slots
        return None if slots is None else RowAdapters(self._layout.weights(self._number), slots)
