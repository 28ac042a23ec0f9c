"""Reads quantization_config of 4-bit checkpoints: AWQ, GPTQ, compressed-tensors' pack-quantized.

All functions raise ConfigError like those of quantization.py, which reads the list of modules that
are not quantized.
"""

from typing import Final

from worker_daemon.layers.quantization import IgnoredModules, Int4Quantization
from worker_daemon.models.fields import Fields

PACKED: Final = "pack-quantized"
"""compressed-tensors' format of 4-bit matrices."""
_UNQUANTIZED: Final = "use the unquantized checkpoint"
_BITS: Final = 4
_SIZES: Final = (32, 64, 128)
_WHOLE_ROW: Final = -1
_FORMATS: Final = {"gptq": 1, "gptq_v2": 0}
"""GPTQ's formats, and what they subtract from zero points."""


def read_gptq(config: Fields) -> Int4Quantization:
    """Read the configuration of AutoGPTQ and GPTQModel."""
    _require_bits(config, "bits")
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if not config.is_empty(name):
            raise config.error(name, "is not supported", _UNQUANTIZED)
    if config.flag("lm_head", False):
        raise config.error("lm_head", "must be false", _UNQUANTIZED)
    if config.text("pack_dtype", "int32") != "int32":
        raise config.error("pack_dtype", "must be int32", _UNQUANTIZED)
    name = "checkpoint_format" if config.has("checkpoint_format") else "format"
    stored = config.text(name, "gptq")
    if stored not in _FORMATS:
        fix = f"use a checkpoint in one of {', '.join(_FORMATS)}"
        raise config.error(name, "is not supported", fix)
    is_symmetric = config.flag("sym", True)
    size = _group_size(config, "group_size")
    return Int4Quantization(
        "gptq",
        size,
        has_zeros=True,  # they are in the checkpoint either way
        zero_offset=_FORMATS[stored],
        has_order=config.flag("desc_act", False) and size is not None,
        is_symmetric=is_symmetric,
    )


def read_awq(config: Fields, ignored: IgnoredModules) -> Int4Quantization:
    """Read the configuration of AutoAWQ. ignored: its modules_to_not_convert."""
    _require_bits(config, "w_bit" if config.has("w_bit") else "bits")
    version = "version" if config.has("version") else "format"
    if config.text(version, "gemm").lower() != "gemm":
        raise config.error(version, "is not supported", "use a checkpoint of version gemm")
    if not config.flag("zero_point", True):
        raise config.error("zero_point", "must be true", _UNQUANTIZED)
    size = _group_size(config, "q_group_size" if config.has("q_group_size") else "group_size")
    return Int4Quantization("awq", size, has_zeros=True, ignored=ignored)


def read_packed(weights: Fields, ignored: IgnoredModules) -> Int4Quantization:
    """Read the weights of compressed-tensors' only group."""
    if weights.text("type") != "int":
        raise weights.error("type", f"does not go with {PACKED}", _UNQUANTIZED)
    _require_bits(weights, "num_bits")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "must be false", _UNQUANTIZED)
    strategy = weights.text("strategy")
    if strategy not in ("group", "channel"):
        raise weights.error("strategy", "is not supported", _UNQUANTIZED)
    size = _group_size(weights, "group_size") if strategy == "group" else None
    order = None if weights.is_empty("actorder") else weights.text("actorder")
    if order not in (None, "static", "weight", "group", "dynamic"):
        raise weights.error("actorder", "is not supported", _UNQUANTIZED)
    is_symmetric = weights.flag("symmetric", True)
    return Int4Quantization(
        "compressed-tensors",
        size,
        has_zeros=not is_symmetric,
        has_order=order in ("group", "dynamic") and size is not None,
        is_symmetric=is_symmetric,
        ignored=ignored,
    )


def _require_bits(fields: Fields, name: str) -> None:
    if fields.integer(name) != _BITS:
        raise fields.error(name, f"must be {_BITS}", _UNQUANTIZED)


def _group_size(fields: Fields, name: str) -> int | None:
    """Return the size of a group; None for whole rows."""
    size = fields.integer(name, minimum=_WHOLE_ROW)
    if size != _WHOLE_ROW and size not in _SIZES:
        fix = f"use one of {', '.join(map(str, _SIZES))} or {_WHOLE_ROW}"
        raise fields.error(name, "is not supported", fix)
    return None if size == _WHOLE_ROW else size
