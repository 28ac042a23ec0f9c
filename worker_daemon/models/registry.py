"""The table of model families by architecture. docs/adding-a-model.md shows how to add one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from worker_daemon.errors import config_error
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.families import (
    bert,
    gemma,
    glm,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from worker_daemon.models.fields import Fields
from worker_daemon.models.pooling_config import names_with_same_layers
from worker_daemon.models.text_config import TEXT_MODELS

Describe = Callable[[Fields], DecoderConfig]
"""Turns a config.json into the decoder that transformers would build. Raises ConfigError, which
names field and fix."""

FAMILIES: Mapping[str, Describe] = MappingProxyType(
    {
        "BertModel": bert.describe,
        "Gemma2ForCausalLM": gemma.describe_gemma2,
        "Gemma3ForCausalLM": gemma.describe_gemma3,
        "Gemma3TextModel": gemma.describe_gemma3,
        "Glm4ForCausalLM": glm.describe_0414,
        "GlmForCausalLM": glm.describe,
        "GptOssForCausalLM": gpt_oss.describe,
        "LlamaForCausalLM": llama.describe,
        "MistralForCausalLM": mistral.describe,
        "MixtralForCausalLM": mixtral.describe,
        "Olmo2ForCausalLM": olmo2.describe,
        "Phi3ForCausalLM": phi3.describe,
        "Qwen2ForCausalLM": qwen2.describe,
        "Qwen2MoeForCausalLM": qwen2_moe.describe,
        "Qwen3ForCausalLM": qwen3.describe,
        "Qwen3MoeForCausalLM": qwen3_moe.describe,
        "RobertaModel": bert.describe_roberta,
        "XLMRobertaModel": bert.describe_roberta,
    }
)
"""By the name in config.json's `architectures`."""


def find_family(architecture: str) -> Describe:
    """Return the entry of the table: it serves the family's classifiers and its bare model too.
    Raises ConfigError with the supported names if there is none."""
    names = (architecture, *names_with_same_layers(architecture))
    describe = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if describe is None:
        fix = "use a checkpoint of " + ", ".join(sorted((*FAMILIES, *TEXT_MODELS)))
        raise config_error("architectures", architecture, "this architecture is not supported", fix)
    return describe
