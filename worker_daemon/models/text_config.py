"""Finds the text model in the config.json of a multimodal checkpoint. It is served alone: prompts
are text, and the vision tower's tensors are not loaded. safetensors_file.full_name knows the names
of the text model's tensors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from worker_daemon.models.config_fields import architecture_name
from worker_daemon.models.fields import Fields

TEXT_MODELS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": MappingProxyType({"gemma3_text": "Gemma3ForCausalLM"}),
        "Gemma3ForSequenceClassification": MappingProxyType(
            {"gemma3_text": "Gemma3TextForSequenceClassification"}
        ),
        "Gemma3Model": MappingProxyType({"gemma3_text": "Gemma3TextModel"}),
        "Mistral3ForConditionalGeneration": MappingProxyType({"mistral": "MistralForCausalLM"}),
        "Mistral3Model": MappingProxyType({"mistral": "MistralModel"}),
    }
)
"""Multimodal architecture -> model_type of its text_config -> the text model's architecture."""
_SHARED: Final = (
    "dtype",
    "eos_token_id",
    "quantization_config",
    "torch_dtype",
)
"""Fields of the whole checkpoint: its text_config leaves them out, or has defaults."""
_WHOLE: Final = (
    "id2label",
    "num_labels",
    "problem_type",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
)
"""Fields of the whole checkpoint alone, about its classifier."""
_TIED: Final = "tie_word_embeddings"
"""A field of the whole checkpoint alone, true by default: text_config's own does not count. Mistral
3, whose head is stored, has true as well (stored_head.py)."""


def text_fields(fields: Fields) -> Fields:
    """Return the fields of a multimodal checkpoint's text model, with its own architecture; other
    checkpoints' fields as they are. Raises ConfigError for a text model of another kind, or one in
    another architecture."""
    architecture = architecture_name(fields)
    text_models = TEXT_MODELS.get(architecture)
    if text_models is None:
        if not fields.is_empty("text_config"):
            fix = "use a checkpoint of " + ", ".join(TEXT_MODELS)
            raise fields.error("architectures", "is not supported with a text_config", fix)
        return fields
    values = fields.optional_object("text_config")
    if values is None:
        raise fields.error("text_config", "is missing", "add it to config.json")
    text = Fields(values, prefix="text_config.")
    model_type = text.text("model_type")
    if model_type not in text_models:
        names = ", ".join(text_models)
        fix = f"use a checkpoint of {architecture} whose text_config has model_type {names}"
        raise text.error("model_type", "is not supported", fix)
    own = {"architectures": [text_models[model_type]]}
    tied = {_TIED: True, **fields.non_null((_TIED,))}
    whole = {**dict.fromkeys(_WHOLE), **fields.non_null((*_WHOLE, *_SHARED))}
    return text.with_values({**whole, **tied, **own})
