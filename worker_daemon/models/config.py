"""config.json -> DecoderConfig, by the family that it names."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from worker_daemon.errors import CheckpointError
from worker_daemon.models.config_fields import architecture_name
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields
from worker_daemon.models.registry import find_family
from worker_daemon.regular_file import read_whole

_MAX_CONFIG_BYTES = 1 << 20


def read_model_config(model_dir: Path) -> DecoderConfig:
    """Read config.json, and the end tokens of generation_config.json if it has any.

    Raises CheckpointError for a missing file or invalid JSON, ConfigError for invalid or
    unsupported fields.
    """
    config = parse_model_config(_read_object(model_dir / "config.json"))
    generation_path = model_dir / "generation_config.json"
    if not generation_path.exists():
        return config
    eos_token_ids = Fields(_read_object(generation_path)).optional_integers("eos_token_id")
    return config if eos_token_ids is None else replace(config, eos_token_ids=eos_token_ids)


def parse_model_config(hf: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder that transformers would build from this config.json. Raises ConfigError,
    which names field and fix."""
    fields = Fields(hf)
    describe = find_family(architecture_name(fields))
    _refuse_unsupported(fields)
    return describe(fields)


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
            fix=f"replace {path.name}",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} is not a JSON object",
            field="model",
            value=str(path.parent),
            fix=f"replace {path.name}",
        )
    return value


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "is not supported", "use a checkpoint with silu")
    if fields.optional_object("quantization_config"):
        raise fields.error(
            "quantization_config", "is not supported", "use the unquantized checkpoint"
        )
