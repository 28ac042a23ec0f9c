"""One pipeline stage of a decoder or an encoder, built from its description.

Shapes: N tokens in the step, R rows with logits, H hidden size, V vocabulary, v a rank's share of
V with its padding. The residual stream [N, H] is rounded to the model's dtype after every
addition, both between layers and between stages, so that a split model computes the same
bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from worker_daemon.contracts.attention import AttentionBackend, AttentionMetadata, AttentionStep
from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.tp import SingleRank, TensorParallel
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.cache_spec import CacheSpec
from worker_daemon.layers.embedding import LMHead, VocabParallelEmbedding, vocab_parallel_weight
from worker_daemon.layers.encoder import (
    EncoderAttentionSpec,
    EncoderEmbedding,
    EncoderLayer,
    EncoderMLPSpec,
)
from worker_daemon.layers.expert_loads import ExpertLoads
from worker_daemon.layers.expert_slots import ExpertSlots, Placement, SlotCounts
from worker_daemon.layers.experts import ExpertsBlock, ExpertsSpec
from worker_daemon.layers.kv_scales import HeadScales
from worker_daemon.layers.mlp import MLPBlock, MLPSpec
from worker_daemon.layers.norm import Part, RMSNorm, residual_stream
from worker_daemon.layers.parameter import Kind, Parameter, Piece, TensorSpec
from worker_daemon.layers.rotary import Rope, rotary_table
from worker_daemon.layers.routed_experts import ChosenExperts
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.token_mixer import TokenMixerSpec
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.description import (
    DecoderConfig,
    LayerSpec,
    distinct_ropes,
    layer_name,
)
from worker_daemon.models.pooler import Pooler

EMBEDDING: Final = "model.embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"
"""Names of a decoder's matrices. A checkpoint may have the one of a tied model under either."""
_ENCODER_EMBEDDING = "embeddings.word_embeddings.weight"


