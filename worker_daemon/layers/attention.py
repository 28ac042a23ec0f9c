"""The attention block of a decoder layer, and a placeholder for attention without a KV cache.

Shapes: N tokens in the step, Hq query heads and Hkv KV heads of this rank, D head_dim, H hidden
size. contracts/attention.py defines the layout of a layer's cache.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from worker_daemon.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    AttentionStep,
)
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.cache_spec import KVLayerSpec
from worker_daemon.layers.kv_scales import HeadScales
from worker_daemon.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    even_shard,
    stacked_shards,
)
from worker_daemon.layers.norm import (
    BlockNorms,
    NormSpec,
    Part,
    QKNormSpec,
    QueryKeyNorm,
    QueryKeySpanNorm,
)
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.rotary import Rope
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.token_mixer import MixerWidths


class NullAttention:
    """AttentionBackend that returns zeros while there is no KV cache, as in the memory profile."""

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        lse: Tensor | None = None,
    ) -> Tensor:
        if lse is not None:
            lse.fill_(-torch.inf)
        return torch.zeros_like(q)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
        lse: Tensor | None = None,
    ) -> Tensor:
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata, lse)

    def merge(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The heads of an attention block, either of the model or of one tensor-parallel rank."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    def local_kv_heads(self, tp_size: int) -> int:
        """Return the KV heads of each of tp_size ranks."""
        return max(1, self.num_key_value_heads // tp_size)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Sizes and switches of an attention block, before tensor parallelism splits it: a
    TokenMixerSpec."""

    norm: NormSpec | None
    """The norm of the residual stream, before the projections; None: they take the stream
    itself."""
    heads: HeadSizes
    """The heads of the whole model."""
    qkv_bias: bool
    o_bias: bool
    rope: Rope
    """The rotation of query and key heads; layers with equal ones share a table."""
    qk_norm: QKNormSpec | None = None
    """The norm of queries and keys; None if the model has no such norm."""
    sliding_window: int | None = None
    """In tokens; None attends to everything."""
    post_norm: NormSpec | None = None
    """The norm of the block's output, before it is added to the residual stream; None: no norm."""
    scale: float | None = None
    """Factor of the scores, above 0; None: head_dim**-0.5."""
    logit_softcap: float | None = None
    """The cap of the scaled scores, above 0: score = cap * tanh(score / cap), before the mask. None
    does not cap."""
    has_sinks: bool = False
    """A learned logit for each query head joins the denominator of its softmax."""
    fused_qkv: bool = False
    """True if the checkpoint has q, k and v as one matrix self_attn.qkv_proj, in this order of
    rows."""

    @property
    def split_sizes(self) -> Mapping[str, int]:
        """See TokenMixerSpec. KV heads may be replicated instead (models/partition.py)."""
        return {"num_attention_heads": self.heads.num_attention_heads}

    @property
    def weight_sizes(self) -> Mapping[str, int]:
        """See TokenMixerSpec."""
        return asdict(self.heads)

    def num_weights(self, hidden_size: int) -> int:
        """See TokenMixerSpec."""
        heads = self.heads
        num_heads = 2 * (heads.num_attention_heads + heads.num_key_value_heads)
        return hidden_size * num_heads * heads.head_dim

    def widths(self, tp_size: int) -> MixerWidths:
        """See TokenMixerSpec."""
        heads = self.heads
        queries = heads.num_attention_heads // tp_size * heads.head_dim
        keys_and_values = 2 * heads.local_kv_heads(tp_size) * heads.head_dim
        return MixerWidths(queries + keys_and_values, queries, keys_and_values)

    def cache_spec(self, prefix: str, tp_size: int) -> KVLayerSpec:
        """See TokenMixerSpec."""
        heads = self.heads
        num_kv_heads = heads.local_kv_heads(tp_size)
        return KVLayerSpec(f"{prefix}.self_attn", num_kv_heads, heads.head_dim, self.sliding_window)

    def build(self, prefix: str, setup: LayerSetup) -> "AttentionBlock":
        """See TokenMixerSpec."""
        return AttentionBlock(prefix, self, setup)


