"""Reads the quantization of ModelOpt's checkpoints in FP8: from hf_quant_config.json, or from
quantization_config of config.json, whose schemes quantization.py checks.

All functions raise ConfigError like those of quantization.py.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from worker_daemon.layers.quantization import (
    Activations,
    IgnoredModules,
    WeightQuantization,
    WeightScales,
)
from worker_daemon.models.fields import Fields
from worker_daemon.models.module_patterns import MAX_CHARS
from worker_daemon.models.safetensors_file import full_name

MODELOPT_FILE: Final = "hf_quant_config.json"
_UNQUANTIZED: Final = "use the unquantized checkpoint"
_ALGORITHMS: Final[Mapping[str, tuple[WeightScales, Activations]]] = MappingProxyType(
    {"FP8": ("tensor", "static"), "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "dynamic")}
)
_CACHE: Final = "FP8"
_WILDCARDS: Final = frozenset("*?[")


def modelopt_section(file: Fields) -> Fields:
    """Return the fields of hf_quant_config.json that read_modelopt takes. file: the whole."""
    values = file.optional_object("quantization")
    if values is None:
        raise file.error("quantization", "is missing", f"replace {MODELOPT_FILE}")
    return Fields(values, prefix=file.full_name("quantization."))


def read_modelopt(config: Fields) -> WeightQuantization:
    """Return the quantization of a section of either file."""
    algorithm = config.text("quant_algo")
    if algorithm not in _ALGORITHMS:
        fix = f"use a checkpoint in {' or '.join(_ALGORITHMS)}, or the unquantized one"
        raise config.error("quant_algo", "is not supported", fix)
    if (config.optional_text("kv_cache_quant_algo") or _CACHE) != _CACHE:
        raise config.error("kv_cache_quant_algo", "is not supported", _UNQUANTIZED)
    scales, activations = _ALGORITHMS[algorithm]
    field = "exclude_modules" if config.has("exclude_modules") else "ignore"
    listed = [full_name(text) for text in config.optional_texts(field) or []]
    if "" in listed:
        raise config.error(field, "has an empty name", "list names")
    globs = [text for text in listed if _WILDCARDS & set(text)]
    names = tuple(text for text in listed if not _WILDCARDS & set(text))
    return WeightQuantization(
        scales, activations, IgnoredModules(patterns=tuple(_joined(globs)), paths=names)
    )


def _joined(globs: Iterable[str]) -> Iterator[str]:
    """Yield regular expressions of at most MAX_CHARS characters that match what one of the shell
    patterns does; a longer one alone. Their number is limited where they are matched."""
    pattern = ""
    for glob in globs:
        own = fnmatch.translate(glob)
        if pattern and len(pattern) + len(own) >= MAX_CHARS:
            yield pattern
            pattern = ""
        pattern = f"{pattern}|{own}" if pattern else own
    if pattern:
        yield pattern
