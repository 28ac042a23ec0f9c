"""The architectures the decoder can be, as a table of what tells them apart. Knows no checkpoint
and no tensor.

Defaults are those that transformers uses for a field that config.json leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from worker_daemon.errors import ConfigError

Switch = Literal["on", "off", "attention_bias", "mlp_bias"]
"""Always on, always off, or whatever the field of that name in config.json says (default: off)."""

Windows = Literal["none", "all_layers", "upper_layers"]
"""Sliding windows: never; `sliding_window` on all layers; Qwen's use_sliding_window,
max_window_layers, layer_types."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture fills in the common decoder."""

    qkv_bias: Switch
    o_bias: Switch
    mlp_bias: Switch
    qk_norm: bool
    windows: Windows
    default_num_kv_heads: int | None
    """None means: as many as query heads."""
    default_head_dim: int | None
    """None means: hidden_size / num_attention_heads."""
    default_eos_token_ids: tuple[int, ...]


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            qk_norm=False,
            windows="none",
            default_num_kv_heads=None,
            default_head_dim=None,
            default_eos_token_ids=(2,),
        ),
        "MistralForCausalLM": Architecture(
            qkv_bias="off",
            o_bias="off",
            mlp_bias="off",
            qk_norm=False,
            windows="all_layers",
            default_num_kv_heads=8,
            default_head_dim=None,
            default_eos_token_ids=(2,),
        ),
        "Qwen2ForCausalLM": Architecture(
            qkv_bias="on",
            o_bias="off",
            mlp_bias="off",
            qk_norm=False,
            windows="upper_layers",
            default_num_kv_heads=32,
            default_head_dim=None,
            default_eos_token_ids=(),
        ),
        "Qwen3ForCausalLM": Architecture(
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="off",
            qk_norm=True,
            windows="upper_layers",
            default_num_kv_heads=32,
            default_head_dim=128,
            default_eos_token_ids=(),
        ),
    }
)


def find_architecture(name: str) -> Architecture:
    """The entry of the table; ConfigError with the supported names where there is none."""
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ConfigError(
            "this architecture is not supported",
            field="architectures",
            value=name,
            fix="use a checkpoint of " + ", ".join(sorted(ARCHITECTURES)),
        )
    return architecture
