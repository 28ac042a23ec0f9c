"""A Llama in which some layers have a decaying sum of each request's values in place of attention:
s[t] = decay * s[t - 1] + v[t], gated.

Shapes: N tokens in the step, B sequences, W width of the sum on this rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.attention import AttentionBackend, AttentionStep
from worker_daemon.layers.cache_spec import StateLayerSpec
from worker_daemon.layers.linear import ColumnParallelLinear, RowParallelLinear, even_shard
from worker_daemon.layers.norm import BlockNorms, NormSpec, Part
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.row_states import states_before, store_states
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.token_mixer import MixerWidths
from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    norm_eps,
    num_layers,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields


@dataclass(frozen=True, slots=True)
class DecayingSumSpec:
    """A TokenMixerSpec."""

    norm: NormSpec
    width: int
    """Of the whole model."""
    checkpoint_blocks: int | None = None
    rope: None = None
    sliding_window: None = None

    @property
    def split_sizes(self) -> Mapping[str, int]:
        return {"sum_width": self.width}

    @property
    def weight_sizes(self) -> Mapping[str, int]:
        return {"sum_width": self.width}

    def num_weights(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.width

    def widths(self, tp_size: int) -> MixerWidths:
        width = self.width // tp_size
        return MixerWidths(2 * width, width, 0)

    def cache_spec(self, prefix: str, tp_size: int) -> StateLayerSpec:
        name, shape = f"{prefix}.self_attn", (self.width // tp_size,)
        return StateLayerSpec(name, shape, torch.float32, self.checkpoint_blocks)

    def build(self, prefix: str, setup: LayerSetup) -> "DecayingSumBlock":
        return DecayingSumBlock(prefix, self, setup)


class DecayingSumBlock:
    """A TokenMixer. The sum is split over the ranks."""

    kv_scales = None

    def __init__(self, prefix: str, spec: DecayingSumSpec, setup: LayerSetup) -> None:
        name, tp, width = f"{prefix}.self_attn", setup.tp, spec.width
        self.kv_spec = spec.cache_spec(prefix, tp.size)
        self._norms = BlockNorms(prefix, spec.norm, None, setup)
        self._first = ColumnParallelLinear(
            f"{name}.values_and_gates",
            [even_shard(f"{name}.{each}", width, tp) for each in ("value_proj", "gate_proj")],
            setup.hidden_size,
            setup,
            bias=False,
        )
        own = width // tp.size
        mine = slice(tp.rank * own, (tp.rank + 1) * own)
        piece = Piece(f"{name}.decay", (width,), (mine,), (slice(0, own),), "bias")
        self._decay = setup.parameter(f"{name}.decay", (own,), (piece,))
        self._out = RowParallelLinear(f"{name}.o_proj", width, setup.hidden_size, setup, bias=False)

    def forward(
        self,
        part: Part,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[Part, Tensor]:
        x, residual = self._norms.project(self._first, part, residual)
        values, gates = x.chunk(2, dim=1)
        sums = self._sums(values.float(), kv_cache, step).to(x.dtype)
        return self._norms.part(self._out.forward(sums * functional.silu(gates))), residual

    def _sums(self, values: Tensor, states: Tensor, step: AttentionStep) -> Tensor:
        """values float32 [N, W] -> the sum after each token, float32 [N, W]."""
        if not states.numel():
            return torch.zeros_like(values)
        metadata, decay = step.metadata, self._decay.data.float().sigmoid()
        bounds = metadata.query_start_loc.long()
        starts, ends = bounds[:-1], bounds[1:]
        num_tokens = values.shape[0]
        out = values.new_zeros(num_tokens + 1, values.shape[1])
        sums = states_before(states, step)
        for offset in range(metadata.max_query_len):
            at = starts + offset
            inside = (at < ends).unsqueeze(1)
            added = decay * sums + values[at.clamp_max(num_tokens - 1)]
            sums = torch.where(inside, added, sums)
            out[torch.where(inside.squeeze(1), at, num_tokens)] = sums
        store_states(states, metadata, sums)
        return out[:num_tokens]

    def parameters(self) -> Iterator[Parameter]:
        yield from self._norms.parameters()
        yield from self._first.parameters()
        yield self._decay
        yield from self._out.parameters()


def describe(fields: Fields) -> DecoderConfig:
    """Return a Llama whose sum_layers have sums, with a checkpoint every sum_checkpoint_blocks."""
    layer = dense_layer(fields, head_sizes(fields))
    norm = NormSpec("input_layernorm", norm_eps(fields))
    every = fields.optional_integer("sum_checkpoint_blocks", minimum=0)
    summing = replace(layer, attention=DecayingSumSpec(norm, fields.integer("sum_width"), every))
    places = fields.optional_integers("sum_layers") or ()
    count = num_layers(fields)
    return decoder_config(fields, [summing if i in places else layer for i in range(count)])
