"""Root-mean-square norms (Zhang and Sennrich, 2019) of the residual stream and of attention
heads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from worker_daemon.contracts.layer_ops import LayerOps, Norm, NormedSum, SpanNorms
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.linear import OutputT, Projection, RowShard
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector
from worker_daemon.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of the residual stream."""

    name: str
    """Name in the checkpoint, without its parent's name and without .weight."""
    rms_norm_eps: float
    weight_offset: float = 0.0
    """Added to the checkpoint's weight in float32: Gemma stores weights minus 1."""


@dataclass(frozen=True, slots=True)
class QKNormSpec:
    """A norm of queries and keys, before their rotation."""

    eps: float
    weight_offset: float = 0.0
    """See NormSpec. 0 if the norm spans heads."""
    spans_heads: bool = False
    """True: one norm over the elements of all query heads, and one over those of all key heads
    (OLMo-2). False: a norm of each head."""


class NormedPart(NamedTuple):
    """The output of a block whose norm has not been computed yet: it is added to the residual
    stream, rounded to the model's dtype first."""

    output: Tensor
    """[N, H]: a rank's summand of the sum over the ranks."""
    norm: Norm


Part: TypeAlias = Tensor | NormedPart | None
"""An addition to the residual stream that has not been computed yet: a rank's summand [N, H] of the
sum over the ranks, a NormedPart, or nothing."""


def residual_stream(part: Part, residual: Tensor, ops: LayerOps, tp: TensorParallel) -> Tensor:
    """Return residual + part [N, H], rounded to the model's dtype."""
    if part is None:
        return residual
    if isinstance(part, NormedPart):
        return ops.rms_norm_add(tp.all_reduce(part.output), residual, part.norm)
    return residual + tp.all_reduce(part)


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * (weight_offset + w) over the residual stream's width, in
    float32, rounded once."""

    def __init__(self, prefix: str, spec: NormSpec, setup: LayerSetup) -> None:
        """prefix: the checkpoint's name of the norm's parent."""
        name, size = f"{prefix}.{spec.name}.weight", setup.hidden_size
        self._weight = setup.parameter(name, (size,), (whole_vector(name, size, "norm"),))
        self._spec = spec
        self._ops = setup.ops
        self._tp = setup.tp

    def forward(self, x: Tensor) -> Tensor:
        """x [N, H] -> the same shape and dtype."""
        return self._ops.rms_norm(x, self.norm)

    def project(
        self, projection: Projection[OutputT], part: Part, residual: Tensor
    ) -> tuple[OutputT, Tensor]:
        """Return (projection(norm(s)), s) with s = residual + part, rounded to the model's dtype
        before the norm. Without part, s is residual itself."""
        output, part_norm = part if isinstance(part, NormedPart) else (part, None)
        source = NormedSum(output, residual, self.norm, part_norm)
        if part is None or self._tp.size == 1:
            return projection.project(source)
        normed, total = self._tp.all_reduce_and_norm(source, self._ops.sum_and_norm)
        return projection.project(normed)[0], total

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight

    @property
    def norm(self) -> Norm:
        """The norm, with the weight's present memory."""
        return Norm(self._weight.data, self._spec.rms_norm_eps, self._spec.weight_offset)


class BlockNorms:
    """The norms of a block, and through them its access to the residual stream, which is residual +
    part."""

    def __init__(
        self, prefix: str, before: NormSpec | None, after: NormSpec | None, setup: LayerSetup
    ) -> None:
        """prefix: the checkpoint's name of the layer. before: the norm of the block's input; None:
        the block takes the residual stream itself. after: the norm of the block's output, before it
        is added to the residual stream."""
        self._before = None if before is None else RMSNorm(prefix, before, setup)
        self._after = None if after is None else RMSNorm(prefix, after, setup)
        self._ops = setup.ops
        self._tp = setup.tp

    def project(
        self, projection: Projection[OutputT], part: Part, residual: Tensor
    ) -> tuple[OutputT, Tensor]:
        """Return (projection(x), s), where s [N, H] is the residual stream, and x its norm or s
        itself."""
        if self._before is not None:
            return self._before.project(projection, part, residual)
        return projection.project(residual_stream(part, residual, self._ops, self._tp))

    def part(self, output: Tensor) -> Part:
        """Return what the block adds to the residual stream. output [N, H]: this rank's summand of
        its output."""
        return output if self._after is None else NormedPart(output, self._after.norm)

    def parameters(self) -> Iterator[Parameter]:
        for norm in (self._before, self._after):
            if norm is not None:
                yield from norm.parameters()


class QueryKeyNorm:
    """HeadNorms: the norms of the query and key heads, which the rotation applies."""

    def __init__(self, prefix: str, head_dim: int, spec: QKNormSpec, setup: LayerSetup) -> None:
        """prefix: the checkpoint's name of the attention."""
        pieces = (
            Piece(
                f"{prefix}.{name}.weight",
                (head_dim,),
                (slice(0, head_dim),),
                (slice(start, start + head_dim),),
                "norm",
            )
            for name, start in (("q_norm", 0), ("k_norm", head_dim))
        )
        self._weight = setup.parameter(f"{prefix}.qk_norm.weight", (2 * head_dim,), pieces)
        self.eps = spec.eps
        self.weight_offset = spec.weight_offset

    @property
    def weight(self) -> Tensor:
        """[2, D], a view of the parameter."""
        return self._weight.data.view(2, -1)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight


class QueryKeySpanNorm:
    """The norm over all queries of a token together, and over all its keys. Each rank holds the
    weights of its heads."""

    def __init__(
        self, prefix: str, queries: RowShard, keys: RowShard, spec: QKNormSpec, setup: LayerSetup
    ) -> None:
        """prefix: the checkpoint's name of the attention. queries, keys: this rank's rows of their
        projections."""
        size, pieces = 0, []
        for name, shard in (("q_norm", queries), ("k_norm", keys)):
            source = slice(shard.start, shard.start + shard.rows)
            target = slice(size, size + shard.rows)
            size = target.stop
            pieces.append(
                Piece(f"{prefix}.{name}.weight", (shard.total,), (source,), (target,), "norm")
            )
        self._weight = setup.parameter(f"{prefix}.qk_norm.weight", (size,), pieces)
        self._query_size = queries.rows
        assert spec.weight_offset == 0.0, "no family has a norm over all heads with an offset"
        self._eps = spec.eps
        self._ops = setup.ops
        self._tp = setup.tp

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [N, (Hq + 2 Hkv) D] -> the same with normed queries and keys; may overwrite it.

        All ranks have equally many elements, and all KV heads are on equally many ranks: so the
        mean of squares over the model is the mean of those of the ranks.
        """
        norms = SpanNorms(self._weight.data, self._eps, self._query_size)
        if self._tp.size == 1:
            return self._ops.norm_spans(qkv, norms)
        means = self._ops.span_means(qkv, norms, self._tp.size)
        return self._ops.norm_spans(qkv, norms, self._tp.all_reduce(means))

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
