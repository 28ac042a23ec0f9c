"""One pipeline stage of a decoder, built from its description.

Shapes: N tokens in the step, R rows with logits, H hidden size, V vocabulary. The residual stream
[N, H] is summed and rounded to the model's dtype after every addition, both between layers and
between stages, so that a split model computes the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker_daemon.contracts.attention import AttentionBackend, AttentionMetadata, AttentionStep
from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.distributed.tp import SingleRank, TensorParallel
from worker_daemon.layers.attention import AttentionBlock, KVLayerSpec, NullAttention
from worker_daemon.layers.embedding import LMHead, VocabParallelEmbedding, vocab_parallel_weight
from worker_daemon.layers.mlp import MLPBlock
from worker_daemon.layers.norm import RMSNorm
from worker_daemon.layers.parameter import Parameter
from worker_daemon.layers.rotary import rotary_table
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.description import DecoderConfig, LayerSpec

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class DecoderLayer:
    """An attention block and an MLP block, each added to the residual stream."""

    spec: LayerSpec

    def __init__(self, index: int, spec: LayerSpec, setup: LayerSetup) -> None:
        prefix = f"model.layers.{index}"
        self.spec = spec
        self._attention = AttentionBlock(prefix, spec.attention, setup)
        self._mlp = MLPBlock(prefix, spec.mlp, setup)

    @property
    def kv_spec(self) -> KVLayerSpec:
        return self._attention.kv_spec

    def forward(
        self,
        part: Tensor | None,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """Write this layer's k and v into kv_cache; return the next (part, residual), [N, H].

        The residual stream is residual + the sum of part over the ranks. The next norm computes
        both. A block that has already summed its output returns no part.
        """
        part, residual = self._attention.forward(part, residual, kv_cache, step, backend)
        return self._mlp.forward(part, residual)

    def parameters(self) -> Iterator[Parameter]:
        yield from self._attention.parameters()
        yield from self._mlp.parameters()


class DecoderStage:
    """Consecutive layers; the first stage also has the embedding, the last the LM head.

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
        setup: LayerSetup,
    ) -> None:
        """rotary is the result of `rotary_table`; setup is the one that all layers were built
        with."""
        self._layers = layers
        self.rotary = rotary
        """The only device tensor that is not a parameter; may be replaced by an equal one."""
        self._embedding = embedding
        self._head = head
        self._attention = attention
        self._setup = setup

    @property
    def ops_name(self) -> str:
        """The name of the layer operations' implementation."""
        return self._setup.ops.name

    def compile_subset(self) -> "tuple[DecoderStage, list[int]]":
        """Return a stage of the first two layers of each kind, and their indices. It launches every
        kernel that this one does and shares all tensors; its results are meaningless."""
        specs = [layer.spec for layer in self._layers]
        kinds = [[i for i, each in enumerate(specs) if each == kind] for kind in set(specs)]
        kept = sorted(index for indices in kinds for index in indices[:2])
        stage = DecoderStage(
            [self._layers[index] for index in kept],
            self.rotary,
            self._embedding,
            self._head,
            self._attention,
            self._setup,
        )
        return stage, kept

    def set_attention(self, attention: AttentionBackend) -> None:
        """Replace the attention of all layers, as after the memory profile."""
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
        """Take and return the residual stream: hidden [N, H], positions int32 or int64 [N] -> [N,
        H].

        kv_caches holds one cache per local layer; it may be empty under NullAttention. metadata
        also holds one per local layer, the same object for layers of one KV group. hidden is not
        changed.
        """
        step = AttentionStep(positions, self.rotary, metadata[0])
        caches = kv_caches or [hidden.new_empty(0)] * len(self._layers)
        part: Tensor | None = None
        for layer, kv_cache, own in zip(self._layers, caches, metadata, strict=True):
            if own is not step.metadata:
                step = replace(step, metadata=own)
            part, hidden = layer.forward(part, hidden, kv_cache, step, self._attention)
        return hidden if part is None else hidden + self._setup.tp.all_reduce(part)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Last stage only: residual stream [R, H] -> [R, V] in the model's dtype; each row is
        contiguous, with possible padding between rows."""
        assert self._head is not None, "compute_logits on a stage that is not the last"
        norm, lm_head = self._head
        return lm_head.forward(norm.forward(hidden))

    def likeliest_tokens(self, hidden: Tensor) -> Tensor:
        """Last stage only: residual stream [R, H] -> int64 [R], the token with each row's largest
        logit, the lowest id among equals."""
        assert self._head is not None, "likeliest_tokens on a stage that is not the last"
        norm, lm_head = self._head
        return lm_head.likeliest(norm.forward(hidden))

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter of this stage and rank once."""
        embedding = [] if self._embedding is None else list(self._embedding.parameters())
        yield from embedding
        for layer in self._layers:
            yield from layer.parameters()
        for part in self._head or ():
            yield from (shared for shared in part.parameters() if shared not in embedding)

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Return checkpoint name -> this rank's region of that tensor, a view of the parameter."""
        return {
            piece.name: parameter.data[piece.target]
            for parameter in self.parameters()
            for piece in parameter.pieces
        }

    @property
    def is_first(self) -> bool:
        """True if it embeds tokens."""
        return self._embedding is not None

    @property
    def is_last(self) -> bool:
        """True if it has the output layer."""
        return self._head is not None

    @property
    def num_parameters_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters())

    @property
    def kv_layer_specs(self) -> tuple[KVLayerSpec, ...]:
        """Return one per local layer, in the order of forward's kv_caches."""
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
    ops: LayerOps,
) -> DecoderStage:
    """Return a stage with zero weights. The partition must have passed `check_partition`.

    max_model_len (tokens) is the length of the rotary table: positions must be smaller. With tied
    embeddings a last stage that is not the first holds its own copy of the embedding.
    """
    setup = LayerSetup(config.hidden_size, tp, dtype, device, ops)
    embedding = None
    head = None
    if is_first or (is_last and config.tie_word_embeddings):
        embedding = vocab_parallel_weight(_EMBEDDING, config.vocab_size, setup)
    if is_last:
        tied = embedding if config.tie_word_embeddings else None
        weight = tied or vocab_parallel_weight(_LM_HEAD, config.vocab_size, setup)
        final_norm = RMSNorm("model", config.final_norm, setup)
        head = (final_norm, LMHead(weight, config.vocab_size, setup))
    return DecoderStage(
        [DecoderLayer(index, config.layers[index], setup) for index in layers],
        rotary_table(config.rope, max_model_len, device),
        VocabParallelEmbedding(embedding, tp) if is_first and embedding else None,
        head,
        attention,
        setup,
    )


def checkpoint_names(config: DecoderConfig) -> frozenset[str]:
    """Return the names of all tensors that the model reads. Builds it without memory to find
    them."""
    return frozenset(checkpoint_shapes(config))


def checkpoint_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors that the model reads."""
    return {
        piece.name: piece.full_shape
        for parameter in whole_model(config, SingleRank(), torch.float32).parameters()
        for piece in parameter.pieces
    }


def whole_model(config: DecoderConfig, tp: TensorParallel, dtype: torch.dtype) -> DecoderStage:
    """Return all layers of one tensor-parallel rank, without memory: for names and shapes."""
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
        ops=TorchOps(),
    )
