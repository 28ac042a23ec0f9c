"""Root-mean-square norms (Zhang and Sennrich, 2019): of the residual stream, of attention heads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.ops import HeadNorms, LayerOps
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in float32, rounded once."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        pieces = (whole_vector(name, size, "norm"),)
        self._weight = Parameter((size,), pieces, name=name, dtype=dtype, device=device)
        self._eps = eps

    def forward(self, x: Tensor, ops: LayerOps) -> Tensor:
        """x [N, size] -> the same shape and dtype."""
        return ops.rms_norm(x, self._weight.data, self._eps)

    def add_and_norm(
        self, part: Tensor | None, residual: Tensor, ops: LayerOps, tp: TensorParallel
    ) -> tuple[Tensor, Tensor]:
        """(norm(s), s) with s = residual + the sum of part over the ranks, both rounded to the
        model's dtype before the norm; without part, s is residual itself."""
        if part is None:
            return self.forward(residual, ops), residual
        return tp.all_reduce_add_rms_norm(
            part, residual, self._weight.data, self._eps, ops.add_rms_norm
        )

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight


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
