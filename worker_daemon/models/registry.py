"""The table of model families by architecture. docs/adding-a-model.md shows how to add one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from worker_daemon.errors import ConfigError
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.families import llama, mistral, qwen2, qwen3
from worker_daemon.models.fields import Fields

Describe = Callable[[Fields], DecoderConfig]
"""Turns a config.json into the decoder that transformers would build. Raises ConfigError, which
names field and fix."""

FAMILIES: Mapping[str, Describe] = MappingProxyType(
    {
        "LlamaForCausalLM": llama.describe,
        "MistralForCausalLM": mistral.describe,
        "Qwen2ForCausalLM": qwen2.describe,
        "Qwen3ForCausalLM": qwen3.describe,
    }
)
"""By the name in config.json's `architectures`."""


def find_family(architecture: str) -> Describe:
    """Return the entry of the table. Raises ConfigError with the supported names if there is
    none."""
    describe = FAMILIES.get(architecture)
    if describe is None:
        raise ConfigError(
            "this architecture is not supported",
            field="architectures",
            value=architecture,
            fix="use a checkpoint of " + ", ".join(sorted(FAMILIES)),
        )
    return describe
