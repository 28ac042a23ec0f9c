"""Sampling defaults of a checkpoint (generation_config.json), which requests may override."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from worker_client.errors import ClientConfigError, config_error
from worker_client.inputs.request_fields import Json
from worker_client.inputs.sampling_params import SamplingParams

FILE_NAME: Final = "generation_config.json"
SOURCES: Final = ("auto", "none")
"""Values of --generation-config: the checkpoint's file, or no defaults."""
NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of the file that vLLM applies too, but for max_new_tokens."""
_MAX_BYTES: Final = 1 << 20


def sampling_defaults(model: Path, source: str) -> Mapping[str, Json]:
    """Return the values of NAMES that a checkpoint sets; empty without the file. source: one of
    SOURCES.

    Raises:
        ClientConfigError: the file cannot be read, or a value is none that a request may have.
    """
    path = model / FILE_NAME
    if source not in SOURCES:
        fix = f"use one of {', '.join(SOURCES)}"
        raise config_error("generation_config", source, "there is no such source", fix)
    if source == "none" or not path.exists():
        return {}
    given = _read(path)
    found = {name: given[name] for name in NAMES if given.get(name) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    try:
        msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        raise _unusable(path, str(error)) from None
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, str(error)) from None


def _unusable(path: Path, problem: str) -> ClientConfigError:
    fix = "mend the file, or give --generation-config none"
    return config_error("generation_config", str(path), problem, fix)
