"""config.json -> DecoderConfig: both forms that transformers writes (releases 4 and 5), with its
defaults.

The only module that knows the fields of config.json; knows no tensor and no parallel size.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from worker_daemon.errors import CheckpointError, ConfigError
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
from worker_daemon.models.fields import Fields
from worker_daemon.models.registry import Architecture, Switch, find_architecture
from worker_daemon.regular_file import read_whole

DTYPES = ("float32", "float16", "bfloat16")
_DEFAULT_THETA = 10_000.0
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28

_MAX_CONFIG_BYTES = 1 << 20
_MAX_VOCAB = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 4096
"""Bounds on what a config.json can make a daemon build: beyond any model, far below what hurts."""
_MAX_LENGTH = 1 << 128
"""What says "no limit". How long a context may be in truth is bound where it is resolved."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that shapes the decoder of one checkpoint. Built once at load, never changed."""

    architecture: str
    """Name as in config.json's `architectures`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Context length the model was made for, in tokens."""
    rope: Rope
    layer_windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None sees everything."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str | None
    """One of DTYPES, as the checkpoint states it; None where it does not."""
    eos_token_ids: tuple[int, ...]

    @property
    def max_supported_len(self) -> int | None:
        """Longest context that is computed exactly, in tokens; None where nothing limits it.

        Dynamic RoPE scaling changes the rotation of past keys once a sequence exceeds
        max_position_embeddings.
        """
        return self.max_position_embeddings if isinstance(self.rope, DynamicRope) else None


def read_model_config(model_dir: Path) -> DecoderConfig:
    """Reads config.json, and the end tokens of generation_config.json where that file names some.

    Raises CheckpointError for a missing file or invalid JSON, ConfigError for what the fields say.
    """
    config = parse_model_config(_read_object(model_dir / "config.json"))
    generation_path = model_dir / "generation_config.json"
    if not generation_path.exists():
        return config
    eos_token_ids = Fields(_read_object(generation_path)).optional_integers("eos_token_id")
    return config if eos_token_ids is None else replace(config, eos_token_ids=eos_token_ids)


def parse_model_config(hf: Mapping[str, object]) -> DecoderConfig:
    """What transformers would make of this config.json; ConfigError names field and fix."""
    fields = Fields(hf)
    name = _architecture_name(fields)
    architecture = find_architecture(name)
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    head_dim = _head_dim(fields, architecture, num_heads)
    length = _length(fields)
    return DecoderConfig(
        architecture=name,
        vocab_size=fields.integer("vocab_size", maximum=_MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", maximum=_MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", maximum=_MAX_WIDTH),
        num_hidden_layers=_num_layers(fields),
        num_attention_heads=num_heads,
        num_key_value_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=length,
        rope=_rope(fields, head_dim, length),
        layer_windows=_layer_windows(fields, architecture),
        qkv_bias=_switch(fields, architecture.qkv_bias),
        o_bias=_switch(fields, architecture.o_bias),
        mlp_bias=_switch(fields, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, architecture),
    )


def _read_object(path: Path) -> Mapping[str, object]:
    try:
        value = json.loads(read_whole(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}",
            field="model",
            value=str(path.parent),
            fix="point model at a directory with config.json and safetensors files",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error}",
            field="model",
            value=str(path.parent),
            fix=f"write {path.name} anew",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds no JSON object",
            field="model",
            value=str(path.parent),
            fix=f"write {path.name} anew",
        )
    return value


def _architecture_name(fields: Fields) -> str:
    names = fields.optional_texts("architectures")
    if not names:
        raise fields.error("architectures", "is missing", "name the model's class in config.json")
    return names[0]


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "is not supported", "use a checkpoint with silu")
    if fields.optional_object("quantization_config"):
        raise fields.error(
            "quantization_config", "is not supported", "use the unquantised checkpoint"
        )


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def _length(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", maximum=_MAX_LENGTH)


def _head_dim(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    head_dim = (
        fields.optional_integer("head_dim", maximum=_MAX_HEAD_DIM) or architecture.default_head_dim
    )
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
        raise ConfigError(
            "rotary embedding needs an even head_dim", field="head_dim", value=head_dim
        )
    return head_dim


def _num_kv_heads(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    absent = None if fields.has("num_key_value_heads") else architecture.default_num_kv_heads
    num_kv_heads = fields.integer("num_key_value_heads", absent or num_heads, maximum=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _switch(fields: Fields, switch: Switch) -> bool:
    if switch in ("on", "off"):
        return switch == "on"
    return fields.flag(switch, False)


def _dtype(fields: Fields) -> str | None:
    field = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.optional_text(field)
    if name is None:
        return None
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(field, "is not supported", "use one of " + ", ".join(DTYPES))
    return name


def _eos_token_ids(fields: Fields, architecture: Architecture) -> tuple[int, ...]:
    if not fields.has("eos_token_id"):
        return architecture.default_eos_token_ids
    return fields.optional_integers("eos_token_id") or ()


def _layer_windows(fields: Fields, architecture: Architecture) -> tuple[int | None, ...]:
    num_layers = _num_layers(fields)
    if architecture.windows == "none":
        return (None,) * num_layers
    window = _sliding_window(fields)
    if architecture.windows == "all_layers":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        window = None
    return _upper_layer_windows(fields, num_layers, window)


def _sliding_window(fields: Fields) -> int | None:
    if not fields.has("sliding_window"):
        return _DEFAULT_WINDOW
    return fields.optional_integer("sliding_window")


def _upper_layer_windows(
    fields: Fields, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    layer_types = fields.optional_texts("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"must have {num_layers} entries, one for each layer")
    if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"has unsupported entries {sorted(unknown)}")
    if window is None and "sliding_attention" in layer_types:
        raise fields.error(
            "layer_types",
            "asks for sliding_attention without a window",
            "set use_sliding_window to true and sliding_window to a number",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(fields: Fields, head_dim: int, length: int) -> Rope:
    """transformers 4 has rope_scaling and a top-level rope_theta, 5 has both in rope_parameters."""
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
        factor=rope.number("factor", _length(model) / original),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale", above=-1),
        mscale_all_dim=rope.optional_number("mscale_all_dim", above=-1),
        truncate=rope.flag("truncate", True),
    )


def _original_length(model: Fields, rope: Fields) -> int:
    """The model's own field goes first, as in transformers; last comes max_position_embeddings."""
    name = "original_max_position_embeddings"
    stated = model.optional_integer(name) or rope.optional_integer(name)
    return stated or _length(model)


_ROPE_BUILDERS: Mapping[str, Callable[[Fields, Fields, int, float], Rope]] = MappingProxyType(
    {
        "default": _default_rope,
        "linear": _linear_rope,
        "dynamic": _dynamic_rope,
        "llama3": _llama3_rope,
        "yarn": _yarn_rope,
    }
)
