"""Converts hidden states to the outputs of pooling requests: final norm, head, activation.

Shapes: N rows, H hidden size, W values of an output.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.layers.linear_method import LinearMethod
from worker_daemon.layers.norm import RMSNorm
from worker_daemon.layers.parameter import Parameter, Piece, whole_vector
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.models.description import PoolerSpec


class Pooler:
    """Computes pooled outputs on the last stage. Its small head is replicated on every rank. Never
    waits for the device."""

    def __init__(self, norm: RMSNorm | None, spec: PoolerSpec, setup: LayerSetup) -> None:
        """norm: the final norm, which the LM head may share; None if there is none."""
        self._norm = norm
        self._spec = spec
        self.hidden_size = setup.hidden_size
        self._dense: LinearMethod | None = None
        self._head: LinearMethod | None = None
        if spec.head is not None:
            head, width = spec.head, setup.hidden_size
            self._head = _matrix(head.prefix, head.num_labels, setup, bias=head.bias)
            if head.dense is not None:
                self._dense = _matrix(head.dense, width, setup, bias=True)

    def states(self, hidden: Tensor) -> Tensor:
        """Residual stream [N, H] -> the model's last hidden states [N, H], in its dtype."""
        return hidden if self._norm is None else self._norm.forward(hidden)

    def embed(self, states: Tensor, dimensions: int, use_activation: bool | None) -> Tensor:
        """states [N, H] -> float32 [N, dimensions], or [N, H] if dimensions is 0."""
        values = states.float()
        if dimensions:
            values = values[:, :dimensions]
        normalize = self._spec.normalize if use_activation is None else use_activation
        return functional.normalize(values, dim=-1) if normalize else values

    def classify(self, states: Tensor, use_activation: bool | None) -> Tensor:
        """states [N, H] -> float32 [N, labels], for a model with a head."""
        head = self._spec.head
        assert self._head is not None and head is not None, "the task was checked"
        x = states.to(next(self._head.parameters()).data.dtype)
        if self._dense is not None:
            x = torch.tanh(self._dense.forward(x))
        scores = self._head.forward(x).float()
        if use_activation is False or head.activation == "none":
            return scores
        return scores.softmax(-1) if head.activation == "softmax" else torch.sigmoid(scores)

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters except the norm's."""
        for method in (self._dense, self._head):
            if method is not None:
                yield from method.parameters()


def _matrix(prefix: str, num_rows: int, setup: LayerSetup, *, bias: bool) -> LinearMethod:
    shape = (num_rows, setup.hidden_size)
    whole = tuple(slice(0, size) for size in shape)
    weight = Piece(f"{prefix}.weight", shape, whole, whole)
    biases = (whole_vector(f"{prefix}.bias", num_rows, "bias"),) if bias else None
    return setup.linear_method(prefix, shape, (weight,), biases)
