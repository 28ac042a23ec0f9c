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

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers without biases; all have the window."""
    fields = fields.with_defaults(_DEFAULTS)
    heads = head_sizes(fields)
    layer = dense_layer(fields, heads, window=sliding_window(fields))
    return decoder_config(fields, [layer] * num_layers(fields))