class DecoderLayer:
    """A block that reads earlier tokens, such as attention, and an MLP block, or one with experts,
    each added to the residual stream."""

    def __init__(
        self, index: int, attention: TokenMixerSpec, mlp: MLPSpec | ExpertsSpec, setup: LayerSetup
    ) -> None:
        prefix = layer_name(index)
        self.rope = attention.rope
        """The rotation whose table forward takes; None: none."""
        self._attention = attention.build(prefix, setup)
        self._mlp: MLPBlock | ExpertsBlock
        if isinstance(mlp, ExpertsSpec):
            load = setup.expert_loads.add(index, mlp.num_experts)
            all_slots = setup.expert_slots
            slots = None if all_slots is None else all_slots.add(index, mlp.num_experts)
            self._mlp = ExpertsBlock(prefix, mlp, setup, load, slots)
        else:
            self._mlp = MLPBlock(prefix, mlp, setup)

    @property
    def kv_spec(self) -> CacheSpec:
        return self._attention.kv_spec

    @property
    def kv_scales(self) -> HeadScales | None:
        return self._attention.kv_scales

    def forward(
        self,
        part: Part,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[Part, Tensor]:
        """Write what this layer keeps into kv_cache; return the next (part, residual).

        The residual stream [N, H] is residual + part. The next norm computes both.
        """
        part, residual = self._attention.forward(part, residual, kv_cache, step, backend)
        if isinstance(self._mlp, ExpertsBlock):
            return self._mlp.forward(part, residual, step.metadata.query_start_loc)
        return self._mlp.forward(part, residual)

    @property
    def experts(self) -> ExpertsBlock | None:
        """Its block with experts; None without."""
        return self._mlp if isinstance(self._mlp, ExpertsBlock) else None

    def parameters(self) -> Iterator[Parameter]:
        yield from self._attention.parameters()
        yield from self._mlp.parameters()


LayerWritten: TypeAlias = Callable[[int], None]
"""Is told that a layer has written what it keeps of a step's tokens, or will have once the work is
done that was launched so far: its number on this stage."""

_LayerInputs: TypeAlias = tuple[DecoderLayer | EncoderLayer, Tensor, AttentionMetadata, int | None]


class StageStart(NamedTuple):
    """The start of the first stage."""

    embedding: VocabParallelEmbedding
    encoder: EncoderEmbedding | None
    """None in a decoder."""


class StageEnd(NamedTuple):
    """The end of the last stage."""

    norm: RMSNorm | None
    lm_head: LMHead | None
    """None in a model that does not generate."""
    pooler: Pooler


class BuiltLayerKind(NamedTuple):
    """The properties of a layer that its kernels depend on."""

    spec: LayerSpec
    dtypes: tuple[torch.dtype, ...]
    """Those of its parameters, in order."""


class DecoderStage:
    """Consecutive layers; the first stage also has the embedding, the last the LM head.

    Built by `build_stage` on the step thread; owns its parameters (zero until loaded) and the
    rotary tables on the device, freed with it. The forward paths never wait for the device.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer | EncoderLayer],
        kinds: Sequence[BuiltLayerKind],
        ropes: Sequence[Rope],
        rotary: Sequence[Tensor],
        start: StageStart | None,
        end: StageEnd | None,
        attention: AttentionBackend,
        setup: LayerSetup,
    ) -> None:
        """ropes: the distinct rotations of the layers; rotary: the result of `rotary_table` for
        each. setup: the one with which all layers were built."""
        self._layers = layers
        self._kinds = kinds
        self.ropes = tuple(ropes)
        """The distinct rotations of the layers; none for an encoder."""
        self.rotary = tuple(rotary)
        """The table of each rotation, device tensors that are not parameters; may be replaced with
        equal ones."""
        self._tables = [
            None if layer.rope is None else self.ropes.index(layer.rope) for layer in layers
        ]
        self._start = start
        self._end = end
        self._attention = attention
        self._setup = setup
        self._layer_written: LayerWritten | None = None

    @property
    def ops_name(self) -> str:
        """Name of the layer operations' implementation."""
        return self._setup.ops.name

    def compile_subset(self) -> "tuple[DecoderStage, list[int]]":
        """Return a stage of the first two layers of each kind, and their indices. It launches the
        same kernels as this stage and shares all tensors; its results are meaningless."""
        all_kinds = self._kinds
        kinds = [[i for i, each in enumerate(all_kinds) if each == kind] for kind in set(all_kinds)]
        kept = sorted(index for indices in kinds for index in indices[:2])
        stage = DecoderStage(
            [self._layers[index] for index in kept],
            [all_kinds[index] for index in kept],
            self.ropes,
            self.rotary,
            self._start,
            self._end,
            self._attention,
            self._setup,
        )
        return stage, kept

    def set_attention(self, attention: AttentionBackend) -> None:
        """Replace the attention of all layers, as after the memory profile."""
        self._attention = attention

    def embed(self, input_ids: Tensor) -> Tensor:
        """First stage only: input_ids int32 or int64 [N], each below V -> [N, H]."""
        assert self._start is not None, "embed on a stage that is not the first"
        return self._start.embedding.forward(input_ids)

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
        changed. If replicas share the experts, this is one forward pass of all of them, which
        ReplicaExperts.begin has begun.
        """
        exchange = self._setup.replica_experts
        if exchange is not None and not hidden.shape[0]:
            self.join_experts()
            return hidden
        if self._start is not None and self._start.encoder is not None:
            hidden = self._start.encoder.forward(hidden, positions)
        no_table = hidden.new_empty(0)
        step = AttentionStep(positions, no_table, metadata[0])
        caches = kv_caches or [hidden.new_empty(0)] * len(self._layers)
        part: Part = None
        for layer, kv_cache, own, index in self._in_order(caches, metadata):
            table = no_table if index is None else self.rotary[index]
            if own is not step.metadata or table is not step.rotary_table:
                step = AttentionStep(positions, table, own)
            part, hidden = layer.forward(part, hidden, kv_cache, step, self._attention)
        if exchange is not None:
            exchange.end()
        return residual_stream(part, hidden, self._setup.ops, self._setup.tp)

    def watched(self, layer_written: "LayerWritten") -> "DecoderStage":
        """Return this stage, with all that it owns, which calls a function after each layer of a
        forward pass: once its work was launched, with its number on this stage."""
        stage = copy(self)
        stage._layer_written = layer_written
        return stage

    def _in_order(
        self, kv_caches: Sequence[Tensor], metadata: Sequence[AttentionMetadata]
    ) -> "Iterable[_LayerInputs]":
        """Return each layer with its cache, its metadata and the number of its table."""
        each = zip(self._layers, kv_caches, metadata, self._tables, strict=True)
        return each if self._layer_written is None else _telling(each, self._layer_written)

    def join_experts(self) -> None:
        """Make the exchanges that other replicas still expect in the forward pass that has begun,
        without tokens; end it. Do nothing if there is none.

        Raises:
            CommError: see ReplicaExperts.run.
        """
        exchange = self._setup.replica_experts
        if exchange is None or not exchange.is_open:
            return
        for block in self._expert_blocks[exchange.num_done :]:
            block.join()
        exchange.end()

    @property
    def most_graphed(self) -> int:
        """The most tokens of a step whose exchanges with other replicas a graph may hold: see
        ReplicaExperts.most_graphed."""
        exchange, setup = self._setup.replica_experts, self._setup
        assert exchange is not None, "other replicas share the experts"
        top_k = max((block.top_k for block in self._expert_blocks), default=1)
        return exchange.most_graphed(setup.hidden_size, top_k, setup.dtype)

    @property
    def _expert_blocks(self) -> list[ExpertsBlock]:
        layers = [layer for layer in self._layers if isinstance(layer, DecoderLayer)]
        return [layer.experts for layer in layers if layer.experts is not None]

    def new_gathered(self, num_rows: int) -> Tensor:
        """Last stage only: return memory for logits [num_rows, V], like gather_logits's result."""
        return self._output[1].new_gathered(num_rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Last stage only: residual stream [R, H] -> [R, V] in the model's dtype; each row is
        contiguous, with possible padding between rows."""
        norm, lm_head = self._output
        return lm_head.forward(norm.forward(hidden))

    def new_logits(self, num_rows: int) -> Tensor:
        """Last stage only: return memory for the rank_logits of as many rows."""
        return self._output[1].new_logits(num_rows)

    def rank_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Last stage only: residual stream [R, H] -> [R, v] in out, this rank's share of the logits
        in the model's dtype, padding included."""
        norm, lm_head = self._output
        return lm_head.multiply(norm.forward(hidden), out)

    def argmax_tokens(self, logits: Tensor) -> Tensor:
        """Last stage only: each rank's logits [R, v] -> int64 [R], the token with each row's
        largest logit, the lowest id among equals."""
        return self._output[1].likeliest(logits)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Last stage only: each rank's logits [R, v] -> [R, V] as compute_logits returns it: a view
        if there is one rank."""
        return self._output[1].gather(logits)

    @property
    def _output(self) -> tuple[RMSNorm, LMHead]:
        assert self._end is not None, "logits of a stage that is not the last"
        assert self._end.lm_head is not None, "logits of a model that does not generate"
        assert self._end.norm is not None, "a decoder has a final norm"
        return self._end.norm, self._end.lm_head

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter of this stage and rank once."""
        embedding: list[Parameter] = []
        for first in self._start or ():
            embedding += [] if first is None else first.parameters()
        yield from embedding
        for layer in self._layers:
            yield from layer.parameters()
        for part in self._end or ():
            if part is not None:
                yield from (shared for shared in part.parameters() if shared not in embedding)
        if self.expert_slots is not None and self.expert_slots.spare is not None:
            yield self.expert_slots.spare

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Return checkpoint name -> this rank's part of that tensor, a view of the parameter. The
        part has the rank's regions one after another."""
        return _views(self.parameters())

    def scale_views(self) -> dict[str, Tensor]:
        """Return name -> this rank's KV scales of that name, a view: saved sets have them too."""
        return _views(each.parameter for each in self.kv_scales)

    def loaded_names(self) -> frozenset[str]:
        """Return the names of the tensors that this rank reads; a matrix that files have packed
        counts under its unpacked name."""
        return frozenset(
            piece.name for parameter in self.parameters() for piece in parameter.loaded_pieces
        )

    @property
    def encoder(self) -> EncoderEmbedding | None:
        """The embedding of an encoder's first stage; None on other stages, and in decoders."""
        return None if self._start is None else self._start.encoder

    @property
    def is_first(self) -> bool:
        """True if the stage embeds tokens."""
        return self._start is not None

    @property
    def is_last(self) -> bool:
        """True if the stage has the end of the model."""
        return self._end is not None

    @property
    def samples(self) -> bool:
        """True if the stage has the LM head."""
        return self._end is not None and self._end.lm_head is not None

    @property
    def pooler(self) -> Pooler | None:
        """The last stage's pooler of hidden states; None on other stages, or if the model cannot
        pool."""
        return None if self._end is None else self._end.pooler

    @property
    def num_parameters_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters())

    @property
    def kv_layer_specs(self) -> tuple[CacheSpec, ...]:
        """Return one spec per local layer, in the order of forward's kv_caches; none for an
        encoder."""
        return tuple(layer.kv_spec for layer in self._layers if layer.kv_spec is not None)

    @property
    def kv_scales(self) -> tuple[HeadScales, ...]:
        """The scales of the local layers' caches, in the layers' order; none unless the cache is in
        FP8. Like the rotary tables they are buffers, not parameters."""
        found = [layer.kv_scales for layer in self._layers if isinstance(layer, DecoderLayer)]
        return tuple(scales for scales in found if scales is not None)

    @property
    def expert_loads(self) -> ExpertLoads:
        """The counters of the local layers with experts: buffers, like the rotary tables."""
        return self._setup.expert_loads

    def allocate_routing(self, device: torch.device) -> None:
        """Give memory to the expert loads, zeroed, and to the tables of slots. Raises
        torch.OutOfMemoryError."""
        self._setup.expert_loads.allocate(device)
        if self._setup.expert_slots is not None:
            self._setup.expert_slots.allocate(device)

    @property
    def routing_bytes(self) -> int:
        """Bytes of what allocate_routing gives memory to."""
        slots = self._setup.expert_slots
        return self._setup.expert_loads.num_bytes + (0 if slots is None else slots.num_bytes)

    @property
    def expert_slots(self) -> ExpertSlots | None:
        """The slots of the local layers' experts; None: they stay where a load puts them."""
        return self._setup.expert_slots

    def experts_of(self, layer: int) -> ExpertsBlock:
        """Return the block with experts of a local layer, by its number in the model. Only for a
        stage with expert_slots, which has the layer's."""
        assert self._setup.expert_slots is not None, "the model was loaded with slots"
        wanted = self._setup.expert_slots.layers[layer]
        layers = [each.experts for each in self._layers if isinstance(each, DecoderLayer)]
        return next(each for each in layers if each is not None and each.slots is wanted)

    @property
    def chosen_experts(self) -> ChosenExperts | None:
        """The choices of its routers; None if it does not collect them."""
        return self._setup.chosen_experts

    @property
    def num_layers(self) -> int:
        """Local layers."""
        return len(self._layers)


def _telling(layers: Iterable[_LayerInputs], layer_written: LayerWritten) -> Iterator[_LayerInputs]:
    for number, each in enumerate(layers):
        yield each
        layer_written(number)


def _views(parameters: Iterable[Parameter]) -> dict[str, Tensor]:
    return {
        piece.name: parameter.data[piece.target]
        for parameter in parameters
        for piece in parameter.held_pieces
    }


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
    adapters: AdapterLayout | None = None,
    *,
    has_fp8_cache: bool = False,
    keeps_experts: bool = False,
    replica_experts: ReplicaExperts | None = None,
    expert_slots: ExpertSlots | None = None,
) -> DecoderStage:
    """Return a stage with zero weights. The partition must have passed `check_partition`.
    adapters: an empty layout, which takes the matrices that adapters may change. has_fp8_cache: its
    layers get scales for a KV cache in FP8. keeps_experts: it collects the choices of its routers.
    replica_experts: the ranks of all replicas that share the experts, with expert_parallel.
    expert_slots: takes the slots of its layers' experts; None: these stay where a load puts them.
    Raises ConfigError if the quantization does not fit merged matrices, or this rank's parts.

    max_model_len (tokens) is the length of the rotary tables: positions must be smaller. With tied
    embeddings a last stage that is not the first holds its own copy of the embedding, if the model
    generates.
    """
    setup = LayerSetup(
        config.hidden_size,
        tp,
        dtype,
        device,
        ops,
        adapters,
        config.quantization,
        has_fp8_cache,
        config.expert_parallel,
        chosen_experts=ChosenExperts() if keeps_experts else None,
        replica_experts=replica_experts,
        expert_slots=expert_slots,
    )
    embedding, start, end = None, None, None
    if is_first or (is_last and config.is_tied):
        name = EMBEDDING if config.encoder is None else _ENCODER_EMBEDDING
        is_routed = any(config.layer_experts) and not config.is_tied
        kind: Kind = "routed_embedding" if is_routed else "matrix"
        alias = LM_HEAD if config.is_tied else None
        embedding = vocab_parallel_weight(name, config.vocab_size, setup, kind, alias)
    if is_first and embedding is not None:
        spec = config.encoder
        encoder = None if spec is None else EncoderEmbedding(spec, setup)
        start = StageStart(VocabParallelEmbedding(embedding, tp, config.embedding_scale), encoder)
    if is_last:
        norm = config.final_norm
        final_norm = None if norm is None else RMSNorm("model", norm, setup)
        lm_head = None
        if config.generates:
            tied = embedding if config.is_tied else None
            weight = tied or vocab_parallel_weight(LM_HEAD, config.vocab_size, setup)
            lm_head = LMHead(weight, config.vocab_size, setup, config.final_logit_softcap)
        pooler = Pooler(final_norm, config.pooler, replace(setup, quantization=None))
        end = StageEnd(final_norm, lm_head, pooler)
    made = [_make_layer(index, config.layers[index], setup) for index in layers]
    if expert_slots is not None:
        blocks = [each.experts for each in made if isinstance(each, DecoderLayer)]
        expert_slots.reserve((each.slot_parameters for each in blocks if each), device)
    ropes = distinct_ropes(config.layers[index] for index in layers)
    stage = DecoderStage(
        made,
        [_kind(config.layers[index], layer) for index, layer in zip(layers, made, strict=True)],
        ropes,
        [rotary_table(rope, max_model_len, device) for rope in ropes],
        start,
        end,
        attention,
        setup,
    )
    stage.allocate_routing(device)
    return stage


