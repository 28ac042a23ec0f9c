"""Fields of config.json that families share, in both forms that transformers writes (releases 4 and
5), with its defaults.

All functions raise ConfigError, which names field and fix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

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
    LongRope,
    Rope,
    YarnRope,
    is_finite,
    max_table_length,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields

DTYPES = ("float32", "float16", "bfloat16")
_DEFAULT_THETA = 10_000.0

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
"""Entries of layer_types."""

_MAX_VOCAB = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 4096
"""Bounds on the sizes in config.json: larger than any model needs, small enough to be safe."""
_MAX_LENGTH = 1 << 128
"""Stands for "no limit". The real limit of a context is applied when the configuration is
resolved."""


def decoder_config(fields: Fields, layers: Sequence[LayerSpec]) -> DecoderConfig:
    """Return a decoder with these layers (at least one) and the parts that all families share.
    Sliding windows that cover max_position_embeddings are dropped: they would hide no token."""
    longest = max_length(fields)
    return DecoderConfig(
        architecture=architecture_name(fields),
        vocab_size=fields.integer("vocab_size", maximum=_MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", maximum=_MAX_WIDTH),
        layers=tuple(_without_full_window(layer, longest) for layer in layers),
        final_norm=NormSpec("norm", norm_eps(fields)),
        max_position_embeddings=longest,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        eos_token_ids=fields.optional_integers("eos_token_id") or (),
        unknown_fields=_unknown_rope_fields(fields),
    )


def _without_full_window(layer: LayerSpec, longest: int) -> LayerSpec:
    """Return the layer without its sliding window if the window covers the longest context."""
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.sliding_window is None:
        return layer
    is_full = attention.sliding_window >= longest
    return with_attention(layer, sliding_window=None) if is_full else layer


def dense_layer(
    fields: Fields,
    heads: HeadSizes,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    window: int | None = None,
    rope: Rope | None = None,
) -> LayerSpec:
    """Return a layer of attention and an MLP, with the names and the epsilon that Llama's
    checkpoints have. head_norms: a norm on each query and key head; window: in tokens; rope: the
    result of model_rope if None."""
    require_text(fields, "hidden_act", "silu")
    eps = norm_eps(fields)
    return LayerSpec(
        AttentionSpec(
            norm=NormSpec("input_layernorm", eps),
            heads=heads,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            rope=model_rope(fields, heads.head_dim) if rope is None else rope,
            qk_norm=QKNormSpec(eps) if head_norms else None,
            sliding_window=window,
        ),
        MLPSpec(
            norm=NormSpec("post_attention_layernorm", eps),
            intermediate_size=intermediate_size(fields),
            mlp_bias=mlp_bias,
        ),
    )


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """Return the layer with other fields of its AttentionSpec."""
    assert isinstance(layer.attention, AttentionSpec), "the layer has attention"
    return replace(layer, attention=replace(layer.attention, **changes))


def with_mlp(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """Return the layer with other fields of its MLPSpec."""
    return replace(layer, mlp=replace(layer.mlp, **changes))


def require_text(fields: Fields, name: str, wanted: str) -> None:
    """Raise ConfigError if a field is present and differs."""
    if fields.text(name, wanted) != wanted:
        raise fields.error(name, "is not supported", f"use a checkpoint with {wanted}")


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


def norm_eps(fields: Fields) -> float:
    """Return the epsilon of all norms."""
    return fields.number("rms_norm_eps", 1e-6)


def head_sizes(fields: Fields) -> HeadSizes:
    """Return the heads of every layer. Defaults: as many KV heads as query heads, and hidden_size /
    num_attention_heads."""
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    head_dim = _head_dim(fields, num_heads)
    return HeadSizes(num_heads, _num_kv_heads(fields, num_heads), head_dim)


def sliding_window(fields: Fields) -> int | None:
    """Return `sliding_window` in tokens; None if there is none."""
    return fields.optional_integer("sliding_window")


def layer_windows(fields: Fields, default_types: list[str]) -> tuple[int | None, ...]:
    """Return each layer's window, by layer_types; default_types: for a checkpoint without them."""
    window = sliding_window(fields)
    layer_types = fields.optional_texts("layer_types")
    if layer_types is None:
        layer_types = default_types
    if len(layer_types) != num_layers(fields):
        raise fields.error("layer_types", f"must have {num_layers(fields)} entries, one per layer")
    if unknown := set(layer_types) - {FULL, SLIDING}:
        raise fields.error("layer_types", f"has unsupported entries {sorted(unknown)}")
    if window is None and SLIDING in layer_types:
        fix = "set sliding_window to a number, and use_sliding_window to true if there is one"
        raise fields.error("layer_types", "asks for sliding_attention without a window", fix)
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def upper_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return each layer's window, by use_sliding_window, and layer_types or max_window_layers."""
    if not fields.flag("use_sliding_window", False):
        fields = fields.with_values({"sliding_window": None})
    first = fields.integer("max_window_layers", minimum=0)
    if sliding_window(fields) is None:
        first = num_layers(fields)
    indices = range(num_layers(fields))
    return layer_windows(fields, [SLIDING if layer >= first else FULL for layer in indices])


