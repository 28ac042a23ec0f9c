"""Linear layers split over the tensor-parallel group, by output rows or by input columns.

Shapes: N tokens, I input features, O output features; weights are stored [O, I] as checkpoints have
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeVar

from torch import Tensor

from worker_daemon.contracts.layer_ops import Activation, GateUp, NormedSum
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.setup import LayerSetup

OutputT = TypeVar("OutputT", covariant=True)


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows of a checkpoint matrix that this rank holds: [start, start + rows)."""

    prefix: str
    """Checkpoint name without its .weight or .bias."""
    total: int
    start: int
    rows: int


def even_shard(prefix: str, total: int, tp: TensorParallel) -> RowShard:
    """Return this rank's equal part of a matrix; the group's size must divide its rows."""
    rows = total // tp.size
    return RowShard(prefix, total, tp.rank * rows, rows)


def stacked_shards(prefix: str, shards: Sequence[RowShard]) -> list[RowShard]:
    """Return these parts as those of one checkpoint matrix that has the shards' matrices one after
    another."""
    total = sum(shard.total for shard in shards)
    starts = accumulate((shard.total for shard in shards), initial=0)
    return [
        RowShard(prefix, total, start + shard.start, shard.rows)
        for shard, start in zip(shards, starts, strict=False)
    ]


class Projection(Protocol[OutputT]):
    """A linear layer that can fuse the norm of its input with its product."""

    def project(self, source: Tensor | NormedSum) -> tuple[OutputT, Tensor]:
        """Return (y, s): y [N, O] of the inputs [N, I] of source, and its s, like
        LayerOps.product."""


class ColumnParallelLinear:
    """Several matrices over one input, merged into one: y = x W^T + b. Each rank computes its own
    rows.

    The output is [N, sum of the shards' rows], in the order of the shards; no communication.
    """

    def __init__(
        self,
        prefix: str,
        shards: Sequence[RowShard],
        in_features: int,
        setup: LayerSetup,
        *,
        bias: bool,
    ) -> None:
        """prefix: name of the merged matrix, without its .weight or .bias."""
        self._method = setup.linear_method(
            prefix,
            (sum(shard.rows for shard in shards), in_features),
            _matrix_pieces(shards, in_features),
            _bias_pieces(shards) if bias else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [N, I] -> [N, local O]."""
        return self._method.forward(x)

    def project(self, source: Tensor | NormedSum) -> tuple[Tensor, Tensor]:
        """See Projection: y [N, local O]."""
        return self._method.project(source)

    def parameters(self) -> Iterator[Parameter]:
        return self._method.parameters()


class GatedColumnParallelLinear:
    """activation(gate) * up of two matrices over one input, merged into one. Each rank computes
    its own rows of both, without communication."""

    def __init__(
        self,
        prefix: str,
        gate: RowShard,
        up: RowShard,
        in_features: int,
        setup: LayerSetup,
        *,
        bias: bool,
        activation: Activation,
    ) -> None:
        """prefix: name of the merged matrix, without its .weight or .bias."""
        shards = (gate, up)
        self._activation = activation
        self._method = setup.linear_method(
            prefix,
            (gate.rows + up.rows, in_features),
            _matrix_pieces(shards, in_features),
            _bias_pieces(shards) if bias else None,
        )

    def project(self, source: Tensor | NormedSum) -> tuple[Tensor | GateUp, Tensor]:
        """See Projection: y [N, local O / 2]."""
        return self._method.project_gated(source, self._activation)

    def parameters(self) -> Iterator[Parameter]:
        return self._method.parameters()


class RowParallelLinear:
    """y = x W^T + b with the input split over the group: each rank multiplies its columns.

    The consumer of the output, usually a norm, sums over the ranks and can do both in one call.

    Only rank 0 holds the bias, so that the sum contains it once.
    """

    def __init__(
        self, prefix: str, in_features: int, out_features: int, setup: LayerSetup, *, bias: bool
    ) -> None:
        columns = in_features // setup.tp.size
        start = setup.tp.rank * columns
        piece = Piece(
            f"{prefix}.weight",
            (out_features, in_features),
            (slice(0, out_features), slice(start, start + columns)),
            (slice(0, out_features), slice(0, columns)),
        )
        whole = (RowShard(prefix, out_features, 0, out_features),)
        has_bias = bias and setup.tp.rank == 0
        self._method = setup.linear_method(
            prefix, (out_features, columns), (piece,), _bias_pieces(whole) if has_bias else None
        )

    def forward(self, x: Tensor | GateUp) -> Tensor:
        """x [N, local I] -> [N, O], this rank's part of the sum."""
        return self._method.forward(x)

    def parameters(self) -> Iterator[Parameter]:
        return self._method.parameters()


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
    """Yield shards and their places, one after another."""
    offset = 0
    for shard in _joined(shards):
        yield shard, slice(offset, offset + shard.rows)
        offset += shard.rows


def _joined(shards: Sequence[RowShard]) -> list[RowShard]:
    """Join shards that follow each other in one checkpoint matrix, as they do on a single rank."""
    joined: list[RowShard] = []
    for shard in shards:
        before = joined[-1] if joined else None
        if (
            before is not None
            and shard.prefix == before.prefix
            and shard.start == before.start + before.rows
        ):
            joined[-1] = replace(before, rows=before.rows + shard.rows)
        else:
            joined.append(shard)
    return joined
