"""Qwen2 and Qwen2.5 (Yang et al., 2024)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    upper_layer_windows,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Return layers with biases only on the query, key and value projections; some may have a
    window."""
    heads, windows = head_sizes(fields, default_num_kv_heads=32), upper_layer_windows(fields)
    layers = [dense_layer(fields, heads, qkv_bias=True, window=window) for window in windows]
    return decoder_config(fields, layers)
