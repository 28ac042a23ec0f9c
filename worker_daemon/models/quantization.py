"""Reads quantization_config of config.json: compressed-tensors and Hugging Face's fp8; 4 bits in
quantization_int4.py, ModelOpt's formats in quantization_modelopt.py.

All functions raise ConfigError, which names field, value and fix. Only what is served exactly is
accepted.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, Literal

from worker_daemon.layers.quantization import (
    Activations,
    IgnoredModules,
    Int4Quantization,
    Quantization,
    WeightQuantization,
    WeightScales,
)
from worker_daemon.models.fields import Fields
from worker_daemon.models.module_patterns import matching_names
from worker_daemon.models.quantization_int4 import PACKED, read_awq, read_gptq, read_packed
from worker_daemon.models.quantization_modelopt import modelopt_section, read_modelopt
from worker_daemon.models.safetensors_file import full_name

_FIELD: Final = "quantization_config"
_METHODS: Final = ("compressed-tensors", "fp8", "modelopt", "gptq", "awq")
_FORMATS: Final = ("float-quantized", "naive-quantized")
_STRATEGIES: Final[tuple[WeightScales, ...]] = ("tensor", "channel", "block")
_BLOCK: Final = [128, 128]
_UNQUANTIZED: Final = "use the unquantized checkpoint"
_REGEX: Final = "re:"
_SPECIAL: Final = frozenset("*+?[](){}|^$\\")
_MODULE_END: Final = r"(?:(?<=\.)|(?=\.|$))"
"""The end of a pattern of modules in MXFP4: the end of a name between dots."""


def read_quantization(fields: Fields, modelopt: Fields | None = None) -> Quantization | None:
    """Return the quantization that config.json describes, or else ModelOpt's file; None if there is
    none. modelopt: the fields of MODELOPT_FILE."""
    values = fields.optional_object(_FIELD)
    if not values:
        return None if modelopt is None else read_modelopt(modelopt_section(modelopt))
    config = Fields(values, prefix=f"{_FIELD}.")
    method = _method(config)
    if method == "modelopt":
        return _read_modelopt(config)
    _check_kv_cache_scheme(config)
    if method == "compressed-tensors":
        return _read_compressed(config)
    if method == "fp8":
        return _read_fp8(config)
    if method == "gptq":
        return read_gptq(config)
    return read_awq(config, _named_ignored(config, "modules_to_not_convert"))


def with_matches(quantization: Quantization, modules: Collection[str]) -> Quantization:
    """Return a checkpoint's quantization with those of a model's modules that its patterns match.
    Raises ConfigError as matching_names does."""
    ignored = quantization.ignored
    matched = matching_names(f"{_FIELD}.ignore", ignored.patterns, modules)
    return replace(quantization, ignored=replace(ignored, matched=matched))


def _method(config: Fields) -> str:
    """Return quant_method, one of _METHODS. Checkpoints of ModelOpt may have quant_algo alone."""
    fix = f"use a checkpoint of {', '.join(_METHODS)}, or the unquantized one"
    if config.has("quant_algo") and not config.has("quant_method"):
        return "modelopt"
    method = config.text("quant_method")
    if method not in _METHODS:
        raise config.error("quant_method", "is not supported", fix)
    return method


def read_mxfp4(fields: Fields, modules: Collection[str]) -> IgnoredModules | None:
    """Return what a checkpoint in MXFP4 leaves unquantized, for a family whose experts may be in
    this format; None if config.json has no quantization_config. modules: all that may be in it.
    Raises ConfigError for other methods."""
    values = fields.optional_object(_FIELD)
    if not values:
        return None
    config = Fields(values, prefix=f"{_FIELD}.")
    if config.text("quant_method") != "mxfp4":
        fix = "use the checkpoint in mxfp4, or the unquantized one"
        raise config.error("quant_method", "is not supported for this model", fix)
    field = "modules_to_not_convert"
    listed = config.optional_texts(field) or []
    patterns = tuple(f"(?:{text}){_MODULE_END}" for text in listed if _SPECIAL & set(text))
    return IgnoredModules(
        patterns=patterns,
        matched=matching_names(config.full_name(field), patterns, modules),
        paths=tuple(text for text in listed if text and not _SPECIAL & set(text)),
    )


def _read_modelopt(config: Fields) -> WeightQuantization:
    """Read ModelOpt's form of quantization_config. Its groups, if there are any, must agree with
    its quant_algo; the scheme of the KV cache is that of a group, or a name."""
    found = read_modelopt(config)
    groups = config.optional_object("config_groups") or {}
    for name in groups:
        prefix = config.full_name("config_groups.")
        group = Fields(Fields(groups, prefix).optional_object(name) or {}, f"{prefix}{name}.")
        _scheme(group, "weights")
        inputs = _scheme(group, "input_activations")
        is_dynamic = found.activations == "dynamic"
        if inputs is not None and inputs.flag("dynamic", is_dynamic) != is_dynamic:
            raise inputs.error("dynamic", "contradicts quant_algo", _UNQUANTIZED)
    scheme = config.non_null(("kv_cache_scheme",)).get("kv_cache_scheme")
    if not isinstance(scheme, str):
        _check_kv_cache_scheme(config, strategy="tensor")
    elif scheme != "FP8":
        raise config.error("kv_cache_scheme", "is not supported", _UNQUANTIZED)
    return found


def _check_kv_cache_scheme(config: Fields, strategy: str | None = None) -> None:
    """Refuse scales of a KV cache that layers/kv_scales.py does not read. They are used with
    kv_cache_dtype fp8 alone. strategy: the default."""
    scheme = _scheme(config, "kv_cache_scheme")
    if scheme is None:
        return
    if scheme.flag("dynamic", False):
        raise scheme.error("dynamic", "must be false", _UNQUANTIZED)
    _require_one_of(scheme, "strategy", ("tensor", "attn_head"), strategy)


def _read_compressed(config: Fields) -> Quantization:
    _require_one_of(config, "format", (*_FORMATS, PACKED))
    sparsity = Fields(
        config.optional_object("sparsity_config") or {}, prefix=f"{_FIELD}.sparsity_config."
    )
    if sparsity.text("format", "dense") != "dense":
        raise sparsity.error("format", "is not supported", _UNQUANTIZED)
    if config.optional_object("transform_config"):
        raise config.error("transform_config", "is not supported", _UNQUANTIZED)
    group = _only_group(config)
    if config.text("format") == PACKED:
        return _read_packed(config, group)
    weights = _scheme(group, "weights")
    if weights is None:
        raise group.error("weights", "is missing", "add it to config.json")
    _require_one_of(weights, "strategy", _STRATEGIES)
    scales = next(s for s in _STRATEGIES if s == weights.text("strategy"))
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "must be false")
    if scales == "block" and weights.optional_integers("block_structure") != tuple(_BLOCK):
        raise weights.error("block_structure", f"must be {_BLOCK}", _UNQUANTIZED)
    activations = _compressed_activations(_scheme(group, "input_activations"))
    if scales == "block" and activations == "static":
        raise weights.error("strategy", "does not go with static activations", _UNQUANTIZED)
    return WeightQuantization(scales, activations, _compressed_ignored(config))


def _read_packed(config: Fields, group: Fields) -> Int4Quantization:
    if group.optional_object("input_activations"):
        raise group.error("input_activations", f"does not go with {PACKED}", _UNQUANTIZED)
    values = group.optional_object("weights")
    if values is None:
        raise group.error("weights", "is missing", "add it to config.json")
    weights = Fields(values, prefix=group.full_name("weights."))
    return read_packed(weights, _compressed_ignored(config))


def _only_group(config: Fields) -> Fields:
    groups = config.optional_object("config_groups") or {}
    names = list(groups)
    if len(names) != 1:
        raise config.error("config_groups", "must have one group", _UNQUANTIZED)
    values = Fields(groups, prefix=f"{_FIELD}.config_groups.").optional_object(names[0])
    group = Fields(values or {}, prefix=f"{_FIELD}.config_groups.{names[0]}.")
    if group.has("format"):
        formats = (PACKED,) if config.text("format") == PACKED else _FORMATS
        _require_one_of(group, "format", formats)
    if group.optional_texts("targets") != ["Linear"]:
        raise group.error("targets", 'must be ["Linear"]', _UNQUANTIZED)
    if group.optional_object("output_activations"):
        raise group.error("output_activations", "is not supported", _UNQUANTIZED)
    return group


def _scheme(group: Fields, name: str) -> Fields | None:
    """Return the scheme of weights or activations, if it is symmetric FP8; None if absent."""
    values = group.optional_object(name)
    if values is None:
        return None
    scheme = Fields(values, prefix=group.full_name(f"{name}."))
    if scheme.text("type") != "float":
        raise scheme.error("type", "is not supported", _UNQUANTIZED)
    if scheme.integer("num_bits") != 8:
        raise scheme.error("num_bits", "is not supported", _UNQUANTIZED)
    if not scheme.flag("symmetric", True):
        raise scheme.error("symmetric", "must be true", _UNQUANTIZED)
    if scheme.optional_text("actorder") is not None:
        raise scheme.error("actorder", "is not supported", _UNQUANTIZED)
    return scheme


def _compressed_activations(scheme: Fields | None) -> Activations:
    if scheme is None:
        return "none"
    if scheme.flag("dynamic", False):
        _require_one_of(scheme, "strategy", ("token", "tensor", "group"))
        return "dynamic"
    _require_one_of(scheme, "strategy", ("tensor",))
    return "static"


def _compressed_ignored(config: Fields) -> IgnoredModules:
    listed = config.optional_texts("ignore") or []
    patterns = tuple(text.removeprefix(_REGEX) for text in listed if text.startswith(_REGEX))
    names = frozenset(full_name(text) for text in listed if not text.startswith(_REGEX))
    return IgnoredModules(names=names, patterns=patterns)


def _read_fp8(config: Fields) -> WeightQuantization:
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise config.error("fmt", "is not supported", "use a checkpoint in e4m3")
    if config.optional_texts("modules_to_convert"):
        raise config.error("modules_to_convert", "is not supported", _UNQUANTIZED)
    _require_one_of(config, "activation_scheme", ("dynamic", "static"), default="dynamic")
    activations: Literal["dynamic", "static"] = "dynamic"
    if config.text("activation_scheme", "dynamic") == "static":
        activations = "static"
    block = config.optional_integers("weight_block_size")
    if block not in (None, tuple(_BLOCK)):
        raise config.error("weight_block_size", f"must be {_BLOCK} or absent", _UNQUANTIZED)
    if block is not None and activations == "static":
        problem = "does not go with weight_block_size"
        raise config.error("activation_scheme", f"static {problem}", _UNQUANTIZED)
    field = "modules_to_not_convert" if config.has("modules_to_not_convert") else "ignored_layers"
    scales: WeightScales = "tensor" if block is None else "block"
    return WeightQuantization(scales, activations, _named_ignored(config, field))


def _named_ignored(config: Fields, field: str) -> IgnoredModules:
    paths = [full_name(path.rstrip(".")) for path in config.optional_texts(field) or []]
    for path in paths:
        if not path or _SPECIAL & set(path):
            raise config.error(field, f"has {path!r}, which is not a name", "list names")
    return IgnoredModules(paths=tuple(paths))


def _require_one_of(
    fields: Fields, name: str, allowed: Sequence[str], default: str | None = None
) -> None:
    if fields.text(name, default) not in allowed:
        fix = f"use one of {', '.join(allowed)}, or the unquantized checkpoint"
        raise fields.error(name, "is not supported", fix)
