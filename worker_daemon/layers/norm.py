"""Root-mean-square norm (Zhang and Sennrich, 2019), alone and after a residual addition."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.layers.parameter import Parameter, whole_vector


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in float32, rounded once."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        pieces = (whole_vector(name, size, "norm"),)
        self._weight = Parameter((size,), pieces, dtype=dtype, device=device)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return functional.rms_norm(x, self._weight.data.shape, self._weight.data, self._eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(s), s) with s = x + residual, rounded to the model's dtype before the norm."""
        total = residual + x
        return self.forward(total), total

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
