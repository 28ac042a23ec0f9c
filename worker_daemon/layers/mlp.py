"""The MLP block of a decoder layer.

Shapes: N tokens, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from worker_daemon.contracts.layer_ops import Activation
from worker_daemon.layers.linear import (
    GatedColumnParallelLinear,
    RowParallelLinear,
    even_shard,
    stacked_shards,
)
from worker_daemon.layers.norm import BlockNorms, NormSpec, Part
from worker_daemon.layers.parameter import Parameter
from worker_daemon.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """Sizes and switches of an MLP block, before tensor parallelism splits it."""

    norm: NormSpec | None
    """The norm of the residual stream, before gate and up; None: they take the stream itself."""
    intermediate_size: int
    mlp_bias: bool
    """True if gate, up and down have biases."""
    activation: Activation = "silu"
    post_norm: NormSpec | None = None
    """The norm of the block's output, before it is added to the residual stream; None: no norm."""
    fused_gate_up: bool = False
    """True if the checkpoint has gate and up as one matrix mlp.gate_up_proj, gate's rows first."""


class MLPBlock:
    """down(activation(gate(x)) * up(x)), where x is the norm of the residual stream, or the stream
    itself."""

    def __init__(self, prefix: str, spec: MLPSpec, setup: LayerSetup) -> None:
        """prefix: the checkpoint's name of the layer."""
        name = f"{prefix}.mlp"
        self._norms = BlockNorms(prefix, spec.norm, spec.post_norm, setup)
        merged = f"{name}.gate_up_proj"
        gate, up = (
            even_shard(f"{name}.{each}", spec.intermediate_size, setup.tp)
            for each in ("gate_proj", "up_proj")
        )
        if spec.fused_gate_up:
            gate, up = stacked_shards(merged, (gate, up))
        self._gate_up = GatedColumnParallelLinear(
            merged,
            gate,
            up,
            setup.hidden_size,
            setup,
            bias=spec.mlp_bias,
            activation=spec.activation,
        )
        self._down = RowParallelLinear(
            f"{name}.down_proj",
            spec.intermediate_size,
            setup.hidden_size,
            setup,
            bias=spec.mlp_bias,
        )

    def forward(self, part: Part, residual: Tensor) -> tuple[Part, Tensor]:
        """Take and return the residual stream as (part, residual), like DecoderLayer.forward."""
        gated, residual = self._norms.project(self._gate_up, part, residual)
        return self._norms.part(self._down.forward(gated)), residual

    def parameters(self) -> Iterator[Parameter]:
        yield from self._norms.parameters()
        yield from self._gate_up.parameters()
        yield from self._down.parameters()
