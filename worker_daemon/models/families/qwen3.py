"""Qwen3, dense (Yang et al., 2025)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    upper_layer_windows,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Return the configuration of Qwen3: layers with norms on the query and key heads and one
    switch for attention biases; some may have a window."""
    bias = fields.flag("attention_bias", False)
    heads = head_sizes(fields, default_num_kv_heads=32, default_head_dim=128)
    layers = [
        dense_layer(fields, heads, qkv_bias=bias, o_bias=bias, head_norms=True, window=window)
        for window in upper_layer_windows(fields)
    ]
    return decoder_config(fields, layers)
