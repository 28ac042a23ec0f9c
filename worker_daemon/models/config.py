"""Reads config.json into a DecoderConfig, by its model family, with the pooling of modules.json."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from worker_daemon.errors import config_error
from worker_daemon.models.config_fields import architecture_name
from worker_daemon.models.decoder import module_names
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields
from worker_daemon.models.pooling_config import (
    MODULES_FILE,
    POOLING_FILE,
    SENTENCE_TRANSFORMERS_FILE,
    pooling_config_path,
    read_architecture,
    read_cross_encoder,
    read_modules,
)
from worker_daemon.models.quantization import read_quantization, with_matches
from worker_daemon.models.quantization_modelopt import MODELOPT_FILE
from worker_daemon.models.registry import find_family
from worker_daemon.models.text_config import text_fields
from worker_daemon.regular_file import broken_file, read_whole

_MAX_CONFIG_BYTES = 1 << 20
_NO_MODELOPT = "use the checkpoint in mxfp4, or the unquantized one"
OVERRIDES: Final = ("max_position_embeddings", "rope_parameters")
"""Fields that a driver may replace: they change positions alone, no size of a weight."""
_SCALING_FIELDS: Final = (
    "original_max_position_embeddings",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
)
"""Fields whose values rope_parameters may have too, in another place."""
_NO_OVERRIDES: Final[Mapping[str, object]] = MappingProxyType({})


def read_overrides(text: str) -> Mapping[str, object]:
    """Return the fields that ModelConfig.hf_overrides names. Raises ConfigError if it is no JSON
    object, or names a field that cannot be replaced."""
    if not text:
        return _NO_OVERRIDES
    fix = f"give a JSON object with some of {', '.join(OVERRIDES)}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise config_error("hf_overrides", text, f"it is not valid JSON: {error}", fix) from error
    if not isinstance(values, dict):
        raise config_error("hf_overrides", text, "it is not a JSON object", fix)
    for name, value in values.items():
        if name not in OVERRIDES:
            problem = "this field of config.json cannot be replaced"
            raise config_error(f"hf_overrides.{name}", value, problem, fix)
    return values


def overridden(hf: Mapping[str, object], overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Return a config.json with the fields of read_overrides in place of its own."""
    text = hf.get("text_config")
    if isinstance(text, dict):
        return {**hf, "text_config": overridden(text, overrides)}
    kept = hf
    if "rope_parameters" in overrides:
        kept = {name: value for name, value in hf.items() if name not in _SCALING_FIELDS}
    return {**kept, **overrides}


def read_model_config(
    model_dir: Path, overrides: Mapping[str, object] = _NO_OVERRIDES
) -> DecoderConfig:
    """Read config.json, ModelOpt's file, the end tokens of generation_config.json, and what
    sentence-transformers' files say of pooling, as far as they exist. overrides: fields that
    replace those of config.json, as read_overrides returns them.

    Raises CheckpointError for a missing file or invalid JSON, ConfigError for invalid or
    unsupported fields.
    """
    modelopt = None
    if (model_dir / MODELOPT_FILE).exists():
        modelopt = Fields(_read_object(model_dir / MODELOPT_FILE), f"{MODELOPT_FILE}: ")
    hf = _read_object(model_dir / "config.json")
    config = parse_model_config(overridden(hf, overrides) if overrides else hf, modelopt)
    if (model_dir / MODULES_FILE).exists() and config.pooler.head is None:
        config = _with_modules(config, model_dir)
    if (model_dir / MODULES_FILE).exists() and (model_dir / SENTENCE_TRANSFORMERS_FILE).exists():
        own = _read_object(model_dir / SENTENCE_TRANSFORMERS_FILE)
        config = read_cross_encoder(config, Fields(own, f"{SENTENCE_TRANSFORMERS_FILE}: "))
    generation_path = model_dir / "generation_config.json"
    if not generation_path.exists():
        return config
    eos_token_ids = Fields(_read_object(generation_path)).optional_integers("eos_token_id")
    return config if eos_token_ids is None else replace(config, eos_token_ids=eos_token_ids)


def parse_model_config(hf: Mapping[str, object], modelopt: Fields | None = None) -> DecoderConfig:
    """Return the decoder that transformers would build from this config.json, of a multimodal
    checkpoint its text model. modelopt: the fields of MODELOPT_FILE, if there is one. Raises
    ConfigError, which names field and fix."""
    fields = text_fields(Fields(hf))
    describe = find_family(architecture_name(fields))
    config = read_architecture(describe(fields), fields)
    # Families whose experts may be in MXFP4 read quantization_config for their forms.
    has_read_it = any(
        each is not None and each.checkpoint_form != "separate" for each in config.layer_experts
    )
    if has_read_it and modelopt is not None and fields.is_empty("quantization_config"):
        raise modelopt.error("quantization", "is not supported for this model", _NO_MODELOPT)
    quantization = None if has_read_it else read_quantization(fields, modelopt)
    if quantization is not None and config.encoder is not None:
        raise fields.error(
            "quantization_config", "is not supported for encoders", "use the unquantized checkpoint"
        )
    if quantization is not None and quantization.ignored.patterns:
        quantization = with_matches(quantization, module_names(config))
    return replace(config, quantization=quantization)


def _with_modules(config: DecoderConfig, model_dir: Path) -> DecoderConfig:
    """Return the embedding model that sentence-transformers would build from the model
    directory."""
    modules = _read_json(model_dir / MODULES_FILE)
    path = _pooling_path(model_dir, modules)
    prefix = f"{path.relative_to(model_dir)}: "
    return read_modules(config, modules, Fields(_read_object(path), prefix=prefix))


def pooling_files(model_dir: Path, config: DecoderConfig) -> Mapping[str, Path]:
    """Return the files that configure a model's pooling, by their names in a saved set; may be
    empty."""
    files = {MODULES_FILE: model_dir / MODULES_FILE}
    if not files[MODULES_FILE].exists():
        return {}
    if config.pooler.head is None:
        files[POOLING_FILE] = _pooling_path(model_dir, _read_json(files[MODULES_FILE]))
    return files


def _pooling_path(model_dir: Path, modules: object) -> Path:
    in_set = model_dir / POOLING_FILE
    return in_set if in_set.exists() else model_dir / pooling_config_path(modules)


def _read_object(path: Path) -> Mapping[str, object]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise broken_file(path, "is not a JSON object", f"replace {path.name}")
    return value


def _read_json(path: Path) -> object:
    try:
        value: object = json.loads(read_whole(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        fix = "point model at a directory with config.json and safetensors files"
        raise broken_file(path, f"cannot be read: {error.strerror}", fix) from error
    except (ValueError, RecursionError) as error:
        problem = f"is not valid JSON: {error}"
        raise broken_file(path, problem, f"replace {path.name}") from error
    return value
