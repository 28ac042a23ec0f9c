"""The description of a decoder or an encoder: its layers, and the blocks in them. `families/` make
it from config.json, `decoder.py` builds it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from worker_daemon.layers.attention import AttentionSpec, HeadSizes
from worker_daemon.layers.cache_spec import CacheSpec, StateLayerSpec
from worker_daemon.layers.encoder import (
    EncoderAttentionSpec,
    EncoderEmbeddingSpec,
    EncoderMLPSpec,
)
from worker_daemon.layers.experts import ExpertsSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec
from worker_daemon.layers.quantization import Quantization
from worker_daemon.layers.rotary import DynamicRope, Rope
from worker_daemon.layers.token_mixer import TokenMixerSpec

ScoreActivation: TypeAlias = Literal["softmax", "sigmoid", "none"]
"""Function that turns a classifier's scores into probabilities; none: they stay as they are."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The blocks of one layer, in order: both of a decoder, or both of an encoder. Identical layers
    share it."""

    attention: TokenMixerSpec | EncoderAttentionSpec
    mlp: MLPSpec | ExpertsSpec | EncoderMLPSpec


def distinct_ropes(layers: Iterable[LayerSpec]) -> tuple[Rope, ...]:
    """Return the rotations of these layers, each once, in the order of their first use; none for an
    encoder. Each has a table."""
    ropes = (layer.attention.rope for layer in layers)
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A classifier of hidden states."""

    prefix: str
    """Checkpoint name, without .weight or .bias."""
    num_labels: int
    bias: bool
    dense: str | None
    """Checkpoint name of a square matrix with a bias and tanh before it; None if there is none."""
    per_token: bool
    """True if it applies to each token, not to the whole prompt."""
    activation: ScoreActivation


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """Conversion of hidden states, after the final norm, into outputs of pooling requests."""

    states: Literal["last", "first", "mean"] = "last"
    """Token states that a prompt's single output is computed from."""
    normalize: bool = True
    """True: embeddings have length 1, unless a request overrides it."""
    head: HeadSpec | None = None
    """None: only embeddings."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All parameters of one checkpoint's decoder. Built once at load, never changed."""

    architecture: str
    """Name as in config.json's `architectures`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """At least one. All with attention heads have equal ones, and all without experts equal inner
    sizes; other settings may differ."""
    final_norm: NormSpec | None
    """None: the layers normalize their results themselves."""
    max_position_embeddings: int
    """Context length that the model was trained for, in tokens."""
    tie_word_embeddings: bool
    """True if an LM head would be the embedding. config.json's word, until `stored_head.py` has
    looked at the weights."""
    dtype: str | None
    """float32, float16 or bfloat16, as the checkpoint states it; None if it does not."""
    eos_token_ids: tuple[int, ...]
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)
    """Names of fields of config.json that have no effect, although they seem to be meant to."""
    generates: bool = True
    """True if it has an LM head."""
    pooler: PoolerSpec = PoolerSpec()
    encoder: EncoderEmbeddingSpec | None = None
    """Embeddings of an encoder, which has no KV cache and attends to the whole prompt. None: a
    decoder."""
    quantization: Quantization | None = None
    """None: all weights are in the model's dtype."""
    expert_parallel: bool = False
    """Each tensor-parallel rank has some of the experts; otherwise it has a part of each."""
    num_redundant_experts: int | None = None
    """Slots of a layer's experts, over all ranks, beyond one for each; None: experts stay where a
    load puts them."""
    embedding_scale: float | None = None
    """Factor of the embeddings of tokens, rounded to the model's dtype first; not applied to
    embeddings that a request sends. None: no factor."""
    final_logit_softcap: float | None = None
    """Limit of the logits, which become limit * tanh(logit / limit); None: no limit."""

    def __post_init__(self) -> None:
        heads = {_heads(each) for each in self.layers} - {None}
        assert len(heads) <= 1, "a model has one implementation of attention, for one head size"
        inner = {each.mlp.intermediate_size for each in self.layers if not _has_experts(each)}
        assert len(inner) <= 1, "a model has one inner size of MLPs without experts"

    @property
    def is_tied(self) -> bool:
        """True if the model has an LM head, and it is the embedding."""
        return self.tie_word_embeddings and self.generates

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> HeadSizes | None:
        """Heads of the layers with attention heads; None if there are none."""
        return next(filter(None, map(_heads, self.layers)), None)

    @property
    def mixers(self) -> tuple[TokenMixerSpec | EncoderAttentionSpec, ...]:
        """The distinct first blocks of the layers, in the order of their first use."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @property
    def intermediate_size(self) -> int | None:
        """Inner size of the MLPs without experts; None if all layers have experts."""
        sizes = (each.mlp.intermediate_size for each in self.layers if not _has_experts(each))
        return next(sizes, None)

    @property
    def layer_weights(self) -> int:
        """Weights of attention's and MLPs' matrices by which a layer multiplies a token, on average
        over the layers; of experts, those of the token and the shared one."""
        size = self.hidden_size
        mixed = sum(layer.attention.num_weights(size) for layer in self.layers)
        inner = sum(_inner_values(layer) for layer in self.layers)
        return mixed // len(self.layers) + size * (3 * inner // len(self.layers))

    @property
    def layer_experts(self) -> tuple[ExpertsSpec | None, ...]:
        """The experts of each layer; None for an MLP."""
        mlps = (layer.mlp for layer in self.layers)
        return tuple(mlp if isinstance(mlp, ExpertsSpec) else None for mlp in mlps)

    def cache_specs(self, layers: Iterable[int], tp_size: int) -> tuple[CacheSpec, ...]:
        """Return what these layers keep on each of tp_size ranks, by their indices; nothing for an
        encoder's."""
        return tuple(
            attention.cache_spec(layer_name(index), tp_size)
            for index in layers
            if not isinstance(attention := self.layers[index].attention, EncoderAttentionSpec)
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotations of all layers."""
        return distinct_ropes(self.layers)

    @property
    def keeps_state(self) -> bool:
        """True if a layer keeps a state per request."""
        specs = self.cache_specs(range(self.num_hidden_layers), tp_size=1)
        return any(isinstance(spec, StateLayerSpec) for spec in specs)

    @property
    def max_supported_len(self) -> int | None:
        """Longest context that is computed exactly, in tokens; None if there is no limit.

        Dynamic RoPE scaling changes the rotation of past keys once a sequence exceeds
        max_position_embeddings.
        """
        is_dynamic = any(isinstance(rope, DynamicRope) for rope in self.ropes)
        return self.max_position_embeddings if is_dynamic else None


def layer_name(index: int) -> str:
    """Return the checkpoint's name of a decoder's layer."""
    return f"model.layers.{index}"


def _heads(layer: LayerSpec) -> HeadSizes | None:
    attention = layer.attention
    if isinstance(attention, AttentionSpec | EncoderAttentionSpec):
        return attention.heads
    return None


def _has_experts(layer: LayerSpec) -> bool:
    return isinstance(layer.mlp, ExpertsSpec)


def _inner_values(layer: LayerSpec) -> int:
    """Return the number of values between up and down of one token, over all of its experts."""
    mlp = layer.mlp
    if not isinstance(mlp, ExpertsSpec):
        return mlp.intermediate_size
    shared = 0 if mlp.shared is None else mlp.shared.intermediate_size
    return mlp.routing.top_k * mlp.intermediate_size + shared
