"""Multi-head latent attention (DeepSeek-V3) in plain torch, with MLPs in all layers: each token
keeps one vector, which all heads share.

Shapes: N tokens in the step, B sequences, L positions of the longest context, Hq heads of this
rank, r the latent's width, R the rotated elements of a head, D the others, V of a value head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_daemon.contracts.attention import AttentionBackend, AttentionMetadata, AttentionStep
from worker_daemon.contracts.layer_ops import Norm
from worker_daemon.layers.cache_spec import LatentLayerSpec
from worker_daemon.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    even_shard,
)
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import BlockNorms, NormSpec, Part
from worker_daemon.layers.parameter import Parameter, whole_vector
from worker_daemon.layers.rotary import Rope, rotate
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.token_mixer import MixerWidths
from worker_daemon.models.config_fields import (
    decoder_config,
    intermediate_size,
    model_rope,
    norm_eps,
    num_layers,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields

SMALL: Mapping[str, object] = {
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""Fields of a small model, for tests.support.checkpoints."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """A TokenMixerSpec."""

    norm: NormSpec
    num_heads: int
    latent_size: int
    """r"""
    rotated_size: int
    """R"""
    plain_size: int
    """D"""
    value_size: int
    """V"""
    rope: Rope
    sliding_window: int | None = None

    @property
    def width(self) -> int:
        """Values of a token in the cache."""
        return self.latent_size + self.rotated_size

    @property
    def split_sizes(self) -> Mapping[str, int]:
        return {"num_attention_heads": self.num_heads}

    @property
    def weight_sizes(self) -> Mapping[str, int]:
        return {
            "num_attention_heads": self.num_heads,
            "kv_lora_rank": self.latent_size,
            "qk_rope_head_dim": self.rotated_size,
            "qk_nope_head_dim": self.plain_size,
            "v_head_dim": self.value_size,
        }

    def num_weights(self, hidden_size: int) -> int:
        heads = self.num_heads * (self.plain_size + self.rotated_size + self.value_size)
        expanded = self.num_heads * (self.plain_size + self.value_size)
        return hidden_size * (heads + self.width) + self.latent_size * expanded

    def widths(self, tp_size: int) -> MixerWidths:
        heads = self.num_heads // tp_size
        queries = heads * (self.plain_size + self.rotated_size)
        return MixerWidths(queries + self.width, heads * self.value_size, 0)

    def cache_spec(self, prefix: str, tp_size: int) -> LatentLayerSpec:
        return LatentLayerSpec(f"{prefix}.self_attn", self.width)

    def build(self, prefix: str, setup: LayerSetup) -> "LatentBlock":
        return LatentBlock(prefix, self, setup)


class LatentBlock:
    """A TokenMixer. Heads are split over the ranks; each rank keeps the whole latent."""

    kv_scales = None

    def __init__(self, prefix: str, spec: LatentSpec, setup: LayerSetup) -> None:
        name, heads, tp = f"{prefix}.self_attn", spec.num_heads, setup.tp
        self.kv_spec = spec.cache_spec(prefix, tp.size)
        self._spec = spec
        self._ops = setup.ops
        self._norms = BlockNorms(prefix, spec.norm, None, setup)
        queries = heads * (spec.plain_size + spec.rotated_size)
        latent = RowShard(f"{name}.kv_a_proj_with_mqa", spec.width, 0, spec.width)
        self._first = ColumnParallelLinear(
            f"{name}.q_and_latent",
            [even_shard(f"{name}.q_proj", queries, tp), latent],
            setup.hidden_size,
            setup,
            bias=False,
        )
        norm = f"{name}.kv_a_layernorm.weight"
        piece = whole_vector(norm, spec.latent_size, "norm")
        self._latent_norm = setup.parameter(norm, (spec.latent_size,), (piece,))
        expanded = heads * (spec.plain_size + spec.value_size)
        self._expand = ColumnParallelLinear(
            f"{name}.expanded",
            [even_shard(f"{name}.kv_b_proj", expanded, tp)],
            spec.latent_size,
            setup,
            bias=False,
        )
        self._out = RowParallelLinear(
            f"{name}.o_proj", heads * spec.value_size, setup.hidden_size, setup, bias=False
        )

    def forward(
        self,
        part: Part,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[Part, Tensor]:
        spec = self._spec
        x, residual = self._norms.project(self._first, part, residual)
        queries, latent, key = x.split(
            [x.shape[1] - spec.width, spec.latent_size, spec.rotated_size], dim=1
        )
        queries = queries.unflatten(1, (-1, spec.plain_size + spec.rotated_size))
        plain, rotated = queries.split([spec.plain_size, spec.rotated_size], dim=2)
        cos, sin = step.rotary_table[step.positions].unsqueeze(2).unbind(1)
        rotated = rotate(rotated.contiguous(), cos, sin, interleaved=True)
        key = rotate(key.contiguous().unsqueeze(1), cos, sin, interleaved=True).squeeze(1)
        # One epsilon, as transformers has it: the configuration's does not count here.
        latent = self._ops.rms_norm(latent.contiguous(), Norm(self._latent_norm.data, 1e-6))
        if kv_cache.numel():
            rows = kv_cache.view(-1, spec.width)
            rows[step.metadata.slot_mapping.long()] = torch.cat((latent, key), dim=1)
            mixed = self._attend(torch.cat((plain, rotated), dim=2), kv_cache, step)
        else:
            mixed = plain.new_zeros(plain.shape[0], plain.shape[1] * spec.value_size)
        return self._norms.part(self._out.forward(mixed)), residual

    def _attend(self, queries: Tensor, kv_cache: Tensor, step: AttentionStep) -> Tensor:
        """queries [N, Hq, D + R] -> [N, Hq V]. Waits for nothing, and every shape follows from the
        step's: so a graph can hold it."""
        spec, metadata = self._spec, step.metadata
        kept = kv_cache[metadata.block_table[metadata.seq_rows.long()].long()].flatten(1, 2)
        places = torch.arange(kept.shape[1], device=kept.device)
        unknown = places >= metadata.seq_lens.unsqueeze(1)
        kept = kept.masked_fill(unknown.unsqueeze(2), 0.0)
        latent, key = kept.split([spec.latent_size, spec.rotated_size], dim=2)
        expanded = self._expand.forward(latent.flatten(0, 1)).view(
            *kept.shape[:2], -1, spec.plain_size + spec.value_size
        )
        keys, values = expanded.split([spec.plain_size, spec.value_size], dim=3)
        shared = key.unsqueeze(2).expand(-1, -1, keys.shape[2], -1)
        keys = torch.cat((keys, shared), dim=3)
        seqs = sequences(metadata, queries.shape[0])
        scores = torch.einsum("nhd,nlhd->nhl", queries, keys[seqs])
        scores = scores * (spec.plain_size + spec.rotated_size) ** -0.5
        later = places > step.positions.unsqueeze(1)
        weights = scores.masked_fill(later.unsqueeze(1), float("-inf")).softmax(dim=2)
        return torch.einsum("nhl,nlhv->nhv", weights, values[seqs]).flatten(1)

    def parameters(self) -> Iterator[Parameter]:
        yield from self._norms.parameters()
        yield from self._first.parameters()
        yield self._latent_norm
        yield from self._expand.parameters()
        yield from self._out.parameters()


def sequences(metadata: AttentionMetadata, num_tokens: int) -> Tensor:
    """Return each token's sequence, int64 [N]; that of padding is the last one."""
    tokens = torch.arange(num_tokens, device=metadata.seq_lens.device)
    ends = metadata.query_start_loc[1:].contiguous()
    return torch.searchsorted(ends, tokens, right=True).clamp_max(ends.shape[0] - 1)


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers, without experts."""
    eps, rotated = norm_eps(fields), fields.integer("qk_rope_head_dim")
    mixer = LatentSpec(
        norm=NormSpec("input_layernorm", eps),
        num_heads=fields.integer("num_attention_heads"),
        latent_size=fields.integer("kv_lora_rank"),
        rotated_size=rotated,
        plain_size=fields.integer("qk_nope_head_dim"),
        value_size=fields.integer("v_head_dim"),
        rope=model_rope(fields, rotated, interleaved=True),
    )
    mlp = MLPSpec(
        norm=NormSpec("post_attention_layernorm", eps),
        intermediate_size=intermediate_size(fields),
        mlp_bias=False,
    )
    return decoder_config(fields, [LayerSpec(mixer, mlp)] * num_layers(fields))
