"""Mistral (Jiang et al., 2023)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    num_layers,
    sliding_window,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers without biases; all have the window."""
    heads = head_sizes(fields, default_num_kv_heads=8)
    layer = dense_layer(fields, heads, window=sliding_window(fields))
    return decoder_config(fields, [layer] * num_layers(fields), default_eos_token_ids=(2,))