class AttentionBlock:
    """TokenMixer: projections of the residual stream, after an optional norm; optional norms of
    queries and keys, rotation, and attention by the backend; output projection, and an optional
    norm of the result.

    Query heads are split evenly. KV heads are split if the group's size divides their number; a
    larger group replicates each KV head on size / num_key_value_heads consecutive ranks.
    """

    def __init__(self, prefix: str, spec: AttentionSpec, setup: LayerSetup) -> None:
        """prefix: the checkpoint's name of the layer."""
        name, heads, hidden_size = f"{prefix}.self_attn", spec.heads, setup.hidden_size
        num_kv_heads = heads.local_kv_heads(setup.tp.size)
        first_kv_head = setup.tp.rank * heads.num_key_value_heads // setup.tp.size
        self.kv_spec = spec.cache_spec(prefix, setup.tp.size)
        self._norms = BlockNorms(prefix, spec.norm, spec.post_norm, setup)
        merged = f"{name}.qkv_proj"
        q, k, v = _qkv_shards(name, heads, first_kv_head, num_kv_heads, setup.tp)
        self._qkv = ColumnParallelLinear(
            merged,
            stacked_shards(merged, (q, k, v)) if spec.fused_qkv else (q, k, v),
            hidden_size,
            setup,
            bias=spec.qkv_bias,
        )
        self._head_norm, self._span_norm = None, None
        if spec.qk_norm is not None and spec.qk_norm.spans_heads:
            self._span_norm = QueryKeySpanNorm(name, q, k, spec.qk_norm, setup)
        elif spec.qk_norm is not None:
            self._head_norm = QueryKeyNorm(name, heads.head_dim, spec.qk_norm, setup)
        self.kv_scales = (
            HeadScales(name, heads.num_key_value_heads, first_kv_head, num_kv_heads, setup)
            if setup.has_fp8_cache
            else None
        )
        """None if the cache has the model's dtype."""
        self._sinks = SinkLogits(name, heads.num_attention_heads, setup) if spec.has_sinks else None
        self._layer = AttentionLayer(
            setup.ops,
            num_kv_heads,
            heads.head_dim,
            heads.head_dim**-0.5 if spec.scale is None else spec.scale,
            spec.sliding_window,
            self._head_norm,
            self.kv_scales,
            spec.rope.interleaved,
            spec.logit_softcap,
            self._sinks,
        )
        self._out = RowParallelLinear(
            f"{name}.o_proj",
            heads.num_attention_heads * heads.head_dim,
            hidden_size,
            setup,
            bias=spec.o_bias,
        )

    def forward(
        self,
        part: Part,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[Part, Tensor]:
        """Take and return the residual stream as (part, residual), like
        DecoderLayer.forward; write k and v into kv_cache, unless that is empty."""
        # Reuse one name, so that each tensor is freed once the next exists.
        x, residual = self._norms.project(self._qkv, part, residual)
        if self._span_norm is not None:
            x = self._span_norm.forward(x)
        x = backend.rotate_and_attend(x, kv_cache, self._layer, step)
        return self._norms.part(self._out.forward(x.flatten(1))), residual

    def parameters(self) -> Iterator[Parameter]:
        yield from self._norms.parameters()
        yield from self._qkv.parameters()
        for norm in (self._head_norm, self._span_norm):
            if norm is not None:
                yield from norm.parameters()
        if self._sinks is not None:
            yield from self._sinks.parameters()
        yield from self._out.parameters()


class SinkLogits:
    """AttentionSinks of this rank's query heads, a parameter that is split like them."""

    def __init__(self, prefix: str, num_heads: int, setup: LayerSetup) -> None:
        """prefix: the checkpoint's name of the attention. num_heads: query heads of the model."""
        name, count = f"{prefix}.sinks", num_heads // setup.tp.size
        heads = slice(setup.tp.rank * count, (setup.tp.rank + 1) * count)
        piece = Piece(name, (num_heads,), (heads,), (slice(0, count),), "bias")
        self._logits = setup.parameter(name, (count,), (piece,))

    @property
    def values(self) -> Tensor:
        """See AttentionSinks."""
        return self._logits.data

    def parameters(self) -> Iterator[Parameter]:
        yield self._logits


def _qkv_shards(
    prefix: str, heads: HeadSizes, first_kv_head: int, num_kv_heads: int, tp: TensorParallel
) -> list[RowShard]:
    total, start, rows = (
        count * heads.head_dim for count in (heads.num_key_value_heads, first_kv_head, num_kv_heads)
    )
    return [
        even_shard(f"{prefix}.q_proj", heads.num_attention_heads * heads.head_dim, tp),
        RowShard(f"{prefix}.k_proj", total, start, rows),
        RowShard(f"{prefix}.v_proj", total, start, rows),
    ]
