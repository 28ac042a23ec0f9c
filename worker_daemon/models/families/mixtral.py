"""Mixtral (Jiang et al., 2024)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    intermediate_size,
    num_layers,
    sliding_window,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.expert_fields import with_experts
from worker_daemon.models.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers with experts, without biases; all have the window, if there is one.
    Weights are those of the chosen experts alone, in float32."""
    fields = fields.with_defaults(_DEFAULTS)
    dense = dense_layer(fields, head_sizes(fields), window=sliding_window(fields))
    layer = with_experts(
        fields,
        dense,
        count_field="num_local_experts",
        intermediate_size=intermediate_size(fields),
        renormalize=True,
        rounds_weights=False,
    )
    return decoder_config(fields, [layer] * num_layers(fields))
