"""Qwen3, dense (Yang et al., 2025)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    upper_layer_windows,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return the configuration of Qwen3: layers with norms on the query and key heads and one
    switch for attention biases; some may have a window."""
    fields = fields.with_defaults(_DEFAULTS)
    bias = fields.flag("attention_bias", False)
    heads = head_sizes(fields)
    layers = [
        dense_layer(fields, heads, qkv_bias=bias, o_bias=bias, head_norms=True, window=window)
        for window in upper_layer_windows(fields)
    ]
    return decoder_config(fields, layers)
