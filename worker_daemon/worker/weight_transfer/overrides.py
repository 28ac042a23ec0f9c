"""Overrides of update_config: where and how the next reload reads. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from rpc_schema.config import ModelConfig
from worker_daemon.errors import config_error

_FIELDS: Final = {
    "model.model": "model",
    "model.seed": "seed",
    "load.load_format": "load_format",
    "load.verify_checksums": "verify_checksums",
}
_AT_LOAD: Final = {
    "model.dtype": "reset, and load_model in that dtype",
    "model.quantization": "reset, and load_model with that quantization",
    "model.hf_overrides": "reset, and load_model with those overrides",
    "model.max_model_len": "update_max_model_len",
}


def apply_overrides(config: ModelConfig, overrides: Mapping[str, str | int | bool]) -> ModelConfig:
    """Return the configuration with these fields changed, each named `section.field`.

    Raises:
        ConfigError: a field is not one that can be changed in a loaded model, or its value is not
            allowed; nothing is applied.
    """
    for name, value in overrides.items():
        if name in _AT_LOAD:
            fix = _AT_LOAD[name]
            raise config_error(name, value, "this field is fixed when a model is loaded", fix)
        if name not in _FIELDS:
            fix = f"one of {', '.join(_FIELDS)}"
            raise config_error(name, value, "only the load and model sections take overrides", fix)
    values = msgspec.structs.asdict(config) | {_FIELDS[n]: v for n, v in overrides.items()}
    try:
        return msgspec.convert(list(values.values()), ModelConfig)
    except msgspec.ValidationError as error:
        problem = "the value is not allowed"
        fix = str(error)
        raise config_error(", ".join(overrides), list(overrides.values()), problem, fix) from None