def make_expert_slots(
    config: DecoderConfig,
    rank: int,
    num_ranks: int,
    dp_rank: int,
    placements: Mapping[int, Placement] | None = None,
) -> ExpertSlots | None:
    """Return the slots of a rank's experts, for build_stage; None if experts stay where a load puts
    them. rank, num_ranks: among those that share the experts. placements: by layer of the model;
    None, and layers without one: see placement_in_order."""
    if config.num_redundant_experts is None:
        return None
    counts = SlotCounts(rank, num_ranks, config.num_redundant_experts, dp_rank)
    return ExpertSlots(counts, placements or {})


def _make_layer(index: int, spec: LayerSpec, setup: LayerSetup) -> DecoderLayer | EncoderLayer:
    attention, mlp = spec.attention, spec.mlp
    if isinstance(attention, EncoderAttentionSpec):
        assert isinstance(mlp, EncoderMLPSpec), "both blocks are an encoder's"
        return EncoderLayer(index, attention, mlp, setup)
    assert isinstance(mlp, MLPSpec | ExpertsSpec), "both blocks are a decoder's"
    return DecoderLayer(index, attention, mlp, setup)


def _kind(spec: LayerSpec, layer: DecoderLayer | EncoderLayer) -> BuiltLayerKind:
    return BuiltLayerKind(spec, tuple(parameter.data.dtype for parameter in layer.parameters()))