def alternating_windows(fields: Fields, period: int) -> tuple[int | None, ...]:
    """Return each layer's window, by layer_types; without them, all layers but every `period`-th
    have one."""
    layers = range(1, num_layers(fields) + 1)
    return layer_windows(fields, [SLIDING if layer % period else FULL for layer in layers])


def _head_dim(fields: Fields, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", maximum=_MAX_HEAD_DIM)
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


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, maximum=_MAX_HEADS)
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


def model_rope(
    fields: Fields,
    head_dim: int,
    *,
    default_share: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """Return the rotation of a model that has one for all layers.

    transformers 4 has rope_scaling and a top-level rope_theta; 5 has both in rope_parameters.
    default_share: partial_rotary_factor if config.json has none; None if the family always rotates
    whole heads. interleaved: the family pairs adjacent elements (layers/rotary.py).
    """
    field = "rope_scaling" if fields.optional_object("rope_scaling") else "rope_parameters"
    values = fields.optional_object(field) or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.error(field, "is given for each layer type", "use one set for the whole model")
    section = Fields(values, prefix=f"{field}.")
    theta = fields.number("rope_theta", _DEFAULT_THETA, above=1)
    share = _rotated_share(fields, section, default_share)
    return _build_rope(fields, section, head_dim, theta, share=share, interleaved=interleaved)


def layer_type_ropes(fields: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """Return the rotations of layers of type full_attention and sliding_attention.

    transformers 5 has rope_parameters with an object for each type. 4 has, as Gemma 3 does,
    rope_theta and rope_scaling for full_attention, and rope_local_base_freq for sliding_attention,
    which is never scaled. The two bases need a value, or a default.
    """
    parameters = fields.optional_object("rope_parameters") or {}
    if unknown := sorted(set(parameters) - {FULL, SLIDING}):
        fix = f"give one object for {FULL} and one for {SLIDING}"
        raise fields.error("rope_parameters", f"has other entries: {', '.join(unknown)}", fix)
    by_type = Fields(parameters, prefix="rope_parameters.")
    scaling = fields.optional_object("rope_scaling")

    def rope(layer_type: str, base_field: str, scaling: Mapping[str, object] | None) -> Rope:
        values = {**(by_type.optional_object(layer_type) or {}), **(scaling or {})}
        prefix = "rope_scaling." if scaling else f"rope_parameters.{layer_type}."
        section = Fields(values, prefix=prefix)
        theta = fields.number(base_field, above=1)
        share = _rotated_share(fields, section, None)
        return _build_rope(fields, section, head_dim, theta, share=share)

    return rope(FULL, "rope_theta", scaling), rope(SLIDING, "rope_local_base_freq", None)


def _build_rope(
    model: Fields,
    section: Fields,
    head_dim: int,
    theta: float,
    *,
    share: float = 1.0,
    interleaved: bool = False,
) -> Rope:
    """Return the rotation that a section describes: rope_type, its factors, and rope_theta, which
    is `theta` if absent. share: of a head's elements; the rotated ones are rounded down.

    Raises ConfigError if a value is missing or not supported, or the table would not be finite.
    """
    field = "rope_type" if section.has("rope_type") else "type"
    rope_type = section.text(field, "default")
    kind = _ROPES.get(rope_type)
    if kind is None:
        fix = "use " + ", ".join(_ROPES)
        raise section.error(field, f"{rope_type} is not supported", fix)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        problem = f"rotates {rotary_dim} elements of each head, which must be an even number"
        raise config_error("partial_rotary_factor", share, problem, "correct it in config.json")
    made = kind.build(model, section, rotary_dim, section.number("rope_theta", theta, above=1))
    made = replace(made, interleaved=interleaved)
    if not is_finite(made, min(max_length(model), max_table_length([made]))):
        raise model.error(
            section.full_name("").rstrip("."),
            "gives rotary tables that are not finite",
            "correct its factors in config.json",
        )
    return made


def _rotated_share(model: Fields, section: Fields, default: float | None) -> float:
    """Return partial_rotary_factor: the section's, else the model's, else the default. If that is
    None, the family has no partial rotation."""
    name = "partial_rotary_factor"
    for source in (section, model):
        share = source.optional_number(name)
        if share is None:
            continue
        if default is None and share != 1.0:
            raise source.error(name, "is not supported", "use 1.0")
        if share > 1.0:
            raise source.error(name, "must be at most 1")
        return share
    return 1.0 if default is None else default


def _default_rope(model: Fields, rope: Fields, rotary_dim: int, theta: float) -> Rope:
    return DefaultRope(rotary_dim, theta)


def _linear_rope(model: Fields, rope: Fields, rotary_dim: int, theta: float) -> Rope:
    return LinearRope(rotary_dim, theta, rope.number("factor"))


def _dynamic_rope(model: Fields, rope: Fields, rotary_dim: int, theta: float) -> Rope:
    return DynamicRope(rotary_dim, theta, rope.number("factor"))


def _llama3_rope(model: Fields, rope: Fields, rotary_dim: int, theta: float) -> Rope:
    low = rope.number("low_freq_factor")
    return Llama3Rope(
        rotary_dim,
        theta,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor", above=low),
        original_max_position_embeddings=_original_length(model, rope),
    )


def _yarn_rope(model: Fields, rope: Fields, rotary_dim: int, theta: float) -> Rope:
    original = _original_length(model, rope)
    return YarnRope(
        rotary_dim,
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


def _long_rope(model: Fields, rope: Fields, rotary_dim: int, theta: float) -> Rope:
    original = _original_length(model, rope)
    return LongRope(
        rotary_dim,
        theta,
        short_factors=_factors(rope, "short_factor", rotary_dim // 2),
        long_factors=_factors(rope, "long_factor", rotary_dim // 2),
        factor=rope.number("factor", max_length(model) / original),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
    )


def _factors(rope: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return the factors of all frequencies."""
    factors = rope.numbers(name)
    if len(factors) != count:
        raise rope.error(name, f"must have {count} numbers, one for each frequency of a head")
    return factors


def _original_length(model: Fields, rope: Fields) -> int:
    """The model's own field comes first, as in transformers, and max_position_embeddings last."""
    stated = model.optional_integer(_ORIGINAL) or rope.optional_integer(_ORIGINAL)
    return stated or max_length(model)


class _RopeKind(NamedTuple):
    """A rope_type."""

    build: Callable[[Fields, Fields, int, float], Rope]
    """(model's fields, section, rotated elements of a head, theta) -> the rotation."""
    keys: tuple[str, ...] = ()
    """Fields of its section besides _ROPE_KEYS."""


_ORIGINAL: Final = "original_max_position_embeddings"
_ROPE_KEYS: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ROPES: Final[Mapping[str, _RopeKind]] = MappingProxyType(
    {
        "default": _RopeKind(_default_rope),
        "linear": _RopeKind(_linear_rope, ("factor",)),
        "dynamic": _RopeKind(_dynamic_rope, ("factor",)),
        "llama3": _RopeKind(
            _llama3_rope, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
        ),
        "yarn": _RopeKind(
            _yarn_rope,
            (
                *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
                *("mscale", "mscale_all_dim", "truncate"),
            ),
        ),
        "longrope": _RopeKind(
            _long_rope, ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor")
        ),
    }
)


def _unknown_rope_fields(fields: Fields) -> tuple[str, ...]:
    """Return the names of what the sections of rotations have besides the fields of their
    rope_type, sorted."""
    found: list[str] = []
    for field in ("rope_scaling", "rope_parameters"):
        values = fields.optional_object(field) or {}
        nested = {name: value for name, value in values.items() if isinstance(value, dict)}
        for name, section in nested.items() if nested else [("", values)]:
            kind = _ROPES.get(str(section.get("rope_type") or section.get("type") or "default"))
            known = {*_ROPE_KEYS, *(kind.keys if kind is not None else ())}
            prefix = fields.full_name(f"{field}.{name}." if name else f"{field}.")
            found += [prefix + key for key in section.keys() - known if section[key] is not None]
    return tuple(sorted(found))
