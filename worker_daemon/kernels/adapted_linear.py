"""Ways to compute a matrix product with LoRA adapters. `python -m benchmarks.lora --kernels-only
--variants all` compares them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import torch

from worker_daemon.contracts.layer_ops import AdapterWeights
from worker_daemon.kernels.activation import silu_and_mul
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.lora import AdapterProducts
from worker_daemon.kernels.lora_fused import FusedShrink


class AdaptedLinear(Protocol):
    """One object serves all layers of a daemon, on one stream."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See LayerOps.adapted_linear."""

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See LayerOps.adapted_gated_linear."""


class AddedProducts:
    """The base model's product, then one launch that adds those of the adapters."""

    def __init__(self, device: torch.device, thin: ThinLinear, products: AdapterProducts) -> None:
        self._pdl = has_dependent_launch(device)
        self._thin = thin
        self._products = products

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See LayerOps.adapted_linear."""
        y = self._thin.linear(x, weight, bias)
        self._products.add(y, x, adapters, token_slots)
        return y

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See LayerOps.adapted_gated_linear."""
        y = self.linear(x, weight, bias, adapters, token_slots)
        return silu_and_mul(y, pdl=self._pdl)


class FusedProducts:
    """The base model's product and the adapters' first half in one launch, if the base model's is
    a tuned one of several rows; AddedProducts otherwise. The second half includes the gate."""

    def __init__(self, thin: ThinLinear, fused: FusedShrink, others: AddedProducts) -> None:
        self._thin = thin
        self._fused = fused
        self._others = others

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See LayerOps.adapted_linear."""
        tile = self._thin.matrix_tile(x, weight)
        if tile is None:
            return self._others.linear(x, weight, bias, adapters, token_slots)
        return self._fused.linear(x, weight, bias, adapters, token_slots, tile)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See LayerOps.adapted_gated_linear."""
        tile = self._thin.matrix_tile(x, weight)
        if tile is None:
            return self._others.gated_linear(x, weight, bias, adapters, token_slots)
        return self._fused.gated_linear(x, weight, bias, adapters, token_slots, tile)


_Make: TypeAlias = Callable[[torch.device, ThinLinear], AdaptedLinear]


def _one_launch(device: torch.device, thin: ThinLinear) -> AddedProducts:
    return AddedProducts(device, thin, AdapterProducts(device))


def _grouped(device: torch.device, thin: ThinLinear) -> AddedProducts:
    return AddedProducts(device, thin, AdapterProducts(device, group_ranks=128))


def _fused(device: torch.device, thin: ThinLinear) -> FusedProducts:
    return FusedProducts(thin, FusedShrink(device), _grouped(device, thin))


VARIANTS: Final[Mapping[str, _Make]] = MappingProxyType(
    {"one launch": _one_launch, "grouped": _grouped, "fused": _fused}
)
DEFAULT: Final = "one launch"