def checkpoint_names(config: DecoderConfig) -> frozenset[str]:
    """Return the names of all tensors that the model reads, with both names of a tied model's
    matrix. Builds the model without memory to find them."""
    return frozenset((*(piece.name for piece in checkpoint_pieces(config)), *head_aliases(config)))


def checkpoint_pieces(config: DecoderConfig) -> list[Piece]:
    """Return the pieces of all tensors that the model reads from files, whole. Raises ConfigError
    as build_stage does."""
    return [part for piece in _loaded_pieces(config) for part in piece.file_pieces]


def head_aliases(config: DecoderConfig) -> dict[str, str]:
    """Return the other name of a tied model's matrix, and its own; empty for other models."""
    return {LM_HEAD: EMBEDDING} if config.is_tied else {}


def module_names(config: DecoderConfig) -> frozenset[str]:
    """Return the names of a model's matrices and vectors, without .weight, as if it were
    unquantized. Raises ConfigError as build_stage does."""
    tensors = unpacked_tensors(replace(config, quantization=None))
    return frozenset(name.removesuffix(".weight") for name in tensors)


def unpacked_tensors(config: DecoderConfig) -> dict[str, TensorSpec]:
    """Return all tensors of the model as if unpacked: a matrix that files have in MXFP4 has its own
    name and shape, instead of those of its blocks and scales. Raises ConfigError as build_stage
    does."""
    return {piece.name: piece.spec for piece in _loaded_pieces(config)}


def _loaded_pieces(config: DecoderConfig) -> Iterator[Piece]:
    for parameter in whole_model(config, SingleRank(), torch.float32).parameters():
        yield from parameter.loaded_pieces


def whole_model(
    config: DecoderConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    adapters: AdapterLayout | None = None,
    ops: LayerOps | None = None,
) -> DecoderStage:
    """Return all layers of one tensor-parallel rank, without memory: for names and shapes, or to be
    given memory and an attention. adapters: see build_stage; ops: None for plain torch."""
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
        ops=TorchOps() if ops is None else ops,
        adapters=adapters,
    )
