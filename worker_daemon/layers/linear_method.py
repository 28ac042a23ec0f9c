"""The multiplication in a linear layer: its parameters, and the device's product with them.

Shapes: N tokens, K input features, M output features of this rank.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from worker_daemon.contracts.layer_ops import (
    Activation,
    Epilogue,
    GateUp,
    LayerOps,
    Matrix,
    NormedSum,
)
from worker_daemon.layers.adapters import MatrixAdapters
from worker_daemon.layers.parameter import Parameter


class StoredMatrix(Protocol):
    """The parameters of a matrix [M, K] in one weight format."""

    @property
    def matrix(self) -> Matrix:
        """The matrix in the parameters' present memory."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters."""


class PlainMatrix(NamedTuple):
    """A matrix in the model's dtype."""

    weight: Parameter

    @property
    def matrix(self) -> Tensor:
        """See StoredMatrix."""
        return self.weight.data

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """See StoredMatrix."""
        return (self.weight,)


class LinearMethod:
    """Multiplies by a matrix in any format: x W^T + b, plus the products of adapters in forward
    passes that use any.

    Owned by one layer. Parameters are read at each use, since their data may move to other memory
    later.
    """

    def __init__(
        self,
        stored: StoredMatrix,
        bias: Parameter | None,
        ops: LayerOps,
        adapters: MatrixAdapters | None = None,
    ) -> None:
        """bias [M], in the model's dtype."""
        self._stored = stored
        self._bias = bias
        self._ops = ops
        self._adapters = adapters
        self._is_separate = adapters is not None and not isinstance(stored, PlainMatrix)

    def forward(self, x: Tensor | GateUp, out: Tensor | None = None) -> Tensor:
        """x [N, K] -> [N, M]. out: see Epilogue."""
        y, _ = self._ops.product(x, self._stored.matrix, self._epilogue(out=out))
        assert isinstance(y, Tensor), "no activation was asked for"
        return y

    def project(self, source: Tensor | NormedSum) -> tuple[Tensor, Tensor]:
        """Return (forward(x), s) with x [N, K] and s of source, like LayerOps.product."""
        y, total = self._ops.product(source, self._stored.matrix, self._epilogue())
        assert isinstance(y, Tensor), "no activation was asked for"
        return y, total

    def project_gated(
        self, source: Tensor | NormedSum, activation: Activation
    ) -> tuple[Tensor | GateUp, Tensor]:
        """Like project, with activation(gate) * up [N, M / 2] of the product; the gate's rows are
        the first half."""
        return self._ops.product(source, self._stored.matrix, self._epilogue(activation))

    def parameters(self) -> Iterator[Parameter]:
        yield from self._stored.parameters
        if self._bias is not None:
            yield self._bias

    def _epilogue(
        self, activation: Activation | None = None, out: Tensor | None = None
    ) -> Epilogue:
        bias = None if self._bias is None else self._bias.data
        adapters = None if self._adapters is None else self._adapters.of_step
        return Epilogue(bias, adapters, activation, out, self._is_separate)
