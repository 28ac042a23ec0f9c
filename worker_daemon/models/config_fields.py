"""Fields of config.json that families share, in both forms that transformers writes (releases 4 and
5), with its defaults.

All functions raise ConfigError, which names field and fix.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from worker_daemon.errors import config_error
from worker_daemon.layers.attention import AttentionSpec, HeadSizes
from worker_daemon.layers.encoder import EncoderEmbeddingSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec, QKNormSpec
from worker_daemon.layers.rotary import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    Rope,
    YarnRope,
    is_finite,
    max_table_length,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields

DTYPES = ("float32", "float16", "bfloat16")
_DEFAULT_THETA = 10_000.0
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28

_MAX_VOCAB = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 4096
"""Bounds on the sizes in config.json: larger than any model needs, small enough to be safe."""
_MAX_LENGTH = 1 << 128
"""Stands for "no limit". The real limit of a context is applied when the configuration is
resolved."""


def decoder_config(
    fields: Fields, layers: Sequence[LayerSpec], *, default_eos_token_ids: tuple[int, ...] = ()
) -> DecoderConfig:
    """Return a decoder with these layers (at least one) and the parts that all families share."""
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "is not supported", "use a checkpoint with silu")
    length = max_length(fields)
    return DecoderConfig(
        architecture=architecture_name(fields),
        vocab_size=fields.integer("vocab_size", maximum=_MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", maximum=_MAX_WIDTH),
        layers=tuple(layers),
        final_norm=NormSpec("norm", _norm_eps(fields)),
        rope=_rope(fields, layers[0].attention.heads.head_dim, length),
        max_position_embeddings=length,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, default_eos_token_ids),
    )


def dense_layer(
    fields: Fields,
    heads: HeadSizes,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    window: int | None = None,
) -> LayerSpec:
    """Return a layer of attention and an MLP, with the names and the epsilon that Llama's
    checkpoints have. head_norms: a norm on each query and key head; window: in tokens."""
    eps = _norm_eps(fields)
    return LayerSpec(
        AttentionSpec(
            norm=NormSpec("input_layernorm", eps),
            heads=heads,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=QKNormSpec(eps) if head_norms else None,
            sliding_window=window,
        ),
        MLPSpec(
            norm=NormSpec("post_attention_layernorm", eps),
            intermediate_size=intermediate_size(fields),
            mlp_bias=mlp_bias,
        ),
    )


def encoder_config(
    fields: Fields, layers: Sequence[LayerSpec], embedding: EncoderEmbeddingSpec
) -> DecoderConfig:
    """Return an encoder of these layers (at least one)."""
    return DecoderConfig(
        architecture=architecture_name(fields),
        vocab_size=fields.integer("vocab_size", maximum=_MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", maximum=_MAX_WIDTH),
        layers=tuple(layers),
        final_norm=None,
        rope=DefaultRope(layers[0].attention.heads.head_dim, _DEFAULT_THETA),  # unused in encoders
        max_position_embeddings=embedding.num_positions - embedding.first_position,
        tie_word_embeddings=False,
        dtype=_dtype(fields),
        eos_token_ids=(),
        generates=False,
        encoder=embedding,
    )


def architecture_name(fields: Fields) -> str:
    """Return the first of `architectures`."""
    names = fields.optional_texts("architectures")
    if not names:
        raise fields.error("architectures", "is missing", "name the model's class in config.json")
    return names[0]


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def max_length(fields: Fields) -> int:
    """Return the context length the model was made for, in tokens."""
    return fields.integer("max_position_embeddings", maximum=_MAX_LENGTH)


def intermediate_size(fields: Fields) -> int:
    """Return the inner width of an MLP."""
    return fields.integer("intermediate_size", maximum=_MAX_WIDTH)


def _norm_eps(fields: Fields) -> float:
    return fields.number("rms_norm_eps", 1e-6)


def head_sizes(
    fields: Fields, *, default_num_kv_heads: int | None = None, default_head_dim: int | None = None
) -> HeadSizes:
    """Return the heads of every layer. Defaults: as many KV heads as query heads, and hidden_size /
    num_attention_heads."""
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    head_dim = _head_dim(fields, default_head_dim, num_heads)
    return HeadSizes(num_heads, _num_kv_heads(fields, default_num_kv_heads, num_heads), head_dim)


def sliding_window(fields: Fields) -> int | None:
    """Return `sliding_window` in tokens; None if it is null."""
    if not fields.has("sliding_window"):
        return _DEFAULT_WINDOW
    return fields.optional_integer("sliding_window")


def upper_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return each layer's window, by use_sliding_window, and layer_types or max_window_layers."""
    count = num_layers(fields)
    window = sliding_window(fields)
    if not fields.flag("use_sliding_window", False):
        window = None
    layer_types = fields.optional_texts("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        return tuple(window if layer >= first else None for layer in range(count))
    if len(layer_types) != count:
        raise fields.error("layer_types", f"must have {count} entries, one for each layer")
    if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"has unsupported entries {sorted(unknown)}")
    if window is None and "sliding_attention" in layer_types:
        raise fields.error(
            "layer_types",
            "asks for sliding_attention without a window",
            "set use_sliding_window to true and sliding_window to a number",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _head_dim(fields: Fields, default: int | None, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", maximum=_MAX_HEAD_DIM) or default
    if head_dim is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            raise fields.error(
                "num_attention_heads",
                f"does not divide hidden_size {hidden_size}",
                "add head_dim to config.json",
            )
        head_dim = hidden_size // num_heads
    if head_dim > _MAX_HEAD_DIM:
        raise fields.error("num_attention_heads", f"gives heads of more than {_MAX_HEAD_DIM}")
    if head_dim % 2:
        raise config_error("head_dim", head_dim, "rotary embedding needs an even head_dim")
    return head_dim


def _num_kv_heads(fields: Fields, default: int | None, num_heads: int) -> int:
    absent = None if fields.has("num_key_value_heads") else default
    num_kv_heads = fields.integer("num_key_value_heads", absent or num_heads, maximum=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _dtype(fields: Fields) -> str | None:
    field = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.optional_text(field)
    if name is None:
        return None
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(field, "is not supported", "use one of " + ", ".join(DTYPES))
    return name


def _eos_token_ids(fields: Fields, default: tuple[int, ...]) -> tuple[int, ...]:
    if not fields.has("eos_token_id"):
        return default
    return fields.optional_integers("eos_token_id") or ()


def _rope(fields: Fields, head_dim: int, length: int) -> Rope:
    """transformers 4 has rope_scaling and a top-level rope_theta; 5 has both in rope_parameters."""
    field = "rope_scaling" if fields.optional_object("rope_scaling") else "rope_parameters"
    values = fields.optional_object(field) or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.error(field, "is given for each layer type", "use one set for the whole model")
    theta = fields.number("rope_theta", _DEFAULT_THETA, above=1)
    rope = Fields(values, prefix=f"{field}.")
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    build = _ROPE_BUILDERS.get(rope_type)
    if build is None:
        raise rope.error(
            "rope_type", f"{rope_type} is not supported", "use " + ", ".join(_ROPE_BUILDERS)
        )
    for source in (fields, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.error("partial_rotary_factor", "is not supported", "use 1.0")
    made = build(fields, rope, head_dim, rope.number("rope_theta", theta, above=1))
    if not is_finite(made, min(length, max_table_length(head_dim))):
        raise fields.error(
            field, "gives rotary tables that are not finite", "correct its factors in config.json"
        )
    return made


def _default_rope(model: Fields, rope: Fields, head_dim: int, theta: float) -> Rope:
    return DefaultRope(head_dim, theta)


def _linear_rope(model: Fields, rope: Fields, head_dim: int, theta: float) -> Rope:
    return LinearRope(head_dim, theta, rope.number("factor"))


def _dynamic_rope(model: Fields, rope: Fields, head_dim: int, theta: float) -> Rope:
    return DynamicRope(head_dim, theta, rope.number("factor"))


def _llama3_rope(model: Fields, rope: Fields, head_dim: int, theta: float) -> Rope:
    low = rope.number("low_freq_factor")
    return Llama3Rope(
        head_dim,
        theta,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor", above=low),
        original_max_position_embeddings=_original_length(model, rope),
    )


def _yarn_rope(model: Fields, rope: Fields, head_dim: int, theta: float) -> Rope:
    original = _original_length(model, rope)
    return YarnRope(
        head_dim,
        theta,
        factor=rope.number("factor", max_length(model) / original),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale", above=-1),
        mscale_all_dim=rope.optional_number("mscale_all_dim", above=-1),
        truncate=rope.flag("truncate", True),
    )


def _original_length(model: Fields, rope: Fields) -> int:
    """The model's own field comes first, as in transformers, and max_position_embeddings last."""
    name = "original_max_position_embeddings"
    stated = model.optional_integer(name) or rope.optional_integer(name)
    return stated or max_length(model)


_ROPE_BUILDERS: Mapping[str, Callable[[Fields, Fields, int, float], Rope]] = MappingProxyType(
    {
        "default": _default_rope,
        "linear": _linear_rope,
        "dynamic": _dynamic_rope,
        "llama3": _llama3_rope,
        "yarn": _yarn_rope,
    }
)
