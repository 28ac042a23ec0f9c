"""Linear layers split over the tensor-parallel group, by output rows or by input columns.

Shapes: N tokens, I input features, O output features; weights are stored [O, I] as checkpoints have
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.ops import LayerOps, NormedSum
from worker_daemon.layers.parameter import Parameter, Piece


@dataclass(frozen=True, slots=True)
class RowShard:
    """The rows of one checkpoint matrix that this rank holds: [start, start + rows)."""

    prefix: str
    """Checkpoint name without its .weight or .bias."""
    total: int
    start: int
    rows: int


def even_shard(prefix: str, total: int, tp: TensorParallel) -> RowShard:
    """This rank's equal part of a matrix whose rows the group's size divides."""
    rows = total // tp.size
    return RowShard(prefix, total, tp.rank * rows, rows)


class Projection(Protocol):
    """A product of the residual stream's norm."""

    def forward(self, x: Tensor, ops: LayerOps) -> Tensor:
        """x [N, I] -> [N, O]."""

    def forward_normed(self, source: NormedSum, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """(forward(n), s) with the norm n and the sum s of source, as LayerOps.norm_linear."""


class ColumnParallelLinear:
    """Several matrices over one input, merged to one: y = x W^T + b, each rank computing its own
    rows.

    The output is [N, sum of the shards' rows], in the order of the shards; no communication.
    """

    def __init__(
        self,
        prefix: str,
        shards: Sequence[RowShard],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """prefix: name of the merged matrix, without its .weight or .bias."""
        self.sizes = [shard.rows for shard in shards]
        rows = sum(self.sizes)
        self._weight = Parameter(
            (rows, in_features),
            _matrix_pieces(shards, in_features),
            name=f"{prefix}.weight",
            dtype=dtype,
            device=device,
        )
        self._bias = _bias(prefix, rows, shards, dtype, device) if bias else None

    @property
    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """W [local O, I] and b [local O]."""
        return self._weight.data, None if self._bias is None else self._bias.data

    def forward(self, x: Tensor, ops: LayerOps) -> Tensor:
        """x [N, I] -> [N, local O]."""
        return ops.linear(x, *self.matrix)

    def forward_normed(self, source: NormedSum, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """(forward(n), s) with the norm n and the sum s of source, as LayerOps.norm_linear."""
        return ops.norm_linear(source, *self.matrix)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
        if self._bias is not None:
            yield self._bias


class GatedLinear:
    """silu(gate) * up of a merged product whose two shards are gate and up."""

    def __init__(self, gate_up: ColumnParallelLinear) -> None:
        self._gate_up = gate_up

    def forward(self, x: Tensor, ops: LayerOps) -> Tensor:
        """x [N, I] -> [N, local O / 2]."""
        return ops.gated_linear(x, *self._gate_up.matrix)

    def forward_normed(self, source: NormedSum, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """(forward(n), s) with the norm n and the sum s of source, as LayerOps.norm_linear."""
        return ops.norm_gated_linear(source, *self._gate_up.matrix)

    def parameters(self) -> Iterator[Parameter]:
        return self._gate_up.parameters()


class RowParallelLinear:
    """y = x W^T + b with the input split over the group: each rank multiplies its columns. The sum
    over the ranks is left to what reads it, a norm mostly, which does both at once.

    Only rank 0 holds the bias, so that the sum contains it once.
    """

    def __init__(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        columns = in_features // tp.size
        start = tp.rank * columns
        piece = Piece(
            f"{prefix}.weight",
            (out_features, in_features),
            (slice(0, out_features), slice(start, start + columns)),
            (slice(0, out_features), slice(0, columns)),
        )
        self._weight = Parameter(
            (out_features, columns), (piece,), name=piece.name, dtype=dtype, device=device
        )
        whole = (RowShard(prefix, out_features, 0, out_features),)
        has_bias = bias and tp.rank == 0
        self._bias = _bias(prefix, out_features, whole, dtype, device) if has_bias else None

    def forward(self, x: Tensor, ops: LayerOps) -> Tensor:
        """x [N, local I] -> [N, O], this rank's part of the sum."""
        bias = None if self._bias is None else self._bias.data
        return ops.linear(x, self._weight.data, bias)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
        if self._bias is not None:
            yield self._bias


def _bias(
    prefix: str, rows: int, shards: Sequence[RowShard], dtype: torch.dtype, device: torch.device
) -> Parameter:
    return Parameter(
        (rows,), _bias_pieces(shards), name=f"{prefix}.bias", dtype=dtype, device=device
    )


def _matrix_pieces(shards: Sequence[RowShard], in_features: int) -> Iterator[Piece]:
    columns = slice(0, in_features)
    for shard, target in _stacked(shards):
        source = slice(shard.start, shard.start + shard.rows)
        full_shape = (shard.total, in_features)
        yield Piece(f"{shard.prefix}.weight", full_shape, (source, columns), (target, columns))


def _bias_pieces(shards: Sequence[RowShard]) -> Iterator[Piece]:
    for shard, target in _stacked(shards):
        source = slice(shard.start, shard.start + shard.rows)
        yield Piece(f"{shard.prefix}.bias", (shard.total,), (source,), (target,), "bias")


def _stacked(shards: Sequence[RowShard]) -> Iterator[tuple[RowShard, slice]]:
    offset = 0
    for shard in shards:
        yield shard, slice(offset, offset + shard.rows)
        offset += shard.rows
