"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024)."""

from worker_daemon.models.config_fields import decoder_config, dense_layer, head_sizes, num_layers
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields

_DEFAULTS = {"eos_token_id": 2}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers; one switch for attention biases, one for MLP biases."""
    fields = fields.with_defaults(_DEFAULTS)
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    layer = dense_layer(fields, head_sizes(fields), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    return decoder_config(fields, [layer] * num_layers(fields))
