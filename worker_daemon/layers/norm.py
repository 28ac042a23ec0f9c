"""Root-mean-square norms (Zhang and Sennrich, 2019) of the residual stream and of attention
heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.layers.linear import OutputT, Projection
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector
from worker_daemon.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of the residual stream."""

    name: str
    """Name in the checkpoint, without its parent's name and without .weight."""
    rms_norm_eps: float


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

    def __init__(self, prefix: str, head_dim: int, eps: float, setup: LayerSetup) -> None:
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
        self.eps = eps

    @property
    def weight(self) -> Tensor:
        """[2, D], a view of the parameter."""
        return self._weight.data.view(2, -1)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
