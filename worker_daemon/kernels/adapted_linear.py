"""Matrix products with LoRA adapters. A tuned product of several rows shrinks its rows too
(lora_fused.py), and a second launch expands them (lora_expand.py). Behind any other product, one
launch does both (lora.py)."""

import torch

from worker_daemon.contracts.layer_ops import AdapterWeights
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.lora import AdapterProducts
from worker_daemon.kernels.lora_expand import add_expanded
from worker_daemon.kernels.lora_fused import FusedShrink


class AdaptedLinear:
    """One object serves all layers of a daemon, on one stream."""

    def __init__(self, device: torch.device, thin: ThinLinear) -> None:
        """device is that of all tensors; thin computes the base model's products."""
        self._pdl = has_dependent_launch(device)
        self._thin = thin
        self._fused = FusedShrink(device)
        self._products = AdapterProducts(device)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """x [N, K] weight [M, K]^T + bias [M] + B (A x) -> [N, M]: see RowAdapters."""
        tile = self._thin.matrix_tile(x, weight)
        if tile is None:
            y = self._thin.linear(x, weight, bias)
            self._products.add(y, x, adapters, token_slots)
            return y
        y, shrunk = self._fused.multiply(x, weight, bias, adapters.a, token_slots, tile)
        add_expanded(y, shrunk, adapters, token_slots, self._pdl)
        return y

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> None:
        """Add B (A x) of x [N, K] to y [N, M] in place: see RowAdapters."""
        self._products.add(y, x, adapters, token_slots)
