"""Matrix products with weights in FP8."""

import torch
from torch.nn import functional

from worker_daemon.contracts.layer_ops import Fp8Matrix


class Fp8Linear:
    """The products of all layers with matrices in FP8; one object per daemon, on one stream."""

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._device = device

    def linear(self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """See LayerOps.fp8_linear."""
        return functional.linear(x, matrix.dequantized(x.dtype), bias)
