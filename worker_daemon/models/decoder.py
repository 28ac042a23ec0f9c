"""The decoder: one pipeline stage of it, for every architecture of the registry. Knows no request
and no file.

Shapes: N tokens in the step, R rows with logits, H hidden size, V vocabulary. The residual stream
[N, H] is summed and rounded to the model's dtype after every addition, between layers as between
stages, so that a split model computes the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker_daemon.distributed.tp import SingleRank, TensorParallel
from worker_daemon.layers.attention import (
    Attention,
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    ForwardContext,
    KVLayerSpec,
    NullAttention,
)
from worker_daemon.layers.embedding import LMHead, VocabParallelEmbedding, vocab_parallel_weight
from worker_daemon.layers.linear import (
    ColumnParallelLinear,
    GatedLinear,
    RowParallelLinear,
    even_shard,
)
from worker_daemon.layers.norm import NormedProjection, RMSNorm
from worker_daemon.layers.ops import LayerOps
from worker_daemon.layers.ops_provider import probe_layer_ops
from worker_daemon.layers.parameter import Parameter
from worker_daemon.layers.rotary import rotary_table
from worker_daemon.models.config import DecoderConfig

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up merged to one matrix, which is called by whoever has
    x."""

    def __init__(
        self,
        prefix: str,
        config: DecoderConfig,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shards = [
            even_shard(f"{prefix}.{name}", config.intermediate_size, tp)
            for name in ("gate_proj", "up_proj")
        ]
        gate_up = ColumnParallelLinear(
            f"{prefix}.gate_up_proj",
            shards,
            config.hidden_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.gate_up = GatedLinear(gate_up)
        self._down = RowParallelLinear(
            f"{prefix}.down_proj",
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )

    def forward(self, gated: Tensor, ops: LayerOps) -> Tensor:
        """What self.gate_up computed, [N, I] -> [N, H], this rank's part of the sum."""
        return self._down.forward(gated, ops)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.gate_up.parameters()
        yield from self._down.parameters()


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        prefix = f"model.layers.{index}"
        attention_prefix = f"{prefix}.self_attn"

        def norm(name: str) -> RMSNorm:
            size, eps = config.hidden_size, config.rms_norm_eps
            return RMSNorm(f"{prefix}.{name}.weight", size, eps, dtype=dtype, device=device)

        self._input_norm = norm("input_layernorm")
        self._attention = Attention(
            attention_prefix, _attention_shape(config, index), tp=tp, dtype=dtype, device=device
        )
        self._normed_qkv = NormedProjection(self._input_norm, self._attention.qkv, tp)
        self._post_attention_norm = norm("post_attention_layernorm")
        self._mlp = MLP(f"{prefix}.mlp", config, tp=tp, dtype=dtype, device=device)
        self._normed_gate_up = NormedProjection(self._post_attention_norm, self._mlp.gate_up, tp)
        self.kv_spec = KVLayerSpec(
            attention_prefix,
            self._attention.num_kv_heads,
            config.head_dim,
            config.layer_windows[index],
        )

    def forward(
        self, part: Tensor | None, residual: Tensor, kv_cache: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Writes this layer's k and v into kv_cache; returns the next (part, residual), [N, H].

        The residual stream is residual + the sum of part over the ranks: both are left to the next
        norm, which reads it.
        """
        # One name for what flows: each result is freed once the next is there.
        x, residual = self._normed_qkv.forward(part, residual, context.ops)
        x = self._attention.forward(x, kv_cache, context)
        x, residual = self._normed_gate_up.forward(x, residual, context.ops)
        return self._mlp.forward(x, context.ops), residual

    def parameters(self) -> Iterator[Parameter]:
        yield from self._input_norm.parameters()
        yield from self._attention.parameters()
        yield from self._post_attention_norm.parameters()
        yield from self._mlp.parameters()


class DecoderStage:
    """Consecutive layers; the first stage has the embedding too, the last the LM head.

    Built by `build_stage` on the step thread; owns its parameters (zero until loaded) and the
    rotary table on the device, freed with it. The forward paths never wait for the device.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        rotary: Tensor,
        embedding: VocabParallelEmbedding | None,
        head: tuple[RMSNorm, LMHead] | None,
        attention: AttentionBackend,
        ops: LayerOps,
        tp: TensorParallel,
    ) -> None:
        """rotary is the table of `rotary_table`."""
        self._layers = layers
        self.rotary = rotary
        """The one tensor on the device that is no parameter; may be replaced by an equal one."""
        self._embedding = embedding
        self._head = head
        self._attention = attention
        self._ops = ops
        self._tp = tp

    @property
    def ops_name(self) -> str:
        """What serves the layer operations."""
        return self._ops.name

    def thinned(self) -> "tuple[DecoderStage, list[int]]":
        """Return a stage of the first two layers of each window, which launches every kernel that
        this one does, and their indices. It shares all tensors; what it computes means nothing."""
        windows = [spec.window for spec in self.kv_layer_specs]
        kinds = [[i for i, each in enumerate(windows) if each == kind] for kind in set(windows)]
        kept = sorted(index for indices in kinds for index in indices[:2])
        stage = DecoderStage(
            [self._layers[index] for index in kept],
            self.rotary,
            self._embedding,
            self._head,
            self._attention,
            self._ops,
            self._tp,
        )
        return stage, kept

    def set_attention(self, attention: AttentionBackend) -> None:
        """Replaces the attention of all layers, as after the memory profile."""
        self._attention = attention

    def embed(self, input_ids: Tensor) -> Tensor:
        """First stage only: input_ids int32 or int64 [N], each below V -> [N, H]."""
        assert self._embedding is not None, "embed on a stage that is not the first"
        return self._embedding.forward(input_ids)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Residual stream in, residual stream out: hidden [N, H], positions int32 or int64 [N] ->
        [N, H].

        kv_caches holds one cache for each local layer; it may be empty under NullAttention.
        metadata holds one for each too, the same for layers of the same group. hidden is not
        changed.
        """
        context = ForwardContext(positions, self.rotary, metadata[0], self._attention, self._ops)
        caches = kv_caches or [hidden.new_empty(0)] * len(self._layers)
        part: Tensor | None = None
        for layer, kv_cache, own in zip(self._layers, caches, metadata, strict=True):
            if own is not context.metadata:
                context = replace(context, metadata=own)
            part, hidden = layer.forward(part, hidden, kv_cache, context)
        return hidden if part is None else hidden + self._tp.all_reduce(part)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Last stage only: residual stream [R, H] -> [R, V] in the model's dtype; a row is
        contiguous, the next may lie behind padding."""
        assert self._head is not None, "compute_logits on a stage that is not the last"
        norm, lm_head = self._head
        return lm_head.forward(norm.forward(hidden, self._ops), self._ops)

    def likeliest_tokens(self, hidden: Tensor) -> Tensor:
        """Last stage only: residual stream [R, H] -> int64 [R], the largest logit of each row, the
        lowest id among equals."""
        assert self._head is not None, "likeliest_tokens on a stage that is not the last"
        norm, lm_head = self._head
        return lm_head.likeliest(norm.forward(hidden, self._ops), self._ops)

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter of this stage and rank once."""
        embedding = [] if self._embedding is None else list(self._embedding.parameters())
        yield from embedding
        for layer in self._layers:
            yield from layer.parameters()
        for part in self._head or ():
            yield from (shared for shared in part.parameters() if shared not in embedding)

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Checkpoint name -> this rank's region of that tensor, a view of the parameter."""
        return {
            piece.name: parameter.data[piece.target]
            for parameter in self.parameters()
            for piece in parameter.pieces
        }

    @property
    def num_parameters_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters())

    @property
    def kv_layer_specs(self) -> tuple[KVLayerSpec, ...]:
        """One for each local layer, in the order of forward's kv_caches."""
        return tuple(layer.kv_spec for layer in self._layers)


def build_stage(
    config: DecoderConfig,
    layers: range,
    is_first: bool,
    is_last: bool,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    attention: AttentionBackend,
    ops: LayerOps | None = None,
) -> DecoderStage:
    """A stage with zero weights. The partition must have passed `check_partition`.

    max_model_len (tokens) is the length of the rotary table: no position may reach it. With tied
    embeddings a last stage that is not the first holds its own copy of the embedding. ops are the
    device's own where None.
    """
    embedding = None
    head = None
    if is_first or (is_last and config.tie_word_embeddings):
        embedding = _vocab_weight(_EMBEDDING, config, tp, dtype, device)
    if is_last:
        tied = embedding if config.tie_word_embeddings else None
        weight = tied or _vocab_weight(_LM_HEAD, config, tp, dtype, device)
        final_norm = RMSNorm(
            "model.norm.weight", config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device
        )
        head = (final_norm, LMHead(weight, config.vocab_size, tp))
    return DecoderStage(
        [DecoderLayer(index, config, tp=tp, dtype=dtype, device=device) for index in layers],
        rotary_table(config.rope, max_model_len, device),
        VocabParallelEmbedding(embedding, tp) if is_first and embedding else None,
        head,
        attention,
        ops or probe_layer_ops(device),
        tp,
    )


def checkpoint_names(config: DecoderConfig) -> frozenset[str]:
    """Names of all tensors that the whole model reads; builds it without memory to find them."""
    return frozenset(checkpoint_shapes(config))


def checkpoint_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the whole model reads."""
    return {
        piece.name: piece.full_shape
        for parameter in whole_model(config, SingleRank(), torch.float32).parameters()
        for piece in parameter.pieces
    }


def whole_model(config: DecoderConfig, tp: TensorParallel, dtype: torch.dtype) -> DecoderStage:
    """All layers of one tensor-parallel rank, without memory: for names and shapes."""
    return build_stage(
        config,
        range(config.num_hidden_layers),
        is_first=True,
        is_last=True,
        tp=tp,
        dtype=dtype,
        device=torch.device("meta"),
        max_model_len=1,
        attention=NullAttention(),
    )


def _vocab_weight(
    name: str,
    config: DecoderConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> Parameter:
    return vocab_parallel_weight(
        name, config.vocab_size, config.hidden_size, tp=tp, dtype=dtype, device=device
    )


def _attention_shape(config: DecoderConfig, layer: int) -> AttentionShape:
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        window=config.layer_windows[layer],
    )
