"""Qwen2 and Qwen2.5 (Yang et al., 2024)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    upper_layer_windows,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return layers with biases only on the query, key and value projections; some may have a
    window."""
    fields = fields.with_defaults(_DEFAULTS)
    heads, windows = head_sizes(fields), upper_layer_windows(fields)
    layers = [dense_layer(fields, heads, qkv_bias=True, window=window) for window in windows]
    return decoder_config(fields, layers)
