"""Root-mean-square norms (Zhang and Sennrich, 2019): of the residual stream, of attention heads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.linear import Projection
from worker_daemon.layers.ops import HeadNorms, LayerOps, NormedSum
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in float32, rounded once."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        pieces = (whole_vector(name, size, "norm"),)
        self._weight = Parameter((size,), pieces, name=name, dtype=dtype, device=device)
        self.eps = eps

    @property
    def weight(self) -> Tensor:
        """[size]"""
        return self._weight.data

    def forward(self, x: Tensor, ops: LayerOps) -> Tensor:
        """x [N, size] -> the same shape and dtype."""
        return ops.rms_norm(x, self.weight, self.eps)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight


class NormedProjection:
    """A projection of the residual stream's norm: what attention and the MLP begin with. Owns
    neither."""

    def __init__(self, norm: RMSNorm, projection: Projection, tp: TensorParallel) -> None:
        self._norm = norm
        self._projection = projection
        self._tp = tp

    def forward(
        self, part: Tensor | None, residual: Tensor, ops: LayerOps
    ) -> tuple[Tensor, Tensor]:
        """(projection(norm(s)), s) with s = residual + the sum of part over the ranks, rounded to
        the model's dtype before the norm; without part, s is residual itself."""
        weight, eps = self._norm.weight, self._norm.eps
        if part is None or self._tp.size == 1:
            return self._projection.forward_normed(NormedSum(part, residual, weight, eps), ops)
        normed, total = self._tp.all_reduce_add_rms_norm(
            part, residual, weight, eps, ops.add_rms_norm
        )
        return self._projection.forward(normed, ops), total


class QueryKeyNorm:
    """The norms of the query and of the key heads, which their rotation applies."""

    def __init__(
        self, prefix: str, head_dim: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
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
        self._weight = Parameter(
            (2 * head_dim,), pieces, name=f"{prefix}.qk_norm.weight", dtype=dtype, device=device
        )
        self._eps = eps

    @property
    def weights(self) -> HeadNorms:
        """What LayerOps.rotate_and_store takes; views the parameter."""
        return HeadNorms(self._weight.data.view(2, -1), self._eps)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
