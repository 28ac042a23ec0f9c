"""Root-mean-square norms (Zhang and Sennrich, 2019) of the residual stream and of attention
heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from worker_daemon.contracts.layer_ops import NormedSum, SpanNorms
from worker_daemon.layers.linear import OutputT, Projection, RowShard
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector
from worker_daemon.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of the residual stream."""

    name: str
    """Name in the checkpoint, without its parent's name and without .weight."""
    rms_norm_eps: float


@dataclass(frozen=True, slots=True)
class QKNormSpec:
    """A norm of queries and keys, before their rotation."""

    eps: float
    spans_heads: bool = False
    """True: one norm over the elements of all query heads, and one over those of all key heads
    (OLMo-2). False: a norm of each head."""


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the residual stream's width, in float32, rounded
    once."""

    def __init__(self, prefix: str, spec: NormSpec, setup: LayerSetup) -> None:
        """prefix: the checkpoint's name of the norm's parent."""
        name, size = f"{prefix}.{spec.name}.weight", setup.hidden_size
        self._weight = setup.parameter(name, (size,), (whole_vector(name, size, "norm"),))
        self._eps = spec.rms_norm_eps
        self._ops = setup.ops
        self._tp = setup.tp

    def forward(self, x: Tensor) -> Tensor:
        """x [N, H] -> the same shape and dtype."""
        return self._ops.rms_norm(x, self._weight.data, self._eps)

    def project(
        self, projection: Projection[OutputT], part: Tensor | None, residual: Tensor
    ) -> tuple[OutputT, Tensor]:
        """Return (projection(norm(s)), s) with s = residual + the sum of part over the ranks,
        rounded to the model's dtype before the norm. Without part, s is residual itself."""
        weight, eps = self._weight.data, self._eps
        if part is None or self._tp.size == 1:
            return projection.forward_normed(NormedSum(part, residual, weight, eps))
        normed, total = self._tp.all_reduce_add_rms_norm(
            part, residual, weight, eps, self._ops.add_rms_norm
        )
        return projection.forward(normed), total

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight


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
