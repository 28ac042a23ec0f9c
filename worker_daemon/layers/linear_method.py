"""The multiplication in a linear layer: its parameters, and the device's kernels for them.

Shapes: N tokens, K input features, M output features of this rank.
"""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from worker_daemon.contracts.layer_ops import (
    Activation,
    GateUp,
    LayerOps,
    NormedSum,
    activated,
)
from worker_daemon.layers.parameter import Parameter


class MatrixMethod(Protocol):
    """Multiplies by a matrix: x W^T + b. Its storage is the implementation's choice."""

    def forward(self, x: Tensor | GateUp) -> Tensor:
        """x [N, K] -> [N, M]."""

    def forward_normed(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        """Return (forward(n), s) with the norm n and the sum s of source."""

    def forward_gated(self, x: Tensor, activation: Activation) -> Tensor | GateUp:
        """x [N, K] -> activation(gate) * up [N, M / 2]; the gate's rows are the first half."""

    def forward_normed_gated(
        self, source: NormedSum, activation: Activation
    ) -> tuple[Tensor | GateUp, Tensor]:
        """Return (forward_gated(n), s) with the norm n and the sum s of source."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters."""


class MatrixProduct(Protocol):
    """Multiplies by a matrix: x W^T + b."""

    def forward(self, x: Tensor | GateUp) -> Tensor:
        """x [N, K] -> [N, M]."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters."""


class UnfusedMethod:
    """A MatrixMethod that computes norm, product and gate by operations of their own."""

    def __init__(self, product: MatrixProduct, ops: LayerOps) -> None:
        self._product = product
        self._ops = ops

    def forward(self, x: Tensor | GateUp) -> Tensor:
        """See MatrixMethod."""
        return self._product.forward(x)

    def forward_normed(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        """See MatrixMethod."""
        normed, total = self._ops.sum_and_norm(source)
        return self.forward(normed), total

    def forward_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """See MatrixMethod."""
        return self._ops.act_and_mul(self.forward(x), activation)

    def forward_normed_gated(
        self, source: NormedSum, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """See MatrixMethod."""
        normed, total = self._ops.sum_and_norm(source)
        return self.forward_gated(normed, activation), total

    def parameters(self) -> Iterator[Parameter]:
        return self._product.parameters()


class LinearMethod:
    """Multiplies by a matrix in the model's dtype: x W^T + b.

    Owned by one layer. Parameters are read at each use, since their data may move to other memory
    later.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None, ops: LayerOps) -> None:
        """weight [M, K], bias [M]."""
        self._weight = weight
        self._bias = bias
        self._ops = ops

    def forward(self, x: Tensor | GateUp) -> Tensor:
        """x [N, K] -> [N, M]."""
        return self._ops.linear(activated(x, self._ops), *self._matrix)

    def new_output(self, num_rows: int) -> Tensor:
        """Return memory [num_rows, M] for forward_into."""
        return self._weight.data.new_empty((num_rows, self._weight.data.shape[0]))

    def forward_into(self, x: Tensor, out: Tensor) -> Tensor:
        """Return forward(x) in out [N, M]. Only without a bias."""
        return self._ops.linear(x, *self._matrix, out)

    def forward_normed(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        """Return (forward(n), s) with the norm n and the sum s of source, like
        LayerOps.norm_linear."""
        return self._ops.norm_linear(source, *self._matrix)

    def forward_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """x [N, K] -> activation(gate) * up [N, M / 2]; the gate's rows are the first half."""
        return self._ops.gated_linear(x, *self._matrix, activation)

    def forward_normed_gated(
        self, source: NormedSum, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """Return (forward_gated(n), s) with the norm n and the sum s of source, like
        LayerOps.norm_gated_linear."""
        return self._ops.norm_gated_linear(source, *self._matrix, activation)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
        if self._bias is not None:
            yield self._bias

    @property
    def _matrix(self) -> tuple[Tensor, Tensor | None]:
        return self._weight.data, None if self._bias is None else self._bias.data
