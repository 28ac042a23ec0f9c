"""Configurations of published checkpoints, and small random models of them.

    model = random_model(shrunk(PUBLISHED["google/gemma-3-4b-it"]))

published_configs.json has the fields as they were published, without those that concern training
alone, from copies in public repositories. Lists of LongRoPE's factors are shortened to their ends.
Gemma 2, Qwen1.5-MoE and glm-4-9b-chat-hf are put together from copies that leave fields out;
GLM-4-9B-0414 has the defaults of transformers' Glm4Config, whose documentation names it. One is as
a log printed it (deepseek-coder), one as the text encoder of another model (Mistral Small 3.2).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text()
)
HEAD_DIM = 16
VOCAB_SIZE = 97
WINDOW = 9
ORIGINAL_LEN = 16
"""Context before an extension."""
_SIZES = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 12,
    "shared_expert_intermediate_size": 32,
    "vocab_size": VOCAB_SIZE,
}
_GEMMA3 = "gemma3_text"
_ORIGINAL = "original_max_position_embeddings"
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def with_factors(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the configuration with lists of that many factors between their ends, if it has
    any."""
    scaling = config.get("rope_scaling") or {}
    lists = {}
    for name in {"short_factor", "long_factor"} & scaling.keys():
        first, last = torch.tensor(scaling[name]).log10().tolist()
        lists[name] = torch.logspace(first, last, count).tolist()
    return config | {"rope_scaling": scaling | lists} if lists else config


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a small copy: few layers, narrow, with the published ratios of heads and of lengths.
    Fields that are absent stay absent. A window, if there is one, has WINDOW tokens."""
    if "text_config" not in config:
        return _shrunk_text(config)
    vision = config["vision_config"] | _VISION
    if "head_dim" in vision:
        vision["head_dim"] = _VISION["hidden_size"] // _VISION["num_attention_heads"]
    return config | {"text_config": _shrunk_text(config["text_config"]), "vision_config": vision}


def _shrunk_text(config: dict[str, Any]) -> dict[str, Any]:
    small = dict(config)
    if "num_attention_heads" in config:
        ratio = config["num_attention_heads"] // config["num_key_value_heads"]
        small["num_key_value_heads"] = min(2, config["num_key_value_heads"])
        small["num_attention_heads"] = ratio * small["num_key_value_heads"]
    is_gemma3 = config["model_type"] == _GEMMA3
    if is_gemma3 or config.get("head_dim") is not None:
        small["head_dim"] = HEAD_DIM
    gemma3_heads = 8  # published multimodal files leave defaults out
    small["hidden_size"] = HEAD_DIM * small.get("num_attention_heads", gemma3_heads)
    small["num_hidden_layers"] = 7 if is_gemma3 else 2
    small |= {name: size for name, size in _SIZES.items() if config.get(name)}
    small |= {"vocab_size": VOCAB_SIZE, "pad_token_id": 0}
    if config.get("sliding_window") is not None:
        small["sliding_window"] = WINDOW
    rotated = int(HEAD_DIM * config.get("partial_rotary_factor", 1.0))
    return with_factors(_with_short_contexts(small), rotated // 2)


def _with_short_contexts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with an original context of ORIGINAL_LEN where one is stated."""
    scaling = config.get("rope_scaling") or {}
    original = config.get(_ORIGINAL) or scaling.get(_ORIGINAL)
    if original is None:
        return config
    longest = config["max_position_embeddings"] * ORIGINAL_LEN // original
    small = config | {"max_position_embeddings": longest}
    if _ORIGINAL in config:
        small[_ORIGINAL] = ORIGINAL_LEN
    if _ORIGINAL in scaling:
        small["rope_scaling"] = scaling | {_ORIGINAL: ORIGINAL_LEN}
    return small


def random_model(config: dict[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """Return the model in float32 that transformers builds from this config.json."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        made = transformers.AutoConfig.from_pretrained(directory)
    if config["model_type"] == "mistral3":
        made.tie_word_embeddings = False  # transformers unties it when it finds the head's weights
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class._from_config(made, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            is_norm = tensor.dim() == 1 and "norm" in name
            std = 0.1 if tensor.dim() == 1 else 0.2
            tensor.normal_(1.0 if is_norm else 0.0, std, generator=generator)
    return model


def save_published(
    model: transformers.PreTrainedModel, path: Path, config: dict[str, Any], **options: Any
) -> None:
    """Save a model with this config.json. options: those of save_pretrained, which takes the names
    that published checkpoints have."""
    model.save_pretrained(path, **options)
    (path / "config.json").write_text(json.dumps(config))
